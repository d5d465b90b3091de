"""`kedge-runc create` and `run`: a container claims its workload and is restored, or starts anew."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.containers import hibernation, snapshot
from kedge.containers.attempts import Attempt, only_one
from kedge.containers.bundle import Bundle
from kedge.containers.credentials import confinement
from kedge.containers.engine.owners import owner_of_container
from kedge.containers.gpu import memory_for
from kedge.containers.guard import Guard
from kedge.containers.network import refuse_mismatch
from kedge.containers.page_writer import PageWriter
from kedge.containers.phases import Phases
from kedge.containers.pod_starts import last_start_s, note_start, take_back_start
from kedge.containers.restore import Target, restore_checkpoint
from kedge.errors import CheckpointError, Corrupted, CriuFailed, NotFound, StorageError
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Lease

from . import claims, marks, settings
from .container import ORPHAN_S, CalledContainer
from .marks import Mark
from .opt_in import Wish, wish_of
from .pod_volumes import with_pod_volumes
from .start import start, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kedge.containers.snapshot import Snapshot


_TCP = "--tcp-established"
_PAUSE_S = 2.0  # for a pause that fails to be tried again
_LOOK_S = 0.05


def create(container: CalledContainer) -> int | None:
    bundle = Bundle.read(Path(container.call.get("bundle") or ".").absolute())
    wish = wish_of(bundle.spec, owner_of_container, str(bundle.path))
    if wish is None:
        return None
    with ExitStack() as stack:
        lock = _alone(container, stack)
        status = _create(container, wish, bundle)
        if status is None and lock is not None:
            os.set_inheritable(os.dup(lock), True)  # the real runc holds it until it has made the container
        return status


def _alone(container: CalledContainer, stack: ExitStack) -> int | None:
    """One create of an ID at a time: a second one would exchange the files of what the first has restored."""
    with suppress(StorageError):  # no room for it: then nothing can be restored either
        return stack.enter_context(only_one("create", container.root, container.id, wait_s=ORPHAN_S))
    return None


def _create(container: CalledContainer, wish: Wish, bundle: Bundle) -> int | None:
    if os.path.lexists(f"{container.root}/{container.id}") and container.status():
        return None  # taken: runc refuses it, and whose it is must not suffer
    environment = {name: value for name in marks.PLACES if (value := os.environ.get(name))}
    with container.store() as manager:
        claim = _claim(container, manager, wish)
        wish = wish.with_key(claims.key_of(claim))
        mark = Mark(wish, str(bundle.path), environment, claim)
        container.write(mark)  # should we be killed, `delete` knows that it was ours
        try:
            checkpoints = _candidates(container, manager, wish, claim, bundle)
            restored = _restore_first(container, manager, wish, checkpoints, bundle)
            if restored is None:
                note_start(container.root, bundle.spec)
        except BaseException:
            manager.break_lease(claim)
            marks.remove_mark(container.mark_path)
            raise
    if restored is None:
        return None
    checkpoint, guard = restored
    container.write(replace(mark, restored=checkpoint.id))
    guard.keep()
    return 0


def run(container: CalledContainer) -> int | None:
    """Create and start at once, for people. In the foreground, where runc stays, nothing is restored."""
    if not container.call.is_set("detach"):
        return None
    status = create(container)
    if status == 0:
        return start(container)
    mark = container.mark()
    if status is None and mark is not None and mark.wish.is_until_success:
        status = subprocess.run([container.real, *container.call.argv], check=False).returncode
        if status == 0:
            watch(container)
    return status


def _claim(container: CalledContainer, manager: CheckpointManager, wish: Wish) -> Lease:
    """Claim the workload, whose key may become one that is this container's alone; Conflict if it sleeps."""
    claim = claims.take(
        manager,
        wish.key,
        container.root,
        container.id,
        only_first=wish.policy == "fail",
        wait_s=claims.LEAVING_S,
        undecided_s=claims.undecided_s(wish.wait_s) if wish.namespace and wish.restore != "no" else 0.0,
    )
    if (key := claims.key_of(claim)) != wish.key:
        container.log(f"kedge: {wish.key} is already running elsewhere: this one is {key}", level="warning")
    try:
        hibernation.refuse_asleep(manager, key)
    except BaseException:
        manager.break_lease(claim)
        raise
    return claim


def _candidates(
    container: CalledContainer, manager: CheckpointManager, wish: Wish, claim: Lease, bundle: Bundle
) -> Sequence[Checkpoint]:
    """The checkpoints that the container may be restored from, the best first; empty when it is to start anew."""
    if wish.restore == "no":
        return []
    if wish.restore != "latest" and wish.restore[:1] != "/":
        return [snapshot.find_for(manager, wish)]
    generations = snapshot.generations(manager, "container", wish.key)
    is_by_path = wish.restore != "latest"
    if is_by_path or (wish.place and not generations):
        _import(container, manager, wish, claim, bundle, wish.restore if is_by_path else wish.place)
        generations = snapshot.generations(manager, "container", wish.key)
    return [
        checkpoint
        for checkpoint in reversed(generations)
        if checkpoint.status != "corrupted" and "crashed" not in checkpoint.tags
    ]


