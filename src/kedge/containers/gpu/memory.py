"""Memory of GPUs, checkpointed and restored with the processes that use it, by the driver's own calls.

CRIU knows nothing of GPUs. So before its dump every process of the tree that uses one is locked, then all of them are
told to move the memory of their devices into their own, where CRIU finds it; afterwards the other way round.

    running ─lock→ locked ─to host→ checkpointed ─dump … restore→ checkpointed ─back→ locked ─unlock→ running

Whatever fails between the first lock and the last unlock is undone, so that the job goes on. A note is written before a
process is locked and removed when it runs again: should this program be killed in between, the next one finds the note
and frees the process (`free_forgotten`). Nothing is dumped after a stage of the GPU has failed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.blobs.group_files import make_own_folder
from kedge.containers.attempts import state_directory
from kedge.containers.phases import Phases
from kedge.containers.pids import list_names, read_link, read_text
from kedge.errors import Conflict, GpuFailed, NotFound, Validation, storage_errors
from kedge.store.lease import started

from .cuda import Device, State, driver, holders

_ATTEMPTS = 3  # to let a process run again
_USED = re.compile(r"/dev/nvidia\d+")


@dataclass(slots=True)
class GpuMemory:
    """The GPU's part in one checkpoint or restore. `mode` is auto, require or off."""

    mode: str = "auto"
    _paused: list[int] = field(default_factory=list)
    _facts: dict[str, object] = field(default_factory=dict)
    _mapping: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "require", "off"):
            raise Validation(f"--gpu {self.mode}", hint="use auto, require or off")

    @contextmanager
    def around_dump(self, pids: Sequence[int], phases: Phases, is_running: Callable[[], bool]) -> Iterator[None]:
        """While these processes are dumped, or that is given up. What still runs then can go on."""
        self._before_dump(pids, phases)
        try:
            yield
        finally:
            self._after_dump(phases, is_running=is_running())

    def _before_dump(self, pids: Sequence[int], phases: Phases) -> None:
        """Lock all, then move all: afterwards CRIU finds the memory of the GPUs in that of the processes.

        If this fails, it has undone what it did.
        """
        if self.mode == "off":
            return
        free_forgotten()
        if self.mode == "require":
            driver()
        users = holders(pids)
        if not users:
            if self.mode == "require":
                raise Validation("none of the processes uses a GPU", hint="leave --gpu require out")
            return
        stopped = [pid for pid in users if driver().state(pid) is not State.RUNNING]
        if stopped:
            raise Conflict(
                f"process {stopped[0]} is paused on its GPU already",
                hint=f"wake it first: kedge process wake {stopped[0]}",
            )
        devices = driver().devices()
        self._facts = {
            "driver": driver().version,
            "processes": len(users),
            "devices": [
                {"uuid": device.uuid, "name": device.name} for device in devices if device.uuid in _used(users, devices)
            ],
        }
        try:
            with phases.phase("gpu lock"):
                for pid in users:
                    write_note(pid, "checkpoint")
                    self._paused.append(pid)
                    driver().lock(pid)
            with phases.phase("gpu to host"):
                for pid in users:
                    driver().to_host(pid)
        except BaseException:
            self._undo()
            raise

    def _after_dump(self, phases: Phases, *, is_running: bool) -> None:
        if is_running and self._paused:
            with phases.phase("gpu back"):
                self._undo()
        for pid in self._paused:  # they ended with the dump
            remove_note(pid)
        self._paused.clear()

    def facts(self) -> Mapping[str, object]:
        """What a checkpoint says of it."""
        return {"gpu": self._facts} if self._facts else {}

    def before_restore(self, metadata: Mapping[str, object]) -> None:
        """Refuse, before anything is touched, what cannot be restored here."""
        saved = metadata.get("gpu")
        if not isinstance(saved, Mapping):
            if self.mode == "require":
                raise Validation("this checkpoint has no GPU memory", hint="leave --gpu require out")
            return
        if self.mode == "off":
            raise Validation("this checkpoint contains GPU memory", hint="leave --gpu off out")
        self._mapping = mapping_for(saved, driver().devices(), can_remap=driver().can_remap)

    def after_restore(self, pids: Sequence[int], phases: Phases) -> None:
        """The processes are back, their GPU memory still in their own: put it back, and let them run."""
        if self.mode == "off":
            return
        self._paused = [pid for pid in holders(pids) if driver().state(pid) is State.CHECKPOINTED]
        if self._paused:
            with phases.phase("gpu back"):
                for pid in self._paused:
                    write_note(pid, "checkpoint")
                self._undo()

    def _undo(self) -> None:
        """Bring every process that was locked back to running. All are tried; the first failure is raised."""
        problems: list[GpuFailed] = []
        for attempt in range(_ATTEMPTS):
            problems.clear()
            for pid in list(self._paused):
                try:
                    resume(pid, self._mapping)
                    self._paused.remove(pid)
                except GpuFailed as error:
                    problems.append(error)
            if not problems:
                return
            time.sleep(0.1 * attempt)
        self._paused.clear()  # the notes stay: the next program tries again
        raise problems[0]


