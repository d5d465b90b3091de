"""Holding a lease: renewed in the background while the work goes on, given back at the end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import LeaseLost, StorageError, Validation
from .model import Lease
from .ports import Index


def default_holder() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


@contextmanager
def hold(index: Index, job: str, *, ttl_s: float, holder: str | None = None) -> Iterator[Lease]:
    """The right to write `job` for as long as the block runs; LeaseHeld when somebody else has it (I5).

    A thread renews it every third of `ttl_s`. If that fails, for example because the process was suspended for
    longer than the lease, the next write with it is refused by the index: the thread need not say anything.
    """
    if not isinstance(ttl_s, int | float) or not 0.1 <= ttl_s <= 86_400:
        raise Validation(f"a lease of {ttl_s!r} s makes no sense", hint="use 0.1 to 86400 seconds")
    lease = index.acquire_lease(job, holder or default_holder(), ttl_s)
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(ttl_s / 3):
            try:
                index.renew_lease(lease)
            except LeaseLost:
                return
            except StorageError:
                continue  # busy or unreachable just now; the index refuses our writes if it lasts too long

    thread = threading.Thread(target=renew, name=f"holdfast-lease-{job}", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join()
        index.release_lease(lease)
