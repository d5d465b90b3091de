"""Two hosts, each a network namespace, and a database between them: a holder that was cut off writes nothing (I5).

`python -m tests.torture.partitions URL` is what runs on a host: it does what it is told on stdin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kedge
from kedge.errors import CheckpointError, LeaseHeld
from kedge.model import Lease
from tests.servers.postgres import Cluster, postgres_cluster

from .ledger import Violation
from .mutants import applied

TTL_S = 0.08
PORT = 54329


class Host:
    """A process in a network namespace of its own, joined to ours by one cable."""

    def __init__(self, number: int, net: int) -> None:
        self.name = f"kd{os.getpid()}-{number}"
        self._cable = f"kd{os.getpid() % 100000}v{number}"
        self.server = f"10.{net}.{number}.1"
        _ip("netns", "add", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self.server}/24", "dev", self._cable)
        _ip("link", "set", self._cable, "up")
        _ip("-n", self.name, "addr", "add", f"10.{net}.{number}.2/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        self._process: subprocess.Popen[str] | None = None

    def start(self, url: str, mutant: str) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", "tests.torture.partitions", url, mutant],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self.answer()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self.server}:{PORT}/postgres"

    def tell(self, *words: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Violation(f"host {self.name} has ended")
        return json.loads(line)

    def ask(self, *words: object) -> Any:
        self.tell(*words)
        return self.answer()

    def cut_off(self) -> None:
        _ip("link", "set", self._cable, "down")

    def join_again(self) -> None:
        _ip("link", "set", self._cable, "up")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._cable], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@contextmanager
def two_hosts(cluster: Cluster, mutant: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts with the store open."""
    with joined_hosts(cluster, 2) as (first, second):
        for host in (first, second):
            host.start(host.url, mutant)
        yield first, second


@contextmanager
def joined_hosts(cluster: Cluster, count: int) -> Iterator[list[Host]]:
    """Hosts with nothing between them but a server that listens to all."""
    hosts: list[Host] = []
    net = 64 + os.getpid() % 128
    try:
        hosts.extend(Host(number, net) for number in range(1, count + 1))
        with open(cluster.folder / "data" / "pg_hba.conf", "a") as rules:
            rules.write(f"host all all 10.{net}.0.0/16 trust\n")
        with open(cluster.folder / "data" / "postgresql.conf", "a") as conf:
            conf.write(f"listen_addresses = '{','.join(host.server for host in hosts)}'\nport = {PORT}\n")
        cluster.stop()
        cluster.start()
        yield hosts
    finally:
        for host in hosts:
            host.close()


def part_and_refuse(cluster: Cluster, *, rounds: int, seconds: float = 1e9, mutant: str = "") -> dict[str, float]:
    """One host has the lease and is cut off; the other takes over; back again, the first one must be refused.

    In one round of five the first is in the middle of saving when its cable is pulled.
    """
    refused = hanging = done = 0
    end = time.monotonic() + seconds
    with two_hosts(cluster, mutant) as (first, second):
        while done < rounds and time.monotonic() < end:
            done += 1
            job = f"job-{os.urandom(4).hex()}"
            token = first.ask("lease", job)
            if first.ask("save", job, token)[0] != "saved":
                raise Violation(f"round {done}: the holder cannot save")
            first.cut_off()
            is_hanging = done % 5 == 0
            if is_hanging:
                first.tell("save", job, token)
                hanging += 1
            heir = second.ask("take over", job)
            if second.ask("save", job, heir)[0] != "saved":
                raise Violation(f"round {done}: the heir cannot save")
            first.join_again()
            answer = first.answer() if is_hanging else first.ask("save", job, token)
            if answer != ["refused", "lease_lost"]:
                raise Violation(f"round {done}: a stale lease was answered {answer}")
            refused += 1
            if second.ask("count", job) != 2:
                raise Violation(f"round {done}: somebody else wrote")
            if second.ask("save", job, heir)[0] != "saved":
                raise Violation(f"round {done}: the heir has lost its lease")
    return {"partitions": done, "stale leases refused": refused, "while saving": hanging, "merged": 0}


def torture(minutes: float, folder: Path) -> dict[str, float]:
    with postgres_cluster() as cluster:
        return part_and_refuse(cluster, rounds=1000, seconds=minutes * 60)


def serve(url: str) -> None:
    """What a host does."""
    with kedge.open(url) as store:
        index = store.store.index
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            what, job, *rest = json.loads(line)
            answer: object
            if what == "lease":
                answer = index.acquire_lease(job, "first", TTL_S).token
            elif what == "take over":
                answer = _take_over(index, job)
            elif what == "count":
                answer = len(store.list(job))
            else:
                lease = Lease(job, rest[0], "host", TTL_S)
                try:
                    answer = ["saved", store.save(job, "step", {"by": os.getpid()}, lease=lease)]
                except CheckpointError as error:
                    answer = ["refused", error.code]
            print(json.dumps(answer), flush=True)


def _take_over(index: Any, job: str) -> int:
    while True:
        try:
            return int(index.acquire_lease(job, "second", 60).token)
        except LeaseHeld:
            time.sleep(0.01)  # sleep: before it asks again


if __name__ == "__main__":
    with applied(sys.argv[2]):
        serve(sys.argv[1])
