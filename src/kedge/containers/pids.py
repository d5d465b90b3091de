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
    found = [pid]
    for one in found:
        try:
            for thread in os.listdir(f"/proc/{one}/task"):
                text = Path(f"/proc/{one}/task/{thread}/children").read_text()
                found += [int(child) for child in re.findall(r"\d+", text)]
        except OSError:
            continue
    return found
