"""The seam of a dump: a socket in the attempt's own folder, so that no killed one leaves anything elsewhere."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kedge.containers.attempts import Attempt, attempt
from kedge.containers.criu import relay
from kedge.containers.criu.command import seam
from tests.waiting import wait_for

# Like CRIU, which has children while it finds out what the kernel can do: they inherit what it has open.
CRIU = """#!{python}
import os, pathlib, socket, sys, time
asking = socket.socket(fileno=int(sys.argv[2]))
asking.recv(1 << 20)
child = os.fork()
if child == 0:
    time.sleep(1000)  # sleep: until it is killed
new = pathlib.Path({folder!r}, "new")
new.write_text(f"{{os.getpid()}} {{child}}")
new.rename(new.with_name("pids"))
time.sleep(1000)  # sleep: until it is killed
"""
# Like CRIU, which asks the runtime before it does the next thing, and gives up when nobody is there to answer.
ASKING = """#!{python}
import socket, sys
asking = socket.socket(fileno=int(sys.argv[2]))
asking.recv(1 << 20)
asking.send({question!r})
sys.exit(0 if asking.recv(1 << 20) else 3)
"""
# criu_resp {type: NOTIFY, success: true, notify {script: "pre-dump"}}
QUESTION = bytes([1 << 3, relay.NOTIFY, 2 << 3, 1, 5 << 3 | 2, 10, 1 << 3 | 2, 8]) + b"pre-dump"
# criu_req {type: DUMP, opts {leave_running: true}}
DUMP_REQUEST = bytes([1 << 3, relay.DUMP, 2 << 3 | 2, 2, 3 << 3, 1])


def test_a_folder_with_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sockets have at most 107 characters, those of folders need not; and the folder goes with the attempt."""
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / ("long" * 30)))
    with attempt("checkpoint", "one") as under_way, seam(under_way) as waiting:
        assert list(under_way.bin.iterdir()) == [under_way.bin / "seam"]
        asking = ask(under_way)
        assert waiting.wait(asking)
        waiting.let_go()
        assert asking.wait() == 0
    assert not under_way.bin.exists()
    assert ask(under_way).wait() == 1  # nobody is there any more


def ask(under_way: Attempt) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-IS", relay.__file__, "--ask", str(under_way.bin)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def test_a_killed_criu_leaves_nobody_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children hold its socket and the locks of the attempt: who waits for those would wait for good."""
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    criu = tmp_path / "criu"
    criu.write_text(CRIU.format(python=sys.executable, folder=str(tmp_path)))
    criu.chmod(0o700)
    runtime, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with attempt("checkpoint", "one") as under_way, seam(under_way), runtime:
        command = [sys.executable, "-IS", relay.__file__, str(criu), str(under_way.bin), "5", "leave", "swrk"]
        held = (near.fileno(), *under_way.held)
        relaying = subprocess.Popen([*command, str(near.fileno())], stdin=subprocess.DEVNULL, pass_fds=held)
        near.close()
        runtime.send(DUMP_REQUEST)
        pids = wait_for(lambda: read(tmp_path / "pids"), "CRIU does not start")
        criu_pid, child = map(int, pids.split())
        os.kill(criu_pid, signal.SIGKILL)
        assert relaying.wait(60) == 256 - signal.SIGKILL
        wait_for(lambda: not is_running(child), "a child of CRIU is left")


def test_a_runtime_that_is_killed_leaves_criu_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU would wait for its answer, and Kedge for CRIU, with a container that stands still."""
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    criu = tmp_path / "criu"
    criu.write_text(ASKING.format(python=sys.executable, question=QUESTION))
    criu.chmod(0o700)
    runtime, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with attempt("checkpoint", "one") as under_way, seam(under_way):
        command = [sys.executable, "-IS", relay.__file__, str(criu), str(under_way.bin), "5", "leave", "swrk"]
        held = (near.fileno(), *under_way.held)
        relaying = subprocess.Popen([*command, str(near.fileno())], stdin=subprocess.DEVNULL, pass_fds=held)
        near.close()
        with runtime:
            runtime.send(DUMP_REQUEST)
            assert runtime.recv(1 << 20) == QUESTION
        assert relaying.wait(60) == 3


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def is_running(pid: int) -> bool:
    """Not a process that has ended and waits for its parent."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
