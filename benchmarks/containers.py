"""A container with a large process: how long it stands still, what its generations take, how soon it is back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kedge
from kedge.containers.runtime import calls as runtime

from .harness import Bench, Missing, Row, interleave, log, mib, milliseconds, seconds, timed

GENERATIONS = 10
# Counts, changes a hundredth of its memory all the time, and writes down how long it stood still.
PROGRAM = """
import os, sys, time
ballast = bytearray(os.urandom(int(sys.argv[1])))
gaps = os.open("/work/gaps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
open("/work/ready", "w").close()
n, last = 0, time.monotonic()
while True:
    n += 1
    at = n * 4096 % (len(ballast) // 100)
    ballast[at : at + 4096] = os.urandom(4096)
    time.sleep(0.001)
    now = time.monotonic()
    if now - last > 0.02:
        os.write(gaps, b"%f\\n" % (now - last))
    last = now
"""


class Subject:
    """A running container, and the two ways to checkpoint it."""

    def __init__(self, lab: object, ballast: int) -> None:
        from tests.lab import PYTHON, Lab, wait_for

        assert isinstance(lab, Lab)
        self.lab = lab
        self.bundle = lab.bundle("one", PYTHON, "-c", PROGRAM, str(ballast))
        self.work = self.bundle / "upper/work"
        self.images = lab.root / "bare"
        lab.start("one")
        wait_for(lambda: True if (self.work / "ready").exists() else None, "it does not start", 60)

    def gap(self, action: Callable[[], object]) -> float:
        """The longest time the container stood still meanwhile."""
        (self.work / "gaps").write_text("")
        action()
        time.sleep(0.1)
        return max(map(float, (self.work / "gaps").read_text().split()), default=0.0)

    def bare(self, *options: str) -> None:
        shutil.rmtree(self.images, ignore_errors=True)
        self.lab.runc("checkpoint", *options, "--image-path", self.images, "--work-path", self.lab.root, "one")

    def ours(self, *options: str) -> dict[str, object]:
        root = self.lab.runtime_root
        answer = self.lab.answer("container", "checkpoint", "one", "--root", root, "--key", "k", *options)
        assert isinstance(answer, dict)
        return answer


@contextmanager
def subject(bench: Bench, ballast: int) -> Iterator[Subject]:
    from tests.lab import lab
    from tests.parts import missing

    if reason := missing("criu"):
        raise Missing(reason)
    with lab(bench.fresh("containers").resolve()) as made:
        yield Subject(made, ballast)


def checkpoint(bench: Bench) -> list[Row]:
    ballast = 25_000_000 if bench.quick else 200_000_000
    with subject(bench, ballast) as one:
        one.ours("--leave-running")  # later generations are the usual case
        sides = {
            "kedge": lambda: one.gap(lambda: one.ours("--leave-running")),
            "runc": lambda: one.gap(lambda: one.bare("--leave-running")),
        }
        found = interleave(bench.rounds, sides)
    work = f"standing still, {ballast // 1_000_000} MB, left running"
    peer = "runc checkpoint"
    return [Row(work, found["kedge"], peer, found["runc"], 1.15, "share", milliseconds)]


def generations(bench: Bench) -> list[Row]:
    ballast = 25_000_000 if bench.quick else 200_000_000
    with subject(bench, ballast) as one:
        for _ in range(GENERATIONS):
            one.ours("--leave-running")
        with kedge.open(one.lab.store, namespace="containers") as store:
            stored = [float(found.stored_bytes) for found in store.list("container:k")]
        one.bare("--leave-running")
        size = float(sum(path.stat().st_size for path in one.images.iterdir()))
    log(f"  first {mib(stored[0])}, further ones {', '.join(mib(added) for added in stored[1:])}")
    work = f"{GENERATIONS} generations, 1 % of {ballast // 1_000_000} MB changed"
    return [
        Row(work, [sum(stored)], "the first", [stored[0]], 1.2, "share", mib),
        Row(work, [sum(stored)], f"{GENERATIONS} dumps", [GENERATIONS * size], 8.0, "faster", mib),
    ]


def restore(bench: Bench) -> list[Row]:
    ballast = 25_000_000 if bench.quick else 200_000_000
    with subject(bench, ballast) as one:
        lab = one.lab
        tar, upper = lab.root / "upper.tar", one.bundle / "upper"
        one.ours("--leave-running")
        one.bare("--leave-running")
        lab.run("tar", "-C", upper, "--xattrs", "--acls", "-cpf", tar, ".")

        def measured(action: Callable[[], object]) -> float:
            lab.remove("one")
            return timed(action, memory=2 * ballast)

        def bare() -> None:
            lab.run("tar", "-C", upper, "--xattrs", "--acls", "-xpf", tar)
            lab.runc("restore", "--detach", "--image-path", one.images, "--work-path", lab.root, "--bundle", one.bundle,
                     "one", stdout=None)  # fmt: skip

        # As it is installed: not every start compiles the modules again. The first one leaves them compiled.
        installed = {name: value for name, value in lab.environment().items() if name != "PYTHONDONTWRITEBYTECODE"}

        def ours() -> None:
            lab.kedge("container", "restore", "k", env=installed)

        measured(ours)
        sides = {"kedge": lambda: measured(ours), "runc": lambda: measured(bare)}
        found = interleave(bench.rounds, sides)
    work = f"back again, {ballast // 1_000_000} MB"
    return [Row(work, found["kedge"], "tar + runc restore", found["runc"], 1.2, "share", seconds)]


def pass_through(bench: Bench) -> list[Row]:
    front = Path(runtime.__file__).with_name("kedge-runc")
    with subject(bench, 1_000_000) as one:
        root = str(one.lab.runtime_root)
        runc = shutil.which("runc") or "runc"

        def call(program: str) -> float:
            started = time.perf_counter()
            null = os.open(os.devnull, os.O_WRONLY)
            words = [program, "--root", root, "state", "one"]
            pid = os.posix_spawn(program, words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
            os.waitpid(pid, 0)
            os.close(null)
            return time.perf_counter() - started

        found = interleave(30 * bench.rounds, {"kedge": lambda: call(str(front)), "runc": lambda: call(runc)})
    row = Row("state of a container that did not opt in", found["kedge"], "runc", found["runc"], 1.4, "share")
    row.show = milliseconds
    return [row]


def shim(bench: Bench) -> list[Row]:
    """`ctr run --detach` below containerd, with its own shim and with ours."""
    from tests.engine import OURS, PLAIN, containerd
    from tests.lab import lab
    from tests.parts import missing

    if reason := missing("criu") or missing("containerd"):
        raise Missing(reason)
    with lab(bench.fresh("shim").resolve()) as made, containerd(made) as engine:
        with kedge.open(made.store, namespace="containers") as store:
            store.save("container:another", "another", {})  # there is a store, which must be asked

        def started(name: str, runtime: str, *wishes: str) -> float:
            begun = time.perf_counter()
            engine.run(name, *wishes, shim=runtime, program=("/usr/bin/sleep", "1000"))
            took = time.perf_counter() - begun
            engine.remove(name)
            return took

        sides = {
            "kedge": lambda: started("ours", OURS),
            "opted in": lambda: started("kept", OURS, "KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=none"),
            "runc.v2": lambda: started("plain", PLAIN),
        }
        found = interleave(5 if bench.quick else 20, sides)
    peer = "containerd's shim"
    return [
        Row("ctr run -d, not opted in", found["kedge"], peer, found["runc.v2"], 1.25, "share", milliseconds),
        Row("ctr run -d, opted in, its first", found["opted in"], peer, found["runc.v2"], 1.25, "share", milliseconds),
    ]


def shim_calls(bench: Bench) -> list[Row]:
    """A call that only passes through the shim, and what stays in memory for a container."""
    from tests.engine import OURS, PLAIN, containerd
    from tests.lab import lab
    from tests.parts import missing

    if reason := missing("criu") or missing("containerd"):
        raise Missing(reason)
    with lab(bench.fresh("calls").resolve()) as made, containerd(made) as engine:
        resident: dict[str, list[float]] = {}
        for name, runtime, wishes in (
            ("plain", PLAIN, ()),
            ("ours", OURS, ()),
            ("kept", OURS, ("KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=none")),
        ):
            before = set(engine.shims())
            engine.run(name, *wishes, shim=runtime, program=("/usr/bin/sleep", "1000"))
            resident[name] = [_resident(pid) for pid in set(engine.shims()) - before]

        def timed(name: str) -> float:
            begun = time.perf_counter()
            engine.ctr("task", "pause", name)
            engine.ctr("task", "resume", name)
            return (time.perf_counter() - begun) / 2

        found = interleave(3 if bench.quick else 20, {one: lambda one=one: timed(one) for one in resident})
        for name in resident:
            engine.remove(name)
    peer = "containerd's shim"
    return [
        Row("a call of ctr, not opted in", found["ours"], peer, found["plain"], 3.0, "share", milliseconds),
        Row("a call of ctr, opted in", found["kept"], peer, found["plain"], 3.0, "share", milliseconds),
        Row("resident, not opted in", resident["ours"], peer, resident["plain"], 1.25, "share", mib),
        Row("resident, opted in", resident["kept"], peer, resident["plain"], 1.25, "share", mib),
    ]


def _resident(pid: int) -> float:
    """Memory of a process alone, without what it shares with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def preempt(bench: Bench) -> list[Row]:
    """Ten containers of 50 MB: all of them in the store, against ten bare dumps into a directory."""
    from tests.engine import OURS, PLAIN, containerd
    from tests.lab import PYTHON, lab, wait_for
    from tests.parts import missing

    if reason := missing("criu") or missing("containerd"):
        raise Missing(reason)
    program = (PYTHON, "-c", PROGRAM, str(5_000_000 if bench.quick else 50_000_000))
    names = [f"c{number}" for number in range(10)]
    with lab(bench.fresh("preempt").resolve()) as made, containerd(made) as engine:
        place = Path("/run/containerd/runc", engine.namespace)

        def wait_ready(path: Path) -> None:
            wait_for(lambda: True if path.exists() else None, "it does not start", 60)

        def timed(shim: str, action: Callable[[], object]) -> float:
            for name in names:
                engine.run(
                    name,
                    "KEDGE_CHECKPOINT=1",
                    f"KEDGE_WORKLOAD={os.urandom(4).hex()}",
                    shim=shim,
                    program=program,
                )
                wait_ready(engine.upper(name) / "work/ready")
            started = time.perf_counter()
            action()
            took = time.perf_counter() - started
            for name in names:
                engine.remove(name)
            return took

        def bare() -> None:
            for name in names:
                images = bench.fresh("images") / name
                command = ("--image-path", images, "--work-path", images.parent, name)
                made.run("runc", "--root", place, "checkpoint", *command)

        def ours() -> None:
            made.kedge("preempt", "--now", "--deadline", "600", env=engine.environment)

        found = interleave(
            1 if bench.quick else 3, {"kedge": lambda: timed(OURS, ours), "runc": lambda: timed(PLAIN, bare)}
        )
    return [Row("preempt, 10 containers of 50 MB", found["kedge"], "10 × runc checkpoint", found["runc"], 1.1, "share")]
