"""What all routes share: the store, one manager per namespace, the worker threads, tokens, tasks and numbers."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kedge.errors import LeaseHeld, StorageError, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from .batches import Batches
from .events import Feeds
from .limits import Body, Limits
from .metrics import Metrics
from .sessions import Sessions
from .tasks import Tasks
from .tokens import ACCESS, Tokens
from .uploads import WaitingSave, save_each
from .webhooks import Notifier, Webhooks

T = TypeVar("T")

Place = str | os.PathLike[str]

_READY, _READY_S = "ready", 1.0  # a lease, and how long it proves that the store takes writes
_TROUBLE_S = 10.0  # so long a failure counts, unless a save succeeds
_GATHER_S = 0.005  # for savers who will be back: a commit of its own costs four times as much as a place in one


class Service:
    """A store as the application sees it. Managers are opened when first needed and live as long as the service."""

    def __init__(
        self, store: CheckpointManager | Place | None, runner: object | None, *, namespace: str, limits: Limits
    ) -> None:
        is_open = isinstance(store, CheckpointManager)
        self._key = store.key_source if isinstance(store, CheckpointManager) else None
        self.namespace = store.namespace if isinstance(store, CheckpointManager) else namespace
        if self.namespace == ACCESS:
            raise Validation(f"the namespace {ACCESS} is not served", hint="it holds the tokens")
        self.url: Place | None = store.url if isinstance(store, CheckpointManager) else store
        self.runner = runner
        self.limits = limits
        self.metrics = Metrics()
        self.tasks = Tasks(lambda: self.manager(ACCESS), self.metrics)
        self.feeds = Feeds(self)
        self.notifier = Notifier(self.webhooks, self.manager)
        self.is_draining = False
        self._trouble: tuple[float, StorageError] | None = None  # the last one of the store, and when (monotonic)
        self._written_s = -_READY_S
        self.slots: set[Body] = set()  # of requests under way, from callers who are known
        self.sign_ins: set[Body] = set()  # and of those who sign in
        self._managers: dict[str, CheckpointManager] = {}
        self._borrowed = {self.namespace} if is_open else set()
        if isinstance(store, CheckpointManager):
            self._managers[self.namespace] = store
        self._opening = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._tokens: Tokens | None = None
        self._sessions: Sessions | None = None
        self.lookups: Batches[tuple[str, str], Checkpoint] = Batches("kedge-lookups", self._look_up)
        self.saves: Batches[WaitingSave, Checkpoint] = Batches("kedge-saves", save_each, gather_s=_GATHER_S)

    def _look_up(self, names: Sequence[tuple[str, str]]) -> list[Checkpoint | BaseException]:
        """Checkpoints by namespace and ID, without their states."""
        checkpoints: list[Checkpoint | BaseException] = []
        for namespace, checkpoint_id in names:
            try:
                checkpoints.append(self.manager(namespace).get(checkpoint_id))
            except Exception as error:  # noqa: BLE001 - of this one alone: those it came with are not to suffer
                checkpoints.append(error)
        return checkpoints

    def manager(self, namespace: str) -> CheckpointManager:
        """The manager of a namespace. Which ones may be asked for is decided before (`auth`)."""
        manager = self._managers.get(namespace)
        if manager is not None:
            return manager
        with self._opening:
            if namespace not in self._managers:
                self._managers[namespace] = CheckpointManager(self.url, namespace=namespace, key=self._key)
            return self._managers[namespace]

    def managers(self) -> list[CheckpointManager]:
        """Those in use so far, without that of the tokens."""
        return [manager for name, manager in list(self._managers.items()) if name != ACCESS]

    @property
    def has_tokens_open(self) -> bool:
        """Whether `tokens` can be asked without opening the store."""
        return self._tokens is not None

    @property
    def tokens(self) -> Tokens:
        if self._tokens is None:
            self._tokens = Tokens(self.manager(ACCESS))
        return self._tokens

    @property
    def sessions(self) -> Sessions:
        if self._sessions is None:
            self._sessions = Sessions(self.manager(ACCESS), self.tokens)
        return self._sessions

    def webhooks(self, actor: str | None = None) -> Webhooks:
        """Those of the store; what is changed is changed in the name of `actor`."""
        records = self.manager(ACCESS)
        acting = records if actor is None else records.acting_as(actor)
        return Webhooks(acting, allow_private=self.limits.private_webhooks)

    async def were_tokens_made(self) -> bool:
        """Whether callers have to be known. Asked by every request without a token: from memory where that can tell."""
        if self._tokens is not None and (known := self._tokens.remember_made()) is not None:
            return known
        return await self.in_thread(lambda: self.tokens.were_made())  # noqa: PLW0108 - `tokens` may open the store

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what may block on one of a bounded number of threads; it sees the context of the request."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="kedge-http")
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, work)

    def note_trouble(self, error: StorageError) -> None:
        """The store could not do what it was asked for."""
        self._trouble = time.monotonic(), error

    def note_saved(self) -> None:
        self._trouble = None

    def check_writable(self) -> None:
        """Raise what keeps the store from saving: what a request met a moment ago, or a small write meets now."""
        now_s = time.monotonic()
        if self._trouble is not None and now_s - self._trouble[0] < _TROUBLE_S:
            raise self._trouble[1]
        if now_s - self._written_s < _READY_S:
            return
        records = self.manager(ACCESS)
        try:
            records.catalogue.release_lease(records.take_lease(_READY, records.actor, _READY_S))
        except LeaseHeld:
            pass  # another worker has just written
        self._written_s = now_s

    def close(self) -> None:
        """Let go of everything that was opened here; work that has begun is finished first."""
        self.is_draining = True
        self.notifier.close()
        self.tasks.close()
        self.lookups.close()
        self.saves.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None
        for name in list(self._managers.keys() - self._borrowed):
            self._managers.pop(name).close()
        self._tokens = self._sessions = None
        self.feeds = Feeds(self)
