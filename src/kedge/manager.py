"""CheckpointManager: the object users hold. Parses what they give, then asks the store."""

from __future__ import annotations

import getpass
import os
import re
import socket
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from . import codec
from .blobs import shelter
from .care.retention import Plan, RetentionPolicy
from .care.upkeep import Upkeep
from .errors import CheckpointError, Conflict, Corrupted, NotFound, Validation
from .model import (
    Checkpoint,
    CheckpointId,
    CheckpointLevel,
    CheckpointStatus,
    Lease,
    parse_choice,
    parse_limit,
    parse_name,
    parse_tags,
    to_us,
)
from .ports import Checkpoints, EventChain, Events, Jobs, NewCheckpoint
from .store import lease
from .store.background import BackgroundSaves, PendingSave
from .store.record import copy_record
from .store.request import Request, parse_request
from .urls import Lock, find_keys, find_lock, keep_keyring, open_found, open_store

if TYPE_CHECKING:
    from .aio import AsyncView
    from .care.copy import Copying, CopyReport
    from .care.gc import GcReport
    from .care.rebuild import RebuildReport
    from .care.rekey import RekeyReport
    from .care.review import Verdict
    from .care.verify import VerifyReport
    from .diff import Diff
    from .store.local import Store

_PAGE = 1000  # checkpoints read at once
_SERVICES = ("http://", "https://")
Progress = Callable[[int, int], None]  # (done, total), in the unit the operation names


