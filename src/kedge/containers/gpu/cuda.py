"""The NVIDIA driver's calls for checkpoints of a process on its GPUs, through ctypes.

running ─lock→ locked ─to host→ checkpointed ─back→ locked ─unlock→ running
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from uuid import UUID

from kedge.containers.pids import read_text
from kedge.errors import GpuFailed, Validation

LOCK_TIMEOUT_MS = 10_000
_NEEDED_API = 12080  # CUDA 12.8, in drivers from 570 on
_REMAPPING_API = 13000  # from here on a restore may go to another GPU
_NOT_INITIALIZED, _NOT_SUPPORTED, _TIMEOUT = 3, 801, 909


class State(IntEnum):
    """Where a process is, as the driver tells it."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class _LockArguments(ctypes.Structure):
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class _Pair(ctypes.Structure):
    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class _RestoreArguments(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * 44),
        ("reserved1", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Device:
    uuid: str
    name: str


class Driver:
    """The driver's calls for checkpoints, on this machine."""

    def __init__(self, library: ctypes.CDLL, version: int) -> None:
        self._library = library
        self.version = version

    @property
    def can_remap(self) -> bool:
        return self.version >= _REMAPPING_API

    def state(self, pid: int) -> State | None:
        """None for a process that has nothing to do with a GPU."""
        state = ctypes.c_int()
        code = self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
        return State(state.value) if code == 0 else None

    def lock(self, pid: int) -> None:
        arguments = _LockArguments(timeout_ms=LOCK_TIMEOUT_MS)
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(arguments))

    def to_host(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def back(self, pid: int, mapping: Mapping[str, str]) -> None:
        """`mapping` names the GPU that takes the place of each that is not here."""
        arguments = None
        if mapping:
            pairs = (_Pair * len(mapping))()
            for pair, (old, new) in zip(pairs, mapping.items(), strict=True):
                pair.old[:], pair.new[:] = UUID(old).bytes, UUID(new).bytes
            arguments = ctypes.byref(_RestoreArguments(pairs=pairs, count=len(mapping)))
        self._call("cuCheckpointProcessRestore", pid, arguments)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def devices(self) -> list[Device]:
        count = ctypes.c_int()
        if self._library.cuDeviceGetCount(ctypes.byref(count)):
            return []
        devices = []
        for number in range(count.value):
            handle, uuid, name = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(128)
            self._library.cuDeviceGet(ctypes.byref(handle), number)
            if self._library.cuDeviceGetUuid_v2(ctypes.byref(uuid), handle) == 0:
                self._library.cuDeviceGetName(name, len(name), handle)
                devices.append(Device(str(UUID(bytes=bytes(uuid))), name.value.decode(errors="replace")))
        return devices

    def _call(self, name: str, pid: int, arguments: object) -> None:
        code = getattr(self._library, name)(pid, arguments)
        if code:
            raise GpuFailed(f"the driver refused {name} of process {pid}: {self._words(code)}", hint=_fix(code))

    def _words(self, code: int) -> str:
        text = ctypes.c_char_p()
        with suppress(AttributeError):
            if self._library.cuGetErrorString(code, ctypes.byref(text)) == 0 and text.value:
                return f"{text.value.decode(errors='replace')} ({code})"
        return f"error {code}"


def _fix(code: int) -> str:
    return {
        _NOT_SUPPORTED: "memory shared with other processes (IPC), managed memory or MPS cannot be checkpointed by "
        "this driver: do without, or update it",
        _TIMEOUT: "a kernel or a call of the job did not end in time: try again when it is less busy",
    }.get(code, "nvidia-smi and the system log tell how the GPU is; the job runs on as before")


_library: list[Driver] = []


def driver() -> Driver:
    """The driver of this machine; Validation when there is none, or it is too old."""
    if _library:
        return _library[0]
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Validation(
            "there is no NVIDIA driver here", hint="libcuda.so.1 comes with driver 570 or newer"
        ) from error
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    if version.value < _NEEDED_API or not hasattr(library, "cuCheckpointProcessLock"):
        raise Validation(
            f"this NVIDIA driver cannot make checkpoints (CUDA {version.value // 1000}.{version.value % 1000 // 10})",
            hint="driver 570 or newer (CUDA 12.8) is needed",
        )
    if code := library.cuInit(0):
        raise GpuFailed(f"the NVIDIA driver does not start: error {code}", hint="nvidia-smi tells more")
    _library.append(Driver(library, version.value))
    return _library[0]


def uses_cuda(pid: int) -> bool:
    """Whether a process has the driver's library loaded; it may still have no context."""
    return "libcuda.so" in read_text(f"/proc/{pid}/maps")


def holders(pids: Sequence[int]) -> list[int]:
    """The processes that have something on a GPU."""
    candidates = [pid for pid in pids if uses_cuda(pid)]
    return [pid for pid in candidates if driver().state(pid) is not None] if candidates else []
