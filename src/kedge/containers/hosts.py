"""Facts about a machine that decide whether what was checkpointed there can be restored here."""

from __future__ import annotations

import os
import platform
import re
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
    first = read_text("/proc/cpuinfo").split("\n\n")[0].splitlines()
    processor = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}
    return {
        "arch": system.machine,
        "kernel": system.release,
        "cpu": processor.get("model name", ""),
        "cpu_features": sorted((processor.get("flags") or processor.get("Features") or "").split()),
        "cgroup": cgroup_mode(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "libc": " ".join(platform.libc_ver()),
        "criu": criu_version(criu) if criu else "",
    }


def cgroup_mode() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "v2"
    return "hybrid" if Path("/sys/fs/cgroup/unified").exists() else "v1"


def version_of(text: object) -> list[int]:
    """The numbers of a version, the first three of them; none for what is no version."""
    return [int(part) for part in re.findall(r"\d+", str(text or ""))[:3]]
