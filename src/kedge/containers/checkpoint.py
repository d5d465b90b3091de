"""One checkpoint of a container, or of a tree of processes: memory and files of one moment.

    pause → dump → files → resume → store         left running: the files are copied first, storing takes its time
    pause → dump → files and store → end          otherwise: it ends only when the checkpoint is durable

Whatever fails, and whenever this program is killed, the source runs on or its checkpoint is whole (see relay). What
differs between a container and bare processes is in their `Source` (bundle, processes).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.errors import Conflict
from kedge.files import File, Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Lease

from . import attempts, hosts, network, snapshot
from .attempts import Attempt
from .criu.command import Dump, dump
from .criu.pages import validate_images
from .network import Network
from .phases import Phases, Report
from .pids import hides_limits, is_alive, pids_below
from .runtime.opt_in import pod_of

if TYPE_CHECKING:
    from .gpu.memory import GpuMemory


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a checkpoint. A dump that is not done by the deadline is given up."""

    key: str
    leave_running: bool = False
    options: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    lease: Lease | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for option in self.options:
            snapshot.refuse_option(option)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of the moment: the root of a container, or what processes have open for writing."""

    root_kind: str = "none"
    root: Path | None = None
    open_files: Mapping[str, File] = field(default_factory=dict)
    volumes: Mapping[str, Tree] = field(default_factory=dict)  # of a pod, by where they are mounted
    facts: Mapping[str, object] = field(default_factory=dict)  # what the checkpoint's metadata says of them


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint that was made. `paused_ms`: how long the source stood still."""

    checkpoint: Checkpoint
    phases_ms: Mapping[str, float]
    paused_ms: float

    @property
    def sockets(self) -> list[str]:
        """The paths of sockets, which were not saved."""
        paths: Any = self.checkpoint.metadata["sockets"]
        return [str(path) for path in paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(ABC):
    """What a checkpoint is made of. Whatever can be asked before the pause is known when it is constructed."""

    kind: str
    id: str
    pid: int  # of its first process
    lock: tuple[str, str]  # what `only_one` checkpoint or restore at a time is about
    runtime: Mapping[str, str]
    network: Network
    locks_network: bool  # whether CRIU locks it as a whole, or connections only
    bundle: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    descriptors: tuple[str, ...] = ()  # what its first three are, where no runtime notes that in the images

    @abstractmethod
    def dump(self, attempt: Attempt, options: Sequence[str], *, leave_running: bool) -> Dump: ...

    @abstractmethod
    def files(self, attempt: Attempt, phases: Phases, *, leave_running: bool) -> Files:
        """Called at the pause. Copies if it is to run on; its own files if it is to end."""


def make_checkpoint(
    manager: CheckpointManager,
    source: Source,
    request: Request,
    *,
    gpu: GpuMemory | None = None,
    report: Report | None = None,
) -> Checkpointed:
    """Make a checkpoint, durable when this returns; the source ends, unless it is left running."""
    if not request.leave_running:
        snapshot.refuse_memory(manager)
    snapshot.keep_private(manager.url)
    _refuse_hidden(source.pid)
    job = snapshot.job_of(source.kind, request.key)
    deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
    with ExitStack() as stack:
        lock = stack.enter_context(attempts.only_one(*source.lock, wait_s=request.deadline_s or 0.0))
        attempt = stack.enter_context(attempts.attempt("checkpoint", source.id, lock))
        locked = source.network if source.locks_network else None
        attempt.describe(network=locked)  # should we be killed
        namespace = stack.enter_context(network.namespace_of(source.pid, locked))
        host = hosts.facts()
        phases = Phases(report=report)
        work = _Work(manager, job, source, request, attempt, gpu, host, phases)
        how = source.dump(attempt, sorted(set(request.options)), leave_running=request.leave_running)
        outcome: Checkpoint | Files | None = None
        try:
            with _gpu_moved(gpu, source.pid, phases):
                try:
                    with phases.phase("dump"):
                        outcome = dump(how, attempt=attempt, at_pause=work.at_pause, deadline=deadline)
                finally:
                    if not request.leave_running:
                        network.remove_lock(namespace)
        finally:
            if isinstance(outcome, Files):  # left running; also when a GPU could not resume: this restores it
                outcome = work.store(outcome)
        assert isinstance(outcome, Checkpoint)  # nothing above returns without one
        paused_ms = _paused_ms(attempt, phases) or 0.0
        return Checkpointed(outcome, phases.milliseconds(), paused_ms)


def _refuse_hidden(pid: int) -> None:
    """CRIU would find out when everything is frozen."""
    for process in pids_below(pid):
        if hides_limits(process):
            raise Conflict(
                f"process {process} is another user's, and root may not read its limits: CAP_SYS_RESOURCE is missing",
                hint="run Kedge, or the engine that calls it, with all capabilities of root; "
                "where that cannot be, let the process run as root",
            )


def _gpu_moved(gpu: GpuMemory | None, pid: int, phases: Phases) -> AbstractContextManager[None]:
    """While this holds, what is on GPUs is in the memory of the processes."""
    return nullcontext() if gpu is None else gpu.around_dump(pids_below(pid), phases, lambda: is_alive(pid))


def _paused_ms(attempt: Attempt, phases: Phases) -> float | None:
    """How long everything stood still: as CRIU says, or, where a GPU was paused with it, until that ran again."""
    gpu_s = [seconds for name, seconds in phases.seconds.items() if name.startswith("gpu ")]
    if not gpu_s:
        return snapshot.paused_ms(attempt.path)
    return round(1000 * (sum(gpu_s) + phases.seconds.get("dump", 0.0) + phases.seconds.get("files", 0.0)), 1)


@dataclass(frozen=True, slots=True)
class _Work:
    """One checkpoint under way: what is needed at the pause and after it."""

    manager: CheckpointManager
    job: str
    source: Source
    request: Request
    attempt: Attempt
    gpu: GpuMemory | None
    host: Mapping[str, object]
    phases: Phases

    def at_pause(self) -> Checkpoint | Files:
        """Nothing of the source moves: short if it is to run on, the whole checkpoint if it is to end."""
        files = self.source.files(self.attempt, self.phases, leave_running=self.request.leave_running)
        return files if self.request.leave_running else self.store(files)

    def store(self, files: Files) -> Checkpoint:
        with self.phases.phase("store"):
            taken = self._snapshot(files)
            leaves_running = self.request.leave_running
            metadata = {
                "kind": taken.kind,
                "id": taken.id,
                "runtime": taken.runtime["name"],
                "network": taken.network["mode"],
                "is_running": leaves_running,
                "paused_ms": _paused_ms(self.attempt, self.phases) if leaves_running else None,
                "phases_ms": self.phases.milliseconds(),
                "rootfs": taken.rootfs_kind,
                "sockets": taken.sockets(),
                "attempt": self.attempt.id,
                **({"pod": pod} if (pod := pod_of(taken.spec)) else {}),
                **files.facts,
                **({} if self.gpu is None else self.gpu.facts()),
                **taken.totals(),
            }
            step = self.job.partition(":")[2]
            checkpoint_id = self.manager.save(
                self.job, step, taken.state(), metadata=metadata, tags=self.request.tags, lease=self.request.lease
            )
            return self.manager.get(checkpoint_id)

    def _snapshot(self, files: Files) -> snapshot.Snapshot:
        images = self.attempt.images
        borders = validate_images(images)
        return snapshot.Snapshot(
            kind=self.source.kind,
            id=self.source.id,
            images=snapshot.images_tree(images, borders),
            runtime=self.source.runtime,
            bundle=self.source.bundle,
            spec=self.source.spec,
            descriptors=self.source.descriptors or snapshot.read_descriptors(images),
            network=self.source.network,
            criu={"version": self.host["criu"], "options": sorted(set(self.request.options))},
            host=self.host,
            processes=snapshot.read_processes(images),
            rootfs_kind=files.root_kind,
            rootfs=None if files.root is None else snapshot.files_tree(files.root),
            files=files.open_files,
            volumes=files.volumes,
        )
