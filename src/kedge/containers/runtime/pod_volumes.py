"""Volumes that containers of a pod share: each is checkpointed by itself, and the pod has one volume.

In a new pod, the files are put in place once, for the first container that is restored. The others find them as that
one goes on with them. They are those that were saved last: when containers of a pod are stopped one after the other,
what the last of them left is right for all, because those before it stood still. That does not hold for one that was
left running by its checkpoint, or started again after it: its files are its own. Nor are files replaced below one that
lives and put none in place, but may have written: then the restore is refused.

In the same pod, a container that has not run since its checkpoint finds its volumes as they should be. One that has,
and shares them with one that lives, cannot be restored: the files would change below the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kedge.containers import snapshot
from kedge.containers.bundle import Bundle
from kedge.containers.engine import runc
from kedge.containers.snapshot import Snapshot
from kedge.containers.volumes import Volume, volumes_of
from kedge.errors import Conflict, NotFound, Validation
from kedge.files import Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from . import claims
from .marks import Mark
from .opt_in import SANDBOX, notes_of
from .settings import chosen


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the metadata of a checkpoint says of the volumes in it (see volumes.facts_of)."""

    sandbox: str
    moment_s: float
    names: Mapping[str, str]  # by where they are mounted
    starts: Mapping[str, float]  # of the pod's containers until then

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Saved | None:
        facts: Any = checkpoint.metadata.get("volumes")
        if not isinstance(facts, dict):
            return None
        return cls(facts["sandbox"], facts["moment_s"], facts["names"], facts["starts"])


@dataclass(frozen=True, slots=True)
class _User:
    """A container that lives, and has the volume too."""

    key: str
    is_read_only: bool
    has_filled: bool  # its restore put the volume's files in place

    @classmethod
    def of(cls, mark: Mark, volume: Volume) -> _User:
        is_saved = volume.is_saved and chosen(mark.wish.volumes, "KEDGE_VOLUMES", ("yes", "no")) == "yes"
        return cls(mark.key, volume.is_read_only, mark.restored is not None and is_saved)


def with_pod_volumes(
    manager: CheckpointManager,
    checkpoint: Checkpoint,
    taken: Snapshot,
    bundle: Bundle,
    *,
    namespace: str,
    last_start_s: float,
) -> Snapshot:
    """The snapshot with the volumes that are to be put in place. `last_start_s`: when the container was last started in
    this pod. Conflict if a volume cannot be what the checkpoint needs."""
    saved = _Saved.of(checkpoint)
    if saved is None:
        return taken
    if notes_of(bundle.spec).get(SANDBOX) == saved.sandbox:
        has_run_since = last_start_s > saved.moment_s or bool(checkpoint.metadata.get("is_running"))
        if not has_run_since:
            return replace(taken, volumes={})
        newest = {}
    else:
        has_run_since = last_start_s > 0.0
        newest = _newest(manager, checkpoint, saved, namespace)
    users: dict[Path, list[_User]] = {}
    for source, user in _users(bundle):
        users.setdefault(source, []).append(user)
    sources = {volume.destination: volume.source for volume in volumes_of(bundle.spec)}
    trees = {}
    for destination, tree in taken.volumes.items():
        sharing = users.get(sources[destination], []) if destination in sources else []
        if sharing and has_run_since:
            raise Conflict(
                f"volume {destination} is in use by {sharing[0].key}, and {checkpoint.id} has other files in it",
                hint="it can be restored when the whole pod is replaced",
            )
        wanted = newest.get(saved.names.get(destination, ""), tree)
        if _may_be_replaced(destination, sharing, wanted, checkpoint):
            trees[destination] = wanted
    return replace(taken, volumes=trees)


def _may_be_replaced(destination: str, sharing: Sequence[_User], wanted: Tree, checkpoint: Checkpoint) -> bool:
    """Whether a volume is to get the files that are wanted in it; Conflict if it needs them and others wrote there."""
    if any(user.has_filled for user in sharing):
        return False
    writers = [user.key for user in sharing if not user.is_read_only]
    if writers and wanted.entries:
        raise Conflict(
            f"volume {destination} is in use by {writers[0]}, which may have written to it, and {checkpoint.id} has "
            "other files in it",
            hint="replace the whole pod; a container that always begins anew must come after those that are restored",
        )
    return not writers  # without files there, nothing is needed: /dev/shm, mostly


def _newest(manager: CheckpointManager, checkpoint: Checkpoint, saved: _Saved, namespace: str) -> dict[str, Tree]:
    """By their names, what other containers of the same pod left in its volumes, this one not having run since."""
    pod: object = checkpoint.metadata.get("pod")
    if checkpoint.metadata.get("is_running") or not isinstance(pod, dict) or not namespace:
        return {}
    trees: dict[str, tuple[float, Tree]] = {}
    for job in manager.jobs(f"container:{namespace}+"):
        for other in manager.list(job.name, limit=1) if job.name != checkpoint.job else ():
            theirs = _Saved.of(other) if other.status != "corrupted" else None
            if theirs is None or theirs.sandbox != saved.sandbox or theirs.moment_s <= saved.moment_s:
                continue
            if theirs.starts.get(pod["container"], 0.0) > saved.moment_s:
                continue
            _, beside = snapshot.load(manager, other.id)
            for destination, name in theirs.names.items():
                if name not in trees or trees[name][0] < theirs.moment_s:
                    trees[name] = theirs.moment_s, beside.volumes[destination]
    return {name: tree for name, (_, tree) in trees.items()}


def _users(bundle: Bundle) -> Iterator[tuple[Path, _User]]:
    """Volumes of this container that others of the pod have which live, and which asked for checkpoints."""
    own = {volume.source for volume in volumes_of(bundle.spec)}
    for container, mark in claims.marked():
        if os.path.realpath(mark.bundle) == os.path.realpath(bundle.path):
            continue
        try:
            theirs = volumes_of(runc.read_spec(Path(mark.bundle)))
        except (NotFound, Validation):
            continue  # it has just been removed
        shared = [volume for volume in theirs if volume.source in own]
        if shared and claims.is_alive(container):
            yield from ((volume.source, _User.of(mark, volume)) for volume in shared)
