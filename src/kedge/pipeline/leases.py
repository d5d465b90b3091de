"""The leases of the runs that a worker carries out, renewed by one thread for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from kedge.blobs.workers import repeating
from kedge.manager import CheckpointManager
from kedge.model import Lease
from kedge.store.lease import default_holder


class Leases:
    """Leases of `ttl_s`, taken and given back by the threads of one worker."""

    def __init__(self, store: CheckpointManager, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._held: dict[Lease, float] = {}  # when it was taken or renewed

    @contextmanager
    def hold(self, key: str, take: Callable[[], Lease] | None = None) -> Iterator[Lease]:
        """The right to write a run, for as long as the block runs; LeaseHeld when somebody else has it (I5).

        `take` takes it, where it is taken with something else.
        """
        taken_at = time.monotonic()
        lease = take() if take else self._store.take_lease(key, default_holder(), self._ttl_s)
        with self._lock:
            self._held[lease] = taken_at
        try:
            yield lease
        finally:
            if self.forget(lease):
                self._store.drain()
                self._store.break_lease(lease)

    def forget(self, lease: Lease) -> bool:
        """Whether it was still held. One that was released by a save is forgotten, and not given back again."""
        with self._lock:
            return self._held.pop(lease, None) is not None

    def renewed(self) -> AbstractContextManager[None]:
        """While the block runs, leases are renewed. What that fails with is told by the next write with the lease."""
        return repeating(self._renew, self._ttl_s / 6, "kedge-leases")

    def _renew(self) -> None:
        due = time.monotonic() - self._ttl_s / 3
        with self._lock:
            leases = [lease for lease, at in self._held.items() if at <= due]
        for lease in leases:
            renewed_at = time.monotonic()
            with suppress(Exception):  # somebody took it over; or the store cannot be reached just now, or refuses
                self._store.renew_lease(lease)
                with self._lock:
                    if lease in self._held:
                        self._held[lease] = renewed_at
