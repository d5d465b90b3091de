"""KedgeSaver: LangGraph's checkpointer on a Kedge store."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.base import Checkpoint as GraphCheckpoint
from langgraph.checkpoint.serde.types import ERROR

from kedge import codec
from kedge.errors import Conflict, IdempotencyConflict, LeaseHeld, NotFound, UnsupportedType, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, Lease
from kedge.store import lease
from kedge.store.request import parse_request

from . import history, names
from .layout import WHOLE_BYTES, Channel, NeedsStreams, decode, encode, lay_channel, lay_tree
from .memory import Laid, Memory

PendingWrites = list[tuple[str, str, Any]]  # a name, because inside the class `list` is a method

_dice = random.SystemRandom()
_TREE = ("checkpoint", "channel_values")
_WRITES = ("task", "values")
_NO_PARENTS: dict[str, Any] = {"parents": {}}  # as almost always, and then not stored


class KedgeSaver(BaseCheckpointSaver[int]):
    """Threads in a store: `graph.compile(checkpointer=KedgeSaver("my-store"))`.

    `store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close. One object serves
    sync and async graphs, threads and processes. When `put` or `put_writes` returns, what it was given survives
    kill -9 and power loss. Two runs that continue the same checkpoint at the same time: the second gets Conflict.
    """

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager | None = None) -> None:
        super().__init__()
        self._is_owner = not isinstance(store, CheckpointManager)
        self.manager = store if isinstance(store, CheckpointManager) else CheckpointManager(store)
        self._memory = Memory()
        self._turns: dict[str, Lease] = {}

    @classmethod
    @contextmanager
    def from_conn_string(cls, url: str) -> Iterator[Self]:
        """As with LangGraph's own savers: `with KedgeSaver.from_conn_string("my-store") as saver`."""
        with cls(url) as saver:
            yield saver

    def setup(self) -> None:
        """Nothing to do; other savers need it."""

    def close(self) -> None:
        if self._is_owner:
            self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> Self:
        """Types are allowed by registering them (kedge.register), so there is nothing to derive."""
        return self

    @contextmanager
    def turn(self, thread_id: str, *, wait_s: float = 60.0) -> Iterator[None]:
        """`with saver.turn("customer 7"): graph.invoke(…)`: waits for other turns of the thread, then keeps them out.

        Across threads, processes and machines; LeaseHeld when it takes longer than `wait_s`. Whoever runs the thread
        from another saver without taking a turn gets LeaseHeld at its first save.
        """
        job = names.prefix_of(thread_id)
        until = time.monotonic() + wait_s
        with ExitStack() as stack:
            while True:
                try:
                    self._turns[job] = stack.enter_context(lease.hold(self.manager.store, job, ttl_s=30))
                    break
                except LeaseHeld:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_dice.uniform(0.01, 0.1))
            try:
                yield
            finally:
                del self._turns[job]

    @asynccontextmanager
    async def aturn(self, thread_id: str, *, wait_s: float = 60.0) -> AsyncIterator[None]:
        turn = self.turn(thread_id, wait_s=wait_s)
        await asyncio.to_thread(turn.__enter__)
        try:
            yield
        finally:
            await asyncio.to_thread(turn.__exit__, None, None, None)

    # Writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Make a checkpoint durable. Conflict when another run has continued the thread since this one read it."""
        thread, namespace, parent = _names(config)
        job = names.job_of(thread, namespace)
        checkpoint_id, created_us = names.id_of(job, checkpoint["id"]), history.microseconds(checkpoint["ts"])
        head: dict[str, Any] = {k: v for k, v in checkpoint.items() if k not in (_TREE[1], "id", "ts")}
        if not checkpoint_id.startswith(checkpoint["id"] + "@"):
            head["id"] = checkpoint["id"]
        if created_us is None:
            head["ts"] = checkpoint["ts"]
        plain, rest = history.split_metadata(get_checkpoint_metadata(config, metadata))
        if rest != _NO_PARENTS:
            head["metadata"] = rest
        parent_id = None if parent is None else names.id_of(job, parent)
        if parent_id is not None and not self._memory.laid((job, parent)) and not self.manager.exists(parent_id):
            parent_id = None
        if parent is not None and (parent_id is None or not parent_id.startswith(parent + "@")):
            head["parent"] = parent
        if names.names_of(job) is None:
            plain |= {"thread_id": thread, "checkpoint_ns": namespace}
        newest = self._memory.continues((job, parent))
        request = replace(
            parse_request(
                job,
                f"{plain.get('source', 'checkpoint')} {plain.get('step', '')}".strip(),
                parent=parent_id,
                metadata=plain,
                idempotency_key=None if newest is None else f"after {newest}",
                lease=self._turns.get(job),
            ),
            checkpoint_id=checkpoint_id,
            created_us=created_us,
        )
        values = checkpoint["channel_values"]
        before = self._memory.laid((job, parent))
        piece_bytes = self.manager.store.row_bytes
        joins = before is not None or parent is None  # else who was here before us may have stored the same by items
        try:
            laid = encode(head)
            channels = {
                name: _unchanged(before, checkpoint, name, new_versions)
                or lay_channel(value, piece_bytes, before.channels.get(name) if before else None, joins=joins)
                for name, value in values.items()
            }
            saved = self._commit(request, lay_tree(laid, channels, _TREE, whole_bytes=WHOLE_BYTES), thread)
            self._memory.keep(
                (job, checkpoint["id"]), Laid(saved.digest, laid, channels, dict(checkpoint["channel_versions"]))
            )
        except (NeedsStreams, UnsupportedType):
            # Encoded as one, what cannot be saved is named by its place in the whole.
            saved = self._commit(request, codec.encode({_TREE[0]: head, _TREE[1]: values}), thread)
        self._memory.saw((job, checkpoint["id"]), saved.seq)
        return _config(thread, namespace, checkpoint["id"])

    def _commit(self, request: Any, encoded: Any, thread: str) -> Checkpoint:
        try:
            return self.manager.commit(request, encoded)
        except IdempotencyConflict as conflict:
            raise Conflict(
                f"thread {thread!r} was continued by another run since this one read it",
                hint="let one run end before the next begins, or branch: give the checkpoint_id to continue from",
            ) from conflict

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Make the writes of a task durable, beside the checkpoint it ran from."""
        thread, namespace, checkpoint_id = _names(config)
        if checkpoint_id is None:
            raise Validation("writes without a checkpoint_id", hint="give the config that put returned")
        job = names.job_of(thread, namespace)
        channels = [[WRITES_IDX_MAP.get(channel, index), channel] for index, (channel, _) in enumerate(writes)]
        task: dict[str, Any] = {"id": task_id, "channels": channels}
        if task_path:
            task["path"] = task_path
        values = {str(n): _storable(channel, value) for n, (channel, value) in enumerate(writes)}
        request = parse_request(
            job,
            "writes",
            level=CheckpointLevel.SUBSTEP,
            lease=self._turns.get(job),
            tags={"of": names.id_of(job, checkpoint_id).partition("@")[0]},
        )
        try:
            piece_bytes = self.manager.store.row_bytes
            before = self._memory.laid((job, checkpoint_id))
            known = before.channels if before else {}
            laid: dict[str, Channel] = {
                name: lay_channel(value, piece_bytes, known.get(channel), joins=before is not None)
                for (name, value), (channel, _) in zip(values.items(), writes, strict=True)
            }
            self._commit(request, lay_tree(encode(task), laid, _WRITES), thread)
        except (NeedsStreams, UnsupportedType):
            self._commit(request, codec.encode({_WRITES[0]: task, _WRITES[1]: values}), thread)

    # Reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint of the config, or the newest of its thread; None when there is none."""
        thread, namespace, checkpoint_id = _names(config)
        job = names.job_of(thread, namespace)
        store = self.manager.store
        if checkpoint_id is None:
            found = store.latest(job, CheckpointLevel.STEP)
        else:
            try:
                found = store.read(names.id_of(job, checkpoint_id))
            except NotFound:
                found = None
        if found is None:
            if checkpoint_id is None:
                self._memory.saw((job, None), 0)
            return None
        result = self._tuple(found[0], found[1], thread, namespace)
        newest = found[0].seq if checkpoint_id is None else history.newest(store, job)
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
        left = limit
        for job in self._jobs(config):
            for found in history.walk(self.manager.store, job, _wanted(config), filter or {}, before):
                if left is not None and left <= 0:
                    return
                try:
                    checkpoint, packed = self.manager.store.read(found.id)
                    result = self._tuple(checkpoint, packed, *history.names_of(checkpoint))
                except NotFound:
                    continue  # deleted meanwhile
                if not history.matches(result.metadata, filter or {}):
                    continue
                left = None if left is None else left - 1
                yield result

    def checkpoints(
        self, config: RunnableConfig, *, filter: dict[str, Any] | None = None, limit: int | None = None
    ) -> Sequence[Checkpoint]:
        """Checkpoints of a thread without their states, newest first: metadata, sizes, tags, pins."""
        found: list[Checkpoint] = []
        for job in self._jobs(config):
            for checkpoint in history.walk(self.manager.store, job, None, filter or {}, None):
                if limit is not None and len(found) >= limit:
                    break
                if history.matches(checkpoint.metadata, filter or {}):
                    found.append(checkpoint)
        return found

    def _tuple(self, checkpoint: Checkpoint, packed: bytes, thread: str, namespace: str) -> CheckpointTuple:
        found = self._memory.laid((checkpoint.job, checkpoint.id.partition("@")[0]))
        if found is not None and found.digest == checkpoint.digest:
            head, values = decode(found.head), {name: channel.value() for name, channel in found.channels.items()}
        else:
            state: Any = self.manager.load_stored((checkpoint, packed))
            head, values = state[_TREE[0]], state[_TREE[1]]
        head.setdefault("id", checkpoint.id.partition("@")[0])
        head.setdefault("ts", checkpoint.created_at.isoformat())
        metadata = {**history.graph_metadata(checkpoint.metadata), **head.pop("metadata", {"parents": {}})}
        parent = head.pop("parent", checkpoint.parent and checkpoint.parent.partition("@")[0])
        return CheckpointTuple(
            config=_config(thread, namespace, head["id"]),
            checkpoint=head | {"channel_values": values},
            metadata=metadata,  # type: ignore[arg-type]
            parent_config=_config(thread, namespace, parent) if parent else None,
            pending_writes=self._pending(checkpoint),
        )

    def _pending(self, checkpoint: Checkpoint) -> PendingWrites:
        """Writes for a checkpoint: a regular one stands as first written, a special one (an interrupt…) as last."""
        merged: dict[tuple[str, int], tuple[str, str, Any]] = {}
        for row in history.writes_of(self.manager.store, checkpoint):
            try:
                state: Any = self.manager.load_stored(self.manager.store.read(row.id))
            except NotFound:
                continue  # deleted meanwhile
            task = state[_WRITES[0]]["id"]
            for number, (index, channel) in enumerate(state[_WRITES[0]]["channels"]):
                if index < 0 or (task, index) not in merged:
                    merged[task, index] = (task, channel, state[_WRITES[1]][str(number)])
        return list(merged.values())

    def _jobs(self, config: RunnableConfig | None) -> Iterator[str]:
        if config is None:
            yield from history.jobs(self.manager.store, names.PREFIX)
            return
        thread, namespace, _ = _names(config)
        if "checkpoint_ns" in config["configurable"]:
            yield names.job_of(thread, namespace)
        else:
            yield from history.jobs_of_thread(self.manager.store, thread)

    # Whole threads

    def delete_thread(self, thread_id: str) -> None:
        """Delete everything of a thread. A pinned checkpoint is a Conflict; then nothing of its job goes."""
        for job in history.jobs_of_thread(self.manager.store, thread_id):
            self._delete(job, [checkpoint.id for checkpoint in self.manager.walk(job)])

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs, and their writes, in every thread."""
        for job in list(history.jobs(self.manager.store, names.PREFIX)) if run_ids else ():
            for run_id in run_ids:
                for found in self.manager.list(job, level="step", metadata={"run_id": run_id}):
                    writes = history.writes_of(self.manager.store, found)
                    self._delete(job, [found.id, *(row.id for row in writes)])

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread with its whole history, sharing every byte. Safe to repeat after an interruption."""
        for job in list(history.jobs_of_thread(self.manager.store, source_thread_id)):
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
            for job in list(history.jobs_of_thread(self.manager.store, thread_id)):
                kept = self._needed(job)
                rows = self.manager.list(job)
                pinned = {row.id.partition("@")[0] for row in rows if row.is_pinned}
                stays = kept | pinned
                self._delete(job, [row.id for row in rows if row.tags.get("of", row.id.partition("@")[0]) not in stays])

    def _needed(self, job: str) -> set[str]:
        """The newest checkpoint of a job, and the ancestors its delta channels are rebuilt from."""
        found = self.manager.store.latest(job, CheckpointLevel.STEP)
        if found is None:
            return set()
        result = self._tuple(*found, *history.names_of(found[0]))
        kept = {found[0].id.partition("@")[0]}
        counters: Mapping[str, object] = result.metadata.get("counters_since_delta_snapshot") or {}
        missing = set(counters) - result.checkpoint["channel_values"].keys()
        while missing and result.parent_config is not None:
            parent = self.get_tuple(result.parent_config)
            if parent is None:
                break
            result = parent
            kept.add(names.id_of(job, result.checkpoint["id"]).partition("@")[0])
            missing -= result.checkpoint["channel_values"].keys()
        return kept

    def _delete(self, job: str, ids: Sequence[str]) -> None:
        if ids:
            self.manager.store.delete(ids, actor=self.manager.actor)
        self._memory.forget(job)

    # The same for asyncio: each call runs in a thread.

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (result := await asyncio.to_thread(next, found, None)) is not None:
            yield result

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: GraphCheckpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await asyncio.to_thread(lambda: self.prune(thread_ids, strategy=strategy))

    async def aget_delta_channel_history(self, *, config: RunnableConfig, channels: Sequence[str]) -> Mapping[str, Any]:
        return await asyncio.to_thread(lambda: self.get_delta_channel_history(config=config, channels=channels))

    def get_next_version(self, current: Any, channel: None = None) -> Any:
        """Whole numbers; a thread that began under another saver goes on in that one's way."""
        if isinstance(current, str):
            number = int(current.split(".")[0]) + 1
            return f"{number:032}.{os.urandom(8).hex()}"
        return 1 if current is None else int(current) + 1


def _names(config: RunnableConfig) -> tuple[str, str, str | None]:
    """(thread, namespace, checkpoint ID or None) of a config."""
    chosen = config["configurable"]
    return str(chosen["thread_id"]), chosen.get("checkpoint_ns") or "", get_checkpoint_id(config) or None


def _wanted(config: RunnableConfig | None) -> str | None:
    return None if config is None else get_checkpoint_id(config)


def _config(thread: str, namespace: str, checkpoint_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}}


def _unchanged(
    before: Laid | None, checkpoint: GraphCheckpoint, name: str, new_versions: ChannelVersions
) -> Channel | None:
    """The channel as the parent has it, when LangGraph says that it has not changed since."""
    if before is None or name in new_versions or name not in before.channels:
        return None
    is_same = before.versions.get(name) == checkpoint["channel_versions"].get(name)
    return before.channels[name] if is_same else None


def _storable(channel: str, value: Any) -> Any:
    """An exception of a class that is not registered is kept as its text: the failure must not hide behind another."""
    if channel != ERROR or not isinstance(value, BaseException):
        return value
    try:
        encode(value)
    except UnsupportedType:
        return repr(value)
    return value
