"""How long a call of `kedge-runc` waits for others, in all: less than its engine waits for the call.

An engine that kills a call asks again, with the same answer: a call that waits too long is never done, and the engine
goes on taking the container for one that runs. What cannot be done in that time is said, and left to the next call.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kedge.errors import CheckpointError

# containerd 1.6 to 2.x: `handleEventTimeout` of CRI; `io.containerd.timeout.shim.cleanup`, which is also for mounts.
# What CRI-O and podman allow is not known here.
ENGINES_S = {"delete": 10.0, "delete of a dead shim": 5.0}
SHARE = 0.4  # of that: our start and the real runc, on a busy machine, take theirs


@dataclass(frozen=True, slots=True)
class Patience:
    """Of one call, which begins now."""

    call: str
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_until", time.monotonic() + SHARE * ENGINES_S[self.call])

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def do(self, work: Callable[[], None], log: Callable[[str], None]) -> bool:
        """Whether that work was done, in time, by the store too. It goes on by itself if it takes longer."""
        child = beside(work, log)
        ended = os.pidfd_open(child)
        try:
            if not select.select([ended], [], [], self.left_s)[0]:
                return False
            return os.waitpid(child, 0)[1] == 0
        finally:
            os.close(ended)


def beside(work: Callable[[], None], log: Callable[[str], None]) -> int:
    """Have work done by a process of its own, which holds no stream of ours: an engine waits until these are closed.
    Its exit status is 1 if the store would not. Other faults are ours, and must not keep a container from going."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        work()
        status = 0
    except CheckpointError as error:
        log(f"kedge: {error}")
    except Exception as error:  # noqa: BLE001 - see above
        log(f"kedge: {type(error).__name__}: {error}")
        status = 0
    finally:
        os._exit(status)
