"""Finding other programs, also where an ordinary PATH, or a service's, does not look."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from kedge.errors import Validation

USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
URGENT = -10  # nice


def which(name: str) -> str | None:
    """The absolute path of a program; None when this machine has none of that name."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{USUAL_PATH}")
    return None if path is None else os.path.abspath(path)


def find_program(name: str) -> str:
    """The same; Validation when there is none."""
    path = which(name)
    if path is None:
        raise Validation(f"there is no {name} on this machine", hint="kedge container doctor says how to get it")
    return path


def run(command: Sequence[str], *, timeout_s: float | None = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit status; what it prints is text."""
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout_s, **options
    )
