"""python -m benchmarks store|pipelines [row …] [--quick] [--json FILE]"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import (
    agents,
    arrays,
    containers,
    encryption,
    gpu,
    history,
    importers,
    machines,
    memory,
    page,
    pipelines,
    queues,
    server,
    shared_runs,
    small_saves,
    startup,
    transfers,
    trees,
)
from .harness import Bench, Missing, Row, log, table, write_json

Rows = dict[str, Callable[[Bench], list[Row]]]

STORE: Rows = {
    "small-saves": small_saves.run,
    "full-save": arrays.full_save,
    "changed-save": arrays.changed_save,
    "scattered-save": arrays.scattered_save,
    "load": arrays.load,
    "async-stall": arrays.async_stall,
    "tree": trees.run,
    "history": history.run,
    "rate": history.rate,
    "memory": memory.run,
    "startup": startup.run,
}
PIPELINES: Rows = {
    "steps": pipelines.steps,
    "maps": pipelines.maps,
    "models": pipelines.models,
    "queues": queues.rates,
    "takeover": queues.takeover,
    "idle": queues.idle,
    "shared-steps": shared_runs.steps,
    "shared-queues": shared_runs.queues,
    "shared-workers": shared_runs.workers,
}
AGENTS: Rows = {
    "calls": agents.calls,
    "conversation": agents.conversation,
    "delta": agents.delta,
    "memories": agents.memories,
}
IMPORTERS: Rows = {"jobs": importers.run}
GPU: Rows = {"gpu": gpu.run}
MACHINES: Rows = {"postgres": machines.postgres, "s3": machines.s3, "copies": machines.copies}
CONTAINERS: Rows = {
    "checkpoint": containers.checkpoint,
    "generations": containers.generations,
    "restore": containers.restore,
    "pass-through": containers.pass_through,
    "shim": containers.shim,
    "shim-calls": containers.shim_calls,
    "preempt": containers.preempt,
}
ENCRYPTION: Rows = {"arrays": encryption.arrays, "small": encryption.small_saves}
SERVER: Rows = {
    "start": server.start,
    "pages": server.pages,
    "look-ups": server.look_ups,
    "posts": server.durable_posts,
    "posts-by-hand": server.posts_by_hand,
    "transfers": transfers.memory,
    "views": page.run,
}
SUITES = {
    "store": STORE,
    "pipelines": PIPELINES,
    "agents": AGENTS,
    "machines": MACHINES,
    "containers": CONTAINERS,
    "importers": IMPORTERS,
    "gpu": GPU,
    "encryption": ENCRYPTION,
    "server": SERVER,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description="Measure Kedge against its peers.")
    parser.add_argument("suite", choices=SUITES)
    known = ", ".join(row for rows in SUITES.values() for row in rows)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"all by default: {known}")
    parser.add_argument("--quick", action="store_true", help="an eighth of the size, fewer rounds: for a first look")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (7; 3 when quick)")
    parser.add_argument("--gib", type=int, default=0, metavar="N", help="size of the state of row s3 (a quarter GiB)")
    parser.add_argument("--rows", type=int, dest="count", help="checkpoints in the long history of `server pages`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--dir", type=Path, default=Path(".dev"), help="where to work: the disk that is measured (.dev)"
    )
    options = parser.parse_args()
    suite = SUITES[options.suite]
    if unknown := set(options.rows) - suite.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(suite)}")

    options.dir.mkdir(exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir)).absolute()
    bench = Bench(
        workspace,
        quick=options.quick,
        rounds=options.rounds or (3 if options.quick else 7),
        gib=options.gib,
        rows=options.count,
    )
    started = time.perf_counter()
    rows: list[Row] = []
    try:
        for name in options.rows or suite:
            log(f"{name} …")
            try:
                rows += suite[name](bench)
            except Missing as missing:
                rows.append(Row(name, skipped=str(missing)))
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    log(f"{time.perf_counter() - started:.0f} s")
    print(table(rows))
    if options.json:
        write_json(options.json, rows, quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
