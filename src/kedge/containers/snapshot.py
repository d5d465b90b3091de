"""What a checkpoint of a container, or of a tree of processes, is in the store.

One state of one moment: a dictionary of plain values and two trees. Everything that works on states works on
it: list, show, diff, copy, retention, encryption. Its job is `container:<key>` or `process:<key>`.

    kind         "container" or "process"
    format       1
    id           of the container, or the PID of the root process, as text
    runtime      {name: runc|crun|podman|containerd|criu, version, root}
    bundle       where the container's bundle was; "" for processes
    spec         the OCI config.json as a dictionary; {} for processes
    descriptors  what the first three descriptors were (runc's descriptors.json)
    network      {mode: own|host|external|none, path}
    criu         {version, options: ["--tcp-established", …]}: options that a restore must repeat
    host         facts a restore elsewhere is checked against (hosts.facts)
    processes    {pid: {name, executable, parent, state, threads, memory_bytes, open_files: {fd: what}}}
    rootfs_kind  overlay: `rootfs` is the upper directory; directory: all of it; none: there was nothing to save
    rootfs       an exact Tree, or None
    images       a Tree of CRIU's images, without logs
    files        {path: File}: of processes without a container, what they had open for writing
    volumes      {path: Tree}: of a container of a pod, its emptyDir volumes by where they are mounted (see volumes)
    extra        {name: Tree}: what came with an imported archive, or others add to the moment

The checkpoint's metadata repeats what lists show: kind, id, runtime, network, processes, memory_bytes, paused_ms,
phases_ms (dump, files, store, …), is_running (whether it was left running), sockets (paths that were not saved), and of
a pod which it was (pod), and of which moment its volumes are (volumes, see `volumes.facts_of`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.blobs.group_files import tighten
from kedge.errors import NotFound, UnsupportedFormat, Validation, storage_errors
from kedge.files import File, Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, parse_name
from kedge.urls import directory_of

from .criu.images import processes as image_processes
from .criu.images import statistics
from .criu.pages import cuts
from .network import Network

if TYPE_CHECKING:
    from .runtime.opt_in import Wish

FORMAT = 1
KINDS = ("container", "process")
# What a dump may be told, and a restore must be told again.
OPTIONS = ("--tcp-established", "--ext-unix-sk", "--shell-job", "--file-locks")
TIES = ("--file-locks", "--tcp-established")  # of containers of engines: without effect where there are none
LEFT_ATTRIBUTES = ("trusted.overlay.origin", "trusted.overlay.uuid")  # they name inodes of one machine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment. The trees are on disk before it is saved, in the store after it was loaded."""

    kind: str
    id: str
    images: Tree
    runtime: Mapping[str, str] = field(default_factory=dict)
    bundle: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    descriptors: tuple[str, ...] = ()
    network: Network = field(default_factory=lambda: Network(mode="none", path=""))
    criu: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    processes: Mapping[str, Any] = field(default_factory=dict)
    rootfs_kind: str = "none"
    rootfs: Tree | None = None
    files: Mapping[str, File] = field(default_factory=dict)
    extra: Mapping[str, Tree] = field(default_factory=dict)
    volumes: Mapping[str, Tree] = field(default_factory=dict)

    def totals(self) -> dict[str, int]:
        """What lists show of its processes."""
        memory_bytes = sum(process["memory_bytes"] for process in self.processes.values())
        return {"processes": len(self.processes), "memory_bytes": memory_bytes}

    def sockets(self) -> list[str]:
        """The paths of sockets, which were not saved."""
        trees = {"": self.rootfs, **self.volumes} if self.rootfs is not None else self.volumes
        skipped = [(place, *entry) for place, tree in trees.items() if tree is not None for entry in tree.skipped]
        return [f"{place}/{path}".lstrip("/") for place, path, what in skipped if what == "a socket"]

    def options(self) -> list[str]:
        """What CRIU was told and must be told again; Validation for anything else that a store may name."""
        options = [str(option) for option in self.criu.get("options", ())]
        for option in options:
            refuse_option(option)
        return options

    def state(self) -> dict[str, object]:
        """As it goes into the store."""
        values = {name: getattr(self, name) for name in _FIELDS}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return {"format": FORMAT, **plain, "descriptors": list(self.descriptors)}


_FIELDS = tuple(item.name for item in fields(Snapshot))


def refuse_option(option: str) -> None:
    if option not in OPTIONS:
        raise Validation(f"unknown option for a dump or restore: {option!r}", hint=f"use {', '.join(OPTIONS)}")


def images_tree(directory: Path, borders: Mapping[str, list[int]] | None = None) -> Tree:
    """CRIU's images as a tree whose pages are cut by address (`cuts`), so that unchanged memory is stored once."""
    borders = cuts(directory) if borders is None else borders
    return Tree(directory, exclude=("*.log", "stats-*", "*.pid"), cuts=borders, allow_changing=False)


