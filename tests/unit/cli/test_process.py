"""The command line as a process: exit codes, pipes, signals, and how fast it starts."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge import CheckpointManager

Kedge = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEDGE_")}
    for name in ("NO_COLOR", "PYTHONUNBUFFERED"):
        kept.pop(name, None)
    return {**kept, "KEDGE_STORE": str(tmp_path / "store"), "COLUMNS": "80"}


@pytest.fixture
def kedge(environment: dict[str, str], tmp_path: Path) -> Kedge:
    def call(*words: str, data: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kedge", *words],
            input=data, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60,
        )  # fmt: skip

    return call


def fill(environment: dict[str, str], count: int) -> None:
    with CheckpointManager(environment["KEDGE_STORE"]) as manager:
        for n in range(count):
            manager.save("job", f"step {n}", {"n": n, "text": "x" * 2000})


def test_exit_codes_and_pure_json(kedge: Kedge) -> None:
    saved = kedge("save", "job", "one", "--json", data='{"x": 1}')
    assert (saved.returncode, saved.stderr) == (0, "")
    assert json.loads(saved.stdout)["seq"] >= 1
    missing = kedge("show", "nobody", "--json")
    assert (missing.returncode, missing.stdout) == (4, "")
    assert json.loads(missing.stderr)["code"] == "not_found"
    assert kedge("save", "job").returncode == 2
    assert kedge("save", "job", "one", data="no json").returncode == 3
    assert kedge("list", "job", "--store", "/proc/version").returncode in (4, 7)


def test_nothing_but_text_without_a_terminal(kedge: Kedge) -> None:
    saved = kedge("save", "job", "one", data="1")
    assert saved.stdout.count("\n") == 1
    assert saved.stderr == ""
    for words in (("list", "job"), ("show", "job"), ("check",), ("gc",), ("stats",), ("copy", "job", "two")):
        result = kedge(*words)
        assert "\x1b" not in result.stdout + result.stderr
        assert result.stderr == ""
        assert result.returncode == 0


def test_closed_and_narrow_minded_streams(environment: dict[str, str]) -> None:
    fill(environment, 2)
    for command, code in (("list job >&-", 0), ("list job 2>&-", 0), ("show nobody 2>&-", 4), ("save job x <&-", 3)):
        result = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m kedge {command}"], env=environment, capture_output=True, timeout=60
        )
        assert result.returncode == code, command
        assert b"Traceback" not in result.stderr
    ascii_only = {**environment, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for words in (["check"], ["show", "job"], ["restore", "job"], ["list", "job", "--json"]):
        subprocess.run([sys.executable, "-m", "kedge", *words], env=ascii_only, check=True, capture_output=True)


def test_a_closed_pipe_is_quiet(environment: dict[str, str]) -> None:
    fill(environment, 250)
    command = f"{sys.executable} -m kedge list job --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert result.stderr == ""
    assert result.stdout.split() == ["{", "141"]


def test_ctrl_c_ends_following(environment: dict[str, str]) -> None:
    fill(environment, 1)
    with subprocess.Popen(
        [sys.executable, "-m", "kedge", "events", "--follow", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["action"] == "save"
        fill(environment, 1)
        assert json.loads(child.stdout.readline())["job"] == "job"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in errors


def on_a_terminal(words: list[str], environment: dict[str, str], columns: int = 80) -> str:
    """Everything a command shows on a terminal of that width."""
    import fcntl
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {name: value for name, value in environment.items() if name != "COLUMNS"}
    child = subprocess.Popen(
        [sys.executable, "-m", "kedge", *words],
        stdin=follower, stdout=follower, stderr=follower, env={**kept, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert child.wait(timeout=60) == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_tables_fit_the_terminal(environment: dict[str, str], columns: int) -> None:
    import re

    with CheckpointManager(environment["KEDGE_STORE"]) as manager:
        for n in range(3):
            step = "a rather long step name that goes on and on " * (n + 1)
            saved = manager.save("job", step, {"value": "v" * 500, "k" * 90: [1] * 50}, tags={"tag": "t" * 40})
    for words in (
        ["list", "job"],
        ["show", "job"],
        ["diff", "job~1", "job"],
        ["cleanup", "job", "--keep-last", "1"],
        ["jobs"],
    ):
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_a_terminal(words, environment, columns))
        lines = shown.replace("\r", "").split("\n")
        if words[0] != "cleanup" or columns >= 80:
            assert max(map(len, lines)) <= columns, words
        if words[0] in ("list", "show"):
            assert saved in "".join(line.strip() for line in lines)


def test_long_ids_leave_room_for_the_rest(environment: dict[str, str]) -> None:
    with CheckpointManager(environment["KEDGE_STORE"]) as manager:
        for n in range(3):
            manager.save("job", f"{n} " + "long " * 30, n)
    shown = on_a_terminal(["list", "job", "--limit", "2"], {**environment, "NO_COLOR": "1"})
    assert [word for word in ("ID", "#", "STEP", "AGE") if word in shown.split()] == ["ID", "#", "STEP", "AGE"]
    assert "  1 long long" in shown
    assert "s ago" in shown or "now" in shown
    assert "there are older ones: --before 2" in shown
    assert "older ones" not in on_a_terminal(["list", "job", "--limit", "3"], environment)


def test_colours_only_on_a_terminal(environment: dict[str, str]) -> None:
    fill(environment, 2)
    assert "\x1b[" in on_a_terminal(["list", "job"], environment)
    assert "\x1b[" not in on_a_terminal(["list", "job"], {**environment, "NO_COLOR": "1"})


def test_the_terminal_gets_no_binary_data(environment: dict[str, str], kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(range(256)) * 100)
    assert kedge("save", "job", "one", "--file", "blob").returncode == 0
    with pytest.raises(AssertionError):  # exit code 3
        on_a_terminal(["restore", "job", "--path", "blob"], environment)
    assert kedge("restore", "job", "--path", "blob", "--to", "out").returncode == 0
    assert (tmp_path / "out").read_bytes() == bytes(range(256)) * 100


def test_help_imports_little() -> None:
    code = "import sys, kedge.cli; print(*sorted(m for m in sys.modules if '.' not in m or 'kedge' in m))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )
    assert not loaded & {"rich", "numpy", "sqlite3", "zipfile"}
    assert {name for name in loaded if name.startswith("kedge.cli.")} == {
        "kedge.cli.app", "kedge.cli.command", "kedge.cli.failures",
    }  # fmt: skip


def test_nobody_looks_for_garbage_when_a_command_ends(environment: dict[str, str]) -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        "sys.argv = ['kedge', '--version']; import kedge.cli; kedge.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize("command", ["run program.py:p", "worker program.py --queue q --until-empty"])
def test_what_a_program_leaves_open_is_written_when_it_ends(
    command: str, environment: dict[str, str], kedge: Kedge, tmp_path: Path
) -> None:
    """By the last look for garbage: a module and its functions hold each other."""
    (tmp_path / "program.py").write_text(
        "import kedge\nresults = open('out.txt', 'w')\n@kedge.pipeline\ndef p() -> None:\n    results.write('a line')\n"
    )
    if command.startswith("worker"):
        submit = "import kedge, program; kedge.queue('q').submit(program.p)"
        subprocess.run([sys.executable, "-c", submit], env=environment, cwd=tmp_path, check=True, timeout=60)
        (tmp_path / "out.txt").unlink()
    assert kedge(*command.split()).returncode == 0
    assert (tmp_path / "out.txt").read_text() == "a line"
