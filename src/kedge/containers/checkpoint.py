"""Freezing a container: its processes and its files, of one moment, as one checkpoint.

    freeze → dump → files → thaw → store          left running: the files are copied away first, storing takes its time
    freeze → dump → files and store → end         otherwise: it ends only when the checkpoint is durable

Whatever fails, and whenever this program is killed, the container runs on or its checkpoint is whole (see relay).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kedge.errors import Conflict, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Lease

from . import hosts, network, snapshot
from .attempts import Attempt, attempt, only_one
from .companions import Companion, Phases, Report, accompanied, facts_of
from .criu.command import dump
from .criu.pages import validate_images
from .engine.runc import Container, runtime_version
from .pids import is_alive, pids_below
from .rootfs import Rootfs, copy_away, find_rootfs
from .runtime.opt_in import pod_of

# What a dump may be told, and a restore must be told again.
OPTIONS = ("--tcp-established", "--ext-unix-sk", "--shell-job", "--file-locks")


@dataclass(frozen=True, slots=True)
class Frozen:
    """What came of a freeze."""

    checkpoint: Checkpoint
    phases_ms: Mapping[str, float]
    frozen_ms: float
    sockets: Sequence[str]


def parse_options(options: Sequence[str]) -> list[str]:
    for option in options:
        if option not in OPTIONS:
            raise Validation(f"{option!r} is no option of a dump", hint=f"use {', '.join(OPTIONS)}")
    return sorted(set(options))


def freeze_container(
    manager: CheckpointManager,
    container: Container,
    *,
    key: str | None = None,
    leave_running: bool = False,
    options: Sequence[str] = (),
    companions: Sequence[Companion] = (),
    tags: Mapping[str, str] | None = None,
    lease: Lease | None = None,
    images_for: Callable[[Attempt], None] | None = None,
    deadline_s: float | None = None,
    report: Report | None = None,
) -> Frozen:
    """Make a checkpoint of a running container, durable when this returns; it ends, unless left running.

    `images_for` is shown the images while everything stands still. What is not dumped by the deadline is given up.
    """
    if container.status not in ("running", "paused"):
        raise Conflict(f"container {container.id} is {container.status}", hint="only a running one can be frozen")
    wanted = parse_options(options)
    if not leave_running:
        snapshot.refuse_memory(manager)
    job = snapshot.job_of("container", key or container.id)
    rootfs = find_rootfs(container.bundle, str(container.spec.get("root", {}).get("path", "rootfs")))
    net = network.mode_of(container.spec)
    deadline = None if deadline_s is None else time.monotonic() + deadline_s
    with ExitStack() as stack:
        lock = stack.enter_context(only_one(container.root, container.id, wait_s=deadline_s or 0.0))
        kept = stack.enter_context(attempt("checkpoint", container.id, lock))
        kept.describe(network=net)
        namespace = stack.enter_context(network.namespace_of(container.pid, net))
        facts = {"host": hosts.facts(), "runtime": runtime_version(container.program)}
        work = _Freeze(manager, job, container, kept, rootfs, net, wanted, leave_running, dict(tags or {}), facts)
        work.phases.report = report
        work.images_for = images_for
        work.lease = lease
        command = container.command(
            "checkpoint", "--image-path", str(kept.images), "--work-path", str(kept.path), *wanted, "--leave-running",
            container.id,
        )  # fmt: skip
        forget = () if leave_running else container.command("delete", "--force", container.id)
        pids = pids_below(container.pid)
        work.companions = companions
        is_dumped = False
        try:
            with accompanied(companions, pids, work.phases, lambda: is_alive(container.pid)):
                started = time.monotonic()
                try:
                    with work.phases.phase("dump"):
                        dump(command, attempt=kept, on_frozen=work.on_frozen, deadline=deadline, forget=forget)
                    is_dumped = True
                finally:
                    if not leave_running:
                        network.remove_lock(namespace)
                work.phases.seconds["dump"] = time.monotonic() - started - work.frozen_work_s()
        finally:
            if leave_running and is_dumped:  # also when a companion could not go on: this brings it back
                work.store()
        return work.result()


def pause_ms(attempt: Attempt, phases: Phases) -> float | None:
    """How long everything stood still: as CRIU says, or, where a GPU was frozen with it, until that ran again."""
    on_gpu = [seconds for name, seconds in phases.seconds.items() if name.startswith("gpu ")]
    if not on_gpu:
        return snapshot.frozen_ms(attempt.path)
    return round(1000 * (sum(on_gpu) + phases.seconds.get("dump", 0.0) + phases.seconds.get("files", 0.0)), 1)


@dataclass(slots=True)
class _Freeze:
    """One freeze under way."""

    manager: CheckpointManager
    job: str
    container: Container
    attempt: Attempt
    rootfs: Rootfs
    network: Mapping[str, str]
    options: Sequence[str]
    leave_running: bool
    tags: dict[str, str]
    facts: Mapping[str, object]  # asked before anything is frozen
    phases: Phases = field(default_factory=Phases)
    checkpoint: Checkpoint | None = None
    sockets: list[str] = field(default_factory=list)
    files: Path | None = None
    companions: Sequence[Companion] = ()
    images_for: Callable[[Attempt], None] | None = None
    lease: Lease | None = None

    def on_frozen(self) -> None:
        """At the seam: nothing of the container moves. Short if it is to run on, complete if it is to end."""
        if self.images_for is not None:
            self.images_for(self.attempt)
        if self.rootfs.kind == "none":
            self.files = None
        elif self.leave_running:
            with self.phases.phase("files"):
                copy_away(self.rootfs.changes, self.attempt.rootfs)
            self.files = self.attempt.rootfs
        else:
            self.files = self.rootfs.changes
        if not self.leave_running:
            self.store()

    def store(self) -> None:
        with self.phases.phase("store"):
            taken = self._snapshot(validate_images(self.attempt.images))
            metadata = {
                "kind": "container",
                "id": self.container.id,
                "runtime": self.container.engine,
                "network": self.network["mode"],
                "is_running": self.leave_running,
                "frozen_ms": self.frozen_ms() if self.leave_running else None,
                "phases_ms": self.phases.milliseconds(),
                "rootfs": self.rootfs.kind,
                "sockets": self.sockets,
                "attempt": self.attempt.id,
                **({"pod": pod} if (pod := pod_of(self.container.spec)) else {}),
                **facts_of(self.companions),
                **process_totals(taken.processes),
            }
            step = self.job.partition(":")[2]
            identity = self.manager.save(
                self.job, step, taken.state(), metadata=metadata, tags=self.tags, lease=self.lease
            )
            self.checkpoint = self.manager.get(identity)

    def _snapshot(self, borders: Mapping[str, list[int]]) -> snapshot.Snapshot:
        tree = None if self.files is None else snapshot.rootfs_tree(self.files)
        self.sockets = [] if tree is None else [path for path, what in tree.skipped if what == "a socket"]
        host = self.facts["host"]
        assert isinstance(host, dict)
        return snapshot.Snapshot(
            kind="container",
            id=self.container.id,
            images=snapshot.images_tree(self.attempt.images, borders),
            runtime={
                "name": self.container.engine,
                "version": str(self.facts["runtime"]),
                "root": self.container.root,
            },
            bundle=str(self.container.bundle),
            spec=self.container.spec,
            descriptors=snapshot.read_descriptors(self.attempt.images),
            network=self.network,
            criu={"version": host["criu"], "options": list(self.options)},
            host=host,
            processes=snapshot.read_processes(self.attempt.images),
            rootfs_kind=self.rootfs.kind,
            rootfs=tree,
        )

    def frozen_work_s(self) -> float:
        return sum(self.phases.seconds.get(name, 0.0) for name in ("files", "store"))

    def frozen_ms(self) -> float | None:
        return pause_ms(self.attempt, self.phases)

    def result(self) -> Frozen:
        assert self.checkpoint is not None  # nothing above returns without one
        frozen = self.frozen_ms() or 0.0
        return Frozen(self.checkpoint, self.phases.milliseconds(), frozen, self.sockets)


def process_totals(processes: Mapping[str, Mapping[str, object]]) -> dict[str, int]:
    memory = sum(int(str(one.get("memory_bytes", 0))) for one in processes.values())
    return {"processes": len(processes), "memory_bytes": memory}
