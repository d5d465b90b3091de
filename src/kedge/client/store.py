"""A store behind a service: `kedge.open("http://…")`. The index and the commit protocol are the service's."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import TypeVar
from urllib.parse import quote

from kedge.chunks import INLINE_BYTES, RecallingSource
from kedge.codec import Encoded
from kedge.errors import CheckpointError, Conflict, Corrupted, NotFound
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, Job, Lease
from kedge.ports import (
    ALL,
    CheckpointIds,
    Checkpoints,
    Events,
    Jobs,
    NewCheckpoint,
    Outcomes,
    Selection,
    Unmet,
    Update,
    digest_of,
)
from kedge.store import Save, Stored, knows, not_over_http
from kedge.store.adoption import Exported, Moved, ReadChunks, record_to_export
from kedge.store.loading import Loading
from kedge.store.manifest import Manifest, pack_manifest, pack_tree, root_of
from kedge.store.received import Received, SendAgain
from kedge.store.request import Request, request_of
from kedge.store.rope import PartedTree, write_parts
from kedge.store.streams import add_streams
from kedge.store.wire import DIGEST_BYTES, LENGTH_BYTES, SAVE_TYPE, parse_length

from .calls import Document, Page
from .connection import Client
from .transfer import HttpReader, Outbox, body_of

_MAX_ATTEMPTS = 8
_MOST_KNOWN = 65536
_PAGE = 500
_KEYS_AT_ONCE = 40

T = TypeVar("T")


class HttpStore(Loading):
    """`kedge.store.Store` behind a service. Where the chunks of a state are is its business."""

    row_bytes = 1 << 16

    def __init__(self, client: Client) -> None:
        self.client = client
        self.reader = HttpReader(client)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # pieces of parted trees that were saved here
        self._lock = threading.Lock()

    def save(self, request: Request, encoded: Encoded | PartedTree | Received, *, actor: str) -> Checkpoint:
        if isinstance(encoded, Received):
            raise not_over_http("handing on what another client sends")
        if request.provided is not None:
            raise Unmet  # the service has no such request
        saved = _again(partial(self._save_once, request, encoded), f"job {request.job}")
        return self._and_then(request, saved, actor)

    def _and_then(self, request: Request, saved: Checkpoint, actor: str) -> Checkpoint:
        """What a save does besides, one after the other: the service has no such request.

        The save is durable, whatever becomes of the rest: a lease runs out; who finds the entry finds its run ended.
        """
        if request.then is not None:
            with suppress(CheckpointError):
                if request.then.delete:
                    self.delete(request.then.delete, even_pinned=True, actor=actor)
            with suppress(CheckpointError):
                if request.then.releases_lease and request.lease is not None:
                    self.release_lease(request.lease)
        return saved

    def _save_once(self, request: Request, encoded: Encoded | PartedTree, distrusted: frozenset[bytes]) -> Checkpoint:
        outbox = Outbox(self.client, distrusted)
        named: Sequence[bytes] = ()
        if isinstance(encoded, PartedTree):
            packed, named = write_parts(encoded, outbox, self._known.__contains__)
            pack = partial(_as_it_is, packed)
        elif not encoded.buffers and len(encoded.tree) <= INLINE_BYTES:
            pack = partial(_as_it_is, pack_tree(encoded.tree))
        else:
            for buffer in encoded.buffers:
                if isinstance(buffer, RecallingSource):
                    buffer.recall(self.earlier_states(request.job))
            pack = partial(_packed, add_streams(outbox, encoded))
        saved = self._send(request, outbox, pack, distrusted)
        self._remember(named)
        return saved

    def _send(
        self,
        request: Request,
        outbox: Outbox,
        pack: Callable[[], tuple[bytes, bytes]],
        distrusted: Collection[bytes] = (),
        copied: Mapping[str, object] | None = None,
    ) -> Checkpoint:
        head = {**request.to_json(), "distrusted": [digest.hex() for digest in distrusted], "copied": copied}
        path = f"/api/v1/jobs/{quote(request.job, safe='')}/checkpoints"
        return Checkpoint.from_json(self.client.upload(path, SAVE_TYPE, body_of(head, outbox, pack)))

    def _remember(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            for digest in digests:
                self._known[digest] = None
                self._known.move_to_end(digest)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        outcomes: Outcomes = []
        for request, encoded, actor in saves:
            try:
                outcomes.append(self.save(request, encoded, actor=actor))
            except CheckpointError as error:
                outcomes.append(error)
        return outcomes

    def branch(self, source: Stored, request: Request, *, actor: str) -> Checkpoint:
        checkpoint, packed = source if source[1] else self.read(source[0].id)
        pack = partial(_as_it_is, packed, self._spilled(packed))

        def send(distrusted: frozenset[bytes]) -> Checkpoint:
            """Chunks that the service cannot reuse travel: keys are being changed, and they have other names now."""
            outbox = Outbox(self.client, distrusted)
            outbox.add_from(Exported(NewCheckpoint.of(checkpoint, packed), sorted(distrusted)), self.read_chunks)
            return self._send(request, outbox, pack, distrusted)

        try:
            return _again(send, f"job {request.job}")
        except (Conflict, Corrupted):
            if knows(self, checkpoint.id):
                raise
            raise NotFound(
                f"the checkpoint to copy to job {request.job} was deleted meanwhile", hint="choose another one"
            ) from None

    def _spilled(self, packed: bytes) -> bytes:
        """What lies in chunks of a manifest that is only the root of one."""
        root = root_of(packed)
        if root is None:
            return b""
        memory = bytearray(root[0])
        self.reader.read_row(root[1], memoryview(memory), of="a checkpoint")
        return bytes(memory)

    def load(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: str | None = None,
    ) -> object:
        if mapped:
            raise not_over_http("mapping a state", "load it as usual")
        return super().load(stored, only=only, into=into, device=device)

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        """The manifest, which was verified when it arrived; one that was not asked for yet is fetched."""
        return self.parse(packed or self.read(checkpoint.id)[1], of=checkpoint.id)

    # Finding and changing

    def together(self, read: Callable[[], T]) -> T:
        return read()

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self.client.checkpoint(checkpoint_id)

    def read(self, checkpoint_id: str) -> Stored:
        head, packed = self._read(checkpoint_id)
        return Checkpoint.from_json(head["checkpoint"]), packed

    def _read(self, checkpoint_id: str) -> tuple[Document, bytes]:
        with self.client.download(f"/api/v1/checkpoints/{quote(checkpoint_id, safe='')}/manifest") as download:
            head: Document = json.loads(download.take(parse_length(download.take(LENGTH_BYTES))))
            packed = download.take(parse_length(download.take(LENGTH_BYTES)))
            if download.take(DIGEST_BYTES) != digest_of(packed):
                raise Corrupted(f"the manifest of {checkpoint_id} was damaged on its way", hint="load it again")
        return head, packed

    def latest(self, job: str, level: CheckpointLevel | None = None) -> Stored | None:
        for checkpoint in self._newest_first(job, level=level):
            if checkpoint.status is not CheckpointStatus.CORRUPTED:
                return checkpoint, b""
        return None

    def _newest_first(self, job: str, level: CheckpointLevel | None) -> Iterator[Checkpoint]:
        cursor, size = None, 1
        while True:
            page = self.client.checkpoints(job, level=level, limit=size, cursor=cursor)
            yield from page.items
            if page.next_cursor is None:
                return
            cursor, size = page.next_cursor, 100

    def find(self, job: str, keys: Sequence[str]) -> dict[str, Stored]:
        checkpoints: dict[str, Checkpoint] = {}
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            checkpoints |= self.client.keys(job, keys[start : start + _KEYS_AT_ONCE])
        return {key: (checkpoint, b"") for key, checkpoint in checkpoints.items()}

    def find_next(self, job: str, after: int, limit: int) -> dict[str, Stored]:
        checkpoints = self.client.keys(job, after=after, limit=limit)
        return {key: (checkpoint, b"") for key, checkpoint in checkpoints.items()}

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        """Asks for each combination of the tags' values by itself."""
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
        left = wanted.limit
        while left is None or left > 0:
            page: Page[Checkpoint] = self.client.checkpoints(
                job,
                level=wanted.level,
                tags=tags,
                metadata=wanted.metadata,
                order="oldest" if wanted.is_forward else "newest",
                limit=_PAGE if left is None else min(left, _PAGE),
                cursor=cursor,
            )
            for checkpoint in page.items:
                if wanted.is_forward and wanted.before is not None and checkpoint.seq >= wanted.before:
                    return
                yield checkpoint
            left = None if left is None else left - len(page.items)
            cursor = page.next_cursor
            if cursor is None:
                return

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[Stored]:
        return [(checkpoint, b"") for checkpoint in self.list(job, wanted)]

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

    def events(
        self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None, wait_s: float = 0.0
    ) -> Events:
        until = time.monotonic() + wait_s
        while not (events := self._events(after, limit, newest, before)) and time.monotonic() < until:
            time.sleep(min(0.3, wait_s))
        return events

    def _events(self, after: int, limit: int, newest: bool, before: int | None) -> Events:
        if newest:
            page = self.client.audit_log(min(limit, 1000), before).items[::-1]
        else:
            page = self.client.events(after, min(limit, 1000)).items
        return [event for event in page if event.id > after and (before is None or event.id < before)]

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        from kedge.care.policies import RetentionPolicy

        self.client.set_retention(job, None if policy_json is None else RetentionPolicy.from_json(policy_json))

    # From and to other stores

    is_encrypted = True  # it may be: digests of its checkpoints say nothing

    def export(self, checkpoint_id: str) -> Exported:
        head, packed = self._read(checkpoint_id)
        key = None if head["key"] is None else (head["key"], bytes.fromhex(head["request_digest"]))
        record = record_to_export(Checkpoint.from_json(head["checkpoint"]), packed, key)
        references = sorted(set(self.contents(packed)))
        return Exported(record, references, spilled=self._spilled(packed))

    def adopt(self, exported: Sequence[Exported], read: ReadChunks, *, actor: str, moved: Moved) -> Checkpoints:
        def read_counted(digests: Sequence[bytes]) -> Mapping[bytes, bytes]:
            pieces = read(digests)
            moved(len(pieces), sum(map(len, pieces.values())))
            return pieces

        return [self._adopt(export, read_counted) for export in exported]

    def _adopt(self, exported: Exported, read: ReadChunks) -> Checkpoint:
        record = exported.record
        copied = {
            "seq": record.seq,
            "codec": record.codec,
            "status": str(record.status),
            "request_digest": record.request_digest.hex(),
        }

        def send(distrusted: frozenset[bytes]) -> Checkpoint:
            outbox = Outbox(self.client, distrusted)
            outbox.add_from(exported, read)
            pack = partial(_as_it_is, record.manifest, exported.spilled)
            return self._send(request_of(record), outbox, pack, distrusted, copied)

        return _again(send, f"checkpoint {record.id}")

    # Life

    def after_fork(self) -> None:
        """Connections of the parent are its own."""
        self.client = self.client.again()
        self.reader = HttpReader(self.client)
        self._lock = threading.Lock()

    def close(self) -> None:
        self.client.close()


def _again(send: Callable[[frozenset[bytes]], Checkpoint], what: str) -> Checkpoint:
    """`send(distrusted)` until the service has all it needs: what it could not reuse is sent the next time."""
    distrusted: frozenset[bytes] = frozenset()
    for _ in range(_MAX_ATTEMPTS):
        try:
            return send(distrusted)
        except SendAgain as again:
            distrusted |= frozenset(again.digests)
    raise Conflict(f"{what}: the service kept losing chunks that this save needs", hint="run it again")


def _as_it_is(packed: bytes, spilled: bytes = b"") -> tuple[bytes, bytes]:
    return packed, spilled


def _packed(manifest: Manifest) -> tuple[bytes, bytes]:
    return pack_manifest(manifest), b""
