"""The long fault tests: `python -m tests.torture [name …] [--minutes N]`, a table of numbers at the end."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import interrupts
from .mutants import MUTANTS

NAMES = (
    "kill_loop",
    "syscalls",
    "crash_states",
    "power_cut",
    "bitflips",
    "disk_full",
    "many_processes",
    "pipelines",
    "queues",
    "agents",
    "training",
    "copies",
    "rekey",
    "histories",
    "containers",
    "shim",
    "pods",
    "kubernetes",
    "node",
    "service_image",
    "s3_faults",
    "database_crashes",
    "failover",
    "partitions",
    "indexed_job",
    "server",
    "fuzz",
    "interrupts",
    "packages",
    "mutants",
    "sync_mutants",
    "model",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*NAMES, []], metavar="name", help=f"of {', '.join(NAMES)}; default: all"
    )
    parser.add_argument("--minutes", type=float, default=10, help="for each (default: 10)")
    parser.add_argument(
        "--seed",
        type=int,
        help="of histories, crash_states, pods, kubernetes: the first one (default: another each time)",
    )
    parser.add_argument("--seeds", type=int, help="of histories: how many (default: as many as there is time for)")
    parser.add_argument(
        "--kind", help="of histories: dir, files, memory, postgres, postgres+s3, http; dir+key: encrypted"
    )
    parser.add_argument("--without", default="", help="of histories: operations to leave out: copy_to,rewrite")
    parser.add_argument(
        "--binaries", type=Path, help="of kubernetes: the directory of kubelet, kube-apiserver and others"
    )
    parser.add_argument("--kills", action="store_true", help="of kubernetes: only kills, for all of the time")
    parser.add_argument("--count", type=int, default=100_000, help="of interrupts (default: 100,000)")
    parser.add_argument("--keep", action="store_true", help="keep the stores of what failed")
    chosen = parser.parse_args()
    rows: list[tuple[str, float, str]] = []
    failed = False
    for name in chosen.names or [name for name in NAMES if name != "kubernetes" or chosen.binaries]:
        print(f"{name} …", flush=True)
        start = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"kedge-{name}-"))
        try:
            numbers = _run(name, chosen, folder)
            result = ", ".join(f"{key} {value:,.0f}" for key, value in numbers.items())
        except AssertionError as error:
            failed = True
            result = f"FAILED: {error}" + (f"\n  kept in {folder}" if chosen.keep or name == "histories" else "")
        rows.append((name, time.monotonic() - start, result))
        print(f"  {result}", flush=True)
        if not (result.startswith("FAILED") and (chosen.keep or name == "histories")):
            shutil.rmtree(folder, ignore_errors=True)
    width = max(len(name) for name, _, _ in rows)
    print(f"\n{'':{width}}  {'seconds':>8}")
    for name, seconds, result in rows:
        print(f"{name:{width}}  {seconds:8.1f}  {result.splitlines()[0]}")
    return 1 if failed else 0


def _run(name: str, chosen: argparse.Namespace, folder: Path) -> dict[str, float]:
    if name == "model":
        return _model(chosen.minutes)
    if name == "mutants":
        return _mutants()
    if name == "interrupts":
        return interrupts.torture(chosen.minutes, folder, chosen.count)
    options: dict[str, object] = {}
    if name == "histories":
        without = frozenset(filter(None, chosen.without.split(",")))
        options = {"seed": chosen.seed, "seeds": chosen.seeds, "kind": chosen.kind, "without": without}
    if name in ("crash_states", "pods"):
        options = {"seed": chosen.seed}
    if name == "kubernetes":
        options = {"binaries": chosen.binaries, "seed": chosen.seed, "only_kills": chosen.kills}
    module = importlib.import_module(f"tests.torture.{name}")
    numbers: dict[str, float] = module.torture(chosen.minutes, folder, **options)
    return numbers


def _pytest(path: str, minutes: float) -> str:
    """What pytest says of a test file, hypothesis with many more and longer examples; "" when the time is over."""
    environment = {**os.environ, "KEDGE_HYPOTHESIS_PROFILE": "torture"}
    command = [sys.executable, "-m", "pytest", "-q", path, "--timeout", "0"]
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=minutes * 60)
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode:
        raise AssertionError(done.stdout[-4000:])
    return done.stdout


def _model(minutes: float) -> dict[str, float]:
    """The state machine of tests/model, for as long as there is time."""
    _pytest("tests/model", minutes)
    return {"machines": 2, "findings": 0}


def _mutants() -> dict[str, float]:
    """Every safeguard taken out once; takes as long as it takes."""
    _pytest("tests/faults/test_mutants.py", 60)
    return {"mutants": len(MUTANTS), "unnoticed": 0}


if __name__ == "__main__":
    sys.exit(main())
