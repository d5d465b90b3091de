"""Freezing and thawing a tree of processes without a container: CRIU alone.

A container's files are kept with it. Processes share those of the machine, of which only the files they have open for
writing are kept, and put back by a restore: so that memory and files agree again, whatever was written since.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kedge.errors import Conflict, Corrupted, NotFound, Validation, storage_error
from kedge.files import File
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from . import hosts, snapshot
from .attempts import Attempt, attempt, only_one
from .checkpoint import Frozen, parse_options, pause_ms, process_totals
from .companions import Companion, Phases, Report, accompanied, facts_of
from .criu import images
from .criu.command import dump, failure
from .criu.pages import validate_images
from .moved_files import replaced
from .pids import is_alive, pids_below
from .programs import find_program
from .restore import Thawed, unpack_images

_BURIAL_S = 10.0
_ALWAYS = ("--link-remap",)  # files that were deleted while they are open


def freeze_process(
    manager: CheckpointManager,
    pid: int,
    *,
    key: str,
    leave_running: bool = False,
    options: Sequence[str] = (),
    companions: Sequence[Companion] = (),
    report: Report | None = None,
) -> Frozen:
    """Make a checkpoint of a process and its descendants, durable when this returns; they end, unless left running."""
    if pid in (1, os.getpid()):
        raise Validation(f"process {pid} cannot be frozen", hint="it is the machine's first, or Kedge itself")
    if not os.path.exists(f"/proc/{pid}"):
        raise NotFound(f"there is no process {pid} to freeze", hint="ps shows which there are")
    wanted = parse_options(options)
    if not leave_running:
        snapshot.refuse_memory(manager)
    job = snapshot.job_of("process", key)
    with ExitStack() as stack:
        stack.enter_context(only_one("process", str(pid)))
        kept = stack.enter_context(attempt("checkpoint", str(pid)))
        work = _Freeze(manager, job, pid, kept, wanted, leave_running, hosts.facts(), Phases(report=report))
        work.descriptors = [_target(pid, number) for number in range(3)]
        command = [
            find_program("criu"), "dump", "--tree", str(pid), "--images-dir", str(kept.images), "--work-dir",
            str(kept.path), "--log-file", "dump.log", "-v4", "--action-script", str(kept.bin / "post-dump"), *_ALWAYS,
            *wanted, *(["--leave-running"] if leave_running else []),
        ]  # fmt: skip
        work.companions = companions
        is_dumped = False
        try:
            with accompanied(companions, pids_below(pid), work.phases, lambda: is_alive(pid)):
                before = sum(work.phases.seconds.values())
                started = time.monotonic()
                dump(command, attempt=kept, on_frozen=work.on_frozen)
                is_dumped = True
                took = time.monotonic() - started
                work.phases.seconds["dump"] = took - (sum(work.phases.seconds.values()) - before)
        finally:
            if leave_running and is_dumped:  # also when a companion could not go on: this brings it back
                work.store()
        return work.result()


@dataclass(slots=True)
class _Freeze:
    """One freeze under way."""

    manager: CheckpointManager
    job: str
    pid: int
    attempt: Attempt
    options: Sequence[str]
    leave_running: bool
    host: Mapping[str, object]
    phases: Phases
    descriptors: list[str] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    companions: Sequence[Companion] = ()

    def on_frozen(self) -> None:
        """At the seam: copies of the files if the processes run on, else the whole checkpoint."""
        paths = written_files(self.attempt.images)
        if self.leave_running:
            with self.phases.phase("files"):
                self.files = {path: File(copy) for path, copy in _copies(paths, self.attempt.files).items()}
            return
        self.files = {path: File(path) for path in paths}
        self.store()

    def store(self) -> None:
        with self.phases.phase("store"):
            borders = validate_images(self.attempt.images)
            processes = snapshot.read_processes(self.attempt.images)
            taken = snapshot.Snapshot(
                kind="process",
                id=str(self.pid),
                images=snapshot.images_tree(self.attempt.images, borders),
                runtime={"name": "criu", "version": str(self.host["criu"]), "root": ""},
                descriptors=tuple(self.descriptors),
                network={"mode": "host", "path": ""},
                criu={"version": self.host["criu"], "options": list(self.options)},
                host=self.host,
                processes=processes,
                files=self.files,
            )
            metadata = {
                "kind": "process", "id": str(self.pid), "runtime": "criu", "network": "host",
                "is_running": self.leave_running, "attempt": self.attempt.id,
                "frozen_ms": pause_ms(self.attempt, self.phases) if self.leave_running else None,
                "phases_ms": self.phases.milliseconds(), **facts_of(self.companions), **process_totals(processes),
            }  # fmt: skip
            identity = self.manager.save(self.job, self.job.partition(":")[2], taken.state(), metadata=metadata)
            self.checkpoint = self.manager.get(identity)

    def result(self) -> Frozen:
        assert self.checkpoint is not None  # nothing above returns without one
        frozen = pause_ms(self.attempt, self.phases) or 0.0
        return Frozen(self.checkpoint, self.phases.milliseconds(), frozen, ())


def written_files(directory: Path) -> list[str]:
    """Files of the machine that the frozen processes have open for writing and that still have their name."""
    found = {
        file.name
        for process in images.processes(directory)
        for file in process.files
        if file.is_writable and file.name.startswith("/") and not file.name.startswith(("/dev/", "/proc/", "/sys/"))
    }
    return sorted(path for path in found if os.path.isfile(path) and not os.path.islink(path))


def _copies(paths: Sequence[str], folder: Path) -> dict[str, Path]:
    folder.mkdir(mode=0o700)
    copies = {}
    for number, path in enumerate(paths):
        copies[path] = folder / str(number)
        try:
            shutil.copy2(path, copies[path], follow_symlinks=False)
            status = os.stat(path)
            os.chown(copies[path], status.st_uid, status.st_gid)
        except OSError as error:
            raise storage_error("copy", path, error) from error
    return copies


def thaw_process(
    manager: CheckpointManager,
    name: str,
    *,
    streams: Mapping[int, int] | None = None,
    companions: Sequence[Companion] = (),
    report: Report | None = None,
) -> Thawed:
    """Bring processes back as children of this one: the newest sound checkpoint of a key, or the one with that ID.

    `streams` gives descriptors of ours for those of the first three that were pipes.
    """
    is_id = manager.exists(name)
    while True:
        checkpoint = snapshot.find(manager, "process", name)
        try:
            return _thaw(manager, checkpoint, streams or {}, companions, Phases(report=report))
        except Corrupted:
            if is_id or manager.condemn(checkpoint.id).status != "corrupted":
                raise  # what is sound in the store is not passed over for an older one


def _thaw(
    manager: CheckpointManager,
    checkpoint: Checkpoint,
    streams: Mapping[int, int],
    companions: Sequence[Companion],
    phases: Phases,
) -> Thawed:
    _, kept = snapshot.load(manager, checkpoint.id)
    if kept.kind != "process":
        raise Validation(f"{checkpoint.id} holds a container", hint="use kedge container restore")
    _until_buried([int(pid) for pid in kept.processes])
    if os.path.exists(f"/proc/{kept.id}"):
        raise Conflict(
            f"process {kept.id}, which is to come back, exists",
            hint="it, or another with its number, runs: end it",
        )
    for companion in companions:
        companion.before_restore(checkpoint.metadata)
    with ExitStack() as stack:
        lock = stack.enter_context(only_one("process", kept.id))
        work = stack.enter_context(attempt("restore", kept.id, lock))
        with phases.phase("load"):
            unpack_images(kept, work)
        with phases.phase("files"):
            stack.enter_context(replaced(kept.files, work))
        inherited = _inherited(kept.descriptors, streams)
        command = [
            find_program("criu"), "restore", "--restore-detached", "--restore-sibling", "--images-dir",
            str(work.images), "--work-dir", str(work.path), "--log-file", "restore.log", "-v4", "--pidfile",
            str(work.path / "pid"), *_ALWAYS, *kept.criu.get("options", ()),
            *(f"--inherit-fd=fd[{fd}]:{pipe}" for pipe, fd in inherited.items()),
        ]  # fmt: skip
        with phases.phase("restore"), (work.path / "runtime.log").open("wb") as said:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds={*inherited.values(), *work.held},  # under way as long as CRIU is
                check=False,
            )
            if done.returncode:
                raise failure("restored", work)
        pid = int((work.path / "pid").read_text())
        stack.push(_kill_if_failed(pid))
        for companion in companions:
            companion.after_restore(pids_below(pid), phases)
    return Thawed(str(pid), pid, checkpoint, phases.milliseconds())


def _kill_if_failed(pid: int) -> Callable[..., None]:
    """Their files go back to what they were when something fails from here on: then they must not run on them."""

    def on_exit(kind: type[BaseException] | None, *_: object) -> None:
        for one in pids_below(pid) if kind is not None else ():
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)

    return on_exit


def _until_buried(pids: Sequence[int]) -> None:
    """Processes that have just ended keep their numbers until their parent, or init, has looked: wait a little."""
    deadline = time.monotonic() + _BURIAL_S
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") and not is_alive(pid) for pid in pids):
        time.sleep(0.02)


def _inherited(descriptors: Sequence[str], streams: Mapping[int, int]) -> dict[str, int]:
    return {what: streams[n] for n, what in enumerate(descriptors) if what.startswith("pipe:") and n in streams}


def _target(pid: int, number: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def choose_high_pid() -> None:
    """Let the next process get a number that will hardly be taken when it is to come back; only root can."""
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
