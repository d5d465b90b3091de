"""Who waits for a CRIU that was killed in a restore is ended, and nobody else is."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.containers.criu import leftovers
from kedge.containers.criu.command import was_killed
from kedge.containers.guard import Guard
from kedge.containers.pids import children_of, is_alive
from tests.waiting import wait_for

# A runtime that asked CRIU for its version before, and does not look what became of its children. CRIU ends when it can
# read its fifo.
RUNTIME = "true & sh -c 'read word <{fifo}; exit 1' & sleep 1000000 & echo ready; exec sleep 1000000"

# As runc: its first child is killed, and it waits for the socket that the second one has too.
STUCK = """
import os, socket, subprocess
near, far = socket.socketpair()
criu = subprocess.Popen(["sh", "-c", "kill -9 $$"])  # one that nobody refers to is reaped by the next Popen
subprocess.Popen(["sleep", "1000000"], pass_fds=[far.fileno()])
far.close()
os._exit(0 if near.recv(1) else 3)
"""

# Goes on when the shell above it was killed, and makes something.
ORPHAN = """
import os, sys, time
shell = os.getppid()
os.kill(shell, 9)
while os.getppid() == shell:
    time.sleep(0.01)  # sleep: until that is seen
time.sleep(0.2)  # sleep: at least until one that does not wait has looked
open(sys.argv[1], "w").close()
"""


# Leaves a process that was forked and holds what it is given: as what CRIU makes.
FORKED = """
import os, signal
if pid := os.fork():
    print(pid, flush=True)
    os._exit(0)
signal.pause()
"""


class Restore:
    """One under way, with a lock."""

    def __init__(self, folder: Path) -> None:
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        self.runtime = subprocess.Popen(
            ["sh", "-c", RUNTIME.format(fifo=self.fifo)], stdout=subprocess.PIPE, pass_fds=[self.lock]
        )
        assert self.runtime.stdout is not None
        assert self.runtime.stdout.readline() == b"ready\n"
        *_, self.criu, self.task = children_of(self.runtime.pid)
        elsewhere = {"start_new_session": True, "stdin": subprocess.DEVNULL}
        self.holder = subprocess.Popen(["sleep", "1000000"], pass_fds=[self.lock], **elsewhere)
        self.stranger = subprocess.Popen(["sleep", "1000000"], **elsewhere)

    def look(self) -> None:
        leftovers.end_if_criu_was_killed(self.runtime.pid, [self.lock])

    def all_run(self) -> bool:
        pids = (self.runtime.pid, self.task, self.holder.pid, self.stranger.pid)
        return all(map(is_alive, pids))

    def close(self) -> None:
        for pid in (self.criu, self.task):
            os.kill(pid, signal.SIGKILL)
        for process in (self.runtime, self.holder, self.stranger):
            process.kill()
            process.communicate()
        os.close(self.lock)


@pytest.fixture(name="restore")
def _restore(tmp_path: Path) -> Iterator[Restore]:
    made = Restore(tmp_path)
    yield made
    made.close()


def test_who_waits_is_ended(restore: Restore) -> None:
    restore.look()
    assert restore.all_run()
    os.kill(restore.criu, signal.SIGKILL)
    wait_for(lambda: not is_alive(restore.criu), "it cannot be killed")
    restore.look()
    wait_for(lambda: not is_alive(restore.task), "a child of the runtime waits")
    assert restore.holder.wait(60) == -signal.SIGKILL
    assert is_alive(restore.runtime.pid)
    assert is_alive(restore.stranger.pid)


def test_one_that_ended_by_itself_left_what_is_to_run(restore: Restore) -> None:
    """It has answered, whatever it was, and its runtime is about to look."""
    restore.fifo.write_text("word\n")
    wait_for(lambda: not is_alive(restore.criu), "it does not end")
    restore.look()
    assert restore.all_run()


def test_one_that_is_killed_after_criu_is_for_criu_to_say(restore: Restore) -> None:
    os.kill(restore.task, signal.SIGKILL)
    wait_for(lambda: not is_alive(restore.task), "it cannot be killed")
    restore.look()
    assert is_alive(restore.criu)
    assert is_alive(restore.holder.pid)


def test_whoever_took_the_lock_looks(restore: Restore, tmp_path: Path) -> None:
    fcntl.flock(restore.lock, fcntl.LOCK_EX)
    os.kill(restore.criu, signal.SIGKILL)
    wait_for(lambda: not is_alive(restore.criu), "it cannot be killed")
    leftovers.end_if_nobody_asks(tmp_path / "lock")
    assert restore.all_run()


def test_nobody_asks_any_more(restore: Restore, tmp_path: Path) -> None:
    """What is half made is ended; who waits for the lock is not."""
    taker = subprocess.Popen(["flock", str(restore.lock)], pass_fds=[restore.lock])
    assert taker.wait() == 0
    waiter = subprocess.Popen(["flock", str(tmp_path / "lock"), "true"])
    leftovers.end_if_nobody_asks(tmp_path / "lock")
    assert restore.all_run()
    os.kill(restore.criu, signal.SIGKILL)
    wait_for(lambda: not is_alive(restore.criu), "it cannot be killed")
    leftovers.end_if_nobody_asks(tmp_path / "lock")
    assert restore.holder.wait(60) == -signal.SIGKILL
    wait_for(lambda: not is_alive(restore.task), "a child of the runtime waits")
    assert is_alive(restore.runtime.pid)
    assert is_alive(restore.stranger.pid)
    waiter.kill()
    waiter.wait()


def test_a_guarded_restore_is_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime is the child of its shell."""
    monkeypatch.setattr(leftovers, "LOOK_S", 0.01)
    runtime = tmp_path / "runtime"
    runtime.write_text(STUCK)
    assert Guard(["true"]).run([sys.executable, str(runtime)], []) == 3


