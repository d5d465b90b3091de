"""Running CRIU, by itself or below a runtime: what it needs, what it said, and the seam in the middle of a dump.

A dump counts only if all of this holds: the program ended with 0, the log ends with CRIU's own word of success, and the
images are there and fit together.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kedge.containers.attempts import Attempt
from kedge.containers.programs import URGENT, USUAL_PATH, find_program, run
from kedge.errors import CheckpointError, CriuFailed, NoSpace, StepTimeout

from . import relay
from .log import explain, gave_up

AtPause = TypeVar("AtPause")

_PAUSE_TIMEOUTS_S = (1, 2, 10)
_LEAST_ROOM_BYTES = 256 * 1024
_SUCCESS = "Dumping finished successfully"
_HUNG_UP = re.compile(r"\bEOF\b|broken pipe|connection reset")  # a runtime whom CRIU never answered
# Outlives us: what was saved and has ended is forgotten by its runtime whoever is killed, and nothing else is.
_ENDING = """
{dump} || exit
[ ! -e {word} ] || {forget}
exit 0
"""


def criu_version(criu: str) -> str:
    for line in run([criu, "--version"]).stdout.splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ").strip()
    return ""


class Seam:
    """Where CRIU waits, with everything paused and the images written, for Kedge's word (see relay)."""

    def __init__(self, folder: Path) -> None:
        self.word = folder / "saved"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        relay.at(str(folder), self._listening.bind)
        self._listening.listen(1)
        self._asking: socket.socket | None = None
        self.is_late = False

    def wait(self, process: subprocess.Popen[bytes], deadline: float | None = None) -> bool:
        """Whether CRIU has arrived at the seam; False when the process ended before. Late, it is told to give up."""
        ended = os.pidfd_open(process.pid)
        try:
            while True:
                waiting = self._asking or self._listening
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready, _, _ = select.select([waiting.fileno(), ended], [], [], left)
                if not ready:
                    self.is_late, deadline = True, None
                    self._give_up()
                elif waiting.fileno() not in ready:
                    return False
                elif self._asking is None:
                    self._asking = self._listening.accept()[0]
                    self._give_up()
                else:
                    with suppress(ConnectionResetError):  # it left without reading all that it was told
                        return self._asking.recv(64) == relay.DUMPED and not self.is_late
                    return False
        finally:
            os.close(ended)

    def _give_up(self) -> None:
        if self.is_late and self._asking is not None:
            self._asking.send(relay.GIVE_UP)

    def let_go(self) -> None:
        """The dump is as we want it: the processes end, or run on if they were to be left running."""
        if self._asking is not None:
            self.word.touch()
            self._asking.send(relay.GO_ON)

    def close(self) -> None:
        """Without a word before, CRIU gives the dump up and lets the processes run on."""
        for connection in (self._asking, self._listening):
            if connection is not None:
                connection.close()


@contextmanager
def seam(attempt: Attempt) -> Iterator[Seam]:
    attempt.bin.mkdir(mode=0o700)
    opened = Seam(attempt.bin)
    try:
        yield opened
    finally:
        opened.close()
        shutil.rmtree(attempt.bin, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Dump:
    """The program that dumps with CRIU, which must put its log into the attempt's folder.

    A runtime must be told to leave the container running, also when it is to end: `forget` is then the command that
    removes it. It ends because the seam asks CRIU for that. So a runtime that calls another CRIU ends nothing.
    `config`: lines for CRIU's configuration, where the program has no option for them.
    """

    command: Sequence[str]
    forget: Sequence[str] = ()
    config: Sequence[str] = ()


def dump(how: Dump, *, attempt: Attempt, at_pause: Callable[[], AtPause], deadline: float | None = None) -> AtPause:
    """Run a dump, and `at_pause` at the seam, whose result is answered; if that raises, nothing has happened.

    CriuFailed says why, in words, when it did not come to that; StepTimeout, when the images were not written by the
    deadline (of `time.monotonic`).
    CRIU cannot stop a process that waits for its vfork: such a dump is tried again, because the moment passes.
    """
    for timeout_s in _PAUSE_TIMEOUTS_S[:-1]:
        try:
            return _dump(how, attempt, at_pause, timeout_s, deadline)
        except CriuFailed:
            log = attempt.log()
            if not ("Timeout reached" in log and "Unseizable" in log):
                raise
            (attempt.path / "dump.log").rename(attempt.path / f"dump-{timeout_s}s.log")
            shutil.rmtree(attempt.images)
            attempt.images.mkdir(mode=0o700)
    return _dump(how, attempt, at_pause, _PAUSE_TIMEOUTS_S[-1], deadline)


def _dump(
    how: Dump, attempt: Attempt, at_pause: Callable[[], AtPause], timeout_s: int, deadline: float | None
) -> AtPause:
    with seam(attempt) as waiting:
        _write_fronts(attempt, timeout_s, ends=bool(how.forget))
        inherited = {**os.environ, "PATH": f"{attempt.bin}:{os.environ.get('PATH', '')}:{USUAL_PATH}"}
        if how.config:
            inherited |= with_config(attempt, how.config)
        command = how.command
        if how.forget:
            script = _ENDING.format(
                dump=shlex.join(command), word=shlex.quote(str(waiting.word)), forget=shlex.join(how.forget)
            )
            command = ["/bin/sh", "-c", script]
        with (attempt.path / "runtime.log").open("wb") as said, urgent():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=inherited, pass_fds=attempt.held
            )
            results: list[AtPause] = []  # none: it never came to the pause
            try:
                if waiting.wait(process, deadline):
                    results.append(at_pause())
                    waiting.let_go()
            finally:
                waiting.close()
                code = process.wait()
    if waiting.is_late:
        raise StepTimeout(f"{attempt.subject} was not dumped in time", hint="give it more time to stop")
    if code != 0 or not attempt_succeeded(attempt):
        raise failure("checkpointed", attempt, killed=Path(how.command[0]).name if was_killed(code) else "")
    if not results:
        raise CriuFailed(
            "the runtime called another CRIU: there is no checkpoint, and the container keeps running",
            hint="let the runtime take criu from its PATH: is it a script that sets one?",
            attempt=attempt.id,
        )
    return results[0]


