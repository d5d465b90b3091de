"""Volumes that containers of a pod share: each is checkpointed by itself, and the pod has one volume.

Containers of a pod are stopped one after the other. What the last of them left in a volume is right for all: those
before it stood still. So each is restored with the files that were saved last, and they are put in place once, for the
first of them that is created. The others find them as that one has changed them since.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kedge.containers import snapshot
from kedge.containers.bundle import Bundle
from kedge.containers.engine import runc
from kedge.containers.snapshot import Snapshot
from kedge.containers.volumes import volumes_of
from kedge.errors import NotFound, Validation
from kedge.files import Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from . import claims


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the metadata of a checkpoint says of the volumes in it (see volumes.facts_of)."""

    sandbox: str
    moment_s: float
    names: Mapping[str, str]  # by where they are mounted

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Saved | None:
        facts: Any = checkpoint.metadata.get("volumes")
        return cls(facts["sandbox"], facts["moment_s"], facts["names"]) if isinstance(facts, dict) else None


def with_pod_volumes(
    manager: CheckpointManager, checkpoint: Checkpoint, taken: Snapshot, bundle: Bundle, namespace: str
) -> Snapshot:
    """The snapshot with the volumes that are to be put in place: the newest of its pod, without those in use."""
    saved = _Saved.of(checkpoint)
    if saved is None:
        return taken
    newest = _newest(manager, checkpoint, saved, namespace)
    in_use = set(_used_by_restored(bundle))
    sources = {volume.destination: volume.source for volume in volumes_of(bundle.spec)}
    trees = {
        destination: newest.get(saved.names.get(destination, ""), tree)
        for destination, tree in taken.volumes.items()
        if sources.get(destination) not in in_use
    }
    return replace(taken, volumes=trees)


def _newest(manager: CheckpointManager, checkpoint: Checkpoint, saved: _Saved, namespace: str) -> dict[str, Tree]:
    """By their names, what other containers of the same pod left in its volumes after this one was checkpointed."""
    trees: dict[str, tuple[float, Tree]] = {}
    for job in manager.jobs(f"container:{namespace}+") if namespace else ():
        for other in manager.list(job.name, limit=1) if job.name != checkpoint.job else ():
            theirs = _Saved.of(other)
            if theirs is None or theirs.sandbox != saved.sandbox or theirs.moment_s <= saved.moment_s:
                continue
            _, beside = snapshot.load(manager, other.id)
            for destination, name in theirs.names.items():
                if name not in trees or trees[name][0] < theirs.moment_s:
                    trees[name] = theirs.moment_s, beside.volumes[destination]
    return {name: tree for name, (_, tree) in trees.items()}


def _used_by_restored(bundle: Bundle) -> Iterator[Path]:
    """Volumes of this pod that a container has which was restored and lives: they are as it needs them."""
    for container, mark in claims.marked():
        if mark.restored is None or os.path.realpath(mark.bundle) == os.path.realpath(bundle.path):
            continue
        try:
            spec = runc.read_spec(Path(mark.bundle))
        except (NotFound, Validation):
            continue  # it has just been removed
        shared = {volume.source for volume in volumes_of(spec)} & {volume.source for volume in volumes_of(bundle.spec)}
        if shared and claims.is_alive(container):
            yield from shared
