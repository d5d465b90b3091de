"""GPU memory, checkpointed and restored with the processes that use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory import GpuMemory


def memory_for(spec: Mapping[str, Any]) -> GpuMemory | None:
    """The memory of GPUs, if the container was given any; others do not wait for that to be imported."""
    devices = [str(entry.get("path", "")) for entry in spec.get("linux", {}).get("devices") or ()]
    mounts = [str(entry.get("destination", "")) for entry in spec.get("mounts") or ()]
    environment = [str(entry) for entry in spec.get("process", {}).get("env") or ()]
    is_given = any(path.startswith("/dev/nvidia") for path in (*devices, *mounts)) or any(
        entry.startswith("NVIDIA_VISIBLE_DEVICES=") and entry.partition("=")[2] not in ("", "void", "none")
        for entry in environment
    )
    if not is_given:
        return None
    from .memory import GpuMemory

    return GpuMemory()
