"""Holding a lease: it is renewed in the background while the block runs, and released at the end."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from kedge.blobs.kernel import boot_id, read_kernel_file
from kedge.blobs.shelter import give_up_if_abandoned, run
from kedge.errors import LeaseLost, Validation
from kedge.model import Lease
from kedge.ports import Catalogue

from .renewal import renewals

FIRST_TOKEN = 1  # of a job's first lease


def default_holder() -> str:
    """Return a recognisable name of this process: host, PID, start time, and where such PIDs count."""
    return f"{socket.gethostname()}:{os.getpid()}:{started(os.getpid())}:{_machine_digest()}"


def boot_clock_s() -> float:
    """Return a clock that nobody sets, and that continues while the machine sleeps (I4)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def is_holder_gone(holder: str) -> bool:
    """Return whether the process that took a lease has certainly ended; False if that cannot be known here."""
    parts = holder.rsplit(":", 3)
    if len(parts) != 4 or not parts[1].isdecimal() or parts[3] != _machine_digest() or parts[2] == "None":
        return False
    return str(started(int(parts[1]))) != parts[2]


def machine() -> dict[str, object]:
    """Return where a PID is valid: the host, its current boot, and the PID namespace."""
    boot, processes = boot_id(), 0
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot = ""
    return {"host": socket.gethostname(), "boot": boot, "processes": processes}


def _machine_digest() -> str:
    return hashlib.sha256(repr(sorted(machine().items())).encode()).hexdigest()[:12]


def started(pid: int) -> str | None:
    """Return when a process started, in the kernel's count; None if it does not exist or is a zombie."""
    try:
        fields = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Holding:
    """A lease that is renewed until `end` is called, or until it is garbage-collected."""

    def __init__(self, leases: Catalogue, lease: Lease) -> None:
        self.lease = lease
        self._is_released = False
        self._leases = leases
        self._stop = threading.Event()
        me = weakref.ref(self)  # an interrupt may drop this object anywhere; then the lease is released, too
        self._renewals = renewals()
        self._renewal = self._renewals.add(
            partial(_renew, me, leases, lease, self._stop), f"kedge-lease-{lease.job}", lease.ttl_s / 3
        )

    def forget(self) -> None:
        """Note that a save has released the lease."""
        self._is_released = True

    def end(self) -> None:
        """Stop renewing and release, safe from signal handlers unless nothing is left to do."""
        self._stop.set()
        if not (self._is_released and self._renewal.drop()):
            run(self._end)

    def _end(self) -> None:
        if self._renewals is renewals():  # otherwise this is a forked child, where nobody renews it
            self._renewals.end(self._renewal)
        if not self._is_released:
            self._leases.release_lease(self.lease)


def _renew(holding: weakref.ref[Holding], leases: Catalogue, lease: Lease, stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(Exception):  # busy or unreachable for now; if it lasts too long, the index refuses our writes
            try:
                if holding() is None:
                    leases.release_lease(lease)
                    return
                leases.renew_lease(lease)
            except LeaseLost:
                return
        stop.wait(lease.ttl_s / 3)


@contextmanager
def hold(leases: Catalogue, job: str, *, ttl_s: float, holder: str | None = None) -> Iterator[Lease]:
    """Hold the lease on `job` while the block runs. Raises LeaseHeld if somebody else has it (I5).

    It is renewed every third of `ttl_s` (see `renewal`). If that fails, for example because the process was suspended
    for longer than the lease, the index refuses the next write under it. Nobody needs to report it.
    """
    check_ttl(ttl_s)
    with hold_taken(leases, lambda: leases.acquire_lease(job, holder or default_holder(), ttl_s)) as holding:
        yield holding.lease


def check_ttl(ttl_s: float) -> None:
    if not isinstance(ttl_s, int | float) or not 0.1 <= ttl_s <= 86_400:
        raise Validation(f"a lease of {ttl_s!r} s is not valid", hint="use 0.1 to 86400 seconds")


@contextmanager
def hold_taken(leases: Catalogue, take: Callable[[], Lease]) -> Iterator[Holding]:
    """Hold a lease that `take` takes. Call `Holding.forget` after a save that releases it."""
    holding = run(_begin, leases, take)
    try:
        yield holding
    finally:
        holding.end()


def _begin(leases: Catalogue, take: Callable[[], Lease]) -> Holding:
    holding = Holding(leases, take())
    try:
        give_up_if_abandoned()
    except BaseException:
        holding.end()
        raise
    return holding
