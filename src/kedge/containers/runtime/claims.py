"""Claims: of all that live at once, one container continues a workload's history.

Two replicas of a Deployment, or a new pod beside the old one of a rolling update, have the same key. If both went on
from the same checkpoint and both were saved, their histories would be one muddle. So a container claims its key when it
is restored, or at its first checkpoint: a lease in the store (I5), whose token every save of it carries. A second one
gets a number of its own, `key@2`, `key@3`, with its own history, and the log says so. One that was not restored from a
history never adds to it: it takes the first number that has no checkpoints. Whoever is recreated takes the first that
nobody alive has.

Who comes while the one before is on its way out waits for that (`LEAVING_S`): while that is checkpointed for good, so
as to be restored from there, or while its engine removes it because its shim is gone. If it takes longer, `create`
fails.

A claim is given back when the container has ended. If its machine is gone with it, the claim runs out after
KEDGE_CLAIM_S. On one machine nobody waits for that, and nobody alive loses a claim: the runtime is asked. Across
machines, `kedge pod guard` renews the claims of what lives. Without it, a claim that ran out can be taken over; who
lost it is still checkpointed, under a number of its own.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.containers import snapshot
from kedge.containers.attempts import is_busy
from kedge.containers.engine import runc
from kedge.containers.programs import find_program
from kedge.errors import CheckpointError, Conflict, LeaseHeld, LeaseLost, StorageError, Validation
from kedge.manager import CheckpointManager
from kedge.model import Lease
from kedge.store.lease import is_holder_gone, started

from . import marks
from .marks import Mark

CLAIM_S = 300.0
LEAVING_S = 30.0
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
) -> Lease:
    """The first claim on `key` that is free. `only_first`: Conflict when the first one is not; `only_empty`: of those
    that have no checkpoints; `wait_s`: so long for who is on its way out, then Conflict."""
    holder = _holder(root, identity)
    until = time.monotonic() + wait_s
    while True:
        here = dict(_alive_here(key, Path(root, identity)))
        if only_empty:  # one look at the numbers instead of a claim on each that turns out to be another's
            known = manager.jobs(snapshot.job_of("container", f"{key}@"))
            here = {job.name: False for job in known if job.checkpoints} | here
        for number in range(1, _MOST):
            numbered = key if number == 1 else f"{key}@{number}"
            job = snapshot.job_of("container", numbered)
            who = "another container on this machine"
            if job not in here:
                try:
                    claim = _take(manager, job, holder, _claim_s())
                except LeaseHeld as error:
                    who = error.holder
                else:
                    if not (only_empty and manager.list(job, limit=1)):
                        return claim
                    manager.break_lease(claim)
                    continue
            if wait_s and (here.get(job) or _is_leaving(manager, numbered)):
                break
            if only_first:
                raise Conflict(f"{key} is alive already, as {who}", hint="stop that one, or use policy fresh or retry")
        else:
            raise Conflict(f"{key} is alive {_MOST} times", hint="give different workloads different keys")
        if time.monotonic() > until:
            raise Conflict(f"{key} is still being checkpointed or removed", hint="start it again when that is done")
        time.sleep(0.1)


def _claim_s() -> float:
    text = os.environ.get("KEDGE_CLAIM_S") or str(CLAIM_S)
    try:
        return float(text)
    except ValueError:
        raise Validation(f"KEDGE_CLAIM_S={text} is no number", hint="use seconds, such as 300") from None


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
    """The mark with a claim that is good for a save: the one it has, or another if somebody took that."""
    if mark.claim is None:
        claim = take(manager, mark.key, root, identity, only_empty=mark.wish.restore != "no")
    else:
        try:
            manager.renew_lease(mark.claim)
            return mark
        except LeaseLost:
            claim = take(manager, key_of(mark.claim).partition("@")[0], root, identity, only_empty=True)
    return replace(mark, claim=claim, wish=mark.wish.with_key(key_of(claim)))


def release(manager: CheckpointManager, mark: Mark) -> None:
    if mark.claim is not None:
        manager.break_lease(mark.claim)


def key_of(claim: Lease) -> str:
    return claim.job.partition(":")[2]


def renew_here() -> list[tuple[str, str]]:
    """Renew the claims of all that live on this machine; (job, why not) of those where that failed."""
    stores: dict[tuple[tuple[str, str], ...], list[Lease]] = {}
    for container, mark in _marked():
        if mark.claim is not None and _state(container):
            stores.setdefault(tuple(sorted(mark.environment.items())), []).append(mark.claim)
    failed = []
    for environment, held in stores.items():
        try:
            with marks.store_of(dict(environment)) as manager:
                failed += [(claim.job, why) for claim in held if (why := _renew(manager, claim))]
        except CheckpointError as error:
            failed += [(claim.job, str(error)) for claim in held]
    return failed


def _renew(manager: CheckpointManager, claim: Lease) -> str:
    try:
        manager.renew_lease(claim)
    except (LeaseLost, StorageError) as error:
        return str(error)
    return ""


def _alive_here(key: str, besides: Path) -> Iterator[tuple[str, bool]]:
    """What other living containers of this machine have claimed of `key`, also where that has run out; and whether
    they are on their way out."""
    for container, mark in _marked():
        claim = mark.claim
        if claim is None or key_of(claim).partition("@")[0] != key or container == besides:
            continue
        if state := _state(container):
            is_ending = bool(mark.ending) and is_busy(str(container.parent), container.name)
            yield claim.job, is_ending or _has_lost_its_shim(container, state.get("pid"))


def _has_lost_its_shim(container: Path, pid: object) -> bool:
    """containerd, and so Docker, removes a container whose shim is gone: that was the parent of its first process."""
    if not container.is_relative_to("/run/containerd") and not container.is_relative_to("/run/docker"):
        return False
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return _read(f"/proc/{parent}/comm") != "containerd-shim"


def _marked() -> Iterator[tuple[Path, Mark]]:
    """Those of this machine, as `root/identity`, that are not known to have ended."""
    for container in marks.marks():
        mark = marks.find_mark(container)
        if mark is not None and not mark.ended:
            yield container, mark


def _holder(root: str, identity: str) -> str:
    machine, boot = _read("/etc/machine-id"), _read("/proc/sys/kernel/random/boot_id")
    host, pid = socket.gethostname(), os.getpid()
    return f"{identity} in {root} on {host} [{machine} {boot} {pid} {started(pid)}]"


def _is_gone(holder: str) -> bool:
    """Whether who holds a claim surely does not live any more; False when that cannot be known here."""
    found = _HOLDER.fullmatch(holder)
    if found is None:
        return False
    identity, root, host, machine, boot, pid, began = found.groups()
    if (host, machine) != (socket.gethostname(), _read("/etc/machine-id")):
        return False
    if boot != _read("/proc/sys/kernel/random/boot_id"):
        return bool(machine)  # this machine has been started again since
    is_being_created = str(started(int(pid))) == began
    return not is_being_created and not _state(Path(root, identity))


def _state(container: Path) -> dict[str, Any]:
    """What its runtime says of a container that lives; nothing of others."""
    program = os.environ.get("KEDGE_RUNC") or find_program("runc")
    done = runc.run(program, str(container.parent), "state", container.name)
    state: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return {} if state.get("status") == "stopped" else state


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
