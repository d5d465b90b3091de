"""Claims: of all that live at once, one container continues a workload's history.

Two replicas of a Deployment, or a new pod beside the old one of a rolling update, have the same key. If both went on
from the same checkpoint and both were saved, their histories would be one muddle. So a container claims its key when it
is restored, or at its first checkpoint: a lease in the store (I5), whose token every save of it carries. A second one
gets a number of its own, `key@2`, `key@3`, with its own history, and the log says so. One that was not restored from a
history never adds to it: it takes the first number that has no checkpoints. Whoever is recreated takes the first that
nobody alive has.

Who comes while the one before is on its way out waits for that (`LEAVING_S`): while that is checkpointed for good, so
as to be restored from there, or while its engine removes it because its shim is gone. If it takes longer, `create`
fails. One that its engine neither starts nor removes is removed after a while (`orphans`). In a cluster a pod is
replaced as soon as it is to go, which its runtime learns later, after its preStop hook. So who would begin anew beside
one that lives waits a while (`UNDECIDED_S`) for that one to be told.

A claim is given back when the container has ended. If its machine is gone with it, the claim runs out after
KEDGE_CLAIM_S. On one machine nobody waits for that, and nobody alive loses a claim: the runtime is asked. Across
machines, `kedge pod guard` renews the claims of what lives. Without it, a claim that ran out can be taken over; who
lost it is still checkpointed, under a number of its own.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kedge.containers import snapshot
from kedge.containers.attempts import is_busy
from kedge.containers.pids import read_text, stat_of
from kedge.errors import CheckpointError, Conflict, LeaseHeld, LeaseLost, StorageError, Validation
from kedge.manager import CheckpointManager
from kedge.model import Lease
from kedge.store.lease import is_holder_gone, started

from . import marks, orphans
from .bounds import keep_within
from .container import engine_of, state_of
from .marks import Mark
from .orphans import Orphans

CLAIM_S = 300.0
LEAVING_S = 30.0
UNDECIDED_S = 10.0
_LEAVING_LEASE_S = 15.0  # renewed all the time: so long the others wait for a machine that is gone
_MOST = 1000
_HOLDER = re.compile(r"(\S+) in (.+) on (\S+) \[(\S*) (\S+) (\d+) (\S+)\]")


def take(
    manager: CheckpointManager,
    key: str,
    root: str,
    identity: str,
    *,
    only_first: bool = False,
    only_empty: bool = False,
    wait_s: float = 0.0,
    undecided_s: float = 0.0,
) -> Lease:
    """The first claim on `key` that is free. `only_first`: Conflict when the first one is not; `only_empty`: of those
    that have no checkpoints; `wait_s`: so long for who is on its way out, then Conflict; `undecided_s`: so long for who
    lives to be told to go, before one without checkpoints is taken beside it."""
    search = _Search(manager, key, Path(root, identity), only_first, only_empty, wait_s > 0, undecided_s > 0)
    seen = Orphans()
    undecided_until = time.monotonic() + undecided_s
    until = undecided_until + wait_s
    while True:
        alive = list(_alive_here(key, search.container))
        reason = _reason_to_wait(alive, seen) if search.is_patient else ""
        if not reason and (claim := search.look(alive, is_undecided=time.monotonic() < undecided_until)) is not None:
            return claim
        if time.monotonic() > until:
            reason = reason or "is still being checkpointed or removed"
            raise Conflict(f"workload {key} {reason}", hint="start it again when that is done")
        time.sleep(0.1)


def _reason_to_wait(alive: Sequence[_Alive], seen: Orphans) -> str:
    """One of these is not started, or has lost its shim: its engine may be about to see to that. Else it is removed."""
    for other in alive:
        if other.abandoned:
            failure = seen.remove(other.container)
            return f"has container {other.container.name}, which {other.abandoned}{failure}"
    return ""


@dataclass(frozen=True, slots=True)
class _Search:
    """For a claim on `key`, by the container that is given as `root/identity`."""

    manager: CheckpointManager
    key: str
    container: Path
    only_first: bool
    only_empty: bool
    is_patient: bool  # waits for who is on its way out
    may_be_next: bool  # waits for who lives, and may be told to go

    def look(self, alive: Sequence[_Alive], *, is_undecided: bool) -> Lease | None:
        """The claim; None while there is something to wait for."""
        here = {other.job: other.is_leaving for other in alive if other.job}
        awaited = is_undecided or any(other.is_leaving for other in alive)
        is_beside = bool(alive)  # whether another one of the workload lives
        if self.only_empty:  # one look at the numbers instead of a claim on each that turns out to be another's
            known = self.manager.jobs(snapshot.job_of("container", f"{self.key}@"))
            here = {job.name: False for job in known if job.checkpoints} | here
        for number in range(1, _MOST):
            numbered = self.key if number == 1 else f"{self.key}@{number}"
            job = snapshot.job_of("container", numbered)
            who = "another container on this machine"
            if job not in here:
                if self.may_be_next and is_beside and awaited and self._is_empty(job):
                    return None
                try:
                    claim = _take(self.manager, job, _holder(self.container), _seconds("KEDGE_CLAIM_S", CLAIM_S))
                except LeaseHeld as error:
                    who = error.holder
                else:
                    if not self.only_empty or self._is_empty(job):
                        return claim
                    self.manager.break_lease(claim)
                    continue
            is_beside = True
            if self.is_patient and (here.get(job) or _is_leaving(self.manager, numbered)):
                return None
            if self.only_first and self.may_be_next and is_undecided:
                return None
            if self.only_first:
                raise Conflict(
                    f"workload {self.key} is already running, as {who}",
                    hint="stop that one, or use policy fresh or retry",
                )
        raise Conflict(
            f"workload {self.key} is already running {_MOST} times", hint="give different workloads different keys"
        )

    def _is_empty(self, job: str) -> bool:
        return not self.manager.list(job, limit=1)


def undecided_s(wanted_s: float | None) -> float:
    """As its container says, or the machine."""
    return _seconds("KEDGE_WAIT_S", UNDECIDED_S) if wanted_s is None else wanted_s


def _seconds(name: str, usual: float) -> float:
    text = os.environ.get(name) or str(usual)
    try:
        return float(text)
    except ValueError:
        raise Validation(f"{name}={text} is not a number", hint=f"use seconds, such as {usual:.0f}") from None


def _take(manager: CheckpointManager, job: str, holder: str, ttl_s: float) -> Lease:
    try:
        return manager.take_lease(job, holder, ttl_s)
    except LeaseHeld as error:
        if not _is_gone(error.holder):
            raise
        manager.break_lease(Lease(job, error.token, error.holder, ttl_s))
        return manager.take_lease(job, holder, ttl_s)


@contextmanager
def leaving(manager: CheckpointManager, key: str) -> Iterator[None]:
    """While the container that has claimed `key` is checkpointed for good: others wait, on any machine."""
    job = f"leaving:{key}"
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(manager.lease(job, ttl_s=_LEAVING_LEASE_S))
                break
            except LeaseHeld as error:  # somebody just asks, or was killed: the claim is ours
                manager.break_lease(Lease(job, error.token, error.holder, 0.0))
        yield


def _is_leaving(manager: CheckpointManager, key: str) -> bool:
    try:
        manager.break_lease(manager.take_lease(f"leaving:{key}", "who asks", 1.0))
    except LeaseHeld as error:
        return not is_holder_gone(error.holder)
    return False


def ensure(manager: CheckpointManager, mark: Mark, root: str, identity: str) -> Mark:
    """The mark with a claim that is good for a save: the one it has, or another if somebody took that. Conflict when
    its namespace has too much in the store."""
    if mark.claim is None:
        claim = take(manager, mark.key, root, identity, only_empty=mark.wish.restore != "no")
    else:
        try:
            manager.renew_lease(mark.claim)
            claim = mark.claim
        except LeaseLost:
            claim = take(manager, key_of(mark.claim).partition("@")[0], root, identity, only_empty=True)
    try:
        keep_within(manager, key_of(claim))
    except BaseException:
        if claim is not mark.claim:
            manager.break_lease(claim)
        raise
    return mark if claim is mark.claim else replace(mark, claim=claim, wish=mark.wish.with_key(key_of(claim)))


def release(manager: CheckpointManager, mark: Mark) -> None:
    if mark.claim is not None:
        manager.break_lease(mark.claim)


def key_of(claim: Lease) -> str:
    return claim.job.partition(":")[2]


def renew_here(seen: Orphans) -> list[tuple[str, str]]:
    """Renew the claims of all that live on this machine, and remove those that are abandoned; (job, why not) of those
    where that failed."""
    stores: dict[tuple[tuple[str, str], ...], list[Lease]] = {}
    failed = []
    for container, mark in marked():
        if not (state := state_of(container)):
            continue
        if orphans.reason(container, mark, state):
            failed += [(snapshot.job_of("container", mark.key), why)] if (why := _remove(container, seen)) else []
        elif mark.claim is not None:
            stores.setdefault(tuple(sorted(mark.environment.items())), []).append(mark.claim)
    for environment, held in stores.items():
        try:
            with marks.store_of(dict(environment)) as manager:
                failed += [(claim.job, why) for claim in held if (why := _renew(manager, claim))]
        except CheckpointError as error:
            failed += [(claim.job, str(error)) for claim in held]
    return failed


def _remove(container: Path, seen: Orphans) -> str:
    try:
        return seen.remove(container)
    except CheckpointError as error:
        return str(error)


def _renew(manager: CheckpointManager, claim: Lease) -> str:
    try:
        manager.renew_lease(claim)
    except (LeaseLost, StorageError) as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class _Alive:
    """Another living container. `job`: what it has claimed, also where that has run out; "": nothing yet.
    `abandoned`: what is wrong with it if it may be."""

    container: Path
    job: str
    is_leaving: bool
    abandoned: str


def _alive_here(key: str, besides: Path) -> Iterator[_Alive]:
    """The other containers of this machine that live and have `key`, or a number of it."""
    for container, mark in marked():
        if mark.key.partition("@")[0] != key or container == besides:
            continue
        if state := state_of(container):
            is_ending = bool(mark.ending) and is_busy(str(container.parent), container.name)
            is_leaving = is_ending or marks.is_leaving(container) or _has_lost_its_shim(container, state.get("pid"))
            job = "" if mark.claim is None else mark.claim.job
            yield _Alive(container, job, is_leaving, orphans.reason(container, mark, state))


def _has_lost_its_shim(container: Path, pid: object) -> bool:
    """containerd, and so Docker, removes a container whose shim is gone: that was the parent of its first process."""
    if engine_of(str(container.parent)) == "runc":
        return False
    fields = stat_of(str(pid))
    return bool(fields) and _line(f"/proc/{fields[1]}/comm") != "containerd-shim"


def marked() -> Iterator[tuple[Path, Mark]]:
    """Those of this machine, as `root/identity`, that are not known to have ended."""
    for container in marks.marks():
        mark = marks.find_mark(container)
        if mark is not None and not mark.ended:
            yield container, mark


def _holder(container: Path) -> str:
    machine, boot = _line("/etc/machine-id"), _line("/proc/sys/kernel/random/boot_id")
    host, pid = socket.gethostname(), os.getpid()
    return f"{container.name} in {container.parent} on {host} [{machine} {boot} {pid} {started(pid)}]"


def _is_gone(holder: str) -> bool:
    """Whether who holds a claim surely does not live any more; False when that cannot be known here."""
    parts = _HOLDER.fullmatch(holder)
    if parts is None:
        return False
    identity, root, host, machine, boot, pid, began = parts.groups()
    if (host, machine) != (socket.gethostname(), _line("/etc/machine-id")):
        return False
    if boot != _line("/proc/sys/kernel/random/boot_id"):
        return bool(machine)  # this machine has been started again since
    is_being_created = str(started(int(pid))) == began
    return not is_being_created and not state_of(Path(root, identity))


def is_alive(container: Path) -> bool:
    return bool(state_of(container))


def _line(path: str) -> str:
    return read_text(path).strip()