def test_what_a_guard_that_was_killed_had_started_is_waited_for(tmp_path: Path) -> None:
    """Until it is there: it would run on files that are put back below it."""
    made, lock = tmp_path / "made", os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    runtime = tmp_path / "runtime"
    runtime.write_text(ORPHAN)
    assert was_killed(Guard(["true"]).run([sys.executable, str(runtime), str(made)], [lock]))
    leftovers.wait_for_others([lock])
    assert made.exists()
    os.close(lock)


def fork(*held: int) -> int:
    """A process of that kind; its parent has ended."""
    with subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, pass_fds=held) as parent:
        assert parent.stdout is not None
        return int(parent.stdout.readline())


def test_what_was_forked_is_not_waited_for(tmp_path: Path) -> None:
    """CRIU and its runtime are gone; who is a program may yet say something."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    half_made = fork(lock)
    program = subprocess.Popen(["sh", "-c", "sleep 0.3"], pass_fds=[lock])
    leftovers.wait_for_others([lock])
    assert program.wait() == 0
    assert not is_alive(half_made)
    os.close(lock)


def test_a_restore_that_did_not_finish() -> None:
    begun = leftovers.to_be_made([half_made := fork()])
    leftovers.end_unfinished(**begun)
    assert not is_alive(half_made)
    leftovers.end_unfinished(**begun)


@pytest.mark.parametrize("change", [{"boot": "another"}, {"since": 1 << 62}])
def test_numbers_of_another_time(change: dict[str, Any]) -> None:
    begun = leftovers.to_be_made([stranger := fork()])
    leftovers.end_unfinished(**{**begun, **change})
    assert is_alive(stranger)
    os.kill(stranger, signal.SIGKILL)


def test_numbers_that_a_program_has_taken(restore: Restore) -> None:
    """With all below it."""
    pids = [restore.runtime.pid, restore.task]
    leftovers.end_unfinished(**{**leftovers.to_be_made(pids), "since": 0})
    assert restore.all_run()