def resume(pid: int, mapping: Mapping[str, str] | None = None) -> None:
    """From wherever it is to running; a process that is gone is none of our business any more."""
    state = driver().state(pid)
    if state is State.CHECKPOINTED:
        driver().back(pid, mapping or {})
    if state in (State.CHECKPOINTED, State.LOCKED):
        driver().unlock(pid)
    if state is State.FAILED:
        raise GpuFailed(
            f"the driver lost the GPU memory of process {pid}",
            hint="end the process; restore it from the last checkpoint",
        )
    remove_note(pid)


def mapping_for(saved: Mapping[str, Any], here: Sequence[Device], *, can_remap: bool) -> dict[str, str]:
    """Which GPU here takes the place of each that was used; {} when the same ones are here."""
    used = [Device(str(device["uuid"]), str(device["name"])) for device in saved.get("devices", ())]
    present = {device.uuid for device in here}
    missing = [device for device in used if device.uuid not in present]
    if not missing:
        return {}
    used_uuids = {device.uuid for device in used}
    free = [device for device in here if device.uuid not in used_uuids]
    mapping = {}
    for device in missing:
        fitting = next((other for other in free if other.name == device.name), None)
        if fitting is None:
            raise Conflict(
                f"there is no free {device.name} here for the one it used",
                hint="restore it on a machine with as many GPUs of the same kind",
            )
        free.remove(fitting)
        mapping[device.uuid] = fitting.uuid
    if not can_remap:
        raise Conflict(
            "it used other GPUs than those here, and this driver cannot move it",
            hint="restore it on its own machine, or update the driver to 580 (CUDA 13)",
        )
    return mapping


def _used(pids: Sequence[int], devices: Sequence[Device]) -> set[str]:
    """The UUIDs of the GPUs these processes have open; all of them where the system does not tell."""
    open_files = {read_link(f"/proc/{pid}/fd/{number}") for pid in pids for number in list_names(f"/proc/{pid}/fd")}
    minors = {path.removeprefix("/dev/nvidia") for path in open_files if _USED.fullmatch(path)}
    by_minor = _minors()
    uuids = {by_minor[minor] for minor in minors if minor in by_minor}
    return uuids or {device.uuid for device in devices}


def _minors() -> dict[str, str]:
    """{minor number: UUID} as the kernel's part of the driver tells it."""
    uuid_of = {}
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        text = read_text(str(path))
        uuid = re.search(r"GPU UUID:\s*GPU-([0-9a-fA-F-]{36})", text)
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if uuid and minor:
            uuid_of[minor[1]] = uuid[1].lower()
    return uuid_of


# --- hibernation: only the GPU is given back, the process stays ---


def hibernate(pid: int) -> float:
    """Move the GPU memory of a process into its own and leave it there; answers the seconds it took."""
    free_forgotten()
    if driver().state(pid) is not State.RUNNING:
        raise _not_there(pid, "runs on a GPU")
    started = time.monotonic()
    write_note(pid, "hibernate")
    try:
        driver().lock(pid)
        driver().to_host(pid)
    except BaseException:
        resume(pid)
        raise
    return time.monotonic() - started


def wake(pid: int) -> float:
    """Put it back on the GPU; answers the seconds it took."""
    if driver().state(pid) not in (State.CHECKPOINTED, State.LOCKED):
        raise _not_there(pid, "hibernates")
    started = time.monotonic()
    resume(pid)
    return time.monotonic() - started


def _not_there(pid: int, what: str) -> Conflict | NotFound:
    state = driver().state(pid) if os.path.exists(f"/proc/{pid}") else None
    if state is None:
        return NotFound(f"process {pid} does not use a GPU, or is gone", hint="nvidia-smi shows those that do")
    return Conflict(f"process {pid} is {state.name.lower()}: it is not one that {what}", hint="kedge container doctor")


# --- notes: what a killed program leaves for the next one ---


def _notes() -> Path:
    return state_directory() / "gpu"


def write_note(pid: int, why: str) -> None:
    """Say that this process is about to be locked, by whom and what for. On disk before the lock is taken."""
    folder = _notes()
    note = {"pid": pid, "started": started(pid), "why": why, "by": os.getpid(), "by_started": started(os.getpid())}
    with storage_errors("write", folder / str(pid)):
        make_own_folder(folder)
        draft = folder / f".{pid}"
        draft.write_text(json.dumps(note))
        os.replace(draft, folder / str(pid))


def remove_note(pid: int) -> None:
    (_notes() / str(pid)).unlink(missing_ok=True)


def notes() -> Iterator[dict[str, Any]]:
    folder = _notes()
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if name.isdecimal():
            with suppress(OSError, ValueError):
                yield json.loads((folder / name).read_text())


def free_forgotten() -> list[int]:
    """Let go of processes that somebody locked and did not live to unlock; answers which."""
    freed = []
    for note in list(notes()):
        pid = int(note["pid"])
        if started(pid) != note["started"]:
            remove_note(pid)  # the process itself is gone
        elif started(int(note["by"])) != note["by_started"]:
            # One that was only locked on the way to hibernation is not where somebody wanted it.
            hibernates = note["why"] == "hibernate" and driver().state(pid) is State.CHECKPOINTED
            if not hibernates:
                resume(pid)
                freed.append(pid)
    return freed