def with_config(attempt: Attempt, lines: Sequence[str]) -> dict[str, str]:
    """The environment in which CRIU, whoever starts it, reads these lines of configuration."""
    path = attempt.path / "criu.conf"
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"CRIU_CONFIG_FILE": str(path)}


@contextmanager
def urgent() -> Iterator[None]:
    """What stands still waits for us, and for every program that we start: on a busy machine, we come first.

    With four busy processes on two processors, a container stood still twice as long without this.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before, URGENT))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def attempt_succeeded(attempt: Attempt) -> bool:
    log = (attempt.path / "dump.log").read_bytes() if (attempt.path / "dump.log").exists() else b""
    lines = log.decode(errors="replace").strip().splitlines()
    return bool(lines) and lines[-1].endswith(_SUCCESS)


def was_killed(status: int) -> bool:
    """Whether a program, or one below a shell, which adds 128 to the number of the signal, was ended by a signal."""
    return status < 0 or 128 < status <= 128 + signal.NSIG


def failure(what: str, attempt: Attempt, *, killed: str = "") -> CheckpointError:
    """The error for a dump or restore that failed, from its logs; a full disk may have no room for the reason.
    `killed`: who was, the runtime that asked CRIU, or CRIU itself. What is in the logs then is no reason."""
    room = os.statvfs(attempt.path)
    if room.f_bavail * room.f_frsize < _LEAST_ROOM_BYTES:
        return NoSpace(
            f"it could not be {what}: the disk is full at {attempt.path.parent.parent}",
            hint="make room, or set KEDGE_STATE_DIR to a larger disk",
        )
    cause = explain(attempt.log())
    log = attempt.path / "runtime.log"
    runtime = log.read_text(errors="replace").strip() if log.exists() else ""
    killed = killed or ("CRIU" if _HUNG_UP.search(runtime) else "")
    if killed:
        message, hint = f"{killed} was killed", "if memory ran out, dmesg says so; else start it again"
    elif cause is not None and cause.code != "unknown":
        message, hint = cause.cause, cause.fix
    else:
        message = cause.line if cause is not None else (runtime.splitlines() or ["it said nothing"])[-1][:500]
        hint = "the log tells more"
    return CriuFailed(
        f"it could not be {what}: {message}",
        hint=f"{hint.rstrip('.')}. Log: kedge container logs {attempt.id}",
        attempt=attempt.id,
        is_verdict=not killed and gave_up(attempt.log()),
    )


def _write_fronts(attempt: Attempt, timeout_s: int, *, ends: bool) -> None:
    """The `criu` that the runtime finds first; and the same question as an action script, for CRIU without runtime."""
    relayed = [sys.executable, "-IS", os.path.abspath(relay.__file__)]
    asked = [find_program("criu"), str(attempt.bin), str(timeout_s), "end" if ends else "leave"]
    fronts = {
        "criu": f'exec {shlex.join([*relayed, *asked])} "$@"\n',
        "post-dump": f'[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"exec {shlex.join([*relayed, '--ask', str(attempt.bin)])}\n",
    }
    for name, text in fronts.items():
        path = attempt.bin / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o700)
