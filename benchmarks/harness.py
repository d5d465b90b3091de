"""What every comparison shares: interleaved rounds, rows with a target, the table and the JSON."""

from __future__ import annotations

import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

GIB = 1 << 30


class Missing(Exception):
    """A peer is not installed, or a part of Kedge does not exist yet: the row is left out, with the reason."""


@dataclass
class Bench:
    """Where to work and how much of it."""

    workspace: Path
    quick: bool
    rounds: int
    gib: int = 0  # size of states, where rows let it be chosen; 0: as they are made for
    rows: int | None = None  # of a long history; None: as many as the benchmark says

    @property
    def state_bytes(self) -> int:
        return GIB // 8 if self.quick else GIB

    def fresh(self, name: str) -> Path:
        """An empty directory; what an earlier round left there is removed."""
        path = self.workspace / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


def seconds(cost: float) -> str:
    return f"{cost:.2f} s"


def milliseconds(cost: float) -> str:
    return f"{cost * 1e3:.3g} ms"


def per_second(cost: float) -> str:
    return f"{1 / cost:,.0f}/s"


def mib(cost: float) -> str:
    return f"{cost / (1 << 20):,.1f} MiB"


@dataclass
class Row:
    """One line of the table. Samples are costs (seconds, bytes): lower is better.

    kind  "faster": the peer's cost over ours must reach the target
          "share":  our cost over the peer's must stay within it
          "limit":  our cost itself must stay within it; the peer only gives the scale
    """

    work: str
    kedge: list[float] = field(default_factory=list)
    peer: str = ""
    other: list[float] = field(default_factory=list)
    target: float | None = None
    kind: Literal["faster", "share", "limit"] = "faster"
    show: Callable[[float], str] = seconds
    best: bool = False  # compare the best of each side: for peers whose buffered writes swing
    skipped: str = ""

    def _pick(self, samples: list[float]) -> float:
        return min(samples) if self.best else statistics.median(samples)

    @property
    def ratio(self) -> float | None:
        return self._ratio(self._pick)

    @property
    def ratio_of_medians(self) -> float | None:
        return self._ratio(statistics.median)

    def _ratio(self, pick: Callable[[list[float]], float]) -> float | None:
        if not self.other:
            return None
        ours, theirs = pick(self.kedge), pick(self.other)
        return theirs / ours if self.kind == "faster" else ours / theirs

    @property
    def is_reached(self) -> bool | None:
        if self.skipped or self.target is None:
            return None
        value = self._pick(self.kedge) if self.kind == "limit" else self.ratio
        if value is None:
            return None
        return value >= self.target if self.kind == "faster" else value <= self.target

    def cells(self) -> list[str]:
        if self.skipped:
            return [self.work, "", f"left out: {self.skipped}", "", "", "", "", ""]
        ratio, median = self.ratio, self.ratio_of_medians
        return [
            self.work,
            self.show(self._pick(self.kedge)),
            f"{self.peer} {self.show(self._pick(self.other))}" if self.other else "",
            "" if ratio is None else f"{ratio:.2f}",
            "" if median is None else f"{median:.2f}",
            self._cpu_text(),
            self._target_text(),
            {True: "yes", False: "NO", None: ""}[self.is_reached],
        ]

    def _cpu_text(self) -> str:
        used = [cpu_of(samples) for samples in (self.kedge, self.other) if samples]
        return " / ".join(_short(cpu_s) for cpu_s in used if cpu_s) if all(used) else ""

    def _target_text(self) -> str:
        if self.target is None:
            return ""
        if self.kind == "limit":
            return f"≤ {self.show(self.target)}"
        return f"{'≥' if self.kind == 'faster' else '≤'} {self.target:g} ×"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table with aligned columns."""
    head = ["work", "Kedge", "peer", "ratio", "of medians", "CPU time", "target", "reached"]
    lines = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def write_json(path: Path, rows: list[Row], *, quick: bool) -> None:
    """Every sample, with the machine and the date."""
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": os.getloadavg(),
        "quick": quick,
        "rows": [
            {
                "work": row.work,
                "peer": row.peer,
                "kind": row.kind,
                "compared": "best" if row.best else "median",
                "ratio": row.ratio,
                "ratio_of_medians": row.ratio_of_medians,
                "target": row.target,
                "reached": row.is_reached,
                "skipped": row.skipped or None,
                "kedge_samples": row.kedge,
                "peer_samples": row.other,
                "kedge_cpu_s": cpu_of(row.kedge),
                "peer_cpu_s": cpu_of(row.other),
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def cpu_of(samples: list[float]) -> float | None:
    """CPU seconds of a run, in the middle; less disturbed by other work on the machine than the clock."""
    known = [sample.cpu_s for sample in samples if isinstance(sample, Cost)]
    return statistics.median(known) if known else None


def machine() -> Mapping[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / GIB, 1),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def log(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


class Cost(float):
    """Seconds on the clock, with the CPU seconds that this process and its children spent meanwhile."""

    cpu_s: float

    def __truediv__(self, count: float) -> Cost:
        part = Cost(float(self) / count)
        part.cpu_s = self.cpu_s / count
        return part


def timed(action: Callable[[], object], *, memory: int = 0) -> Cost:
    """What the action takes, begun with a quiet disk; giving back what it returned is not counted.

    `memory` is how much it will need, as page cache or of its own: see `touch_memory`.
    """
    if memory:
        os.sync()
        touch_memory(memory)
    since = Stopwatch()
    result = action()
    cost = since.cost()
    del result
    return cost


class Stopwatch:
    def __init__(self) -> None:
        self._cpu_s, self._start = _cpu_s(), time.perf_counter()

    def cost(self) -> Cost:
        cost = Cost(time.perf_counter() - self._start)
        cost.cpu_s = _cpu_s() - self._cpu_s
        return cost


def _cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def interleave(rounds: int, sides: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """A B A B …: each side prepares, measures its own cost, and returns it."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(rounds):
        for name, side in sides.items():
            os.sync()
            samples[name].append(side())
        log(f"  {n + 1}/{rounds}  " + "  ".join(f"{name} {costs[-1]:.4g}" for name, costs in samples.items()))
    return samples


def touch_memory(size: int) -> None:
    """Make the machine own this much free memory.

    A virtual machine gives free memory back to its host, and getting it again costs more than what is measured
    here (0.1 to 3 s a GiB, at random). Touched just before, it is there for every side alike.
    """
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    for page in range(0, size, mmap.PAGESIZE):
        region[page] = 1
    region.close()


def drop_cache(path: Path) -> None:
    """Let go of the cached pages of a file, or of all files below a directory."""
    for file in _files(path):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    block = bytearray(1 << 20)
    for file in _files(path):
        with open(file, "rb", buffering=0) as handle:
            while handle.readinto(block):
                pass


def disk_bytes(path: Path) -> int:
    """What a directory takes on disk."""
    return sum(os.stat(file).st_blocks * 512 for file in _files(path))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
