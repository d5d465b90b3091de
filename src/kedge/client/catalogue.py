"""The catalogue of a store behind a service: `kedge.ports.Catalogue` over its API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from urllib.parse import quote

from kedge.care.policies import RetentionPolicy
from kedge.errors import Corrupted, NotFound
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus, Event, EventChain, Job, Lease
from kedge.ports import ALL, CheckpointIds, Checkpoints, Events, Jobs, Selection, Update, digest_of
from kedge.store import Stored
from kedge.store.wire import DIGEST_BYTES, LENGTH_BYTES, parse_length

from .calls import Document
from .connection import Client

_PAGE = 500
_KEYS_AT_ONCE = 40
_EVENTS = 1000
_LOOK_EVERY_S = 0.3  # for events


class HttpCatalogue:
    """Asks the service each time; nothing is cached here."""

    is_encrypted = True  # it may be: its checkpoints' digests cannot be compared
    row_bytes = 1 << 16

    def __init__(self, client: Client) -> None:
        self.client = client  # a forked child gets another one

    def changed_jobs(self, after: int, limit: int) -> None:
        return None

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self.client.checkpoint(checkpoint_id)

    def read(self, checkpoint_id: str) -> Stored:
        head, packed = self.download(checkpoint_id)
        return Checkpoint.from_json(head["checkpoint"]), packed

    def download(self, checkpoint_id: str) -> tuple[Document, bytes]:
        """Return the service's document of a checkpoint, and its verified manifest."""
        with self.client.download(f"/api/v1/checkpoints/{quote(checkpoint_id, safe='')}/manifest") as download:
            head: Document = json.loads(download.take(parse_length(download.take(LENGTH_BYTES))))
            packed = download.take(parse_length(download.take(LENGTH_BYTES)))
            if download.take(DIGEST_BYTES) != digest_of(packed):
                raise Corrupted(f"the manifest of {checkpoint_id} was damaged on its way", hint="load it again")
        return head, packed

    def find(self, job: str, keys: Sequence[str] | range) -> dict[str, Stored]:
        checkpoints: dict[str, Checkpoint] = {}
        if isinstance(keys, range):
            checkpoints, keys = self.client.keys(job, after=keys.start - 1, limit=len(keys)), ()
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            checkpoints |= self.client.keys(job, keys[start : start + _KEYS_AT_ONCE])
        return {key: (checkpoint, b"") for key, checkpoint in checkpoints.items()}

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        """Request each combination of the tags' values separately."""
        rows = {
            row.seq: row
            for values in product(*wanted.tags.values())
            for row in self._list(job, wanted, dict(zip(wanted.tags, values, strict=True)))
        }
        oldest_first = [rows[seq] for seq in sorted(rows)]
        if wanted.limit is None:
            return oldest_first
        return oldest_first[: wanted.limit] if wanted.is_forward else oldest_first[-wanted.limit :]

    def _list(self, job: str, wanted: Selection, tags: Mapping[str, str]) -> Iterator[Checkpoint]:
        cursor: str | int | None = (wanted.after or 0) if wanted.is_forward else wanted.before
        left, size = wanted.limit, min(wanted.limit or _PAGE, _PAGE)
        while left is None or left > 0:
            page = self.client.checkpoints(
                job,
                level=wanted.level,
                tags=tags,
                metadata=wanted.metadata,
                order="oldest" if wanted.is_forward else "newest",
                limit=size if left is None or wanted.is_intact else min(left, size),
                cursor=cursor,
            )
            for checkpoint in page.items:
                if wanted.is_forward and wanted.before is not None and checkpoint.seq >= wanted.before:
                    return
                if not (wanted.is_intact and checkpoint.status is CheckpointStatus.CORRUPTED):
                    yield checkpoint
                    left = None if left is None else left - 1
            size, cursor = _PAGE, page.next_cursor
            if cursor is None:
                return

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[Stored]:
        return [(checkpoint, b"") for checkpoint in self.list(job, wanted)]

    def newest(self, jobs: Sequence[str], tag: tuple[str, str] | None = None) -> dict[str, Checkpoint]:
        """Request each job separately."""
        wanted = Selection(limit=1, tags={} if tag is None else {tag[0]: [tag[1]]})
        return {job: row for job in jobs for row in self.list(job, wanted)}

    def job(self, name: str) -> Job | None:
        try:
            return self.client.job(name)
        except NotFound:
            return None

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        jobs: list[Job] = []
        cursor: str | None = after or None
        while limit is None or len(jobs) < limit:
            page = self.client.jobs(prefix, _PAGE if limit is None else min(limit - len(jobs), _PAGE), cursor)
            jobs += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        return jobs

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        gone: CheckpointIds = []
        for checkpoint_id in checkpoint_ids:
            try:
                if even_pinned:
                    self.client.pin(checkpoint_id, False)
                self.client.delete(checkpoint_id)
            except NotFound:
                continue
            gone.append(CheckpointId(checkpoint_id))
        return gone

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        changed: Checkpoint | None = None
        if update.is_pinned is not None:
            changed = self.client.pin(checkpoint_id, update.is_pinned)
        if update.tags is not None:
            changed = self.client.tag(checkpoint_id, update.tags)
        if update.status is not None:
            changed = self.client.set_status(checkpoint_id, str(update.status))
        return changed or self.get(checkpoint_id)

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self.client.take_lease(job, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self.client.renew_lease(lease)

    def release_lease(self, lease: Lease) -> None:
        self.client.release_lease(lease)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        """Request as many pages as the limit needs."""
        events: list[Event] = []
        place: str | int | None = before if newest else after
        while len(events) < limit:
            size = min(limit - len(events), _EVENTS)
            page = self.client.audit_log(size, place) if newest else self.client.events(int(place or 0), size)
            inside = [event for event in page.items if event.id > after and (before is None or event.id < before)]
            events += inside
            place = page.next_cursor
            if place is None or len(inside) < len(page.items):
                break
        return events[::-1] if newest else events

    def audit(self, until: int | None = None) -> EventChain:
        return self.client.verify_audit(until)

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not (events := self.client.events(after, 1).items) and time.monotonic() < until:
            time.sleep(min(_LOOK_EVERY_S, timeout_s))
        return bool(events)

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self.client.set_retention(job, None if policy_json is None else RetentionPolicy.from_json(policy_json))
