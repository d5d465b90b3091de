"""A write transaction in a database: its events, jobs and leases. `writes` has the other operations.

SQLite and PostgreSQL share the statements (see `reads`). An open transaction is the only writer in its namespace:
nothing can happen between a check and the change that relies on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from kedge.errors import LeaseHeld, LeaseLost
from kedge.model import Lease, now_us
from kedge.ports import KEYS

from .event_chain import chain_of
from .rows import Row


class LeaseRow(NamedTuple):
    """A row of the table of leases. The database determines how long the lease is still valid (`_left_s`)."""

    token: int
    holder: str
    is_live: bool
    until_s: float
    boot_id: str = ""


class JobRow(NamedTuple):
    """What a save needs to know of its job."""

    no: int
    last_seq: int
    lease: LeaseRow | None


class SqlTransaction:
    """Events, jobs and leases of one namespace."""

    _LEASE: str  # the columns of a LeaseRow
    _ns: int
    _namespace: str
    _head: tuple[int, bytes] | None = None  # number and chain of the newest event, once known

    # Implemented by each database

    def _one(self, sql: str, *parameters: object) -> Row | None:
        raise NotImplementedError

    def _do(self, sql: str, *parameters: object) -> None:
        """Execute without waiting for the answer, where the database allows that (PostgreSQL)."""
        raise NotImplementedError

    def _many(self, sql: str, rows: Sequence[Row]) -> None:
        raise NotImplementedError

    def _newest_event(self) -> tuple[int, bytes]:
        raise NotImplementedError

    def _left_s(self, lease: LeaseRow) -> float:
        """Return the seconds a lease is still valid, by a clock that no caller sets (I4); 0 if it has expired."""
        raise NotImplementedError

    def _put_lease(self, job_no: int, token: int, holder: str, ttl_s: float) -> None:
        raise NotImplementedError

    def _extend_lease(self, job_no: int, ttl_s: float) -> None:
        raise NotImplementedError

    # Events

    def event(
        self, action: str, actor: str, job: str | None = None, checkpoint: str | None = None, detail: str = "{}"
    ) -> None:
        number, chain = self._head or self._newest_event()
        number, at_us = number + 1, now_us()
        chain = chain_of(chain, number, at_us, self._ns, actor, action, job, checkpoint, detail)
        self._do(
            "INSERT INTO main.event (id, at_us, ns_no, actor, action, job, checkpoint, detail, chain) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            number, at_us, self._ns, actor, action, job, checkpoint, detail, chain,
        )  # fmt: skip
        self._head = (number, chain)

    # Jobs

    def job_no(self, name: str) -> int:
        """Return the number of a job, which is created if there is none."""
        row = self._one("SELECT no FROM main.job WHERE ns_no = ? AND name = ?", self._ns, name)
        return int(row[0]) if row else self._new_job(name, now_us())

    def _new_job(
        self, name: str, at_us: int, *, last_seq: int = 0, checkpoints: int = 0, size: int = 0, stored: int = 0
    ) -> int:
        row = self._one(
            "INSERT INTO main.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, "
            "updated_us) VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING no",
            self._ns, name, last_seq, checkpoints, size, stored, at_us, at_us,
        )  # fmt: skip
        assert row is not None
        return int(row[0])

    # Leases

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        lease = self._lease(job)
        if lease and lease.is_live and (left_s := self._left_s(lease)):
            raise held(job, self._namespace, lease.token, lease.holder, left_s)
        token = (lease.token if lease else 0) + 1
        self._put_lease(self._leased_no(job), token, holder, ttl_s)
        self.event("lease", holder, job or None, detail=json.dumps({"token": token}))
        return Lease(job, token, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        if not self._is_current(lease.job, lease.token):
            raise lost(lease.job, self._namespace)
        self._extend_lease(self._leased_no(lease.job), lease.ttl_s)

    def end_lease(self, job: str, token: int) -> None:
        """End a lease; one that was lost is ignored."""
        lease = self._lease(job)
        if lease is not None and lease.is_live and lease.token == token:
            self._do("UPDATE main.lease SET is_live = ? WHERE job_no = ?", False, self._leased_no(job))
            self.event("release", lease.holder, job or None, detail=json.dumps({"token": token}))

    def check_holder(self, token: int | None) -> None:
        """Raise LeaseLost if a change of keys has lost its lease: another one may have begun (I10)."""
        if token is not None and not self._is_current(KEYS, token):
            raise lost(KEYS, self._namespace)

    def _is_current(self, job: str, token: int) -> bool:
        lease = self._lease(job)
        return lease is not None and bool(lease.is_live) and lease.token == token

    def _lease(self, job: str) -> LeaseRow | None:
        if job == KEYS:
            row = self._one(f"SELECT {self._LEASE} FROM main.lease WHERE job_no = ?", keys_no(self._ns))
        else:
            row = self._one(
                f"SELECT {self._LEASE} FROM main.lease JOIN main.job ON no = job_no WHERE ns_no = ? AND name = ?",
                self._ns, job,
            )  # fmt: skip
        return LeaseRow(*row) if row else None

    def _leased_no(self, job: str) -> int:
        """Return the lease table's number for a job; for `KEYS`, a number that no job has."""
        return keys_no(self._ns) if job == KEYS else self.job_no(job)


def keys_no(ns_no: int) -> int:
    """Return the number under which the lease table has the keys of a namespace."""
    return -ns_no


def held(job: str, namespace: str, token: int, holder: str, left_s: float) -> LeaseHeld:
    shown = ":".join(holder.split(":")[:2])  # host and process; the rest is for programs
    if job == KEYS:
        return LeaseHeld(
            f"the keys of namespace {namespace} are being changed by {shown}",
            hint="run it again once that has ended; the lease expires if its process is gone",
            holder=holder,
            token=token,
        )
    return LeaseHeld(
        f"job {job} is leased by {shown} for another {left_s:.0f} s",
        hint="wait until it expires, or stop that process; nobody renews the lease of a process that is gone",
        holder=holder,
        token=token,
    )


def lost(job: str, namespace: str) -> LeaseLost:
    if job == KEYS:
        return LeaseLost(
            f"another change of the keys of namespace {namespace} has begun, so this one stops",
            hint="nothing is lost: let the other one end, then run kedge rekey --rewrite again",
        )
    return LeaseLost(
        f"this process no longer holds the lease of job {job}",
        hint="it expired, or another process took it over: stop, or take a new lease",
    )
