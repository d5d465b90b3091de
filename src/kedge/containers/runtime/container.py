"""The container that a call of `kedge-runc` is about: what the real runc, its mark and its store know of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import marks
from .marks import Mark

if TYPE_CHECKING:
    from kedge.containers.engine.runc import Container
    from kedge.manager import CheckpointManager

    from .arguments import Call

ORPHAN_S = 10.0  # what a killed call of ours had started is waited for so long


class CalledContainer:
    """`manager` is that of an open store, where one call follows another."""

    def __init__(self, real: str, call: Call, manager: CheckpointManager | None = None) -> None:
        self.real = real
        self.call = call
        self.id = call.container_id
        self.root = call.get("root") or "/run/runc"
        self.mark_path = marks.mark_of(self.root, self.id)
        self._manager = manager

    def runc(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.real, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )

    def other(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Call the real runc with another command for the same container."""
        return self.runc(*self.call.other(command, *words))

    def status(self) -> str:
        """What runc says; "" when it does not know the container."""
        done = self.other("state")
        return str(json.loads(done.stdout).get("status")) if done.returncode == 0 else ""

    def is_running(self) -> bool:
        return self.status() in ("running", "paused")

    def remove(self) -> subprocess.CompletedProcess[str]:
        """Kill and delete it, even if it is paused: not every runc ends one that is."""
        done = self.other("delete", "--force")
        if done.returncode and self.other("resume").returncode == 0:
            done = self.other("delete", "--force")
        return done

    def look_up(self) -> Container:
        from kedge.containers.engine.runc import look_up

        return look_up(self.id, engine_of(self.root), self.root, self.real)

    def mark(self) -> Mark | None:
        return marks.read_mark(self.mark_path)

    def write(self, mark: Mark) -> None:
        marks.write_mark(self.mark_path, mark)

    def settled_mark(self) -> Mark | None:
        """The mark, which says that the container has ended also when the call that did it was killed before that. What
        that call left is put right by `delete`, which has time for it, and by the next checkpoint or restore."""
        mark = self.mark()
        if mark is not None and not mark.ended and mark.ending and not self.status():
            mark = replace(mark, ended=mark.ending, ending=None)
            self.write(mark)
        return mark

    def has_ended(self) -> bool:
        """Whether it was checkpointed and is no more."""
        mark = self.settled_mark()
        return mark is not None and mark.ended is not None

    def store(self) -> AbstractContextManager[CheckpointManager]:
        return marks.store_of(os.environ) if self._manager is None else nullcontext(self._manager)

    def log(self, message: str, level: str = "error") -> None:
        """Where the engine looks: runc's log file, in its format, and stderr, which may be a /dev/null for reading."""
        if level != "info":
            with suppress(OSError):
                os.write(2, f"{message}\n".encode())
        path = self.call.get("log")
        if not path:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.call.get("log-format") == "json":
            line = json.dumps({"level": level, "msg": message, "time": now})
        else:
            line = f'time="{now}" level={level} msg={json.dumps(message)}'
        with open(path, "a") as file:
            file.write(line + "\n")


def engine_of(root: str) -> str:
    if root.startswith("/run/containerd"):
        return "containerd"
    return "docker" if root.startswith("/run/docker") else "runc"


def state_of(container: Path) -> dict[str, object]:
    """What runc says of a container that lives, given as `root/identity`; nothing of others."""
    from kedge.containers.engine import runc  # start time
    from kedge.containers.programs import find_program

    program = os.environ.get("KEDGE_RUNC") or find_program("runc")
    done = runc.run(program, str(container.parent), "state", container.name)
    state: dict[str, object] = json.loads(done.stdout) if done.returncode == 0 else {}
    return {} if state.get("status") == "stopped" else state
