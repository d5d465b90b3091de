"""PostgreSQL killed under savers, again and again: nothing lost, nothing doubled."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import kedge
from tests.servers.postgres import Cluster, postgres_cluster

from .ledger import Violation


def crash_under_savers(cluster: Cluster, url: str, *, crashes: int, seconds: float = 1e9) -> dict[str, float]:
    """SIGQUIT to a server process, which drops everybody at once, in the middle of statements and commits."""
    stop = threading.Event()
    saved: dict[str, list[str]] = {f"job-{n}": [] for n in range(4)}
    failures: list[BaseException] = []
    refused: list[kedge.errors.Unavailable] = []
    done = 0
    end = time.monotonic() + seconds
    with kedge.open(url) as store:

        def work(job: str) -> None:
            ids = saved[job]
            try:
                while not stop.is_set():
                    state = {"n": len(ids), "big": os.urandom(70_000) if len(ids) % 9 == 0 else b""}
                    try:
                        ids.append(store.save(job, "step", state, idempotency_key=f"{len(ids)}"))
                    except kedge.errors.Unavailable as error:  # two crashes in one large save: refused, and done again
                        refused.append(error)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(job,)) for job in saved]
        for thread in threads:
            thread.start()
        try:
            while done < crashes and time.monotonic() < end and not failures:
                before = sum(map(len, saved.values()))
                while sum(map(len, saved.values())) < before + 20 and not failures:
                    time.sleep(0.02)  # sleep: between two looks, until everybody is at work again
                cluster.crash()
                done += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
        if failures:
            raise Violation(f"after {done} crashes: {failures[0]!r}")
        for job, ids in saved.items():
            if [c.id for c in store.list(job)] != ids:
                raise Violation(f"{job}: not what was acknowledged, once each, in order")
        if not store.verify().is_ok:
            raise Violation("the store is damaged")
    acknowledged = sum(map(len, saved.values()))
    return {"crashes": done, "acknowledged": acknowledged, "refused": len(refused), "lost": 0, "doubled": 0}


def torture(minutes: float, folder: Path) -> dict[str, float]:
    with postgres_cluster() as cluster:
        return crash_under_savers(cluster, cluster.url("postgres"), crashes=100, seconds=minutes * 60)
