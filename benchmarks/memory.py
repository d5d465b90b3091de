"""Peak memory above the state while a large state is saved and loaded, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .harness import Bench, Row, mib

LIMIT = 32 << 20


def run(bench: Bench) -> list[Row]:
    store = bench.fresh("memory") / "store"
    rows = []
    for name, work in (
        ("save", "full save"),
        ("changed", "save, 5 % changed"),
        ("into", "load into existing arrays"),
        ("fresh", "load into fresh memory"),
    ):
        command = [sys.executable, "-m", "benchmarks.memory", name, str(store), str(bench.state_bytes)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        above = json.loads(answer.stdout)
        rows.append(Row(f"memory above the state, {work}", [above], target=LIMIT, kind="limit", show=mib))
    return rows


def measure(name: str, store: Path, state_bytes: int) -> int:
    """Bytes of peak memory above state, interpreter and numpy; importing Kedge counts as Kedge's."""
    from .state import State

    state = State(state_bytes)
    if name == "changed":
        state.change_some()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here

    import kedge

    with kedge.open(store) as manager:
        if name in ("save", "changed"):
            manager.save("train", "epoch", state.arrays)
        elif name == "into":
            manager.load(manager.list("train")[0].id, into=state.arrays)
        else:
            loaded = manager.load(manager.list("train")[0].id)
            assert len(loaded) == len(state.arrays)
            before += state.size_bytes
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    print(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
