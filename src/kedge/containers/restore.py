"""One restore of a checkpoint, as a container or as a tree of processes, here or on another machine.

    files beside → root unmounted → load and verify → files in place → restore → running

Whatever fails, the files are as before and the network is unlocked. Nothing runs before every byte has been read and
verified; a runtime that can be held back begins while memory pages still are (see page_writer). The root is unmounted
first, because that waits until all that was written to its disk is durable: the images, which nobody needs again, would
be waited for too. What differs is in the `Target` (bundle, processes, runtime.create).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kedge.errors import Corrupted, CriuFailed
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from . import attempts, snapshot
from .attempts import Attempt
from .criu.pages import validate_images
from .criu.timers import arm_periodic
from .page_writer import PageWriter, written_images
from .phases import Phases, Report
from .pids import pids_below
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .gpu.memory import GpuMemory


@dataclass(frozen=True, slots=True)
class Restored:
    """A container or processes that run again."""

    id: str
    pid: int
    checkpoint: Checkpoint
    phases_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(ABC):
    """Where a checkpoint is restored."""

    id: str
    lock: tuple[str, str]  # what `only_one` checkpoint or restore at a time is about
    wait_s: float = 0.0  # for that lock

    def refuse_taken(self) -> None:  # noqa: B027 - one that has nothing to refuse
        """Conflict if something is there already. Called under the lock."""

    @abstractmethod
    def files(self, taken: Snapshot, attempt: Attempt) -> AbstractContextManager[Callable[[], None]]:
        """Gives what puts the files in their place, for good; they are as before if anything fails within."""

    @abstractmethod
    def run(self, taken: Snapshot, attempt: Attempt, pages: PageWriter) -> None:
        """Let it run from the attempt's images; CriuFailed, and nothing left behind, when that fails. Whoever cannot
        hold CRIU back waits for the pages first."""

    def pid(self, attempt: Attempt) -> int:
        """Of the first process that runs again."""
        return int((attempt.path / "pid").read_text())

    @abstractmethod
    def end(self, attempt: Attempt) -> None:
        """End it again: its files go back to what they were, and it must not run on them."""

    def settle(self) -> None:  # noqa: B027 - nor to settle
        """All of it is there."""


def restore_newest(
    manager: CheckpointManager,
    kind: str,
    name: str,
    target_for: Callable[[Snapshot], Target],
    *,
    gpu: GpuMemory | None = None,
    report: Report | None = None,
) -> Restored:
    """Restore the newest sound checkpoint of a key, or the one with that ID.

    A checkpoint that turns out to be damaged is marked, and the one before it is taken, unless it was named itself.
    """
    is_id = manager.exists(name)
    while True:
        checkpoint = snapshot.find(manager, kind, name)
        try:
            _, taken = snapshot.load(manager, checkpoint.id, kind)
            target = target_for(taken)
            return restore_checkpoint(checkpoint, taken, target, gpu=gpu, phases=Phases(report=report))
        except Corrupted as error:
            if is_id or manager.condemn(checkpoint.id).status != "corrupted":
                raise  # what is sound in the store is not passed over for an older one
            warnings.warn(f"checkpoint {checkpoint.id} is damaged, the one before it is used: {error}", stacklevel=2)


def restore_checkpoint(
    checkpoint: Checkpoint, taken: Snapshot, target: Target, *, gpu: GpuMemory | None, phases: Phases
) -> Restored:
    """Restore a checkpoint: it runs when this returns; if anything fails, all is as before."""
    if gpu is not None:
        gpu.before_restore(checkpoint.metadata)
    with ExitStack() as stack:
        lock = stack.enter_context(attempts.only_one(*target.lock, wait_s=target.wait_s))
        target.refuse_taken()
        attempt = stack.enter_context(attempts.attempt("restore", target.id, lock))
        with phases.phase("files"):
            put_in_place = stack.enter_context(target.files(taken, attempt))
        with phases.phase("load"):
            pages = stack.enter_context(written_images(taken.images, attempt))
            validate_images(attempt.images, pages.sizes)  # looked at before CRIU sees them
            arm_periodic(attempt.images)
        with phases.phase("files"):
            put_in_place()
        with phases.phase("restore"):
            _run(taken, target, attempt, pages)
        stack.push(_end_if_failed(target, attempt))
        pid = target.pid(attempt)
        if gpu is not None:
            gpu.after_restore(pids_below(pid), phases)
        target.settle()
    return Restored(target.id, pid, checkpoint, phases.milliseconds())


def _run(taken: Snapshot, target: Target, attempt: Attempt, pages: PageWriter) -> None:
    try:
        target.run(taken, attempt, pages)
    except CriuFailed:
        pages.wait()  # if CRIU failed because it got no pages, this says why there are none
        raise


def _end_if_failed(target: Target, attempt: Attempt) -> Callable[..., None]:
    def on_exit(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            target.end(attempt)

    return on_exit
