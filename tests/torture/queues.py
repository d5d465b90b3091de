"""Workers of a queue that are killed, frozen and told to stop, and a database that restarts under them.

Whatever happens: each run ends, each of its steps is durable once, its result is made of those, the run is completed
once, a worker that was taken over writes nothing any more (I5), and the runs of a group keep their order.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import kedge
from kedge.model import RunStatus
from kedge.pipeline.entries import DEAD
from tests.servers.postgres import Cluster, postgres_cluster, wait_until_up
from tests.waiting import wait_for

from .ledger import Violation
from .queue_program import PARTS, work

PROGRAM = Path(__file__).with_name("queue_program.py")
LEASE_S = 1.0
PATIENCE_S = 300.0  # only for what would never come


class Farm:
    """Worker processes of one queue."""

    def __init__(self, folder: Path, url: str, size: int) -> None:
        self.folder = folder
        self.url = url
        self.workers: list[subprocess.Popen[bytes]] = []
        self.started = 0
        for _ in range(size):
            self.start()

    def start(self) -> None:
        words = [str(PROGRAM), "--queue", "q", "--concurrency", "2", "--lease", f"{LEASE_S:g}", "--grace", "5"]
        limits = ["--max-takeovers", "1000"]  # a machine that is busy takes runs over more often
        self.started += 1
        with open(self.folder / f"worker-{self.started}.log", "wb") as log:
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "kedge", "worker", *words, *limits, "--store", self.url],
                    cwd=self.folder, stdout=log, stderr=log,
                )
            )  # fmt: skip

    def executed(self) -> int:
        """How many steps were executed so far."""
        log = self.folder / "log"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def end(self, worker: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal that ends it, and start another one in its place."""
        self.workers.remove(worker)
        worker.send_signal(number)
        try:
            worker.wait(PATIENCE_S)
        finally:
            worker.kill()
        self.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def check_alive(self) -> None:
        """No worker ends by itself, whatever the store does."""
        for worker in self.workers:
            if worker.poll() is not None:
                raise Violation(f"a worker ended by itself, with exit code {worker.returncode}: {self.said()}")

    def said(self) -> str:
        logs = sorted(self.folder.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs[-3:])


class Storm:
    """What happens to the workers, drawn at random."""

    def __init__(self, farm: Farm, queue: kedge.Queue, draw: random.Random, cluster: Cluster | None) -> None:
        self.farm = farm
        self.queue = queue
        self.draw = draw
        self.cluster = cluster
        self.counts: Counter[str] = Counter()

    def strike(self) -> None:
        """One blow, after the workers have done a little more."""
        goal = self.farm.executed() + self.draw.randint(1, 15)
        self.wait(lambda: self.farm.executed() >= goal)
        actions: list[Callable[[], None]] = [self.kill, self.kill, self.kill, self.freeze, self.freeze, self.stop]
        if self.cluster is not None:
            actions += [self.crash_database, self.restart_database]
        action = self.draw.choice(actions)
        action()
        self.counts[action.__name__] += 1

    def wait(self, is_reached: Callable[[], bool]) -> None:
        """Until then, or until nothing is left to be done, as long as anything goes on."""
        executed, is_over = -1, False

        def look() -> bool:
            nonlocal is_over
            self.farm.check_alive()
            is_over = is_reached() or self.is_done()
            return is_over or self.farm.executed() > executed

        while not is_over:
            executed = self.farm.executed()
            wait_for(look, f"nothing goes on: {self.farm.said()}", PATIENCE_S)

    def is_done(self) -> bool:
        return len(self.queue) == 0

    def kill(self) -> None:
        self.farm.end(self.draw.choice(self.farm.workers), signal.SIGKILL)

    def stop(self) -> None:
        self.farm.end(self.draw.choice(self.farm.workers), signal.SIGTERM)

    def freeze(self) -> None:
        """For longer than its lease, so that others have what it was at; it wakes up in the middle of a statement."""
        worker = self.draw.choice(self.farm.workers)
        worker.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S * self.draw.uniform(1, 2.5))  # sleep: the length of the freeze; nothing depends on it
        worker.send_signal(signal.SIGCONT)

    def crash_database(self) -> None:
        assert self.cluster is not None
        self.cluster.crash()
        wait_until_up(self.cluster.url("postgres"))

    def restart_database(self) -> None:
        assert self.cluster is not None
        self.cluster.stop()
        self.cluster.start()


