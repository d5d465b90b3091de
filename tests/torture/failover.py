"""A PostgreSQL primary killed under savers, its synchronous standby promoted, again and again: nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

import kedge
from tests.servers.postgres import Cluster
from tests.waiting import wait_for

from .ledger import Violation

# By name: '*' would take the stream of a base backup for a standby, and answer commits that only that has.
_SYNCHRONOUS = "synchronous_standby_names = 'standby'\nsynchronous_commit = on\n"
_NAMED = "cluster_name = 'standby'\n"


class Pair:
    """A primary and a standby; a commit is answered when both have it, if `is_synchronous`."""

    def __init__(self, folder: Path, *, is_synchronous: bool = True) -> None:
        self._folder = folder
        self._settings = _SYNCHRONOUS if is_synchronous else ""
        self._count = 0
        self.primary = Cluster(self._new_folder())
        self.primary.start()
        self.standby = self._follow(self.primary)
        if is_synchronous:
            self.primary.configure(self._settings)
            self._wait_for_standby()

    @property
    def url(self) -> str:
        """Of both, in the order in which they were made: the one that takes writes is looked for."""
        hosts = ",".join(str(self._folder / name) for name in ("a", "b"))
        return f"postgresql://postgres@/postgres?host={hosts}&target_session_attrs=read-write"

    def fail_over(self, how: signal.Signals) -> None:
        """Kill the primary, promote the standby, and give it a standby in the place of the old primary."""
        self.primary.kill(how)
        self.standby.promote()
        shutil.rmtree(self.primary.folder)
        self.primary, place = self.standby, self.primary.folder
        self.standby = self._follow(self.primary, place)
        self._wait_for_standby()

    def stop(self) -> None:
        for server in {self.primary, self.standby}:
            server.stop()

    def _new_folder(self) -> Path:
        folder = self._folder / "ab"[self._count]
        self._count += 1
        return _made(folder)

    def _follow(self, primary: Cluster, folder: Path | None = None) -> Cluster:
        standby = Cluster(_made(folder) if folder else self._new_folder(), copied_from=primary)
        standby.configure(_NAMED + self._settings, reload=False)
        standby.start()
        return standby

    def _wait_for_standby(self) -> None:
        def is_synchronous() -> bool:
            with psycopg.connect(self.primary.url("postgres"), autocommit=True) as db:
                return db.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone() is not None

        wait_for(is_synchronous, "the standby does not follow")


def _made(folder: Path) -> Path:
    folder.mkdir()
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    return folder


@contextmanager
def pair_of_servers(*, is_synchronous: bool = True) -> Iterator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: the path of a socket has 107 characters at most
    folder.chmod(0o755)
    try:
        pair = Pair(folder, is_synchronous=is_synchronous)
        try:
            yield pair
        finally:
            pair.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fail_over_under_savers(pair: Pair, *, failovers: int, seconds: float = 1e9) -> dict[str, float]:
    stop = threading.Event()
    saved: dict[str, list[str]] = {f"job-{n}": [] for n in range(4)}
    failures: list[BaseException] = []
    refused: list[kedge.errors.Unavailable] = []
    done = 0
    end = time.monotonic() + seconds
    with kedge.open(pair.url) as store, store.lease("leased", ttl_s=600) as lease:
        store.save("leased", "step", 0, lease=lease)

        def work(job: str) -> None:
            ids = saved[job]
            try:
                while not stop.is_set():
                    state = {"n": len(ids), "big": os.urandom(70_000) if len(ids) % 9 == 0 else b""}
                    try:
                        ids.append(store.save(job, "step", state, idempotency_key=f"{len(ids)}"))
                    except kedge.errors.Unavailable as error:  # longer away than it is waited for: done again
                        refused.append(error)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(job,)) for job in saved]
        for thread in threads:
            thread.start()
        try:
            while done < failovers and time.monotonic() < end and not failures:
                before = sum(map(len, saved.values()))
                while sum(map(len, saved.values())) < before + 20 and not failures:
                    time.sleep(0.02)  # sleep: between two looks, until everybody is at work again
                pair.fail_over((signal.SIGQUIT, signal.SIGKILL)[done % 2])
                done += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
        if failures:
            raise Violation(f"after {done} failovers: {failures[0]!r}")
        for job, ids in saved.items():
            if [c.id for c in store.list(job)] != ids:
                raise Violation(f"{job}: not what was acknowledged, once each, in order")
        _check_lease(pair, lease)
        if not store.verify().is_ok:
            raise Violation("the store is damaged")
    acknowledged = sum(map(len, saved.values()))
    return {"failovers": done, "acknowledged": acknowledged, "refused": len(refused), "lost": 0, "doubled": 0}


def _check_lease(pair: Pair, lease: kedge.Lease) -> None:
    """The lease from before all failovers is still held on the new primary, and writes; nobody else does."""
    with kedge.open(pair.url) as other:
        try:
            other.save("leased", "step", 1)
        except kedge.LeaseHeld:
            other.save("leased", "step", 1, lease=lease)
            return
    raise Violation("a job was written without its lease")


def torture(minutes: float, folder: Path) -> dict[str, float]:
    with pair_of_servers() as pair:
        return fail_over_under_savers(pair, failovers=30, seconds=minutes * 60)
