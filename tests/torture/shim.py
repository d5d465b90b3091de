"""The tests of the shim and of pods below every containerd that is known, with many rounds of starting and stopping."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

VERSIONS = ("system", "1.7", "2")
ROUNDS = 50
_NAMES = ("shim", "shim_alike", "shim_faults", "pods", "deploy", "containerds")
_FILES = tuple(f"tests/e2e/test_{name}.py" for name in _NAMES)


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """All tests for each version, whatever the others came to; takes as long as it takes."""
    root = Path(__file__).parents[2]
    numbers: dict[str, float] = {}
    failed: list[str] = []
    for version in VERSIONS:
        many = {"KEDGE_REQUIRE": "all", "KEDGE_CONTAINERD": version, "KEDGE_ROUNDS": str(ROUNDS)}
        options = ("-q", "-n0", "--timeout=0", f"--basetemp={folder}/{version}")
        command = [sys.executable, "-m", "pytest", *options, *_FILES]
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **many}, capture_output=True, text=True, check=False
        )
        numbers[f"{version}: passed"] = sum(int(found) for found in re.findall(r"(\d+) passed", done.stdout))
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            failed += [f"containerd {version}: {line}" for line in lines or [done.stdout[-4000:]]]
    assert not failed, "\n".join([str(numbers), *failed])
    return {**numbers, "rounds each": ROUNDS}
