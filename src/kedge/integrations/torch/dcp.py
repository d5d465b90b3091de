"""torch.distributed.checkpoint into a store and back: any number of ranks, any sharding, what changed is stored.

    job              one checkpoint for each dcp.save: what there is, and in which part. Committed last, by the
                     coordinator: before that nobody sees the save
    job.rank<n>      the parts: what a rank had to write, by name

Everything goes through the codec: DCP's own storage pickles objects and unpickles them on load, this does not (I7).
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kedge.errors import Corrupted, NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

_KIND = "dcp"  # in the metadata of a whole save
_TENSORS, _OBJECTS = "tensors", "objects"


class _Place:
    """A store and a job, picklable: DCP may save from a process of its own."""

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager, job: str) -> None:
        self._url = store.url if isinstance(store, CheckpointManager) else os.fspath(store)
        self._namespace = store.namespace if isinstance(store, CheckpointManager) else "default"
        self._key = store.key_source if isinstance(store, CheckpointManager) else None
        self._manager = store if isinstance(store, CheckpointManager) else None
        self.job = job

    @property
    def manager(self) -> CheckpointManager:
        if self._manager is None:
            self._manager = CheckpointManager(self._url, namespace=self._namespace, key=self._key)
        return self._manager

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_manager": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str)


class KedgeWriter(_Place, StorageWriter):  # type: ignore[misc]
    """`dcp.save(state, storage_writer=KedgeWriter("my-store", "run-7"), checkpoint_id="step 100")`.

    `checkpoint_id` becomes the name of the step; `saved` is the ID of the newest checkpoint, on the coordinator.
    `keep_last` deletes older saves of the job once a newer one is complete.
    """

    def __init__(
        self, store: str | os.PathLike[str] | CheckpointManager, job: str, *, keep_last: int | None = None
    ) -> None:
        super().__init__(store, job)
        self._keep_last = keep_last
        self._step = "save"
        self._rank = 0
        self.saved: str | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._step = "save" if checkpoint_id is None else str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank") or 0)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Make the part of this rank durable."""
        tensors: dict[str, object] = {}
        objects: dict[str, object] = {}
        keys: list[tuple[MetadataIndex, str, int]] = []
        for item in plan.items:
            key = _key(item.index)
            if item.type is WriteItemType.BYTE_IO:
                objects[key] = planner.lookup_object(item.index)
            else:
                tensors[key] = planner.resolve_data(item).detach()
            keys.append((item.index, key, item.tensor_storage_size() or 0))
        part = self.manager.save(f"{self.job}.rank{self._rank}", self._step, {_TENSORS: tensors, _OBJECTS: objects})
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, size, [part, key]) for index, key, size in keys])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All parts are durable: make the whole visible (I1)."""
        written = [result for of_rank in results for result in of_rank]
        parts = list(dict.fromkeys(result.storage_data[0] for result in written))
        state = {
            "state_dict": {name: _describe(entry) for name, entry in metadata.state_dict_metadata.items()},
            "planner": metadata.planner_data,
            "storage": [[*_index(result.index), *result.storage_data] for result in written],
            "version": metadata.version,
        }
        about = {"kind": _KIND, "parts": parts}
        self.saved = self.manager.save(self.job, self._step, state, metadata=about)
        if self._keep_last is not None:
            self._prune(self._keep_last)

    def _prune(self, keep_last: int) -> None:
        """Older saves go first, then parts that nobody names and that are older than one that somebody does."""
        self.manager.cleanup(self.job, keep_last)
        parts_of: Any = [save.metadata.get("parts", ()) for save in self.manager.walk(self.job)]
        needed = {part for parts in parts_of for part in parts}
        for job in self.manager.jobs(f"{self.job}.rank"):
            parts = self.manager.list(job.name)
            newest = max((part.seq for part in parts if part.id in needed), default=0)
            for part in parts:
                if part.seq < newest and part.id not in needed:
                    self.manager.delete(job.name, part.id)


class KedgeReader(_Place, StorageReader):  # type: ignore[misc]
    """`dcp.load(state, storage_reader=KedgeReader("my-store", "run-7"))`: the newest whole save of the job.

    `checkpoint_id` is the ID of a checkpoint, or the name of a step. Another number of ranks than saved it is fine.
    """

    def __init__(
        self, store: str | os.PathLike[str] | CheckpointManager, job: str, checkpoint_id: str | None = None
    ) -> None:
        super().__init__(store, job)
        self._wanted = checkpoint_id
        self._places: dict[MetadataIndex, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._wanted = str(checkpoint_id)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        save = self._find()
        state: Any = self.manager.load(save.id)
        try:
            storage = {_index_of(*entry[:2]): (entry[2], entry[3]) for entry in state["storage"]}
            described = {name: _metadata_of(entry) for name, entry in state["state_dict"].items()}
            return Metadata(described, state["planner"], storage, StorageMeta(save.step), state["version"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Corrupted(f"checkpoint {save.id} is no save of torch.distributed.checkpoint: {error!r}") from error

    def _find(self) -> Checkpoint:
        whole = self.manager.list(self.job, metadata={"kind": _KIND})
        if self._wanted is not None:
            whole = [save for save in whole if self._wanted in (save.id, save.step)]
        if not whole:
            which = "" if self._wanted is None else f" that is {self._wanted!r}"
            raise NotFound(f"job {self.job} has no whole save{which}", hint="kedge list JOB shows what there is")
        return whole[-1]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: object) -> Future[None]:
        by_part: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            part, key = self._places[item.storage_index]
            by_part.setdefault(part, []).append((key, item))
        for part, items in by_part.items():
            self._read_part(part, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_part(self, part: str, items: Sequence[tuple[str, ReadItem]], planner: Any) -> None:
        keys = {key for key, _ in items}
        if keys == {key for where, key in self._places.values() if where == part}:
            state: Any = self.manager.load(part)
        else:
            names = [[f"{kind}/{key}" for kind in (_TENSORS, _OBJECTS)][_is_object(items, key)] for key in keys]
            state = self.manager.load(part, only=[glob.escape(name) for name in names])
        for key, item in items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(state[_OBJECTS][key]))
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(_narrowed(state[_TENSORS][key], item))
            planner.commit_tensor(item, target)


def _is_object(items: Sequence[tuple[str, ReadItem]], key: str) -> bool:
    return next(item.type is LoadItemType.BYTE_IO for name, item in items if name == key)


def _narrowed(tensor: Any, item: ReadItem) -> object:
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _pickled(value: object) -> io.BytesIO:
    """The form in which planners take objects; made here, from what the codec loaded, and from nothing else."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


# --- DCP's descriptions as plain data ---


def _key(index: MetadataIndex) -> str:
    return index.fqn if not index.offset or not any(index.offset) else f"{index.fqn}@{list(index.offset)}"


def _index(index: MetadataIndex) -> tuple[str, list[int] | None]:
    return index.fqn, None if index.offset is None else list(index.offset)


def _index_of(fqn: str, offset: Sequence[int] | None) -> MetadataIndex:
    return MetadataIndex(fqn, None if offset is None else torch.Size(offset))


def _describe(entry: Any) -> Mapping[str, object] | None:
    if isinstance(entry, BytesStorageMetadata):
        return None
    chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
    return {"dtype": entry.properties.dtype, "requires_grad": entry.properties.requires_grad,
            "size": list(entry.size), "chunks": chunks}  # fmt: skip


def _metadata_of(entry: Any) -> object:
    if entry is None:
        return BytesStorageMetadata()
    size: Callable[[object], object] = torch.Size
    chunks = [ChunkStorageMetadata(size(offsets), size(sizes)) for offsets, sizes in entry["chunks"]]
    properties = TensorProperties(dtype=entry["dtype"], requires_grad=entry["requires_grad"])
    return TensorStorageMetadata(properties, size(entry["size"]), chunks)
