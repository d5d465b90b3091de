"""Processes of this machine, by their numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def pids_below(pid: int) -> list[int]:
    """A process and its descendants, as this machine numbers them."""
    pids = [pid]
    for process in pids:
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                text = Path(f"/proc/{process}/task/{thread}/children").read_text()
                pids += [int(child) for child in re.findall(r"\d+", text)]
        except OSError:
            continue
    return pids
