"""CheckpointManager: the object users hold. It parses their arguments, then asks the store."""

from __future__ import annotations

import copy
import getpass
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from . import codec
from .blobs import shelter
from .blobs.shelter import Turns
from .care import Care
from .care.local import LocalCare
from .care.methods import CaringManager
from .errors import CheckpointError, NotFound, Validation
from .model import (
    Checkpoint,
    CheckpointId,
    CheckpointLevel,
    CheckpointStatus,
    EventChain,
    Lease,
    parse_choice,
    parse_limit,
    parse_name,
    parse_tags,
)
from .ports import Events, Update
from .store import Save, Store, lease
from .store.background import BackgroundSaves, PendingSave
from .store.methods import Session
from .store.request import Request, parse_lease, parse_request, request_again
from .store.rope import PartedTree
from .store.transfer import IncomingState
from .urls import FORMS, Lock, default_url, find_lock, needing, open_store, without_secrets

if TYPE_CHECKING:
    from .aio import AsyncView

_SERVICES = ("http://", "https://")


class CheckpointManager(CaringManager):
    """A store: saves states under jobs and loads them again.

    Thread-safe. Several processes may use one store, and a fork may use it in parent and child. For asyncio,
    `manager.aio` has the same methods as coroutines. Use it as a context manager, or call close() when done.
    """

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
            raise Validation(f"{chosen!r} names no store", hint=FORMS)
        self.url = os.fspath(chosen) if chosen is not None else default_url()
        self.namespace = parse_name("namespace", namespace)
        self.actor = actor_here()
        self.key_source = key  # as given, for processes that open the same store; for no other use
        store, self._caring = shelter.run(self._open, create, find_lock(key, encrypt_names))
        self._session = Session(store)
        _open_managers.add(self)

    def _open(self, create: bool, lock: Lock | None) -> tuple[Store, Care]:
        if self.url.startswith(_SERVICES):
            with needing("httpx", extra="client"):
                from .client import open_service

            return open_service(self.url, self.namespace, has_key=lock is not None)
        store = open_store(self.url, self.namespace, create=create, lock=lock, actor=self.actor)
        return store, LocalCare(store, self.url, lock)

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

        When this returns, the checkpoint survives kill -9 and power loss (I1). When it raises, no visible checkpoint
        was created, unless a `watch` callback raised: those run after the commit. A second call with the same
        `idempotency_key` returns the first ID instead of saving again. Do not change the state until this returns: if
        another thread changes it meanwhile, a mixture of old and new may be saved, which still loads.
        """
        request = parse_request(
            job_id, step_name, level, parent, tags, metadata, pin, lease, idempotency_key, schema_version
        )
        return self.save_request(request, state)

    def save_request(self, request: Request, state: object) -> CheckpointId:
        """Save `state` with the options of a parsed request."""
        if self._session.background.is_used:
            self._session.background.drain()  # the newest save is the one requested last
            self._session.background.raise_unseen()
        return self.commit(request, codec.encode(state)).id

    def save_many(self, saves: Sequence[Save]) -> list[Checkpoint | BaseException]:
        """Save several states at once, each with its own actor; returns a checkpoint or an exception for each.

        Has the same effect as saving from as many threads, but without the threads: small states share one commit.
        """
        self._check_open()
        self._session.background.drain()
        outcomes = self.store.save_many(saves)
        for n, outcome in enumerate(outcomes):
            if isinstance(outcome, Checkpoint):
                try:
                    self._note(outcome, self._retain(outcome))
                except Exception as error:  # noqa: BLE001 - raised by a watcher; concerns only this save
                    outcomes[n] = error
        return outcomes

    def save_async(self, job_id: str, step_name: str, state: object, **options: Any) -> PendingSave[CheckpointId]:
        """Copy `state` now and commit it in the background. Takes the options of `save`.

        You may change the state as soon as this returns, except for the files of a Tree or File. The checkpoint is
        durable when `.result()` returns its ID. All saves of a manager, including those of `save`, commit in the order
        of the calls. If you do not call `.result()`, the next save or close() raises the error. A program that ends
        waits for pending saves.
        """
        request = parse_request(job_id, step_name, **options)
        self._check_open()
        self._session.background.raise_unseen()
        staged = self._session.background.stage(codec.encode(state))
        return self._session.turns.run(
            self._session.background.commit_later, staged, lambda encoded: self.commit(request, encoded).id
        )

    def commit(self, request: Request, encoded: codec.Encoded | PartedTree | IncomingState) -> Checkpoint:
        """Save a parsed request and its encoded state; the request may contain an ID and a time."""
        checkpoint, failure = self._session.turns.run(self._save_in_turn, request, encoded)
        self._note(checkpoint, failure)
        return checkpoint

    @contextmanager
    def begin(self, request: Request, state: object) -> Iterator[lease.Holding]:
        """Save the first checkpoint of a job, take its lease in the same commit, and hold that lease (I5).

        Raises Unmet if the job exists or another condition of the request fails.
        """
        assert request.lease is not None
        taken, encoded, saved = request.lease, codec.encode(state), list[tuple[Checkpoint, CheckpointError | None]]()

        def take() -> Lease:
            saved.append(self._session.turns.run(self._save_in_turn, request, encoded))
            return taken

        with lease.hold_taken(self.catalogue, take) as holding:
            try:
                self._note(*saved[0])
                yield holding
            finally:
                self._session.background.drain()

    def _save_in_turn(
        self, request: Request, encoded: codec.Encoded | PartedTree | IncomingState
    ) -> tuple[Checkpoint, CheckpointError | None]:
        self._check_open()
        if self._session.background.is_used:
            self._session.background.drain()  # an interrupted save_async may have come first
        checkpoint = self._session.store.save(request, encoded, actor=self.actor)
        return checkpoint, self._retain(checkpoint, is_first=bool(request.provided and request.provided.takes))

    def _retain(self, checkpoint: Checkpoint, *, is_first: bool = False) -> CheckpointError | None:
        try:
            self._caring.after_save(checkpoint, actor=self.actor, is_first=is_first)
        except CheckpointError as error:  # the checkpoint is saved; retention is retried after the next save
            return error
        return None

    def _note(self, checkpoint: Checkpoint, failure: CheckpointError | None) -> None:
        """Count a save, call the watchers, and warn of `failure` (of the job's retention)."""
        self._session.counters["saves"] += 1
        self._session.counters["saved_bytes"] += checkpoint.size_bytes
        self._session.counters["stored_bytes"] += checkpoint.stored_bytes
        for watcher in self._session.watchers:
            watcher("save", checkpoint)
        if failure is not None:
            warnings.warn(f"retention of job {checkpoint.job} failed after a save: {failure}", stacklevel=4)

    # Changing

    def resume_from(
        self, checkpoint_id: str, job_id: str | None = None, *, lease: Lease | None = None
    ) -> tuple[Checkpoint, object]:
        """Branch: make this state the newest checkpoint of its job, or of `job_id`, with `checkpoint_id` as its parent.

        Returns the new checkpoint and the state. Nothing is copied: both share their chunks.
        """
        source = self.catalogue.read(parse_name("checkpoint ID", checkpoint_id))
        state = self.load_stored(source)
        job = source[0].job if job_id is None else parse_name("job", job_id)
        request = request_again(source[0], job=job, parent=source[0].id, created_us=None, lease=lease)
        return self.store.branch(source, request, actor=self.actor), state

    def delete(self, job_id: str, checkpoint_id: str) -> bool:
        """Delete a checkpoint; gc frees its space later. Returns False if there is none; raises Conflict if pinned."""
        try:
            self._in_job(job_id, checkpoint_id)
        except NotFound:
            if self.exists(checkpoint_id):
                raise
            return False
        return bool(self.catalogue.delete([checkpoint_id], actor=self.actor))

    def pin(self, checkpoint_id: str, pinned: bool = True) -> Checkpoint:
        """Protect a checkpoint from cleanup and deletion, or remove that protection."""
        return self._update(checkpoint_id, Update(is_pinned=pinned))

    def tag(self, checkpoint_id: str, /, **tags: str | None) -> Checkpoint:
        """Set tags of a checkpoint; the value None removes a tag."""
        parse_tags({name: value for name, value in tags.items() if value is not None})
        for name in tags:
            parse_name("tag", name)
        return self._update(checkpoint_id, Update(tags=tags))

    def set_status(self, checkpoint_id: str, status: CheckpointStatus | str) -> Checkpoint:
        """Set a checkpoint's status. `load_latest` skips a corrupted one until verify finds it intact."""
        return self._update(checkpoint_id, Update(status=parse_choice(CheckpointStatus, status)))

    def _update(self, checkpoint_id: str, update: Update) -> Checkpoint:
        return self.catalogue.update(parse_name("checkpoint ID", checkpoint_id), update, actor=self.actor)

    # Leases, events

    @contextmanager
    def lease(self, job_id: str, ttl_s: float = 30.0) -> Iterator[Lease]:
        """Hold the lease on a job: `with manager.lease(job) as lease: manager.save(…, lease=lease)` (I5).

        Raises LeaseHeld if another process has it. Only saving needs the lease; deleting and tagging do not. The end of
        the block waits for pending save_asyncs. A forked child must take its own lease.
        """
        with lease.hold(self.catalogue, parse_name("job", job_id), ttl_s=ttl_s) as held:
            try:
                yield held
            finally:
                self._session.background.drain()

    def take_lease(self, job_id: str, holder: str, ttl_s: float) -> Lease:
        """Acquire a lease that outlives this process, for another one to renew. Raises LeaseHeld if it is taken (I5).

        An expired lease remains valid for its holder until somebody else acquires one.
        """
        return self.catalogue.acquire_lease(parse_name("job", job_id), holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        """Renew a lease for its full duration. Raises LeaseLost if it was released or taken over."""
        self.catalogue.renew_lease(parse_lease(lease))

    def break_lease(self, lease: Lease) -> None:
        """End a lease early, if you know that its holder is gone. A newer lease is not affected (I5)."""
        self.catalogue.release_lease(parse_lease(lease))

    def events(
        self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None, wait_s: float = 0.0
    ) -> Events:
        """Return events from the append-only log of all changes, by all processes, in order.

        With `newest`, the last ones. Only events with numbers above `after` and below `before`. Waits up to `wait_s`
        seconds for the next event.
        """
        read = partial(self.catalogue.events, after, parse_limit(limit) or 100, newest=newest, before=before)
        events = read()
        return read() if not events and wait_s > 0 and self.catalogue.wait_for_event(after, wait_s) else events

    def audit(self, until: int | None = None) -> EventChain:
        """Verify the hash chain of the whole event log."""
        return self.catalogue.audit(until)

    def watch(self, callback: Callable[[str, Checkpoint], None]) -> None:
        """Call `callback("save", checkpoint)` in the saving thread after each save of this object."""
        self._session.watchers.append(callback)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when this object is closed, while it can still save."""
        self._session.closers.append(callback)

    # Life

    def drain(self) -> None:
        """Wait for all background saves."""
        self._session.background.drain()

    def acting_as(self, actor: str) -> Self:
        """Return a view of this store whose changes are logged under another actor. Close only the original."""
        view = copy.copy(self)
        view.actor = actor
        return view

    @property
    def aio(self) -> AsyncView:
        """The same methods as coroutines: `await manager.aio.save(…)`. The event loop is never blocked."""
        from .aio import AsyncView  # its callers have imported asyncio already; others need not pay for it

        return AsyncView(self)

    def close(self) -> None:
        """Finish background saves and close the store. Raises the error of a save_async that nobody has seen.

        A store that cannot be written out (`memory:dir` on a full disk) stays open; call close() again.
        """
        if self._session.is_closed:
            return
        try:
            while self._session.closers:
                self._session.closers.pop(0)()
        finally:
            self._session.turns.run(self._let_go)
            self._session.turns.close()

    def _let_go(self) -> None:
        try:
            self._session.background.close()
            self._care.close()
        finally:
            self._session.is_closed = True
            try:
                self._session.store.close()
            except BaseException:
                self._session.is_closed = False
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncView:
        """`async with kedge.open(…) as store: await store.save(…)`: the coroutines of `aio`."""
        return self.aio

    async def __aexit__(self, *_: object) -> None:
        await self.aio.close()

    @property
    def place(self) -> str:
        """Return the URL without user and password, for display."""
        return without_secrets(self.url)

    def __repr__(self) -> str:
        return f"CheckpointManager({self.place!r}, namespace={self.namespace!r})"

    def _after_fork(self) -> None:
        """Replace the parent's threads and locks in a forked child. Adapters handle their own."""
        self._session.background = BackgroundSaves()
        self._session.turns = Turns()
        self._caring.after_fork()
        self._session.store.after_fork()


def actor_here() -> str:
    """Return the current user as events name it: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{os.uname().nodename}"


_open_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _after_fork() -> None:
    for manager in list(_open_managers):
        manager._after_fork()


os.register_at_fork(after_in_child=_after_fork)