def _import(
    container: CalledContainer, manager: CheckpointManager, wish: Wish, claim: Lease, bundle: Bundle, path: str
) -> None:
    """What lies at the path becomes a checkpoint, once; it may be gone when it is one already. At the place of ARCH
    there may be nothing, or what that left unfinished, and would not have restored either."""
    from . import dumps  # the readers of archives are much code, and rarely needed

    if path == wish.place and not (os.path.lexists(path) and dumps.is_finished(path)):
        return
    try:
        dumps.import_dump(manager, path, key=wish.key, namespace=wish.namespace, spec=bundle.spec, lease=claim)
    except NotFound as error:
        if not snapshot.generations(manager, "container", wish.key):
            raise
        container.log(f"kedge: the newest checkpoint is used: {error}", level="warning")


def _restore_first(
    container: CalledContainer,
    manager: CheckpointManager,
    wish: Wish,
    checkpoints: Sequence[Checkpoint],
    bundle: Bundle,
) -> tuple[Checkpoint, Guard] | None:
    """Restore the first of these that can be; None when it is to start anew.

    Until the guard is told to keep it, because its engine knows of it, the container goes if we are killed.
    """
    keeps_tcp = settings.chosen(wish.tcp, "KEDGE_TCP", ("close", "keep")) == "keep"
    for number, checkpoint in enumerate(checkpoints):
        for left in reversed(range(wish.tries)):
            target = RuncTarget.of(container, bundle, keeps_tcp=keeps_tcp)
            try:
                _restore(manager, checkpoint.id, target, wish.namespace)
            except CheckpointError as error:
                target.guard.drop()
                container.log(f"kedge: {checkpoint.id} could not be restored: {error}", level="warning")
                is_damaged = isinstance(error, Corrupted) and manager.condemn(checkpoint.id).status == "corrupted"
                if not left and _is_blameless(error):
                    raise  # nothing speaks against the checkpoint: an older one, or none, would undo its work
                if not left and wish.policy == "fail" and number == len(checkpoints) - 1:
                    raise
                if is_damaged:
                    break  # it stays so
            else:
                return checkpoint, target.guard
    return None


def _is_blameless(error: CheckpointError) -> bool:
    """Whether a checkpoint could not be restored for no fault of its own: its programs were killed, for instance."""
    return isinstance(error, StorageError) or (isinstance(error, CriuFailed) and not error.is_verdict)


def _restore(manager: CheckpointManager, checkpoint_id: str, target: RuncTarget, namespace: str) -> None:
    checkpoint, taken = snapshot.load(manager, checkpoint_id)
    refuse_mismatch(taken.network, target.bundle.network)
    if taken.volumes:
        started_s = last_start_s(target.container.root, target.bundle.spec)
        taken = with_pod_volumes(manager, checkpoint, taken, target.bundle, namespace=namespace, last_start_s=started_s)
    restore_checkpoint(checkpoint, taken, target, gpu=memory_for(target.bundle.spec), phases=Phases())


@dataclass(frozen=True, slots=True, kw_only=True)
class RuncTarget(Target):
    """What an engine wants to create: restored, and paused until it says `start`."""

    container: CalledContainer
    bundle: Bundle
    guard: Guard
    keeps_tcp: bool

    @classmethod
    def of(cls, container: CalledContainer, bundle: Bundle, *, keeps_tcp: bool) -> RuncTarget:
        guard = Guard([container.real, *container.call.other("delete", "--force")])
        lock = (container.root, container.id)
        return cls(
            id=container.id,
            lock=lock,
            wait_s=ORPHAN_S,
            container=container,
            bundle=bundle,
            guard=guard,
            keeps_tcp=keeps_tcp,
        )

    def files(self, taken: Snapshot, attempt: Attempt) -> AbstractContextManager[Callable[[], None]]:
        return self.bundle.files(taken, attempt)

    def run(self, taken: Snapshot, attempt: Attempt, pages: PageWriter) -> None:
        options = [*taken.options(), *confinement(self.bundle.spec)]
        closes_tcp = _TCP in options and not self.keeps_tcp
        if closes_tcp:
            options.remove(_TCP)
        words = self.container.call.to_restore(str(attempt.images), str(attempt.path), options)
        command = [self.container.real, *words]
        try:
            self.bundle.run(command, attempt, self._run_noted, pages, closes_tcp=closes_tcp)
        except CriuFailed:
            self.end(attempt)  # it is there, if its runtime or the guard was killed after all else
            raise

    def _run_noted(self, command: Sequence[str], held: Sequence[int]) -> int:
        """The start is noted when processes can run, not before: a restore that fails earlier, or is killed, can be
        tried again. If we are killed in here, nobody knows whether they ran, and the note stays."""
        before_s = last_start_s(self.container.root, self.bundle.spec)
        note_start(self.container.root, self.bundle.spec)
        status = self.guard.run(command, held)
        if status:
            take_back_start(self.container.root, self.bundle.spec, before_s)
        return status

    def pid(self, attempt: Attempt) -> int:
        pid_file = self.container.call.get("pid-file")
        return int(Path(pid_file).read_text()) if pid_file else self.container.look_up().pid

    def end(self, attempt: Attempt) -> None:
        done = self.container.remove()
        if done.returncode:
            self.container.log(f"kedge: what was restored could not be removed again: {done.stderr.strip()}")

    def settle(self) -> None:
        """On a busy machine, runc may give up before the processes stand still. If they run on, `start` leaves them so:
        they are what it is to achieve."""
        until = time.monotonic() + _PAUSE_S
        while (paused := self.container.other("pause")).returncode:
            if time.monotonic() > until:
                reason = paused.stderr.strip()
                self.container.log(f"kedge: it runs before it is started: {reason}", level="warning")
                return
            time.sleep(_LOOK_S)
