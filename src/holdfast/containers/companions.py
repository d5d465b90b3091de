"""Who has a part in freezing and thawing a container besides CRIU: see freezing.Companion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .freezing import Companion


def companions_for(spec: Mapping[str, Any]) -> list[Companion]:
    """The memory of GPUs, if the container was given any; others do not wait for that to be imported."""
    devices = [str(one.get("path", "")) for one in spec.get("linux", {}).get("devices") or ()]
    mounts = [str(one.get("destination", "")) for one in spec.get("mounts") or ()]
    environment = [str(one) for one in spec.get("process", {}).get("env") or ()]
    is_given = any(path.startswith("/dev/nvidia") for path in (*devices, *mounts)) or any(
        one.startswith("NVIDIA_VISIBLE_DEVICES=") and one.partition("=")[2] not in ("", "void", "none")
        for one in environment
    )
    if not is_given:
        return []
    from .gpu import GpuMemory

    return [GpuMemory()]
