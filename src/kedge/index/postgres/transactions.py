"""A write transaction on PostgreSQL: how it begins and ends, the events it appends, and leases. As `transactions`.

It holds the row of its namespace, so that nobody else writes there meanwhile: between a check and the change that
relies on it nothing can happen.
"""

from __future__ import annotations

import json

from kedge.index.event_chain import chain_of
from kedge.index.rows import Row
from kedge.index.sqlite.transactions import held, keys_no, lost, now_us
from kedge.model import Lease
from kedge.ports import KEYS, NewCheckpoint

from .server import CHANNEL, Connection

_LEASE = "token, holder, extract(epoch FROM until - clock_timestamp())::float8, is_live"


class PostgresTransaction:
    """One transaction.

    `is_careful`: look whether an ID is taken before using it. Otherwise the database refuses, and fails the
    transaction, which is then run again with care: IDs are drawn at random, and saves need not wait for an answer each.
    """

    def __init__(self, db: Connection, ns_no: int, namespace: str, *, is_careful: bool) -> None:
        self._db = db
        self._ns = ns_no
        self._namespace = namespace
        self._is_careful = is_careful
        self._has_events = False
        head = self._one("SELECT last_event, chain FROM kedge.namespace WHERE no = %s FOR UPDATE", ns_no)
        assert head is not None
        self._head: tuple[int, bytes] = (head[0], head[1])

    def _one(self, sql: str, *parameters: object) -> Row | None:
        return self._db.execute(sql, parameters).fetchone()

    def _do(self, sql: str, *parameters: object) -> None:
        """Without waiting for it, in a pipeline: what goes wrong is told by a later statement."""
        self._db.execute(sql, parameters)

    def savepoint(self) -> tuple[int, bytes]:
        self._do("SAVEPOINT one")
        return self._head

    def undo(self, head: tuple[int, bytes]) -> None:
        self._do("ROLLBACK TO one")
        self._head = head

    def finish(self) -> None:
        """Before the commit: where the chain of events ends now. Listeners hear of it when it is durable."""
        if self._has_events:
            self._do("UPDATE kedge.namespace SET last_event = %s, chain = %s WHERE no = %s", *self._head, self._ns)
            self._do("SELECT pg_notify(%s, %s)", CHANNEL, f"{self._namespace}:{self._head[0]}")

    # Events

    def event(
        self, action: str, actor: str, job: str | None = None, checkpoint: str | None = None, detail: str = "{}"
    ) -> None:
        number, at_us = self._head[0] + 1, now_us()
        chain = chain_of(self._head[1], number, at_us, self._ns, actor, action, job, checkpoint, detail)
        self._do(
            "INSERT INTO kedge.event VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            self._ns, number, at_us, actor, action, job, checkpoint, detail, chain,
        )  # fmt: skip
        self._head = (number, chain)
        self._has_events = True

    def job_no(self, name: str) -> int:
        """The number of a job, which is made if there is none."""
        found = self._one("SELECT no FROM kedge.job WHERE ns_no = %s AND name = %s", self._ns, name) or self._one(
            "INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, "
            "updated_us) VALUES (%s, %s, 0, 0, 0, 0, %s, %s) RETURNING no",
            self._ns, name, now_us(), now_us(),
        )  # fmt: skip
        assert found is not None
        return int(found[0])

    # Leases, by the clock of the server: that of the transaction would stand still while it waits its turn

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        found = self._lease(job)
        if found and found[3] and found[2] > 0:
            raise held(job, self._namespace, found[0], found[1], found[2])
        token = (found[0] if found else 0) + 1
        self._do(
            "INSERT INTO kedge.lease VALUES (%s, %s, %s, clock_timestamp() + make_interval(secs => %s), true) "
            "ON CONFLICT (job_no) DO UPDATE SET token = excluded.token, holder = excluded.holder, "
            "until = excluded.until, is_live = true",
            self._leased_no(job), token, holder, ttl_s,
        )  # fmt: skip
        self.event("lease", holder, job or None, detail=json.dumps({"token": token}))
        return Lease(job, token, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        found = self._lease(lease.job)
        if not found or found[0] != lease.token or not found[3]:
            raise lost(lease.job, self._namespace)
        self._do(
            "UPDATE kedge.lease SET until = clock_timestamp() + make_interval(secs => %s) WHERE job_no = %s",
            lease.ttl_s, self._leased_no(lease.job),
        )  # fmt: skip

    def release_lease(self, lease: Lease) -> None:
        found = self._lease(lease.job)
        if found and found[0] == lease.token and found[3]:
            self._do("UPDATE kedge.lease SET is_live = false WHERE job_no = %s", self._leased_no(lease.job))
            self.event("release", lease.holder, lease.job or None, detail=json.dumps({"token": lease.token}))

    def _leased_no(self, job: str) -> int:
        """What stands for a job in the table of leases; for `KEYS`, a number that no job has."""
        return keys_no(self._ns) if job == KEYS else self.job_no(job)

    def _lease(self, job: str) -> Row | None:
        if job == KEYS:
            return self._one(f"SELECT {_LEASE} FROM kedge.lease WHERE job_no = %s", keys_no(self._ns))
        return self._one(
            f"SELECT {_LEASE} FROM kedge.lease JOIN kedge.job ON no = job_no WHERE ns_no = %s AND name = %s",
            self._ns, job,
        )  # fmt: skip

    def check_holder(self, token: int | None) -> None:
        """LeaseLost if a change of keys, of this lease, is no longer the current one: another may have begun (I10)."""
        if token is None:
            return
        found = self._lease(KEYS)
        if found is None or found[0] != token or not found[3]:
            raise lost(KEYS, self._namespace)


def check_lease(new: NewCheckpoint, namespace: str, lease: Row | None) -> bool:
    """Refuse a write without the right to it (I5); answers whether it ends an expired lease."""
    token, holder, left_s, is_live = lease or (None, "", 0.0, False)
    if new.lease_token is not None:
        if not is_live or token != new.lease_token:
            raise lost(new.job, namespace)
        return False
    if is_live and left_s > 0:
        raise held(new.job, namespace, token, holder, left_s)
    return bool(is_live)
