"""`kedge process run`: a command that survives being stopped, with nothing changed in it.

Starts the command, or restores it where it was; checkpoints it on an interval, and for good on SIGTERM. Its output goes
through pipes of ours, because a restored process can be given new ends of them.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kedge.errors import CheckpointError, NotFound, Validation
from kedge.manager import CheckpointManager

from . import snapshot
from .checkpoint import Request, make_checkpoint
from .gpu.memory import GpuMemory
from .phases import Report
from .processes import ProcessSource, ProcessTarget, choose_high_pid
from .restore import restore_newest

PAUSED = 75  # exit status: stopped by a signal, at a checkpoint
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Supervision:
    """One run of a command under a key."""

    manager: CheckpointManager
    key: str
    every_s: float | None = None
    options: Sequence[str] = ()
    gpu: GpuMemory | None = None
    say: Report = field(default=lambda text: None)
    keep: bool = False  # the checkpoints, also after the command ended well

    def run(self, command: Sequence[str], *, fresh: bool = False) -> int:
        """The exit status of the command; PAUSED when a signal stopped it at a checkpoint."""
        if self.every_s is not None and self.every_s <= 0:
            raise Validation(
                f"--every must be above 0 (got {self.every_s})", hint="give the seconds between two checkpoints"
            )
        snapshot.refuse_memory(self.manager)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ends = [os.pipe(), os.pipe()]
        wakeup = os.pipe()
        for fd in wakeup:
            os.set_blocking(fd, False)
        before = {number: signal.signal(number, lambda *_: None) for number in (*_SIGNALS, signal.SIGCHLD)}
        signal.set_wakeup_fd(wakeup[1], warn_on_full_buffer=False)
        try:
            pid = self._begin(command, {1: ends[0][1], 2: ends[1][1]}, fresh=fresh)
            for _, writing in ends:
                os.close(writing)
            return self._watch(pid, {ends[0][0]: 1, ends[1][0]: 2}, wakeup[0])
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin(self, command: Sequence[str], streams: dict[int, int], *, fresh: bool) -> int:
        if not fresh and snapshot.generations(self.manager, "process", self.key):
            restored = restore_newest(
                self.manager, "process", self.key, lambda taken: ProcessTarget.of(taken, streams), gpu=self.gpu
            )
            what = f"{restored.checkpoint.id} as process {restored.pid}: {_command_of(restored.pid)}"
            self.say(f"restored from {what}")
            return restored.pid
        if not command:
            raise NotFound(f"{self.key} has no checkpoint", hint="give a command to start: -- CMD")
        choose_high_pid()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=streams[1], stderr=streams[2], start_new_session=True
            )
        except OSError as error:
            raise Validation(f"{command[0]} cannot be started: {error.strerror}", hint="check the command") from error
        process.returncode = 0  # waited for below, by its number: it may be another process by then
        self.say(f"started as process {process.pid}")
        return process.pid

    def _watch(self, pid: int, outputs: dict[int, int], wakeup: int) -> int:
        next_at = time.monotonic() + self.every_s if self.every_s else None
        with selectors.DefaultSelector() as waiting:
            for fd in (*outputs, wakeup):
                waiting.register(fd, selectors.EVENT_READ)
            while True:
                timeout = None if next_at is None else max(0.0, next_at - time.monotonic())
                for ready, _ in waiting.select(timeout):
                    data = os.read(ready.fd, 65536)
                    if ready.fd == wakeup:
                        if set(data) & set(_SIGNALS) and self._stop(pid):
                            self._drain(outputs, waiting)
                            return PAUSED
                    elif data:
                        _write(outputs[ready.fd], data)
                    else:
                        waiting.unregister(ready.fd)
                if (status := _exit_status(pid)) is not None:
                    self._drain(outputs, waiting)
                    return self._ended(status)
                if next_at is not None and time.monotonic() >= next_at:
                    self._checkpoint(pid, leave_running=True)
                    next_at = time.monotonic() + (self.every_s or 0)

    def _stop(self, pid: int) -> bool:
        """On a signal: checkpoint for good; if that fails, the command gets the signal itself, as without us."""
        if self._checkpoint(pid, leave_running=False):
            _exit_status(pid, wait=True)
            return True
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return False

    def _checkpoint(self, pid: int, *, leave_running: bool) -> bool:
        """A checkpoint that fails is told and harms nobody: the command runs on, and an earlier one is still there."""
        try:
            request = Request(self.key, leave_running=leave_running, options=self.options)
            checkpointed = make_checkpoint(self.manager, ProcessSource.of(pid), request, gpu=self.gpu)
        except CheckpointError as error:
            self.say(f"checkpoint failed: {error}")
            return False
        self.say(f"checkpoint {checkpointed.checkpoint.id}, {checkpointed.paused_ms:.0f} ms" if leave_running else
                 f"stopped at checkpoint {checkpointed.checkpoint.id}")  # fmt: skip
        return True

    def _ended(self, status: int) -> int:
        if status == 0 and not self.keep:
            for checkpoint in snapshot.generations(self.manager, "process", self.key):
                if not checkpoint.is_pinned:
                    self.manager.delete(checkpoint.job, checkpoint.id)
        return status

    @staticmethod
    def _drain(outputs: dict[int, int], waiting: selectors.BaseSelector) -> None:
        for fd in [fd for fd in outputs if fd in waiting.get_map()]:
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while data := os.read(fd, 65536):
                    _write(outputs[fd], data)


def _exit_status(pid: int, *, wait: bool = False) -> int | None:
    """As a shell gives it; None while it runs. Other children that were left to us are buried on the way."""
    while True:
        try:
            ended, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
        except ChildProcessError:
            return 0
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _command_of(pid: int) -> str:
    """What goes on, for people who gave another command with the same key."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
        return shlex.join(words)[:200]
    return "it has ended already"


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
