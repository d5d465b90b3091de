"""Leases by the clock of the machine, which nobody sets (I4), and those of keys on any connection."""

from __future__ import annotations

import sqlite3
import time

from kedge.blobs.kernel import boot_id
from kedge.index.transactions import LeaseRow, keys_no, lost
from kedge.ports import KEYS

LEASE = "token, holder, is_live, until_s, boot_id"


def boot_clock() -> tuple[str, float]:
    """(which boot, seconds since)."""
    return boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def seconds_left(lease: LeaseRow) -> float:
    """0 when it has ended, as it has when the machine was started anew."""
    boot, clock_s = boot_clock()
    return max(0.0, lease.until_s - clock_s) if lease.boot_id == boot else 0.0


def check_holder(ns_no: int, namespace: str, token: int | None, db: sqlite3.Connection) -> None:
    """As `SqlTransaction.check_holder`, for a sweep, which has a connection of its own."""
    if token is None:
        return
    row = db.execute("SELECT token, is_live FROM lease WHERE job_no = ?", (keys_no(ns_no),)).fetchone()
    if row is None or row[0] != token or not row[1]:
        raise lost(KEYS, namespace)
