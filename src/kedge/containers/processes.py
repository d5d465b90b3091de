"""Trees of processes without a container, as sources of checkpoints and targets of restores: CRIU alone.

A container's files are saved with it. Processes share those of the machine, of which only the files they have open for
writing are saved, and put back by a restore: so that memory and files agree again, whatever was written since.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kedge.errors import Conflict, NotFound, Validation, storage_errors
from kedge.files import File

from . import hosts
from .attempts import Attempt, put_right
from .checkpoint import Files, Source
from .criu import images, leftovers
from .criu.command import Dump, failure, was_killed
from .criu.watches import config_for
from .moved_files import replaced
from .network import Network
from .page_writer import PageWriter
from .phases import Phases
from .pids import is_alive, pids_below, read_link
from .programs import find_program
from .restore import Target
from .snapshot import Snapshot

_REAP_S = 10.0
_ALWAYS = ("--link-remap",)  # files that were deleted while they are open


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSource(Source):
    """A running process and its descendants."""

    @classmethod
    def of(cls, pid: int) -> ProcessSource:
        """NotFound if there is no such process."""
        if pid in (1, os.getpid()):
            raise Validation(
                f"process {pid} cannot be checkpointed", hint="it is the machine's first process, or Kedge itself"
            )
        if not os.path.exists(f"/proc/{pid}"):
            raise NotFound(f"there is no process {pid} to checkpoint", hint="ps shows which there are")
        return cls(
            kind="process",
            id=str(pid),
            pid=pid,
            lock=("process", str(pid)),
            runtime={"name": "criu", "version": str(hosts.facts()["criu"]), "root": ""},
            network=Network(mode="host", path=""),
            locks_network=False,
            descriptors=tuple(read_link(f"/proc/{pid}/fd/{number}") for number in range(3)),
        )

    def dump(self, attempt: Attempt, options: Sequence[str], *, leave_running: bool) -> Dump:
        command = [
            find_program("criu"), "dump", "--tree", self.id, "--images-dir", str(attempt.images), "--work-dir",
            str(attempt.path), "--log-file", "dump.log", "-v4", "--action-script", str(attempt.bin / "post-dump"),
            *_ALWAYS, *options, *(["--leave-running"] if leave_running else []),
        ]  # fmt: skip
        return Dump(command, config=config_for(pids_below(self.pid)))

    def files(self, attempt: Attempt, phases: Phases, *, leave_running: bool) -> Files:
        paths = written_files(attempt.images)
        if not leave_running:
            return Files(open_files={path: File(path) for path in paths})
        with phases.phase("files"):
            copies = _copies(paths, attempt.files)
        return Files(open_files={path: File(copy) for path, copy in copies.items()})


def written_files(directory: Path) -> list[str]:
    """Files of the machine that the paused processes can write, and that still have their name."""
    names = {
        file.name
        for process in images.processes(directory)
        for file in process.files
        if file.is_writable and file.name.startswith("/") and not file.name.startswith(("/dev/", "/proc/", "/sys/"))
    }
    return sorted(path for path in names if os.path.isfile(path) and not os.path.islink(path))


def _copies(paths: Sequence[str], folder: Path) -> dict[str, Path]:
    folder.mkdir(mode=0o700)
    copies = {}
    for number, path in enumerate(paths):
        copies[path] = folder / str(number)
        with storage_errors("copy", path):
            shutil.copy2(path, copies[path], follow_symlinks=False)
            status = os.stat(path)
            os.chown(copies[path], status.st_uid, status.st_gid)
    return copies


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTarget(Target):
    """Children of this process, which get the numbers that they had.

    `streams` gives descriptors of ours for those of the first three that were pipes.
    """

    pids: Sequence[int]
    streams: Mapping[int, int]

    @classmethod
    def of(cls, taken: Snapshot, streams: Mapping[int, int]) -> ProcessTarget:
        pids = [int(pid) for pid in taken.processes]
        return cls(id=taken.id, lock=("process", taken.id), pids=pids, streams=streams)

    def refuse_taken(self) -> None:
        if self._is_taken():
            put_right()  # what a killed restore has half made
        if self._is_taken():
            raise Conflict(
                f"process {self.id} cannot be restored: there is a process with its number",
                hint="end that process first",
            )

    def _is_taken(self) -> bool:
        _wait_until_reaped(self.pids)
        return os.path.exists(f"/proc/{self.id}")

    @contextmanager
    def files(self, taken: Snapshot, attempt: Attempt) -> Iterator[Callable[[], None]]:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(replaced(taken.files, attempt))

    def run(self, taken: Snapshot, attempt: Attempt, pages: PageWriter) -> None:
        pages.wait()
        pipes = {n: what for n, what in enumerate(taken.descriptors) if what.startswith("pipe:")}
        inherited = {what: self.streams[n] for n, what in pipes.items() if n in self.streams}
        command = [
            find_program("criu"), "restore", "--restore-detached", "--restore-sibling", "--images-dir",
            str(attempt.images), "--work-dir", str(attempt.path), "--log-file", "restore.log", "-v4", "--pidfile",
            str(attempt.path / "pid"), *_ALWAYS, *taken.options(),
            *(f"--inherit-fd=fd[{fd}]:{pipe}" for pipe, fd in inherited.items()),
        ]  # fmt: skip
        makes = leftovers.to_be_made(self.pids)
        attempt.describe(makes=makes)
        with (attempt.path / "runtime.log").open("wb") as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds={*inherited.values(), *attempt.held},  # under way as long as CRIU is
                check=False,
            )
        if was_killed(done.returncode):
            leftovers.wait_for_others(attempt.held)
            leftovers.end_unfinished(**makes)
            raise failure("restored", attempt, killed="CRIU")
        if done.returncode:
            raise failure("restored", attempt)

    def end(self, attempt: Attempt) -> None:
        for pid in pids_below(self.pid(attempt)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _wait_until_reaped(pids: Sequence[int]) -> None:
    """Processes that have just ended keep their numbers until their parent, or init, has looked: wait a little."""
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") and not is_alive(pid) for pid in pids):
        time.sleep(0.02)


def choose_high_pid() -> None:
    """Let the next process get a number that will hardly be taken when it is to be restored; only root can."""
    try:
        limit = int(Path("/proc/sys/kernel/pid_max").read_text())
        number = limit // 2 + int.from_bytes(os.urandom(4), "little") % (limit // 2 - 1000)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number))
    except (OSError, ValueError):
        return


def parse_pid(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,9}", text):
        raise Validation(f"{text!r} is not the number of a process", hint="ps shows them")
    return int(text)
