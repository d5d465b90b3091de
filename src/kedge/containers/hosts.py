"""Facts about a machine that decide whether what was checkpointed there can be restored here."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from .criu.command import criu_version
from .pids import read_text
from .programs import which


def facts() -> dict[str, object]:
    """Kernel, processor, cgroups and versions, as every checkpoint has them."""
    return dict(_facts(which("criu")))


@cache  # for a process that makes many checkpoints
def _facts(criu: str | None) -> dict[str, object]:
    system = os.uname()
    return {
        "arch": system.machine,
        "kernel": system.release,
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "cgroup": cgroup_mode(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "libc": " ".join(platform.libc_ver()),
        "criu": criu_version(criu) if criu else "",
    }


def cpu_features() -> list[str]:
    for line in _cpuinfo():
        if line.startswith(("flags", "Features")):
            return sorted(line.split(":", 1)[1].split())
    return []


def cpu_model() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return ""


def cgroup_mode() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "v2"
    return "hybrid" if Path("/sys/fs/cgroup/unified").exists() else "v1"


def _cpuinfo() -> list[str]:
    return read_text("/proc/cpuinfo").split("\n\n")[0].splitlines()
