"""A restore that is undone when whoever asked for it is killed.

An engine that got no answer knows of no container. Would it run all the same, nobody could stop it, and the next one of
the workload would be restored from the same moment a second time. So a shell stands between: it restores, and
waits for the word that the container is known. If that does not come, because we are gone, it removes the container.
If the shell itself is killed, the restore has failed, and what it makes all the same is removed by us.
"""

from __future__ import annotations

import fcntl
import os
import select
import shlex
import signal
from collections.abc import Sequence

from .criu import leftovers
from .pids import children_of

# Descriptors 8 and 9 are ours: shells know only those up to 9, and the runtime must not have them.
_SCRIPT = """
{restore} 8>&- 9<&-
status=$?
(trap '' PIPE; echo $status >&8) 2>/dev/null
exec 8>&-
[ $status = 0 ] || exit 0
read -r word <&9 || {delete} >/dev/null 2>&1 8>&- 9<&-
"""
_ABOVE = 20  # numbers that cannot be 8 or 9
_KILLED = 128 + signal.SIGKILL


class Guard:
    """A restore under way, and afterwards the container's right to stay. One that never ran guards nothing."""

    def __init__(self, delete: Sequence[str]) -> None:
        self._delete = delete
        self._shell = self._word = self._status = -1

    def run(self, restore: Sequence[str], held: Sequence[int]) -> int:
        """Run a restore; its exit status. It has our streams, and holds `held`: locks, not free while it works."""
        script = _SCRIPT.format(restore=shlex.join(restore), delete=shlex.join(self._delete))
        self._status, status = (_above(fd) for fd in os.pipe())
        word, self._word = (_above(fd) for fd in os.pipe())
        locks = [_above(os.dup(fd)) for fd in held]
        given = [(status, 8), (word, 9), *zip(locks, locks, strict=True)]
        actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in given]
        try:
            self._shell = os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ, file_actions=actions)
        finally:
            for fd in (status, word, *locks):
                os.close(fd)
        return self.wait(held)

    def wait(self, held: Sequence[int]) -> int:
        """The exit status of the restore, which goes on if the shell was killed."""
        with open(self._status, "rb") as status:
            while not select.select([status], [], [], leftovers.LOOK_S)[0]:
                for runtime in children_of(self._shell):
                    leftovers.end_if_criu_was_killed(runtime, held)
            if answer := status.read():
                return int(answer)
        self.drop()  # the shell was killed, and said nothing
        return _KILLED

    def keep(self) -> None:
        """The container is known: it stays, whoever dies from now on."""
        os.write(self._word, b"known\n")
        self.drop()

    def drop(self) -> None:
        """Without a word before, the container goes."""
        if self._shell > 0:
            os.close(self._word)
            os.waitpid(self._shell, 0)
            self._shell = -1


def _above(fd: int) -> int:
    """The same under a number that is not one of the shell's."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    finally:
        os.close(fd)