def files_tree(directory: Path) -> Tree:
    """Files of a container, with everything that makes them what they are. Sockets are left out: see `skipped`."""
    return Tree(directory, exact=True, without_attributes=LEFT_ATTRIBUTES)


def read_descriptors(images: Path) -> tuple[str, ...]:
    """What the first three descriptors were, as runc noted them; () where no runtime did."""
    try:
        names = json.loads((images / "descriptors.json").read_text())
    except FileNotFoundError:
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def read_processes(images: Path) -> dict[str, object]:
    """The processes in the images, for people: what diff and lists show."""
    return {
        str(process.pid): {
            "name": process.name,
            "executable": process.executable,
            "parent": process.parent,
            "state": process.state,
            "threads": len(process.threads),
            "memory_bytes": process.memory_bytes,
            "open_files": {str(file.fd): f"{file.kind} {file.name}".strip() for file in process.files if file.fd >= 0},
        }
        for process in image_processes(images)
    }


def paused_ms(work: Path) -> float | None:
    """How long CRIU says that everything stood still; None where it does not say."""
    try:
        return statistics(work).get("frozen_us", 0) / 1000
    except NotFound:
        return None


def job_of(kind: str, key: str) -> str:
    """The job that holds the generations of a workload."""
    return parse_name("key", f"{kind}:{parse_name('key', key)}")


def refuse_memory(manager: CheckpointManager) -> None:
    """Validation if the store is in memory: what ends would be gone with this program."""
    if manager.url.startswith("memory:"):
        raise Validation(
            f"the store {manager.url} would be gone when this command ends", hint="give --store a directory or a server"
        )


def keep_private(url: str) -> None:
    """The memory of processes is in this store: if it is a directory, nobody else may read it, whoever made it."""
    path = directory_of(url)
    if path is not None and path.is_dir():
        with storage_errors("take the rights of others from", path):
            tighten(path)


def load(manager: CheckpointManager, checkpoint_id: str, kind: str = "") -> tuple[Checkpoint, Snapshot]:
    """A checkpoint's snapshot, of that kind if one is given: nothing of its trees is read yet; what is read later is
    verified (I2)."""
    checkpoint = manager.get(checkpoint_id)
    if checkpoint.metadata.get("kind") not in KINDS:
        raise Validation(
            f"checkpoint {checkpoint_id} of job {checkpoint.job} is not a checkpoint of a container",
            hint="kedge container list shows those that are",
        )
    taken = parse(manager.load(checkpoint_id), checkpoint_id)
    if kind and taken.kind != kind:
        raise Validation(
            f"checkpoint {checkpoint_id} is a checkpoint of a {taken.kind}, not of a {kind}",
            hint=f"use kedge {taken.kind} restore",
        )
    return checkpoint, taken


def parse(state: object, name: str) -> Snapshot:
    """The snapshot that a loaded state is."""
    if not isinstance(state, dict) or state.get("kind") not in KINDS or not isinstance(state.get("images"), Tree):
        raise Validation(f"{name} is not the state of a container", hint="kedge container list shows those that are")
    if state.get("format") != FORMAT:
        raise UnsupportedFormat(f"{name} has container format {state.get('format')!r}", hint="update Kedge")
    known = {key: value for key, value in state.items() if key in _FIELDS}
    return Snapshot(**{**known, "descriptors": tuple(state.get("descriptors", ()))})


def generations(manager: CheckpointManager, kind: str, key: str) -> list[Checkpoint]:
    """The checkpoints of a workload, oldest first."""
    return manager.list(job_of(kind, key))


def find(manager: CheckpointManager, kind: str, name: str) -> Checkpoint:
    """The checkpoint a user means by `name`: an ID, or a key, whose newest sound one is taken."""
    if manager.exists(name):
        return manager.get(name)
    sound = [checkpoint for checkpoint in generations(manager, kind, name) if checkpoint.status != "corrupted"]
    if not sound:
        raise NotFound(f"no checkpoint of {kind} {name}", hint=f"kedge {kind} list shows the checkpoints")
    return sound[-1]


def find_for(manager: CheckpointManager, wish: Wish) -> Checkpoint:
    """The checkpoint that a container asked to begin with: an ID, or a key, of its own namespace and no other."""
    own = f"container:{wish.namespace}+" if wish.namespace else "container:"
    if manager.exists(wish.restore):
        checkpoint = manager.get(wish.restore)
        if checkpoint.job.startswith(own):
            return checkpoint
    else:
        for key in (wish.key_of(wish.restore), own.partition(":")[2] + wish.restore, wish.restore):
            if job_of("container", key).startswith(own) and generations(manager, "container", key):
                return find(manager, "container", key)
    where = f" in namespace {wish.namespace}" if wish.namespace else ""
    raise NotFound(f"{wish.restore} is not a checkpoint or key of a container{where}", hint="kedge container list")
