"""The index in PostgreSQL, for many machines.

The same contract as SQLite's. Writers lock what they change (`locks`), waiting savers of a process share a transaction
(`group_commit`), readers see the newest state and wait for nobody (I6, `reads`). Saves are committed by a function of
the server, a whole batch in one round trip (`batch`); what that leaves alone, and all other changes, is done statement
by statement, by one writer of the namespace at a time (`writes`). The schema is in `sql`.

An answer may be lost between a server that commits and us. A save is then simply committed again: its ID is its own,
and "that ID exists, with this digest" means that it arrived the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psycopg

from kedge.errors import LeaseHeld, OutcomeUnknown, StorageError
from kedge.index.changes import SqlChanges
from kedge.index.group_commit import REFUSALS, GroupCommit, Save, Waiting, half_as_long, one_by_one
from kedge.index.rows import Row, late_manifests
from kedge.index.sqlite.connections import survive_forks
from kedge.index.writes import SqlWrites
from kedge.model import Checkpoint, Lease
from kedge.ports import (
    KEYS,
    CheckpointIds,
    Checkpoints,
    NewCheckpoint,
    Outcomes,
    References,
    Update,
)

from .batch import (
    MOST_DELETED,
    Delete,
    Quick,
    ReleaseLease,
    RenewLease,
    Retag,
    TakeLease,
    commit_together,
    lane_of,
)
from .dialect import for_postgres
from .reads import PostgresReads
from .server import CHANNEL, Connection, Server, end_if_suspended, typed
from .writes import PostgresWrites

T = TypeVar("T")

_LOST_ANSWERS = 3  # in a row, until a save gives up
_LANES = 2  # of a process: as many batches are under way at once, where commits are slow
_SLOW_S = 0.004  # a faster commit leaves no time in which the processor would have nothing else to do
_TIDY_AFTER = 1000  # operations of a process; whoever asks for events does the same
_TOLD_S = 0.1  # so long others tell who waits, too, after the first has: they may have asked before who waits
_NOTIFY = (
    "UPDATE kedge.awaited SET until = least(until, clock_timestamp() + make_interval(secs => %s)) "
    "WHERE ns_no = %s AND until > clock_timestamp() RETURNING pg_notify(%s, %s)"
)
_LATE_MANIFESTS = late_manifests(  # an event is in one of the two tables, whoever moves it
    "(SELECT ns_no, id, checkpoint FROM main.event UNION ALL "
    f"SELECT ns_no, {2**63 - 1}, checkpoint FROM main.unnumbered)"
)


class PostgresIndex(PostgresReads, SqlChanges):
    """`ports.Index` in a PostgreSQL database whose schema is there (`Server.migrate`)."""

    row_bytes = 8192  # a longer one is a few pages; a row each for shorter ones costs more than they share

    def __init__(self, server: Server, *, namespace: str = "default") -> None:
        super().__init__(server, namespace)
        self._lanes = self._new_lanes()
        self._untidy = 0  # operations since this process numbered events last
        survive_forks(self)

    def _new_lanes(self) -> list[GroupCommit]:
        return [GroupCommit(self._run_batch, gather=half_as_long) for _ in range(_LANES)]

    def before_fork(self) -> None:
        return None  # connections of the parent are left alone in the child

    def after_fork(self, *, is_child: bool) -> None:
        if is_child:
            self._lanes = self._new_lanes()

    def close(self) -> None:
        self._server.close()

    # Transactions

    def _write(self, operation: Callable[[PostgresWrites], T] | Save) -> T:
        self._server.check_open()
        return self._lane(operation).run(operation)

    def _lane(self, operation: object) -> GroupCommit:
        """What locks the same has the same one: in another it would wait for a whole commit."""
        is_slow = max(lane.took_s for lane in self._lanes) > _SLOW_S
        return self._lanes[lane_of(operation) % len(self._lanes) if is_slow else 0]

    def _write_again(self, operation: Callable[[PostgresWrites], T] | Save) -> T:
        """For what may be done twice: also when the answer to a commit was lost."""
        for _ in range(_LOST_ANSWERS):
            try:
                return self._write(operation)
            except OutcomeUnknown:
                continue
        return self._write(operation)

    def _change(self, change: Callable[[SqlWrites], T], *, is_urgent: bool = False, is_repeatable: bool = True) -> T:
        return self._write_again(change) if is_repeatable else self._write(change)

    def _run_batch(self, batch: Sequence[Waiting[Any]]) -> None:
        """All operations in one transaction or two; each gets its result, its refusal, or the failure of all."""
        left = list(batch)  # what is not done yet
        try:
            self._server.backoff.run(lambda: self._run_transaction(left))
        except Exception as failure:  # noqa: BLE001 - goes to every caller: nothing was acknowledged
            for waiting in left:
                waiting.error = typed(failure, self._server.name)
        except BaseException:  # Ctrl-C belongs to the thread that got it; the others hear what it means for them
            for waiting in left:
                waiting.error = StorageError(f"{self._server.name}: the commit was interrupted", hint="save again")
            raise

        else:
            self._untidy += len(batch)
            if self._untidy >= _TIDY_AFTER:
                self._untidy = 0
                with suppress(StorageError):  # what was committed is; the next one, or who reads events, tidies up
                    self.tidy()

    def _run_transaction(self, left: list[Waiting[Any]]) -> None:
        """May be run again as long as no commit was sent: Unavailable. Afterwards callers get OutcomeUnknown."""
        with self._server.lend(plans="once") as db:
            left[:] = self._run_quickly(db, left)  # what is done is not done again
            if not left:
                return
            if not self._run_together(db, left):
                self._run_apart(db, left)
            try:
                db.execute("COMMIT")
            except psycopg.OperationalError as error:
                self._lose(db, left, error)
                return
            self._announce(db)

    def _announce(self, db: Connection) -> None:
        """Wake who waits for events. Not in the commit itself: those that notify wait for each other in the server.

        Once for all that wait: who waits on says so again.
        """
        with suppress(psycopg.Error):  # who hears nothing looks by itself
            db.execute(_NOTIFY, (_TOLD_S, self._ns, CHANNEL, self.namespace))

    def _lose(self, db: Connection, batch: Sequence[Waiting[Any]], error: Exception) -> None:
        lost = OutcomeUnknown(f"{self._server.name}: {error}", hint="look whether it was done, then do it again")
        for waiting in batch:
            waiting.error = waiting.error or lost
        db.close()
        self._server.distrust()

    def _run_quickly(self, db: Connection, batch: Sequence[Waiting[Any]]) -> Sequence[Waiting[object]]:
        """The quick way, for saves and leases with which nothing is the matter; answers what is still to be done."""
        operations = [waiting.operation for waiting in batch if isinstance(waiting.operation, Quick)]
        if len(operations) < len(batch):
            return batch
        for waiting in batch:
            waiting.error = None
        try:
            outcomes, is_awaited = commit_together(db, operations, self._ns, self.namespace)
        except Exception as error:  # noqa: BLE001 - the other ways meet it again, and tell whose it is
            if not db.closed:
                db.execute("ROLLBACK")
                return batch
            self._lose(db, batch, error)
            return ()
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                waiting.error = outcome
            elif outcome is not None:
                waiting.result = outcome[0]
        if is_awaited:
            self._announce(db)
        return [waiting for waiting, outcome in zip(batch, outcomes, strict=True) if outcome is None]

    def _begin(self, db: Connection, *, is_careful: bool, pipeline: psycopg.Pipeline | None = None) -> PostgresWrites:
        db.execute("BEGIN")
        end_if_suspended(db)
        db.execute("SET LOCAL plan_cache_mode = force_custom_plan")
        return PostgresWrites(db, self._ns, self.namespace, is_careful=is_careful, pipeline=pipeline)

    def _run_together(self, db: Connection, batch: Sequence[Waiting[Any]]) -> bool:
        """The usual way: operations refuse before they change anything. False if one failed half-way."""
        try:
            with db.pipeline() as pipeline:  # what nobody waits for goes out together
                writes = self._begin(db, is_careful=False, pipeline=pipeline)
                for waiting in batch:
                    waiting.error = None
                    try:
                        waiting.result = _result_of(waiting.operation, writes)
                    except REFUSALS as refusal:
                        waiting.error = refusal
        except Exception:
            if db.closed:
                raise
            db.execute("ROLLBACK")  # the culprit is met again, alone, in _run_apart
            return False
        return True

    def _run_apart(self, db: Connection, batch: Sequence[Waiting[Any]]) -> None:
        """Each in a savepoint, so that what one of them did half-way is undone and the others do not suffer."""
        writes = self._begin(db, is_careful=True)
        for waiting in batch:
            waiting.error = None
            writes.savepoint()
            try:
                waiting.result = _result_of(waiting.operation, writes)
            except psycopg.OperationalError:
                raise
            except Exception as error:  # noqa: BLE001 - handed to its caller
                waiting.error = typed(error, self._server.name)
                writes.undo()

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        return self._write_again(Save(records, actor))

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        self._server.check_open()
        outcomes: list[Checkpoints | BaseException]
        operations = [Save((record,), actor) for record, actor in saves]
        outcomes = self._lane(operations[0]).run_each(operations) if operations else []
        answers: Outcomes = []
        for (record, actor), outcome in zip(saves, outcomes, strict=True):
            if isinstance(outcome, OutcomeUnknown):
                answers += one_by_one(self, [(record, actor)])
            else:
                answers.append(outcome if isinstance(outcome, BaseException) else outcome[0])
        return answers

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        if update.tags and update == Update(tags=update.tags):
            return self._write_again(Retag(checkpoint_id, update, actor))
        return super().update(checkpoint_id, update, actor=actor)

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        if len(checkpoint_ids) <= MOST_DELETED:
            return self._write(Delete(checkpoint_ids, even_pinned, actor))
        return super().delete(checkpoint_ids, even_pinned=even_pinned, actor=actor)

    # Leases

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        if job == KEYS:
            return super().acquire_lease(job, holder, ttl_s)
        taking = TakeLease(job, holder, ttl_s)
        try:
            return self._write(taking)
        except OutcomeUnknown as unknown:
            try:
                return self._write_again(taking)
            except LeaseHeld as held:
                if held.holder != holder:
                    raise
                raise unknown from held  # it may be ours, and runs out by itself

    def renew_lease(self, lease: Lease) -> None:
        if lease.job == KEYS:
            super().renew_lease(lease)
        else:
            self._write_again(RenewLease(lease))

    def release_lease(self, lease: Lease) -> None:
        if lease.job == KEYS:
            super().release_lease(lease)
        else:
            self._write_again(ReleaseLease(lease.job, lease.token))

    # Chunks and packs

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        """Marks go to a temporary table. Writers go on while it fills; the end of the transaction locks them out."""
        return self._server.run(lambda db: self._sweep(db, references, lease_token))

    def _sweep(self, db: Connection, references: References, lease_token: int | None) -> tuple[int, int]:
        with db.transaction():
            # For this transaction alone, which is all that pgbouncer grants.
            db.execute("CREATE TEMP TABLE mark (digest bytea PRIMARY KEY) ON COMMIT DROP")

            def mark(digests: Iterable[bytes]) -> None:
                some = [*digests]
                db.execute("INSERT INTO pg_temp.mark SELECT unnest(%s::bytea[]) ON CONFLICT DO NOTHING", (some,))

            def fetch(sql: str, *parameters: object) -> Sequence[Row]:
                return db.execute(for_postgres(sql), parameters, binary=True).fetchall()

            seen = fetch("SELECT last_event FROM main.namespace WHERE no = ?", self._ns)[0][0]
            for _, checkpoint, manifest in self._walk(fetch):
                mark(references(checkpoint.id, manifest))
            end_if_suspended(db)
            # From here on nobody commits in this namespace: a save has come before, and its references are found
            # through its event, or it comes after, and hears that chunks are gone (I3).
            PostgresWrites(db, self._ns, self.namespace, is_careful=True).check_holder(lease_token)
            for checkpoint_id, manifest in fetch(_LATE_MANIFESTS, self._ns, seen):
                mark(references(checkpoint_id, manifest))
            db.execute(
                "INSERT INTO pg_temp.mark SELECT base FROM kedge.chunk WHERE ns_no = %s AND base IS NOT NULL "
                "ON CONFLICT DO NOTHING",
                (self._ns,),
            )
            ((count, size),) = fetch(
                "WITH gone AS (DELETE FROM main.chunk WHERE ns_no = ? AND NOT EXISTS "
                "(SELECT 1 FROM pg_temp.mark WHERE mark.digest = chunk.digest) RETURNING stored_bytes) "
                "SELECT count(*), coalesce(sum(stored_bytes), 0)::bigint FROM gone",
                self._ns,
            )
        return count, size

    def condemn(self, pack: str) -> bool:
        return self._server.run(lambda db: self._condemn(db, pack))

    def _condemn(self, db: Connection, pack: str) -> bool:
        with db.transaction():
            end_if_suspended(db)
            # The row's lock keeps out whoever is about to name the pack; who has named it has committed.
            db.execute(
                "INSERT INTO kedge.pack (name) VALUES (%s) ON CONFLICT (name) DO UPDATE SET name = excluded.name",
                (pack,),
            )
            changed = db.execute(
                "UPDATE kedge.pack SET is_condemned = true WHERE name = %s "
                "AND NOT EXISTS (SELECT 1 FROM kedge.chunk WHERE pack_no = no) "
                "AND NOT EXISTS (SELECT 1 FROM kedge.record WHERE pack_no = no)",
                (pack,),
            )
            return changed.rowcount == 1

    # Keys

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        try:
            is_done = self._write(lambda writes: writes.set_keyring(keyring, key_id, replacing, actor, lease_token))
        except OutcomeUnknown:
            is_done = self.keyring() == keyring
        self.is_encrypted = self.is_encrypted or is_done
        return is_done

    def refuse_older(self) -> None:
        """Nothing here knows what another database had."""

    def accept(self, closed: Mapping[str, str]) -> None:
        if closed != self.closed_namespaces():
            self._write_again(lambda writes: writes.set_locked(closed))

    def make_room(self) -> bool:
        return False  # the disk is the server's

    def scrub(self) -> None:
        """The database's own vacuum does that, in its time."""


def _result_of(operation: Callable[[PostgresWrites], T] | Save, writes: PostgresWrites) -> T | Checkpoints:
    return writes.commit(*operation) if isinstance(operation, Save) else operation(writes)
