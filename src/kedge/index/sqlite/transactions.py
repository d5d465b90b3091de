"""A write transaction of the index: how it begins, the events it appends, and leases.

What else happens inside is in `writes`.
"""

from __future__ import annotations

import json
import sqlite3
import time

from kedge.errors import LeaseHeld, LeaseLost
from kedge.index.event_chain import chain_of
from kedge.index.rows import Row
from kedge.model import Lease
from kedge.ports import KEYS

from .database import run_alone

MAX_JOBS = 1000  # remembered between transactions

LeaseRow = tuple[int, str, str, float, int]
_LEASE = "token, holder, boot_id, until_s, is_live"


def now_us() -> int:
    return time.time_ns() // 1000


def boot_clock() -> tuple[str, float]:
    """(which boot, seconds since): a clock nobody sets (I4)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return boot_id, time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Transactions:
    """Write transactions of one namespace, one after the other on one connection."""

    def __init__(self, connection: sqlite3.Connection, ns_no: int, namespace: str, busy_timeout_s: float) -> None:
        self._ns = ns_no
        self._namespace = namespace
        self._busy_timeout_s = busy_timeout_s
        self.use(connection)

    def forget(self) -> None:
        """What is remembered between transactions holds while nobody else commits, and none of ours is undone."""
        self._data_version: int | None = None
        self._head: tuple[int, bytes] | None = None  # number and chain of the newest event
        self._jobs: dict[str, Row] = {}  # number, last_seq, and the columns of the lease
        self._key_id: str | None = None  # of the current data key; "" where there is none

    def use(self, connection: sqlite3.Connection, ns_no: int | None = None) -> None:
        """Go on with another connection, on which the namespace may have another number."""
        self._ns = self._ns if ns_no is None else ns_no
        connection.execute("PRAGMA busy_timeout=0")  # `begin` waits
        self._db = connection
        self.forget()

    def begin(self) -> None:
        run_alone(self._db, "BEGIN IMMEDIATE", self._busy_timeout_s)
        # Changes when another connection, of whatever process, has committed; exact, because we hold the write lock.
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._data_version or len(self._jobs) > MAX_JOBS:
            self.forget()
            self._data_version = version

    def undo(self, savepoint: str) -> None:
        self.forget()
        self._db.execute(f"ROLLBACK TO {savepoint}")

    # Events

    def event(
        self, action: str, actor: str, job: str | None = None, checkpoint: str | None = None, detail: str = "{}"
    ) -> None:
        if self._head is None:
            found = self._db.execute("SELECT id, chain FROM event ORDER BY id DESC LIMIT 1").fetchone()
            self._head = found or (0, bytes(32))
        number, chain = self._head[0] + 1, self._head[1]
        at_us = now_us()
        chain = chain_of(chain, number, at_us, self._ns, actor, action, job, checkpoint, detail)
        self._db.execute(
            "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (number, at_us, self._ns, actor, action, job, checkpoint, detail, chain),
        )
        self._head = (number, chain)

    # Jobs and leases

    def job_no(self, name: str) -> int:
        """The number of a job, which is made if there is none."""
        now = now_us()
        self._db.execute(
            "INSERT OR IGNORE INTO job VALUES (NULL, ?, ?, 0, 0, 0, 0, ?, ?, NULL)", (self._ns, name, now, now)
        )
        return int(self._db.execute("SELECT no FROM job WHERE ns_no = ? AND name = ?", (self._ns, name)).fetchone()[0])

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        self._jobs.pop(job, None)
        found = self._lease(job)
        if found and found[4] and (left_s := seconds_left(found[2], found[3])):
            raise held(job, self._namespace, found[0], found[1], left_s)
        token = (found[0] if found else 0) + 1
        boot_id, clock_s = boot_clock()
        self._db.execute(
            "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?, 1)",
            (self._leased_no(job), token, holder, boot_id, clock_s + ttl_s),
        )
        self.event("lease", holder, job or None, detail=json.dumps({"token": token}))
        return Lease(job, token, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self._jobs.pop(lease.job, None)
        found = self._lease(lease.job)
        if not found or found[0] != lease.token or not found[4]:
            raise lost(lease.job, self._namespace)
        boot_id, clock_s = boot_clock()
        self._db.execute(
            "UPDATE lease SET boot_id = ?, until_s = ? WHERE job_no = ?",
            (boot_id, clock_s + lease.ttl_s, self._leased_no(lease.job)),
        )

    def release_lease(self, lease: Lease) -> None:
        self._jobs.pop(lease.job, None)
        found = self._lease(lease.job)
        if found and found[0] == lease.token and found[4]:
            self._db.execute("UPDATE lease SET is_live = 0 WHERE job_no = ?", (self._leased_no(lease.job),))
            self.event("release", lease.holder, lease.job or None, detail=json.dumps({"token": lease.token}))

    def _leased_no(self, job: str) -> int:
        """What stands for a job in the table of leases; for `KEYS`, a number that no job has."""
        return keys_no(self._ns) if job == KEYS else self.job_no(job)

    def _lease(self, job: str) -> LeaseRow | None:
        if job == KEYS:
            return lease_of_keys(self._db, self._ns)
        found: LeaseRow | None = self._db.execute(
            f"SELECT {_LEASE} FROM lease JOIN job ON no = job_no WHERE ns_no = ? AND name = ?", (self._ns, job)
        ).fetchone()
        return found


def keys_no(ns_no: int) -> int:
    """What stands for the keys of a namespace where a lease names a job."""
    return -ns_no


def lease_of_keys(db: sqlite3.Connection, ns_no: int) -> LeaseRow | None:
    found: LeaseRow | None = db.execute(f"SELECT {_LEASE} FROM lease WHERE job_no = ?", (keys_no(ns_no),)).fetchone()
    return found


def check_holder(ns_no: int, namespace: str, token: int | None, db: sqlite3.Connection) -> None:
    """LeaseLost if a change of keys, of this lease, is no longer the current one: another may have begun (I10)."""
    if token is None:
        return
    found = lease_of_keys(db, ns_no)
    if found is None or found[0] != token or not found[4]:
        raise lost(KEYS, namespace)


def held(job: str, namespace: str, token: int, holder: str, left_s: float) -> LeaseHeld:
    shown = ":".join(holder.split(":")[:2])  # host and process; the rest is for programs
    if job == KEYS:
        return LeaseHeld(
            f"the keys of namespace {namespace} are being changed by {shown}",
            hint="wait until that has ended, then run it again; it ends by itself when its process is gone",
            holder=holder,
            token=token,
        )
    return LeaseHeld(
        f"job {job} is leased by {shown} for another {left_s:.0f} s",
        hint="wait until it ends, or stop that process; a lease ends by itself when its holder is gone",
        holder=holder,
        token=token,
    )


def lost(job: str, namespace: str) -> LeaseLost:
    if job == KEYS:
        return LeaseLost(
            f"another change of the keys of namespace {namespace} has begun since, and this one stops",
            hint="nothing is lost: let the other one end, then run kedge rekey --rewrite again",
        )
    return LeaseLost(
        f"the lease of job {job} is no longer ours",
        hint="it ended, or somebody took the job over: stop, or take a new lease",
    )


def seconds_left(boot_id: str, until_s: float) -> float:
    """Seconds a lease still runs; 0 when it has ended, as it has when the machine was started anew."""
    now_boot, clock_s = boot_clock()
    return max(0.0, until_s - clock_s) if boot_id == now_boot else 0.0
