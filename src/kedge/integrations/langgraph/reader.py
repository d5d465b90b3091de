"""Rows of a thread's job as what LangGraph saved: checkpoints with their values, and the writes of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple, DeltaChannelHistory, PendingWrite, get_checkpoint_id

from kedge.codec.fragments import NotAFragment, decode_fragment
from kedge.errors import Corrupted, NotFound
from kedge.manager import CheckpointManager
from kedge.model import CheckpointId

from . import history, names
from .layout import Item, take_apart
from .memory import Laid, Memory
from .names import Address
from .record import tuple_of

TREE = ("checkpoint", "channel_values")
WRITES = ("task", "values")


class Reader:
    """What was decoded before, and is remembered, is not decoded again."""

    def __init__(self, manager: CheckpointManager, memory: Memory, piece_bytes: int) -> None:
        self._manager = manager
        self._memory = memory
        self._piece_bytes = piece_bytes

    def tuple_of(
        self, reading: history.Reading, address: Address, like: Laid | None = None, *, is_kept: bool = True
    ) -> tuple[CheckpointTuple, Laid | None]:
        """What a checkpoint holds, and how it is laid out; it shares what it has in common with one like it."""
        state: Any
        try:
            laid = self._laid(reading.stored, like, is_kept)
            values = {name: channel.value() for name, channel in laid.channels.items()}
            state = {TREE[0]: laid.new_head(), TREE[1]: values}
        except (NotAFragment, Corrupted):
            # It has buffers, or is deep; what is really damaged, or deleted meanwhile, is named by this.
            laid, state = None, self._manager.load_stored(reading.stored)
        pending = self._pending(reading.writes) if reading.writes else []
        return tuple_of(reading.stored[0], address, state[TREE[0]], state[TREE[1]], pending), laid

    def _laid(self, stored: history.Stored, like: Laid | None, is_kept: bool) -> Laid:
        checkpoint = stored[0]
        key = checkpoint.job, names.plain_id(checkpoint.id)
        known = self._memory.laid(key)
        if known is not None and known.digest == checkpoint.digest:
            return known
        tree = self._manager.store.tree(stored)
        head, channels = take_apart(tree, TREE, self._piece_bytes, {} if like is None else like.channels)
        versions: Any = decode_fragment(head)
        laid = Laid(checkpoint.digest, head, channels, versions.get("channel_versions", {}))
        if is_kept:
            self._memory.keep(key, laid)
        return laid

    def _pending(self, writes: Sequence[history.Stored]) -> list[PendingWrite]:
        """Writes for a checkpoint, in the order in which LangGraph applies them: by path, task and index.

        A regular write stands as first written, a special one (an interrupt…) as last.
        """
        merged: dict[tuple[str, int], tuple[str, PendingWrite]] = {}
        for stored in writes:
            try:
                state: Any = self._written(stored)
            except NotFound:
                continue  # deleted meanwhile
            task, path = state[WRITES[0]]["id"], state[WRITES[0]].get("path", "")
            for number, (index, channel) in enumerate(state[WRITES[0]]["channels"]):
                if index < 0 or (task, index) not in merged:
                    merged[task, index] = path, (task, channel, state[WRITES[1]][str(number)])
        return [write for _, (_, write) in sorted(merged.items(), key=lambda entry: (entry[1][0], entry[0]))]

    def _written(self, stored: history.Stored) -> object:
        """What `put_writes` has saved."""
        key = stored[0].job, stored[0].digest
        try:
            if (tree := self._memory.tree(key)) is None:
                tree = Item(self._manager.store.tree(stored), 0)
                self._memory.keep_tree(key, tree)
            return tree.value()
        except (NotAFragment, Corrupted):  # as in `tuple_of`
            return self._manager.load_stored(stored)

    def delta_history(
        self, target: history.Stored | None, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What was written to each channel before `target`, since the ancestor that has a value of it: the seed."""
        missing = set(channels)
        histories: dict[str, DeltaChannelHistory] = {name: {"writes": []} for name in channels}
        laid: Laid | None = None
        for reading in history.read_ancestors(self._manager, target, self._parent) if target and missing else ():
            for write in reversed(self._pending(reading.writes)):
                if write[1] in missing:
                    histories[write[1]]["writes"].append(write)
            values, laid = self._values(reading.stored, laid, missing)
            for name, value in values.items():
                histories[name]["seed"] = value
            missing -= values.keys()
            if not missing:
                break
        for entry in histories.values():
            entry["writes"].reverse()
        return histories

    def _values(self, stored: history.Stored, like: Laid | None, names: set[str]) -> tuple[dict[str, Any], Laid | None]:
        """Those of these channels that a checkpoint has a value of, and how it is laid out."""
        try:
            laid = self._laid(stored, like, is_kept=False)
            return {name: channel.value() for name, channel in laid.channels.items() if name in names}, laid
        except (NotAFragment, Corrupted):  # as in `tuple_of`
            state: Any = self._manager.load_stored(stored)
            return {name: value for name, value in state[TREE[1]].items() if name in names}, None

    def _parent(self, stored: history.Stored) -> CheckpointId | None:
        """What a checkpoint continues; where that was not stored yet, its head names it."""
        checkpoint = stored[0]
        if checkpoint.parent is not None:
            return CheckpointId(checkpoint.parent)
        result, _ = self.tuple_of(history.Reading(stored, []), Address(""), is_kept=False)
        parent = None if result.parent_config is None else get_checkpoint_id(result.parent_config)
        return names.id_of(checkpoint.job, parent) if parent else None
