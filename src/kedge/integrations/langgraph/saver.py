"""KedgeSaver: LangGraph's checkpointer on a Kedge store."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import islice
from typing import Any, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.base import Checkpoint as GraphCheckpoint
from langgraph.checkpoint.serde.types import ERROR

from kedge import codec
from kedge.codec import by_name
from kedge.codec.fragments import NotAFragment, encode_fragment
from kedge.errors import Conflict, IdempotencyConflict, LeaseHeld, UnsupportedType, Validation
from kedge.integrations.agents import JobWrites, StoreOwner, finished, in_thread
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, Lease
from kedge.store import lease
from kedge.store.request import Request

from . import history, names
from .layout import WHOLE_BYTES, Channel, lay_channel, lay_tree
from .memory import Laid, Memory
from .names import Address
from .reader import TREE, WRITES, Reader
from .recent import Recent
from .record import address_of, describe

_dice = random.SystemRandom()
_FEW = 32  # checkpoints of a listing, which are remembered: it will be asked for again


class KedgeSaver(StoreOwner, BaseCheckpointSaver[int]):
    """Threads in a store: `graph.compile(checkpointer=KedgeSaver("my-store"))`.

    `store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close. One object serves
    sync and async graphs, threads and processes. When `put` or `put_writes` returns, what it was given survives
    kill -9 and power loss. Two runs that continue the same checkpoint at the same time: the second gets Conflict.

    Classes with fields need no registration. They are rebuilt, without running code, where the program has imported
    them and they are its own, well known (`types`), or of a package in `allow`; else they come back as Unrestored data.
    """

    def __init__(
        self, store: str | os.PathLike[str] | CheckpointManager | None = None, *, allow: Iterable[str] = ()
    ) -> None:
        super().__init__(store)
        by_name.allow(*allow)
        by_name.allow_own_modules()
        self._piece_bytes = self.manager.catalogue.row_bytes
        self._memory = Memory()
        self._reader = Reader(self.manager, self._memory, self._piece_bytes)
        self._recent = Recent(self.manager.catalogue)
        self._writing = JobWrites()
        self._turns: dict[str, Lease] = {}

    @classmethod
    @contextmanager
    def from_conn_string(cls, url: str) -> Iterator[Self]:
        """As with LangGraph's own savers: `with KedgeSaver.from_conn_string("my-store") as saver`."""
        with cls(url) as saver:
            yield saver

    def setup(self) -> None:
        """Nothing to do; other savers need it."""

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """Also rebuild these classes, each a (module, name), as LangGraph finds them in the schemas of a graph."""
        by_name.allow(*(f"{module}:{'.'.join(qualname)}" for module, *qualname in extra_allowlist))
        return self

    @contextmanager
    def turn(self, thread_id: str, *, wait_s: float = 60.0) -> Iterator[None]:
        """`with saver.turn("customer 7"): graph.invoke(…)`: waits for other turns of the thread, then keeps them out.

        Across threads, processes and machines; LeaseHeld when it takes longer than `wait_s`. Whoever runs the thread
        from another saver without taking a turn gets LeaseHeld at its first save.
        """
        with ExitStack() as stack:
            for pause_s in self._take(stack, names.prefix_of(thread_id), wait_s):
                time.sleep(pause_s)
            yield

    @asynccontextmanager
    async def aturn(self, thread_id: str, *, wait_s: float = 60.0) -> AsyncIterator[None]:
        stack = ExitStack()
        try:
            attempts = self._take(stack, names.prefix_of(thread_id), wait_s)
            while (pause_s := await finished(next, attempts, None)) is not None:
                await asyncio.sleep(pause_s)
            yield
        finally:
            await finished(stack.close)

    def _take(self, stack: ExitStack, job: str, wait_s: float) -> Iterator[float]:
        """Try to take the job's lease; gives what to wait before the next attempt, and ends when `stack` has it."""
        until = time.monotonic() + wait_s
        while True:
            try:
                self._turns[job] = stack.enter_context(lease.hold(self.manager.catalogue, job, ttl_s=30))
                stack.callback(self._turns.pop, job)
                return
            except LeaseHeld:
                if time.monotonic() >= until:
                    raise
            yield _dice.uniform(0.01, 0.1)

    # Writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Make a checkpoint durable. Conflict when another run has continued the thread since this one read it."""
        address = Address.of(config)
        job, parent = address.job, address.checkpoint_id
        before = self._memory.laid((job, parent))
        is_stored = before is not None or (parent is not None and self.manager.exists(names.id_of(job, parent)))
        # A fork puts a copy beside a checkpoint it has read, so nobody was given its parent to continue.
        is_fork = metadata.get("source") == "fork"
        newest = history.newest(self.manager, job) if is_fork else self._memory.continues((job, parent))
        head, request = describe(
            address,
            checkpoint,
            get_checkpoint_metadata(config, metadata),
            is_parent_stored=is_stored,
            lease=self._turns.get(job),
            idempotency_key=None if newest is None else f"after {newest}",
        )
        versions = checkpoint["channel_versions"]

        def lay(name: str, value: object) -> Channel:
            known = None if before is None else before.channels.get(name)
            if before and known and name not in new_versions and before.versions.get(name) == versions.get(name):
                return known  # LangGraph says that it has not changed since
            return lay_channel(value, self._piece_bytes, known)

        saved, laid = self._save(request, address, TREE, head, checkpoint["channel_values"], lay, WHOLE_BYTES)
        if laid is not None:
            self._memory.keep((job, checkpoint["id"]), Laid(saved.digest, *laid, dict(versions)))
        self._memory.saw((job, checkpoint["id"]), saved.seq)
        return address.config(checkpoint["id"])

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Make the writes of a task durable, beside the checkpoint it ran from."""
        address = Address.of(config)
        if address.checkpoint_id is None:
            raise Validation("writes without a checkpoint_id", hint="give the config that put returned")
        job = address.job
        channels = [[WRITES_IDX_MAP.get(channel, index), channel] for index, (channel, _) in enumerate(writes)]
        task: dict[str, Any] = {"id": task_id, "channels": channels}
        if task_path:
            task["path"] = task_path
        values = {str(n): _stored(channel, value) for n, (channel, value) in enumerate(writes)}
        tags = {"of": names.plain_id(names.id_of(job, address.checkpoint_id))}
        request = Request(job, "writes", CheckpointLevel.SUBSTEP, tags=tags, lease=self._turns.get(job))
        before = self._memory.laid((job, address.checkpoint_id))

        def lay(number: str, value: object) -> Channel:
            known = None if before is None else before.channels.get(writes[int(number)][0])
            return lay_channel(value, self._piece_bytes, known)

        self._save(request, address, WRITES, task, values, lay)

    def _save(
        self,
        request: Request,
        address: Address,
        keys: tuple[str, str],
        head: Mapping[str, Any],
        values: Mapping[str, Any],
        lay: Callable[[str, object], Channel],
        whole_bytes: int = 0,
    ) -> tuple[Checkpoint, tuple[bytes, Mapping[str, Channel]] | None]:
        """Commit {keys[0]: head, keys[1]: values}; answers also how they were laid out, where they could be."""
        state: Any
        try:
            laid = encode_fragment(head), {name: lay(name, value) for name, value in values.items()}
            state = lay_tree(*laid, keys, whole_bytes=whole_bytes)
        except (NotAFragment, UnsupportedType):
            # Encoded as one, what cannot be saved is named by its place in the whole.
            laid, state = None, codec.encode({keys[0]: head, keys[1]: values}, by_name=True)
        try:
            saved = self.manager.commit(request, state)
        except IdempotencyConflict as conflict:
            raise _continued(address) from conflict
        if request.checkpoint_id not in (None, saved.id):  # another run has saved the same: its turn is not this one's
            raise _continued(address)
        return saved, laid

    # Reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint of the config, or the newest of its thread; None when there is none."""
        address = Address.of(config)
        job = address.job
        reading, newest = history.read(self.manager, self._recent, job, address.checkpoint_id)
        if reading is None:
            if address.checkpoint_id is None:
                self._memory.saw((job, None), newest)
            return None
        result, _ = self._reader.tuple_of(reading, address)
        self._memory.saw((job, result.checkpoint["id"]), newest)
        return result

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints with their states, newest first; `checkpoints` gives them without."""
        results = self._results(config, filter or {}, before, limit)
        if limit == 1 and config is not None and "checkpoint_ns" in config["configurable"]:
            # A list of one is how a replay loads what a subgraph goes on from.
            job = Address.of(config).job
            newest = history.newest(self.manager, job)
            first = next(results, None)
            self._memory.saw((job, None if first is None else first.checkpoint["id"]), newest)
            return iter(() if first is None else (first,))
        return results if limit is None else islice(results, max(limit, 0))

    def _results(
        self, config: RunnableConfig | None, filter: Mapping[str, Any], before: RunnableConfig | None, most: int | None
    ) -> Iterator[CheckpointTuple]:
        chosen = None if config is None else Address.of(config).checkpoint_id
        for job in self._jobs(config):
            laid: Laid | None = None  # of the checkpoint before
            for page in history.read_pages(self.manager, self._recent, job, chosen, filter, before, most):
                for reading in page:
                    is_kept = most is not None and most <= _FEW
                    result, laid = self._reader.tuple_of(reading, address_of(reading.stored[0]), laid, is_kept=is_kept)
                    if _matches(result.metadata, filter):
                        yield result

    def checkpoints(
        self, config: RunnableConfig, *, filter: dict[str, Any] | None = None, limit: int | None = None
    ) -> Sequence[Checkpoint]:
        """Checkpoints of a thread without their states, newest first: metadata, sizes, tags, pins."""
        rows = (
            checkpoint
            for job in self._jobs(config)
            for checkpoint in history.rows(self.manager, self._recent, job, filter or {}, limit)
            if _matches(checkpoint.metadata, filter or {})
        )
        return [*islice(rows, None if limit is None else max(limit, 0))]

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        address = Address.of(config)
        reading, _ = history.read(self.manager, self._recent, address.job, address.checkpoint_id)
        return self._reader.delta_history(None if reading is None else reading.stored, channels)

    def _jobs(self, config: RunnableConfig | None) -> Iterator[str]:
        if config is None:
            return history.jobs(self.manager, names.PREFIX)
        address = Address.of(config)
        if "checkpoint_ns" in config["configurable"]:
            return iter((address.job,))
        return history.jobs_of_thread(self.manager, address.thread)

    # Whole threads

    def delete_thread(self, thread_id: str) -> None:
        """Delete everything of a thread. A pinned checkpoint is a Conflict; then nothing of its job goes."""
        for job in history.jobs_of_thread(self.manager, thread_id):
            self._delete(job, [checkpoint.id for checkpoint in self.manager.walk(job)])

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs, and their writes, in every thread."""
        for job in [*history.jobs(self.manager, names.PREFIX)] if run_ids else ():
            for run_id in run_ids:
                for checkpoint in self.manager.list(job, level="step", metadata={"run_id": run_id}):
                    writes = history.writes_of(self.manager, checkpoint)
                    self._delete(job, [checkpoint.id, *(saved.id for saved in writes)])

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with its whole history, sharing every byte. Safe to repeat after an interruption."""
        for job in [*history.jobs_of_thread(self.manager, source_thread_id)]:
            history.copy_job(self.manager, job, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """ "keep_latest": of each namespace only the newest checkpoint stays, with its writes, with those ancestors
        that its delta channels are rebuilt from, and with what is pinned. "delete": nothing stays."""
        if strategy not in ("keep_latest", "delete"):
            raise Validation(f"strategy={strategy!r}", hint='use "keep_latest" or "delete"')
        for thread_id in thread_ids:
            if strategy == "delete":
                self.delete_thread(thread_id)
                continue
            for job in [*history.jobs_of_thread(self.manager, thread_id)]:
                reading, _ = history.read(self.manager, self._recent, job, None)
                if reading is None:
                    continue
                # What a run adds meanwhile has a higher number: its checkpoints, and writes that come before theirs.
                saved = self.manager.list(job, before=reading.stored[0].seq)
                stays = self._needed(reading) | {names.plain_id(row.id) for row in saved if row.is_pinned}
                self._delete(job, [s.id for s in saved if s.tags.get("of", names.plain_id(s.id)) not in stays])

    def _needed(self, newest: history.Reading) -> set[str]:
        """A checkpoint, and the ancestors its delta channels are rebuilt from."""
        job = newest.stored[0].job
        current, _ = self._reader.tuple_of(newest, address_of(newest.stored[0]))
        needed = {names.plain_id(newest.stored[0].id)}
        counters: Mapping[str, object] = current.metadata.get("counters_since_delta_snapshot") or {}
        missing = set(counters) - current.checkpoint["channel_values"].keys()
        while missing and current.parent_config is not None:
            parent = Address.of(current.parent_config)
            ancestor, _ = history.read(self.manager, self._recent, job, parent.checkpoint_id)
            if ancestor is None:
                break
            current, _ = self._reader.tuple_of(ancestor, parent)
            needed.add(names.plain_id(ancestor.stored[0].id))
            missing -= current.checkpoint["channel_values"].keys()
        return needed

    def _delete(self, job: str, ids: Sequence[str]) -> None:
        if ids:
            self.manager.catalogue.delete(ids, actor=self.manager.actor)
        self._memory.forget(job)

    # The same for asyncio

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        await self._writing.settled(Address.of(config).job)
        return await finished(self.get_tuple, config)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        job = Address.of(config).job
        return await self._writing.run(job, self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await self._writing.run(Address.of(config).job, self.put_writes, config, writes, task_id, task_path)

    adelete_thread = in_thread(delete_thread)
    adelete_for_runs = in_thread(delete_for_runs)
    acopy_thread = in_thread(copy_thread)
    aprune = in_thread(prune)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        results = await finished(self.list, config, **options)
        while (result := await finished(next, results, None)) is not None:
            yield result

    aget_delta_channel_history = in_thread(get_delta_channel_history)

    def get_next_version(self, current: Any, channel: None = None) -> Any:
        """Whole numbers; a thread that began under another saver goes on in that one's way."""
        if isinstance(current, str):
            number = int(current.split(".")[0]) + 1
            return f"{number:032}.{os.urandom(8).hex()}"
        return 1 if current is None else int(current) + 1


def _continued(address: Address) -> Conflict:
    return Conflict(
        f"thread {address.thread!r} was continued by another run since this one read it",
        hint="let one run end before the next begins, or branch: give the checkpoint_id to continue from",
    )


def _matches(metadata: Mapping[str, Any], filter: Mapping[str, Any]) -> bool:
    return all(key in metadata and metadata[key] == value for key, value in filter.items())


def _stored(channel: str, value: Any) -> Any:
    """What a task wrote; the error it ended with as text, as LangGraph's own savers give it."""
    return repr(value) if channel == ERROR and isinstance(value, BaseException) else value
