"""Old checkpoints brought over: how many a second, and how much memory that takes, against copying the files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from .harness import Bench, Row, interleave, mib, per_second, timed

_IMPORT = """
import resource, sys, kedge
from kedge.legacy.importers import bring
with kedge.open(sys.argv[2]) as store:
    assert bring(sys.argv[1], store).imported == int(sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _write(folder: Path, count: int) -> None:
    """Checkpoints of the jobs system, about 1 KB each, a thousand to a job."""
    for n in range(count):
        job = f"job_{n // 1000}"
        if n % 1000 == 0:
            (folder / job).mkdir()
        at = 1_763_461_834 + n % 1000
        name = f"step_{at}_{n:08x}"
        document = {
            "checkpoint_id": name,
            "job_id": job,
            "step_name": f"step {n % 1000}",
            "state": {"current_step": n, "outputs": {f"key {k}": "x" * 40 for k in range(16)}},
            "timestamp": f"2025-11-18T10:{n % 1000 // 60:02}:{n % 60:02}.{n % 1_000_000:06}+00:00",
            "workflow_version": "1.0",
        }
        (folder / job / f"{name}.json").write_text(json.dumps(document, indent=2))


def run(bench: Bench) -> list[Row]:
    count = 10_000 if bench.quick else 100_000
    source = bench.fresh("old")
    _write(source, count)
    used: list[float] = []

    def bring(size: int, folder: Path) -> float:
        store = bench.fresh("store") / "s"
        words = [sys.executable, "-c", _IMPORT, str(folder), str(store), str(size)]
        said = ""

        def work() -> None:
            nonlocal said
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout

        cost = timed(work)
        used.append(float(said))
        return cost

    def copy() -> float:
        target = bench.fresh("copy") / "c"
        return timed(lambda: (shutil.copytree(source, target), subprocess.run(["sync", "-f", str(target)], check=True)))

    rounds = 1 if not bench.quick else min(bench.rounds, 2)
    samples = interleave(rounds, {"kedge": lambda: bring(count, source), "copy": copy})
    large = max(used)
    few = bench.fresh("few")
    _write(few, count // 10)
    used.clear()
    bring(count // 10, few)
    return [
        Row(
            f"import {count:,} old checkpoints of 1 KB",
            [cost / count for cost in samples["kedge"]],
            "copytree + sync",
            [cost / count for cost in samples["copy"]],
            target=1 / 2000,
            kind="limit",
            show=per_second,
        ),
        Row(
            f"memory of that, against {count // 10:,}",
            [large],
            "a tenth of them",
            list(used),
            target=1.5,
            kind="share",
            show=mib,
        ),
    ]
