"""What doctor and preflight say of GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kedge.containers.findings import Finding
from kedge.errors import GpuFailed, Validation

from .cuda import State, driver, uses_cuda
from .memory import free_forgotten, notes


def findings(pids: Sequence[int] = ()) -> Iterator[Finding]:
    """What can be said of GPUs before anything is paused; with processes, of those among them that use one."""
    if not os.path.exists("/proc/driver/nvidia") and not any(uses_cuda(pid) for pid in pids):
        with suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            yield from _of_driver()
            return
        if not pids:
            yield Finding("gpu", "note", "no NVIDIA driver here: nothing to checkpoint on a GPU")
        return
    yield from _of_driver()
    for pid in pids:
        if uses_cuda(pid):
            yield from _of_process(pid)


def _of_driver() -> Iterator[Finding]:
    try:
        cuda = driver()
    except (Validation, GpuFailed) as error:
        yield Finding("gpu", "bad", error.message, error.hint)
        return
    version = f"CUDA {cuda.version // 1000}.{cuda.version % 1000 // 10}"
    devices = ", ".join(f"{device.name} ({device.uuid})" for device in cuda.devices()) or "no device"
    moves = "can" if cuda.can_remap else "cannot"
    yield Finding("gpu", "ok", f"{version}: {devices}; a restore {moves} go to another GPU of the kind")
    freed = free_forgotten()
    if freed:
        yield Finding("gpu", "warn", f"released process {', '.join(map(str, freed))}, locked by a program that died")
    for note in notes():
        if note["why"] == "hibernate":
            yield Finding("gpu", "note", f"process {note['pid']} hibernates", f"kedge process wake {note['pid']}")


def _of_process(pid: int) -> Iterator[Finding]:
    who = f"process {pid}"
    state = driver().state(pid)
    if state is None:
        return
    if state is not State.RUNNING:
        yield Finding(who, "bad", f"{state.name.lower()} on its GPU", f"kedge process wake {pid}")
        return
    yield Finding(who, "ok", "uses a GPU: its memory there is saved with it")
    with suppress(OSError):
        surroundings = Path(f"/proc/{pid}/environ").read_bytes()
        if b"CUDA_MPS_PIPE_DIRECTORY=" in surroundings or os.path.exists("/tmp/nvidia-mps/control"):  # nosec B108
            yield Finding(who, "bad", "works through MPS, which cannot be checkpointed", "start it without MPS")
    yield Finding(
        who,
        "note",
        "memory shared with other processes (IPC) or managed by the driver is refused by it, if there is any",
    )