def storm(
    folder: Path, url: str, *, runs: int, blows: int, seed: int, cluster: Cluster | None = None, seconds: float = 1e9
) -> dict[str, float]:
    """So many runs under so many blows, or for so long; then in peace until all have ended."""
    end_at = time.monotonic() + seconds
    with kedge.open(url) as store, kedge.queue("q", store=store) as queue, _farm(folder, url) as farm:
        for number in range(runs):
            queue.submit(work, number, key=f"w{number}", retries=1, group=group_of(number))
        weather = Storm(farm, queue, random.Random(seed), cluster)
        while sum(weather.counts.values()) < blows and time.monotonic() < end_at and not weather.is_done():
            weather.strike()
        weather.wait(lambda: any(queue.entries(DEAD)))
        executed = farm.executed()
        for number in range(runs):
            check_run(store, queue, number, farm)
        check_order(store, runs)
        if not store.verify().is_ok:
            raise Violation("the store is damaged")
    return {"runs": runs, "executions": executed, "again": executed - runs * PARTS, **weather.counts}


@contextmanager
def _farm(folder: Path, url: str) -> Iterator[Farm]:
    farm = Farm(folder, url, 3)
    try:
        yield farm
    finally:
        farm.close()


def check_run(store: kedge.CheckpointManager, queue: kedge.Queue, number: int, farm: Farm) -> None:
    key = f"w{number}"
    records = list(store.walk(key))
    steps: dict[str, Any] = {}
    session = token = 0
    ends = 0
    for record in records:
        about: Any = record.metadata
        if about["session"] < session:
            raise Violation(f"{record.id} was written by session {about['session']} of {key}, after {session}")
        session = about["session"]
        if about["kind"] == "step":
            if record.step in steps:
                raise Violation(f"{record.step} of {key} is durable twice")
            steps[record.step] = store.load(record.id)
        elif about["kind"] == "run":
            if about["token"] < token:
                raise Violation(f"{record.id}: token {about['token']} after {token}")
            token = about["token"]
            ends += about["status"] == RunStatus.COMPLETED
    if ends != 1 or records[-1].metadata.get("status") != RunStatus.COMPLETED:
        raise Violation(f"{key} was completed {ends} times: {queue_state(queue, key)}; {farm.said()}")
    if queue.handle(key).result(0) != [steps[f"part {part}"]["result"] for part in range(PARTS)]:
        raise Violation(f"{key}: the result is not made of its steps")


def group_of(number: int) -> str:
    """Two of three runs belong to a group."""
    return f"group {number % 6}" if number % 3 else ""


def check_order(store: kedge.CheckpointManager, runs: int) -> None:
    """Runs of a group: the next one begins when the one before has ended."""
    ended: dict[str, tuple[int, datetime]] = {}
    for number in range(runs):
        if not (group := group_of(number)):
            continue
        records = list(store.walk(f"w{number}"))
        before, at = ended.get(group, (number, records[0].created_at))
        if records[0].created_at < at:
            raise Violation(f"{group}: run {number} began before run {before} had ended")
        ended[group] = (number, records[-1].created_at)


def queue_state(queue: kedge.Queue, key: str) -> str:
    return "; ".join(f"{entry.state} {entry.note}" for entry in queue.entries() if entry.key == key) or "not queued"


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """Half of the time on one machine's store, half on PostgreSQL."""
    seed, seconds = random.randrange(10**6), minutes * 60
    print(f"  seed {seed}", flush=True)
    totals: Counter[str] = Counter()
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        for kind in ("directory", "postgres"):
            place = folder / f"{kind}-{seed}"
            place.mkdir()
            if kind == "directory":
                numbers = storm(place, str(place / "store"), runs=400, blows=25, seed=seed)
            else:
                with postgres_cluster() as cluster:
                    url = cluster.empty_database()
                    numbers = storm(place, url, runs=400, blows=25, seed=seed, cluster=cluster)
            print(f"  {kind} {numbers}", flush=True)
            totals.update({name: int(value) for name, value in numbers.items()})
        seed += 1
    return dict(totals)
