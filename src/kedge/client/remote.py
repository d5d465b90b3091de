"""A store behind a service, for everything that takes a CheckpointManager: pipelines, workflows, the command line.

The index and the commit protocol are the service's. What would need its chunks here is refused with an error that says
so: trees of files, mapped loads, copies between stores, LangGraph's savers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from kedge import codec
from kedge.care.gc import GcReport
from kedge.care.retention import Kept, Plan, RetentionPolicy
from kedge.care.review import Verdict
from kedge.care.verify import Problem, VerifyReport
from kedge.codec.wire import size_of_frame, write_frame
from kedge.diff.changes import Change, ChangeKind, Diff
from kedge.documents import checkpoint_from_json
from kedge.errors import CheckpointError, NotFound, Validation
from kedge.manager import CheckpointManager, Progress
from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus, Job, Lease, parse_name
from kedge.ports import Checkpoints, EventChain, Events, Jobs
from kedge.store.manifest import Manifest
from kedge.store.request import Request

from .calls import Call, Page
from .connection import Client

_PAGE = 500
_KEYS_AT_ONCE = 40
_POLL_S = 0.1


def not_here(what: str, hint: str = "use the store itself, where the service runs") -> NoReturn:
    raise Validation(f"{what} is not available over HTTP", hint=hint)


class RemoteManager(CheckpointManager):
    """`kedge.open("http://…")`. What it inherits works on `RemoteStore`; the rest is asked of the service."""

    def _open(self, create: bool, lock: object) -> Any:
        if lock is not None:
            not_here("a key", "keys belong to where the store is: give it to kedge serve")
        wanted = None if self.namespace == "default" else self.namespace  # else the one the service has for us
        return RemoteStore(Client(self.url, namespace=wanted))

    @property
    def client(self) -> Client:
        """Every call of the API."""
        client: Client = self._store.client  # type: ignore[attr-defined]
        return client

    def _retain(self, saved: Checkpoint) -> None:
        """The service sees to that."""

    def resume_from(
        self, checkpoint_id: str, job_id: str | None = None, *, lease: Lease | None = None
    ) -> tuple[Checkpoint, object]:
        state = self.load(checkpoint_id)
        return self.client.branch(checkpoint_id, job_id, lease.token if lease else None), state

    def copy(self, job: str, new_job: str) -> Checkpoints:
        self.client.copy(job, new_job)
        return self.list(new_job)

    def _copying(self, *_: object) -> NoReturn:
        not_here("copying between stores")

    def rebuild(self, *, progress: Progress | None = None) -> NoReturn:
        not_here("rebuilding an index")

    def rekey(self, *_: object, **__: object) -> NoReturn:
        not_here("changing keys")

    def apply(
        self,
        policy: RetentionPolicy,
        *,
        job: str | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
    ) -> Plan:
        made = self.client.retention(policy, job, dry_run=dry_run)
        keep = tuple(Kept(_without(each, "reasons"), tuple(each["reasons"])) for each in made["keep"])
        delete = tuple(checkpoint_from_json(each) for each in made["delete"])
        if progress:
            progress(len(delete), len(delete))
        return Plan(policy, keep, delete, made["frees_bytes"], job)

    def review(self, policy: RetentionPolicy, *, job: str | None = None, dry_run: bool = True) -> Iterator[Verdict]:
        """In one answer of the service, which holds all of it."""
        made = self.apply(policy, job=job, dry_run=dry_run)
        verdicts = [Verdict(kept.checkpoint, kept.reasons) for kept in made.keep]
        verdicts += [Verdict(checkpoint, ()) for checkpoint in made.delete]
        return iter(sorted(verdicts, key=lambda verdict: (verdict.checkpoint.job, -verdict.checkpoint.seq)))

    def set_retention(self, job_id: str, policy: RetentionPolicy | None) -> None:
        self.client.set_retention(parse_name("job", job_id), policy)

    def diff(self, a: str, b: str) -> Diff:
        told = self.client.diff(a, b)
        changes = tuple(
            Change(c["path"], ChangeKind(c["kind"]), c.get("old"), c.get("new"), c.get("detail", ""))
            for c in told["changes"]
        )
        names = ("left_out", "added", "removed", "changed", "bytes_changed", "shared_bytes")
        counts = {name: told[name] for name in names}
        return Diff(changes, old_id=told["old"], new_id=told["new"], **counts)

    def verify(self, job: str | None = None, deep: bool = True, *, progress: Progress | None = None) -> VerifyReport:
        told = self._finish(self.client.start_verify(job, deep), progress)
        problems = tuple(Problem(**each) for each in told.pop("problems"))
        return VerifyReport(problems=problems, corrupted=tuple(told.pop("corrupted")), **told)

    def condemn(self, checkpoint_id: str) -> Checkpoint:
        return self.client.condemn(parse_name("checkpoint ID", checkpoint_id))  # the service looks for itself

    def gc(self, *, dry_run: bool = False, progress: Progress | None = None) -> GcReport:
        told = self._finish(self.client.start_gc(dry_run=dry_run), progress)
        return GcReport(damaged=tuple(told.pop("damaged")), **told)

    def _finish(self, task: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
        """Wait for a task of the service; its result."""
        while task["status"] == "running":
            time.sleep(_POLL_S)
            task = self.client.task(task["id"])
            if progress and task["total"]:
                progress(task["done"], task["total"])
        if task["status"] == "failed":
            raise CheckpointError(f"{task['kind']} failed: {task['error']}", hint="the service's log tells more")
        result: dict[str, Any] = task["result"]
        return result

    def stats(self, job: str | None = None) -> Mapping[str, int]:
        return self.client.stats(job)


class RemoteStore:
    """The part of `store.Store` that a CheckpointManager and those who browse states need."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.index = RemoteIndex(client)

    def save(self, request: Request, encoded: object, *, actor: str) -> Checkpoint:
        if not isinstance(encoded, codec.Encoded):
            not_here("saving an agent's thread")
        if request.checkpoint_id is not None or request.created_us is not None:
            not_here("saving under a given ID or time")
        buffers: list[memoryview] = []
        for buffer in encoded.buffers:
            if not isinstance(buffer, memoryview):
                not_here("saving files, trees and the memory of accelerators", "save them where the store is")
            buffers.append(buffer)
        body = {
            "step": request.step,
            "level": str(request.level),
            "parent": request.parent,
            "tags": request.tags or {},
            "pin": request.is_pinned,
            "schema_version": request.schema_version,
            "lease": request.lease.token if request.lease else None,
            "metadata": json.loads(request.metadata_json),
        }
        headers = {} if request.idempotency_key is None else {"Idempotency-Key": _header(request.idempotency_key)}
        path = f"/api/v1/jobs/{request.job}/checkpoints"
        call = Call("POST", path, checkpoint_from_json, body=body, headers=headers)
        sizes = {n: len(buffer) for n, buffer in enumerate(buffers)}
        frame = write_frame(encoded.tree, sizes, lambda n: [buffers[n]])
        return self.client.upload(call, frame, size_of_frame(len(encoded.tree), sizes))

    def save_each(self, saves: Sequence[tuple[Request, codec.Encoded, str]]) -> list[Checkpoint | BaseException]:
        outcomes: list[Checkpoint | BaseException] = []
        for request, encoded, actor in saves:
            try:
                outcomes.append(self.save(request, encoded, actor=actor))
            except CheckpointError as error:
                outcomes.append(error)
        return outcomes

    def load(
        self,
        checkpoint: Checkpoint,
        packed: bytes,
        *,
        only: Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: str | None = None,
    ) -> object:
        if mapped or device is not None:
            not_here("loading mapped or onto a device", "load it as usual")
        if only is None:
            frame = self._download(checkpoint.id, "all")
            return codec.decode(frame.tree, frame.buffers.__getitem__, into=into)
        return codec.decode(self.open(checkpoint, packed).tree or b"", self._fetch(checkpoint.id), only=only)

    def _fetch(self, checkpoint_id: str) -> Callable[[int], memoryview]:
        return lambda number: self._download(checkpoint_id, str(number)).buffers[number]

    def _download(self, checkpoint_id: str, buffers: str) -> Any:
        path = f"/api/v1/checkpoints/{checkpoint_id}/raw"
        return self.client.download(Call("GET", path, _same, {"buffers": buffers}))

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        return Manifest(self._download(checkpoint.id, "none").tree)

    def tree(self, checkpoint: Checkpoint, manifest: Manifest) -> bytes:
        return manifest.tree or b""

    def read_buffers(
        self, checkpoint: Checkpoint, manifest: Manifest, ordinals: Sequence[int], *_: object, **__: object
    ) -> Mapping[int, memoryview]:
        numbers = ",".join(map(str, ordinals))
        found: Mapping[int, memoryview] = self._download(checkpoint.id, numbers).buffers if numbers else {}
        return found

    def knows(self, checkpoint_id: str) -> bool:
        try:
            self.index.get(checkpoint_id)
        except NotFound:
            return False
        return True

    def after_fork(self) -> None:
        """Connections of the parent are its own."""
        self.client = self.client.again()
        self.index.client = self.client

    def close(self) -> None:
        self.client.close()

    def __getattr__(self, name: str) -> NoReturn:
        not_here(f"this ({name} of the store)")


class RemoteIndex:
    """The part of `ports.Index` that a CheckpointManager needs; manifests stay where they are (b"")."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self.client.checkpoint(checkpoint_id)

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        return self.get(checkpoint_id), b""

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
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

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        found: dict[str, Checkpoint] = {}
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            found |= self.client.keys(job, keys[start : start + _KEYS_AT_ONCE])
        return {key: (checkpoint, b"") for key, checkpoint in found.items()}

    def find_next(self, job: str, after: int, limit: int) -> dict[str, tuple[Checkpoint, bytes]]:
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

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> Sequence[str]:
        gone = []
        for each in checkpoint_ids:
            try:
                self.client.delete(each)
            except NotFound:
                continue
            gone.append(each)
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

    def __getattr__(self, name: str) -> NoReturn:
        not_here(f"this ({name} of the index)")


def _without(document: Mapping[str, Any], name: str) -> Checkpoint:
    return checkpoint_from_json({key: value for key, value in document.items() if key != name})


def _header(text: str) -> str:
    if not text.isascii() or not text.isprintable() or text != text.strip():
        raise Validation("over HTTP an idempotency key is plain ASCII", hint="use a UUID, for example")
    return text


def _same(answer: Any) -> Any:
    return answer
