"""The tests of the shim and of pods below every containerd that is known, with many rounds of starting and stopping."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

VERSIONS = ("system", "1.7", "2")
ROUNDS = 50
_FILES = tuple(f"tests/e2e/test_{name}.py" for name in ("shim", "shim_alike", "shim_faults", "pods", "deploy"))


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """All tests for each version; takes as long as it takes."""
    root = Path(__file__).parents[2]
    numbers = {"containerds": 0.0, "tests": 0.0, "rounds": 0.0}
    for version in VERSIONS:
        many = {"HOLDFAST_REQUIRE": "all", "HOLDFAST_CONTAINERD": version, "HOLDFAST_ROUNDS": str(ROUNDS)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "--timeout=0",
            f"--basetemp={folder}/{version}",
            *_FILES,
        ]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **many}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"containerd {version}: {done.stdout[-4000:]}"
        numbers["containerds"] += 1
        numbers["tests"] += sum(int(found) for found in re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE))
        numbers["rounds"] += ROUNDS
    return numbers