class CheckpointManager:
    """Saves states under jobs and brings them back.

    Thread-safe; several processes may use one store; a fork may go on using it in parent and child; from asyncio,
    `manager.aio` has the same methods as coroutines. Use as a context manager, or close() when done.
    """

    def __new__(
        cls,
        storage_path: str | os.PathLike[str] | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        **_: object,
    ) -> Self:
        """A place that begins with http:// or https:// is a service."""
        chosen = storage_path if storage_path is not None else storage_dir
        if cls is CheckpointManager and str(default_url() if chosen is None else chosen).startswith(_SERVICES):
            from .client.remote import RemoteManager

            return object.__new__(RemoteManager)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        storage_path: str | os.PathLike[str] | None = None,
        storage_dir: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "default",
        create: bool = True,
        key: bytes | str | None = None,
        encrypt_names: bool | None = None,
    ) -> None:
        chosen = storage_path if storage_path is not None else storage_dir
        if chosen is not None and not isinstance(chosen, str | os.PathLike):
            raise Validation(f"{chosen!r} names no store", hint='use a directory, "file:directory" or "memory:"')
        self.url = os.fspath(chosen) if chosen is not None else default_url()
        self.namespace = parse_name("namespace", namespace)
        self.actor = actor_here()
        lock = find_lock(key, encrypt_names)
        self._store = shelter.run(self._open, create, lock)
        self._lock = lock
        self.key_source = key  # what was given, for processes that open the same store; no one else's business
        self.counters: Counter[str] = Counter()
        self._background = BackgroundSaves()
        self._watchers: list[Callable[[str, Checkpoint], None]] = []
        self._closers: list[Callable[[], None]] = []
        self._upkeep = Upkeep()
        self._closed = threading.Event()
        _open_managers.add(self)

    def _open(self, create: bool, lock: Lock | None) -> Store:
        return open_store(self.url, self.namespace, create=create, lock=lock, actor=self.actor)

    # Saving

    def save(
        self,
        job_id: str,
        step_name: str,
        state: object,
        *,
        level: CheckpointLevel | str = CheckpointLevel.STEP,
        parent: str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        pin: bool = False,
        lease: Lease | None = None,
        idempotency_key: str | None = None,
        schema_version: str = "1.0",
    ) -> CheckpointId:
        """Make `state` durable as the next checkpoint of `job_id` and return its ID.

        When this returns, the checkpoint survives kill -9 and power loss (I1). When it raises, nothing was stored
        that anyone can see, except when a `watch` callback raised: those run after the commit. The same
        `idempotency_key` again returns the first ID instead of saving twice. Keep the state as it is until this
        returns: one that another thread changes meanwhile may be saved half old and half new, though it always loads.
        """
        request = parse_request(
            job_id, step_name, level, parent, tags, metadata, pin, lease, idempotency_key, schema_version
        )
        self._background.drain()  # the newest save is the one that was asked for last
        self._background.raise_unseen()
        return self._commit(request, codec.encode(state)).id

    def save_encoded(self, job_id: str, step_name: str, encoded: codec.Encoded, **options: Any) -> Checkpoint:
        """Like `save`, for a state that was encoded elsewhere; the caller has checked that it can be decoded."""
        request = parse_request(job_id, step_name, **options)
        self._background.drain()
        return self._commit(request, encoded)

    def save_each(self, saves: Sequence[tuple[Request, codec.Encoded, str]]) -> list[Checkpoint | BaseException]:
        """Several saves that came at the same time, each with its actor: for each its checkpoint, or what it raises.

        As if as many threads had saved, without the threads: small states share one commit.
        """
        self._check_open()
        self._background.drain()
        outcomes = self._store.save_each(saves)
        for n, outcome in enumerate(outcomes):
            if isinstance(outcome, Checkpoint):
                try:
                    self._note(outcome)
                except Exception as error:  # noqa: BLE001 - of a watcher; belongs to this save alone
                    outcomes[n] = error
        return outcomes

    def save_async(self, job_id: str, step_name: str, state: object, **options: Any) -> PendingSave[CheckpointId]:
        """Copy `state` now, commit it in the background; options are those of `save`.

        The state may be changed as soon as this returns, except the files of a Tree or File. Durable when `.result()`
        returns the ID. Saves of one manager commit in the order given, those of `save` among them. A failure that
        nobody asked for is raised by the next save and by close(); a program that just ends waits for them too.
        """
        request = parse_request(job_id, step_name, **options)
        self._check_open()
        self._background.raise_unseen()
        staged = self._background.stage(codec.encode(state))
        return self._store.turns.run(
            self._background.commit_later, staged, lambda encoded: self._commit(request, encoded).id
        )

    def _commit(self, request: Request, encoded: codec.Encoded) -> Checkpoint:
        self._check_open()
        checkpoint = self._store.turns.run(self._save_in_turn, request, encoded)
        self._note(checkpoint)
        return checkpoint

    def _save_in_turn(self, request: Request, encoded: codec.Encoded) -> Checkpoint:
        self._background.drain()  # an interrupted save_async may have got there meanwhile
        return self._store.save(request, encoded, actor=self.actor)

    def _note(self, checkpoint: Checkpoint) -> None:
        """Whatever is to follow a save."""
        self.counters["saves"] += 1
        self.counters["saved_bytes"] += checkpoint.size_bytes
        self.counters["stored_bytes"] += checkpoint.stored_bytes
        for watcher in self._watchers:
            watcher("save", checkpoint)
        try:
            self._retain(checkpoint)
        except CheckpointError as error:  # the save is done; the next one tries again
            warnings.warn(f"retention of job {checkpoint.job} failed after a save: {error}", stacklevel=4)

    # Finding

    def list(
        self,
        job_id: str,
        *,
        level: CheckpointLevel | str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: str | int | None = None,
        after: str | int | None = None,
    ) -> Checkpoints:
        """Checkpoints of a job, oldest first, without their states; [] for an unknown job.

        `limit` keeps the newest ones; page backwards with `before=` the first of the last page (its ID or seq).
        `metadata` filters by JSON paths, such as {"model.name": "small"}.
        """
        return self._store.index.list(
            parse_name("job", job_id),
            level=None if level is None else parse_choice(CheckpointLevel, level),
            tags=parse_tags(tags) or None,
            metadata=_parse_filter(metadata),
            limit=parse_limit(limit),
            before=self._seq_of(job_id, before),
            after=self._seq_of(job_id, after),
        )

    def walk(
        self,
        job_id: str,
        *,
        level: CheckpointLevel | str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        before: str | int | None = None,
        after: str | int | None = None,
    ) -> Iterator[Checkpoint]:
        """`list` one by one, oldest first, in memory that does not grow with the history.

        It is read in pages: what is saved meanwhile comes too, what is deleted before its page is read does not.
        """
        first, last = self._seq_of(job_id, after) or 0, self._seq_of(job_id, before)
        wanted: dict[str, Any] = {"level": level, "tags": tags, "metadata": metadata, "before": last}
        while page := self.list(job_id, **wanted, after=first, limit=_PAGE):
            yield from page
            first = page[-1].seq

    def get(self, checkpoint_id: str) -> Checkpoint:
        """The checkpoint without its state; NotFound if there is none."""
        return self._store.index.get(parse_name("checkpoint ID", checkpoint_id))

    def exists(self, checkpoint_id: str) -> bool:
        return self._store.knows(parse_name("checkpoint ID", checkpoint_id))

    def jobs(self, prefix: str = "", limit: int | None = None, after: str | None = None) -> Jobs:
        """Jobs by name; page with `after=` the last name."""
        if not isinstance(prefix, str) or not isinstance(after, str | None):
            raise Validation(f"prefix={prefix!r}, after={after!r}", hint="use the beginning of a job's name")
        return self._store.index.jobs(prefix, parse_limit(limit), after or "")

    # Loading

    def load(
        self,
        checkpoint_id: str,
        *,
        only: str | Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: object = None,
    ) -> object:
        """The state of a checkpoint, verified (I2).

        `only` is a glob or several over '/'-joined paths ("model/layer3/*"): the rest is neither read nor returned.
        `into` is a state of the same shape whose arrays and tensors, on any device, are filled in place.
        `mapped` gives read-only arrays over the store's files: no memory of their own where chunks are uncompressed.
        Tensors, which torch cannot protect, are writable then; what is written stays in this process.
        `device` is where tensors go ("cuda:1"), chunk by chunk, without a copy of the state in main memory.
        """
        checkpoint, packed = self._store.index.read(parse_name("checkpoint ID", checkpoint_id))
        return self._load(checkpoint, packed, only=only, into=into, mapped=mapped, device=device)

    def load_latest(
        self, job_id: str, *, level: CheckpointLevel | str | None = None, into: object = None, device: object = None
    ) -> tuple[Checkpoint, object] | None:
        """The newest checkpoint of a job and its state; None when there is none yet. `into`, `device`: as for `load`.

        One that verify found damaged is passed over with a warning; when all are, that is Corrupted.
        """
        wanted = None if level is None else parse_choice(CheckpointLevel, level)
        while True:
            found = self._store.index.latest(parse_name("job", job_id), wanted)
            if found is None:
                # All of them in one read: what was saved since `latest` looked is not damaged, but found next time.
                history = self._store.index.list(job_id, level=wanted)
                if not history:
                    return None
                if all(checkpoint.status is CheckpointStatus.CORRUPTED for checkpoint in history):
                    raise Corrupted(
                        f"every checkpoint of job {job_id} is marked as damaged, such as {history[-1].id}",
                        hint="run kedge check; put lost files back, or load one by its ID to see what is wrong",
                    )
                continue
            self._warn_of_newer(found[0], wanted)
            try:
                return found[0], self._load(*found, into=into, device=device)
            except NotFound:
                if self.exists(found[0].id):
                    raise
                # deleted while it was loaded: another one is the newest now

    def _warn_of_newer(self, found: Checkpoint, level: CheckpointLevel | None) -> None:
        newer = self._store.index.list(found.job, level=level, limit=1, after=found.seq)
        if newer and newer[0].status is CheckpointStatus.CORRUPTED:
            text = f"checkpoint {newer[0].id}, newer than {found.id} of job {found.job}, is damaged and passed over"
            warnings.warn(text, stacklevel=3)

    def load_by_key(self, job_id: str, idempotency_key: str) -> tuple[Checkpoint, object] | None:
        """The checkpoint saved under an idempotency key, and its state; None when there is none yet."""
        found = self._store.index.find(parse_name("job", job_id), (idempotency_key,)).get(idempotency_key)
        return None if found is None else (found[0], self._load(*found))

    def read_ahead(
        self, job_id: str, after: int, limit: int = 64
    ) -> dict[str, tuple[Checkpoint, Callable[[], object]]]:
        """What was saved under idempotency keys next behind sequence number `after`; states are loaded when called."""
        found = self._store.index.find_next(parse_name("job", job_id), after, limit)
        return {
            key: (checkpoint, partial(self._load, checkpoint, packed)) for key, (checkpoint, packed) in found.items()
        }

    def get_by_key(self, job_id: str, idempotency_key: str) -> Checkpoint | None:
        """The checkpoint saved under an idempotency key, without its state; None when there is none."""
        found = self._store.index.find(parse_name("job", job_id), (idempotency_key,)).get(idempotency_key)
        return None if found is None else found[0]

    def restore(self, job_id: str, checkpoint_id: str | None = None) -> object:
        """The state of a job's checkpoint, the newest by default; NotFound (a FileNotFoundError) when missing."""
        if checkpoint_id is None:
            found = self.load_latest(job_id)
            if found is None:
                raise NotFound(f"job {job_id} has no checkpoint", hint="kedge jobs shows which jobs exist")
            return found[1]
        self._in_job(job_id, checkpoint_id)
        return self.load(checkpoint_id)

    def resume_from(
        self, checkpoint_id: str, job_id: str | None = None, *, lease: Lease | None = None
    ) -> tuple[Checkpoint, object]:
        """Branch: make this state the newest of its job, or of `job_id`, with `checkpoint_id` as parent.

        Returns the new checkpoint and the state. Nothing is copied: both share their chunks.
        """
        source, packed = self._store.index.read(parse_name("checkpoint ID", checkpoint_id))
        state = self._load(source, packed)
        record = self._copy_of(source, packed, job_id or source.job)
        token = lease.token if lease else None
        branch = replace(record, parent=source.id, created_us=time.time_ns() // 1000, lease_token=token)
        return self._store.commit_shared(branch, actor=self.actor), state

    def outline(self, checkpoint_id: str) -> object:
        """The state with arrays and buffers summarised, not read: for showing, comparing, browsing."""
        checkpoint, packed = self._store.index.read(parse_name("checkpoint ID", checkpoint_id))
        try:
            manifest = self._store.open(checkpoint, packed)
            return codec.outline(self._store.tree(checkpoint, manifest))
        except Corrupted:
            self._check_exists(checkpoint)
            raise

    def _load(
        self,
        checkpoint: Checkpoint,
        packed: bytes,
        *,
        only: str | Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: object = None,
    ) -> object:
        self._check_open()
        patterns = [only] if isinstance(only, str) else only
        if patterns is not None and (not patterns or not _are_texts(patterns)):
            raise Validation(f"only={only!r}", hint='use paths, with * where any name fits: "model/*"')
        if into is not None and (patterns is not None or mapped or device is not None):
            raise Validation("into= excludes only=, mapped= and device=", hint="give a smaller state to into= instead")
        if mapped and device is not None:
            raise Validation("mapped= excludes device=", hint="what is mapped stays in main memory")
        place = None if device is None else codec.parse_device(device)
        try:
            state = self._store.load(checkpoint, packed, only=patterns, into=into, mapped=mapped, device=place)
        except Corrupted:
            self._check_exists(checkpoint)
            raise
        self.counters["loads"] += 1
        self.counters["loaded_bytes"] += checkpoint.size_bytes
        return state

    def _check_exists(self, checkpoint: Checkpoint) -> None:
        """Chunks that are gone are damage, unless their checkpoint was deleted meanwhile and gc has been there."""
        if not self.exists(checkpoint.id):
            raise NotFound(
                f"checkpoint {checkpoint.id} was deleted while it was read", hint="kedge list JOB shows what exists"
            ) from None

    # Changing

    def delete(self, job_id: str, checkpoint_id: str) -> bool:
        """Remove a checkpoint; False when there is none. Its bytes go with the next gc. A pinned one is a Conflict."""
        try:
            self._in_job(job_id, checkpoint_id)
        except NotFound:
            if self.exists(checkpoint_id):
                raise
            return False
        return bool(self._store.index.delete([checkpoint_id], actor=self.actor))

    def pin(self, checkpoint_id: str, pinned: bool = True) -> Checkpoint:
        """Keep a checkpoint from every cleanup and delete, or let go of it again."""
        return self._store.index.update(parse_name("checkpoint ID", checkpoint_id), is_pinned=pinned, actor=self.actor)

    def tag(self, checkpoint_id: str, **tags: str | None) -> Checkpoint:
        """Set tags; None removes one."""
        parse_tags({name: value for name, value in tags.items() if value is not None})
        for name in tags:
            parse_name("tag", name)
        return self._store.index.update(parse_name("checkpoint ID", checkpoint_id), tags=tags, actor=self.actor)

    def set_status(self, checkpoint_id: str, status: CheckpointStatus | str) -> Checkpoint:
        """Mark a checkpoint as archived, or as corrupted: `latest` passes it over until verify finds it sound."""
        wanted = parse_choice(CheckpointStatus, status)
        return self._store.index.update(parse_name("checkpoint ID", checkpoint_id), status=wanted, actor=self.actor)

    def condemn(self, checkpoint_id: str) -> Checkpoint:
        """Read all of a checkpoint that a load found damaged and, if it is, mark it and its damaged chunks.

        The next save writes those chunks again. What turns out to be sound is not marked: see the status of what this
        returns. What cannot be read now is StorageError. `verify` does the same for a whole job, or everything.
        """
        from .care.verify import condemn

        return condemn(self._store, parse_name("checkpoint ID", checkpoint_id), actor=self.actor)

    def copy(self, job: str, new_job: str) -> Checkpoints:
        """Copy a job's history to a new name, sharing every byte. Safe to repeat after an interruption."""
        parse_name("job", new_job)
        if job == new_job:
            raise Conflict(f"job {job} cannot be copied onto itself", hint="choose another name")
        if not (history := self.list(job)):
            raise NotFound(f"job {job} has no checkpoint", hint="kedge jobs shows which jobs exist")
        renamed: dict[str, CheckpointId] = {}
        copies: Checkpoints = []
        for source in history:
            record = self._copy_of(*self._store.index.read(source.id), new_job)
            parent = renamed.get(source.parent or "", source.parent)
            if parent is not None and not self.exists(parent):
                parent = None  # deleted: the line of ancestors begins here
            record = replace(record, parent=parent, idempotency_key=f"copy:{source.id}")
            copies.append(self._store.commit_shared(record, actor=self.actor))
            renamed[source.id] = copies[-1].id
        return copies

    def copy_to(
        self,
        target: CheckpointManager,
        *,
        job: str | None = None,
        since: datetime | None = None,
        mirror: bool = False,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Bring another store, of any kind, up to this one: all jobs or one, everything or what was saved `since`.

        IDs, numbers, parents, tags, pins, times and keys stay; only chunks that `target` lacks are moved, each
        verified. Stopped anywhere, run it again. With `mirror`, what was deleted here is deleted there too.
        """
        return self._copying(target, job, since, mirror).copy(progress)

    def follow_to(
        self,
        target: CheckpointManager,
        *,
        stop: threading.Event,
        job: str | None = None,
        since: datetime | None = None,
        mirror: bool = False,
        changed: Callable[[CopyReport], None] = lambda _: None,
        progress: Progress | None = None,
    ) -> None:
        """As `copy_to`, then go on with every change here until `stop` is set; `changed` hears of each round.

        `target` keeps how far this has come: the next one goes on there instead of comparing everything.
        """
        from .care.follow import Following

        Following(self._copying(target, job, since, mirror)).run(stop=stop, changed=changed, progress=progress)

    def _copying(self, target: CheckpointManager, job: str | None, since: datetime | None, mirror: bool) -> Copying:
        from .care.copy import Copying

        if not isinstance(target, CheckpointManager):
            raise Validation(f"{target!r} is no open store", hint="open it with kedge.open(url)")
        if since is not None and (not isinstance(since, datetime) or since.tzinfo is None):
            raise Validation(
                f"since={since!r}", hint="use a datetime with a time zone: datetime.now(UTC) - timedelta(1)"
            )
        return Copying(
            self._store,
            target._store,
            job=None if job is None else parse_name("job", job),
            since_us=None if since is None else to_us(since),
            mirror=mirror,
            actor=self.actor,
        )

    def _copy_of(self, source: Checkpoint, packed: bytes, job: str) -> NewCheckpoint:
        named = self._store.chunks(packed)
        return copy_record(source, packed, parse_name("job", job), references=named, new_id=self._store.new_id)

    # Retention

    def cleanup(self, job_id: str, keep_last: int = 10) -> int:
        """Delete all but the newest `keep_last` checkpoints of a job; pinned ones stay. Returns how many went."""
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise Validation(f"keep_last={keep_last!r}", hint="use a whole number from 1 on")
        policy = RetentionPolicy(keep_last=keep_last)
        return sum(not verdict.reasons for verdict in self.review(policy, job=job_id, dry_run=False))

    def apply(
        self,
        policy: RetentionPolicy,
        *,
        job: str | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
    ) -> Plan:
        """What `policy` would delete, in one job or in all; with dry_run=False, done.

        The answer holds every checkpoint that was looked at; for long histories see `review`.
        """
        from .care.retention import execute, plan

        _check_policy(policy)
        made = plan(self._store.index, policy, job=None if job is None else parse_name("job", job))
        return made if dry_run else execute(self._store.index, made, actor=self.actor, progress=progress)

    def review(self, policy: RetentionPolicy, *, job: str | None = None, dry_run: bool = True) -> Iterator[Verdict]:
        """Each checkpoint of a job, or of all, with the reasons `policy` has to keep it; none: it goes. Newest first.

        With dry_run=False it is gone when it is told, and what is not asked for stays. Memory does not grow with
        the history.
        """
        from .care.review import carry_out, review

        _check_policy(policy)
        name = None if job is None else parse_name("job", job)
        if dry_run:
            return review(self._store.index, policy, name)
        return chain.from_iterable(carry_out(self._store.index, policy, name, actor=self.actor))

    def set_retention(self, job_id: str, policy: RetentionPolicy | None) -> None:
        """Apply `policy` to a job by itself, after its saves; None ends that.

        A save does a bounded part of it (I6): a long history shrinks with the saves that follow; `cleanup` does it
        at once.
        """
        if policy is not None:
            _check_policy(policy)
        text = None if policy is None else policy.to_json()
        self._store.index.set_retention(parse_name("job", job_id), text, actor=self.actor)
        self._upkeep.set_policy(job_id, policy)

    def _retain(self, saved: Checkpoint) -> None:
        """Do a bounded part of what the job's own policy asks for (I6)."""
        self._upkeep.after_save(self._store.index, saved, actor=self.actor)

    # Caring for the store

    def diff(self, a: str, b: str) -> Diff:
        """What changed from checkpoint `a` to checkpoint `b`, by path."""
        from .diff import diff

        older, newer = (self._store.index.read(parse_name("checkpoint ID", i)) for i in (a, b))
        return diff(self._store, older, newer)

    def verify(self, job: str | None = None, deep: bool = True, *, progress: Progress | None = None) -> VerifyReport:
        """Check digests of everything (deep), or that everything named exists (quick). See `kedge check`."""
        from .care.verify import verify

        wanted = None if job is None else parse_name("job", job)
        if wanted is not None and self._store.index.job(wanted) is None:
            raise NotFound(f"job {wanted} not found", hint="kedge jobs shows which jobs exist")
        return verify(self._store, job=wanted, deep=deep, actor=self.actor, progress=progress)

    def gc(self, *, dry_run: bool = False, progress: Progress | None = None) -> GcReport:
        """Give back the space of deleted checkpoints. Safe beside writers and readers, in other processes too (I3).

        With `dry_run`, only what would be given back is told.
        """
        from .care.gc import collect, foresee

        kept = self._store.at_rest()
        if dry_run:
            return foresee(kept, progress=progress)
        if kept is not self._store:
            collect(self._store, actor=self.actor)
        return collect(kept, actor=self.actor, progress=progress)

    def rebuild(self, *, progress: Progress | None = None) -> RebuildReport:
        """After the index was lost, or put back from an old backup: add what the packs know, in every namespace.

        Whatever the index has stays as it is. Stop savers first. See `kedge rebuild`.
        """
        from .care.rebuild import rebuild

        keys = None if self._lock is None else find_keys(self._store, self._lock)

        @contextmanager
        def opened(namespace: str) -> Iterator[Store]:
            store = open_found(self.url, namespace, self._lock, keys, actor=self.actor)
            try:
                yield store
            finally:
                store.close()

        if self._store.at_rest() is not self._store:
            raise Validation("what is in memory has no packs to rebuild from", hint="open the directory it is kept in")
        if self.url == "memory:":
            raise Validation("a store in memory has no packs to rebuild from", hint="its index cannot get lost alone")
        report = rebuild(self._store.blobs, opened, actor=self.actor, keys=keys, progress=progress)
        self._store.index.accept()
        if self._store.vault is not None:
            self._store.vault.refresh()
        return report

    def rekey(
        self, new_key: bytes | str | None = None, *, rewrite: bool = False, progress: Progress | None = None
    ) -> RekeyReport:
        """Change the keys of this namespace: the master key to `new_key`, nothing being rewritten; or, with `rewrite`,
        the data key too, every checkpoint being written anew. For keys that leaked; resumes after an interruption.
        LeaseHeld, and nothing is changed, while another change of these keys is under way.
        """
        from .care.rekey import change_master, changing
        from .care.rekey import rewrite as rewrite_all
        from .crypto import parse_master

        if self._lock is None:
            raise Validation("this store is not encrypted", hint="make a new one with a key, and save there")
        if new_key is None and not rewrite:
            raise Validation("no new key was given", hint="give new_key=, rewrite=True, or both")
        master = None if new_key is None else parse_master(new_key)
        store = self._store.at_rest()
        if rewrite:
            self._background.drain()
        with changing(store) as lease:
            if master is not None:
                report = change_master(store, self._lock.master, master, lease, actor=self.actor)
                self._lock = replace(self._lock, master=master)
                self.key_source = new_key
                keep_keyring(self.url, self._store)
                if not rewrite:
                    return report
            report = rewrite_all(store, self._lock.master, lease, actor=self.actor, progress=progress)
            keep_keyring(self.url, self._store)
        return report

    @property
    def encryption(self) -> Mapping[str, object] | None:
        """How this namespace is encrypted, without secrets: IDs of the keys, whether names are; None if it is plain."""
        vault = self._store.at_rest().vault
        return None if vault is None else vault.description

    def stats(self, job: str | None = None) -> Mapping[str, int]:
        """Numbers of the store, or of one job."""
        from .care.verify import stats

        return stats(self._store, None if job is None else parse_name("job", job))

    # Leases, events

    @contextmanager
    def lease(self, job_id: str, ttl_s: float = 30.0) -> Iterator[Lease]:
        """`with manager.lease(job) as lease: manager.save(…, lease=lease)`; LeaseHeld when somebody has it (I5).

        It is about saving: deleting and tagging need no lease. At the end of the block pending save_asyncs are waited
        for. A forked child must take a lease of its own.
        """
        with lease.hold(self._store.index, parse_name("job", job_id), ttl_s=ttl_s) as held:
            try:
                yield held
            finally:
                self._background.drain()

    def take_lease(self, job_id: str, holder: str, ttl_s: float) -> Lease:
        """A lease that outlives this process, for who renews it in another one; LeaseHeld when somebody has it (I5).

        One that has run out still serves its holder, as long as nobody else has taken one since.
        """
        return self._store.index.acquire_lease(parse_name("job", job_id), holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        """Its whole time again; LeaseLost when it was given back or taken over."""
        self._store.index.renew_lease(lease)

    def break_lease(self, lease: Lease) -> None:
        """End a lease before its time, for who knows that its holder is gone. A newer one is left alone (I5)."""
        self._store.index.release_lease(lease)

    def events(
        self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None, wait_s: float = 0.0
    ) -> Events:
        """The append-only log of all changes, by every process, in order; with `newest`, the end of it.

        Only what is below `before`, where that is given.

        Waits up to `wait_s` for the next one.
        """
        if wait_s > 0:
            self._store.index.wait_for_event(after, wait_s)
        return self._store.index.events(after, parse_limit(limit) or 100, newest=newest, before=before)

    def audit(self, until: int | None = None) -> EventChain:
        """The log of changes read from its beginning, each entry proved to follow from those before it."""
        return self._store.index.audit(until)

    def watch(self, callback: Callable[[str, Checkpoint], None]) -> None:
        """Call `callback("save", checkpoint)` in the saving thread after each save of this object."""
        self._watchers.append(callback)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when this object is closed, while it can still save."""
        self._closers.append(callback)

    # Life

    def acting_as(self, actor: str) -> Self:
        """The same open store, with another name for who changes it in the log. Close the first one only."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, actor=actor)
        return view

    @property
    def aio(self) -> AsyncView:
        """The same methods as coroutines: `await manager.aio.save(…)`. The event loop is never blocked."""
        from .aio import AsyncView  # whoever gets here uses asyncio already; others need not pay for it

        return AsyncView(self)

    def close(self) -> None:
        """Finish background saves and let go of the store. Raises what a save_async failed with unseen.

        A store that cannot be let go of (`memory:dir`, whose disk is full) stays open, and may be closed again.
        """
        if self._closed.is_set():
            return
        try:
            while self._closers:
                self._closers.pop(0)()
        finally:
            self._store.turns.run(self._let_go)

    def _let_go(self) -> None:
        try:
            self._background.close()
            self._finish_upkeep()
        finally:
            self._closed.set()
            try:
                self._store.close()
            except BaseException:
                self._closed.clear()
                raise

    def _finish_upkeep(self) -> None:
        try:
            self._upkeep.finish()
        except CheckpointError as error:  # every save is done; another one tries again
            warnings.warn(f"retention failed: {error}", stacklevel=3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def place(self) -> str:
        """The URL for showing: without user and password."""
        return without_secrets(self.url)

    def __repr__(self) -> str:
        return f"CheckpointManager({self.place!r}, namespace={self.namespace!r})"

    def _after_fork(self) -> None:
        """In a forked child: threads and locks of the parent are of no use here. The adapters see to themselves."""
        self._background = BackgroundSaves()
        self._upkeep.after_fork()
        self._store.after_fork()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Conflict(f"{self!r} is closed", hint="open it again with kedge.open()")

    def _in_job(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        checkpoint = self.get(checkpoint_id)
        if checkpoint.job != parse_name("job", job_id):
            raise NotFound(
                f"checkpoint {checkpoint_id} not found in job {job_id}",
                hint=f"it belongs to job {checkpoint.job}",
            )
        return checkpoint

    def _seq_of(self, job_id: str, where: str | int | None) -> int | None:
        if isinstance(where, str):
            return self._in_job(job_id, where).seq
        if where is not None and type(where) is not int:
            raise Validation(f"{where!r} is no place in a history", hint="use a checkpoint ID or a sequence number")
        return where


def _parse_filter(metadata: Mapping[str, object] | None) -> Mapping[str, object] | None:
    if metadata is not None and (not isinstance(metadata, Mapping) or not _are_texts(metadata)):
        raise Validation(f"metadata={metadata!r}", hint='use paths and values: {"model.name": "small"}')
    return metadata


def _are_texts(values: object) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)


def _check_policy(policy: object) -> None:
    if not isinstance(policy, RetentionPolicy):
        raise Validation(f"{policy!r} is not a RetentionPolicy", hint="use RetentionPolicy(keep_last=10), for example")


def without_secrets(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)


def default_url() -> str:
    """Where the store is when nobody says."""
    return os.environ.get("KEDGE_STORE") or ".kedge"


def actor_here() -> str:
    """Who works here, as events name it: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


_open_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _after_fork() -> None:
    for manager in list(_open_managers):
        manager._after_fork()


os.register_at_fork(after_in_child=_after_fork)
