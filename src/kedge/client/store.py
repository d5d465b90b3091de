"""A store behind a service: `kedge.open("http://…")`. The index and the commit protocol are the service's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kedge import codec
from kedge.codec.wire import size_of_frame, write_frame
from kedge.errors import CheckpointError, NotFound, Validation
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, EventChain, Job, Lease
from kedge.ports import CheckpointIds, Checkpoints, Events, Jobs, Outcomes
from kedge.store import Save, Stored, not_over_http
from kedge.store.request import Request

from .calls import Call, Page
from .connection import Client

_PAGE = 500
_KEYS_AT_ONCE = 40


class HttpStore:
    """`kedge.store.Store` behind a service. A manifest stays where it is: what is stored is known by its ID."""

    row_bytes = 1 << 16

    def __init__(self, client: Client) -> None:
        self.client = client

    def save(self, request: Request, encoded: object, *, actor: str) -> Checkpoint:
        if not isinstance(encoded, codec.Encoded):
            raise not_over_http("saving an agent's thread")
        if request.checkpoint_id is not None or request.created_us is not None:
            raise not_over_http("saving under a given ID or time")
        buffers: list[memoryview] = []
        for buffer in encoded.buffers:
            if not isinstance(buffer, memoryview):
                raise not_over_http(
                    "saving files, trees and the memory of accelerators", "save them where the store is"
                )
            buffers.append(buffer)
        headers = {} if request.idempotency_key is None else {"Idempotency-Key": _header(request.idempotency_key)}
        path = f"/api/v1/jobs/{request.job}/checkpoints"
        call = Call("POST", path, Checkpoint.from_json, body=request.to_json(), headers=headers)
        sizes = {n: len(buffer) for n, buffer in enumerate(buffers)}
        frame = write_frame(encoded.tree, sizes, lambda n: [buffers[n]])
        return self.client.upload(call, frame, size_of_frame(len(encoded.tree), sizes))

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        outcomes: Outcomes = []
        for request, encoded, actor in saves:
            try:
                outcomes.append(self.save(request, encoded, actor=actor))
            except CheckpointError as error:
                outcomes.append(error)
        return outcomes

    def branch(self, source: Stored, request: Request, *, actor: str) -> Checkpoint:
        if request.parent != source[0].id or request.checkpoint_id is not None:
            raise not_over_http("saving under a given ID or parent")
        return self.client.branch(source[0].id, request.job, request.lease.token if request.lease else None)

    def load(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: str | None = None,
    ) -> object:
        if mapped or device is not None:
            raise not_over_http("loading mapped or onto a device", "load it as usual")
        checkpoint = stored[0]
        if only is None:
            frame = self._download(checkpoint.id, "all")
            return codec.decode(frame.tree, frame.buffers.__getitem__, into=into)
        return codec.decode(self.tree(stored), self._fetch(checkpoint.id), only=only)

    def _fetch(self, checkpoint_id: str) -> Callable[[int], memoryview]:
        return lambda number: self._download(checkpoint_id, str(number)).buffers[number]

    def _download(self, checkpoint_id: str, buffers: str) -> Any:
        path = f"/api/v1/checkpoints/{checkpoint_id}/raw"
        return self.client.download(Call("GET", path, _same, {"buffers": buffers}))

    def tree(self, stored: Stored) -> bytes:
        tree: bytes = self._download(stored[0].id, "none").tree
        return tree

    def buffers(self, stored: Stored, ordinals: Sequence[int] | None = None) -> Mapping[int, memoryview]:
        numbers = "all" if ordinals is None else ",".join(map(str, ordinals))
        buffers: Mapping[int, memoryview] = self._download(stored[0].id, numbers).buffers if numbers else {}
        return buffers

    def buffer_sizes(self, stored: Stored) -> Sequence[int | None]:
        raise not_over_http("the sizes of buffers")

    # Finding and changing

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self.client.checkpoint(checkpoint_id)

    def read(self, checkpoint_id: str) -> Stored:
        return self.get(checkpoint_id), b""

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
        found: dict[str, Checkpoint] = {}
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            found |= self.client.keys(job, keys[start : start + _KEYS_AT_ONCE])
        return {key: (checkpoint, b"") for key, checkpoint in found.items()}

    def find_next(self, job: str, after: int, limit: int) -> dict[str, Stored]:
        found = self.client.keys(job, after=after, limit=limit)
        return {key: (checkpoint, b"") for key, checkpoint in found.items()}

    def list(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Checkpoints:
        is_oldest_first = after is not None or limit is None
        cursor: str | int | None = (after or 0) if is_oldest_first else before
        found: list[Checkpoint] = []
        while limit is None or len(found) < limit:
            page: Page[Checkpoint] = self.client.checkpoints(
                job,
                level=level,
                tags=tags,
                metadata=metadata,
                order="oldest" if is_oldest_first else "newest",
                limit=_PAGE if limit is None else min(limit - len(found), _PAGE),
                cursor=cursor,
            )
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        if is_oldest_first:
            return found if before is None else [c for c in found if c.seq < before]
        return found[::-1]

    def job(self, name: str) -> Job | None:
        try:
            return self.client.job(name)
        except NotFound:
            return None

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        found: list[Job] = []
        cursor: str | None = after or None
        while limit is None or len(found) < limit:
            page = self.client.jobs(prefix, _PAGE if limit is None else min(limit - len(found), _PAGE), cursor)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        gone: CheckpointIds = []
        for each in checkpoint_ids:
            try:
                self.client.delete(each)
            except NotFound:
                continue
            gone.append(CheckpointId(each))
        return gone

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        changed: Checkpoint | None = None
        if is_pinned is not None:
            changed = self.client.pin(checkpoint_id, is_pinned)
        if tags is not None:
            changed = self.client.tag(checkpoint_id, tags)
        if status is not None:
            changed = self.client.set_status(checkpoint_id, str(status))
        return changed or self.get(checkpoint_id)

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self.client.take_lease(job, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self.client.renew_lease(lease)

    def release_lease(self, lease: Lease) -> None:
        self.client.release_lease(lease)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        if newest:
            found = self.client.audit_log(min(limit, 1000), before).items[::-1]
        else:
            found = self.client.events(after, min(limit, 1000)).items
        return [event for event in found if event.id > after and (before is None or event.id < before)]

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self.events(after, 1):
            if time.monotonic() >= until:
                return False
            time.sleep(min(0.3, timeout_s))
        return True

    def audit(self, until: int | None = None) -> EventChain:
        return self.client.verify_audit(until)

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        from kedge.care.policies import RetentionPolicy

        self.client.set_retention(job, None if policy_json is None else RetentionPolicy.from_json(policy_json))

    # Life

    def after_fork(self) -> None:
        """Connections of the parent are its own."""
        self.client = self.client.again()

    def close(self) -> None:
        self.client.close()


def _header(text: str) -> str:
    if not text.isascii() or not text.isprintable() or text != text.strip():
        raise Validation("over HTTP an idempotency key is plain ASCII", hint="use a UUID, for example")
    return text


def _same(answer: Any) -> Any:
    return answer
