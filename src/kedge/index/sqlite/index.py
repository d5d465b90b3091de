"""The index in SQLite: one file, many threads and processes, every commit synced (I1).

How the file is opened, shared and written to is in `file`; what is asked of it, and what happens inside its
transactions, in `index.reads` and `index.writes`, which PostgreSQL shares.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from functools import partial

from kedge.errors import Corrupted, NoSpace, Validation
from kedge.index.group_commit import Save, one_by_one
from kedge.index.reads import Conditions, SqlReads
from kedge.index.rows import Row
from kedge.model import Checkpoint, CheckpointStatus, EventChain, Lease
from kedge.ports import (
    CheckpointIds,
    Checkpoints,
    Chunk,
    Digests,
    NewCheckpoint,
    Outcomes,
    Problems,
    RecordPlace,
    References,
    Seen,
    Selection,
    Update,
)
from kedge.ports.selection import PATH_HINT

from .closed_mark import has_event, newest_event
from .database import translated
from .file import SqliteFile
from .leases import check_holder
from .sweep import audit, integrity_problems, sweep
from .writes import MAX_JOBS

_LOOK_EVERY_S = 0.1  # for events of other processes


class SqliteIndex(SqliteFile, SqlReads):
    """`ports.Index` in a SQLite file."""

    row_bytes = 896  # fits without a page of its own

    # How it is read

    def _fetch(self, db: sqlite3.Connection, sql: str, *parameters: object) -> Sequence[Row]:
        return db.execute(sql, parameters).fetchall()

    def _among(self, column: str, values: Sequence[str] | Sequence[bytes]) -> tuple[str, Sequence[object]]:
        return f"{column} IN ({','.join('?' * len(values))})", values

    def _metadata_filter(self, wanted: Selection) -> Conditions:
        conditions: list[str] = []
        parameters: list[object] = []
        for names, value in wanted.metadata_paths():
            path = "$" + "".join(f'."{name}"' for name in names)
            if any('"' in name or "\0" in name for name in names):
                raise Validation(f"{'.'.join(names)!r} is not a metadata path", hint=PATH_HINT)
            if value is None or isinstance(value, bool):
                conditions.append("json_type(metadata, ?) = ?")
                parameters += [path, "null" if value is None else str(value).lower()]
                continue
            kinds = "('text')" if isinstance(value, str) else "('integer', 'real')"
            conditions.append(f"json_type(metadata, ?) IN {kinds} AND json_extract(metadata, ?) = ?")
            parameters += [path, path, value]
        return conditions, parameters

    def _number_of(self, db: sqlite3.Connection, job: str) -> int | None:
        """Asked for once: the number of a job is its own for ever."""
        number = self._numbers.get(job)
        if number is None and (number := super()._number_of(db, job)) is not None:
            if len(self._numbers) >= MAX_JOBS:
                self._numbers.clear()
            self._numbers[job] = number
        return number

    def _newest_event(self, db: sqlite3.Connection) -> int:
        return newest_event(db)[0]

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        return self._write(Save(records, actor))

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        if self._path is None:
            return one_by_one(self, saves)
        self._check_room()
        outcomes = self._group.run_each([Save((record,), actor) for record, actor in saves])
        return [outcome if isinstance(outcome, BaseException) else outcome[0] for outcome in outcomes]

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self._write(partial(self._writes.delete, checkpoint_ids, even_pinned, actor), is_urgent=True)

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        return self._write(partial(self._writes.update, checkpoint_id, update, actor))

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        return self._write(partial(self._writes.mark, seen, status, actor), is_urgent=True) if seen else []

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self._write(partial(self._writes.set_retention, job, policy_json, actor))

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        self._write(partial(self._writes.reserve_numbers, job, last_seq))

    # Leases, events

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self._write(partial(self._writes.acquire_lease, job, holder, ttl_s))

    def renew_lease(self, lease: Lease) -> None:
        self._write(partial(self._writes.renew_lease, lease))

    def release_lease(self, lease: Lease) -> None:
        self._write(partial(self._writes.release_lease, lease))

    def append_event(self, action: str, *, actor: str, job: str | None = None, detail: str = "{}") -> None:
        self._write(partial(self._writes.event, action, actor, job, None, detail), is_urgent=True)

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self.events(after, 1):
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LOOK_EVERY_S))
        return True

    def audit(self, until: int | None = None) -> EventChain:
        with self._reading() as db:
            return audit(db, until)

    # Chunks and packs

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        self._check_writable()
        with translated(self._name):
            if self._path is None:
                with self._memory_lock:
                    check = partial(check_holder, self._ns, self.namespace, lease_token)
                    swept = sweep(self._connection, self._ns, self.manifests, references, lambda: False, check)
                    assert swept is not None
                    return swept
            self._say_open()
            try:
                return self._sweep(references, lease_token)
            except NoSpace:
                if not self.make_room():
                    raise
                return self._sweep(references, lease_token)

    def _sweep(self, references: References, lease_token: int | None) -> tuple[int, int]:
        check = partial(check_holder, self._ns, self.namespace, lease_token)
        for is_last in (False, False, True):
            with self._reading() as connection:
                # On its own connection: a fork waits for it to come back, and would keep others from being lent.
                manifests = partial(self._walk, partial(self._fetch, connection))
                stop = (lambda: False) if is_last else (lambda: self._pool.is_paused)
                if (swept := sweep(connection, self._ns, manifests, references, stop, check)) is not None:
                    return swept
        raise AssertionError("the last sweep never stops")

    def condemn(self, pack: str) -> bool:
        self._check_identity()  # what a repaired index names, the one it replaced may not (I3)
        number = self._one("SELECT no FROM pack WHERE name = ?", pack)
        return number is None or not any(  # gc asks while it holds the pack's lock: nobody is about to name it
            self._one(f"SELECT 1 FROM {table} WHERE pack_no = ? LIMIT 1", *number) for table in ("chunk", "record")
        )

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> Digests:
        return self._write(partial(self._writes.mark_damaged, chunks, is_damaged), is_urgent=True) if chunks else []

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str, records: Sequence[RecordPlace] = ()) -> int:
        return self._write(partial(self._writes.relocate, chunks, from_pack, records), is_urgent=True)

    def set_recorded(self, places: Sequence[RecordPlace], chunks: Sequence[Chunk], *, up_to: int) -> None:
        self._write(partial(self._writes.set_recorded, places, chunks, up_to))

    # What the store once had

    def refuse_older(self) -> None:
        if self._state is None:
            return
        with self._reading() as db:
            said = self._state.read()
            if not has_event(db, said.event, said.chain):
                raise Corrupted(
                    f"{self._name} is older than what is stored: it does not know event {said.event:,}",
                    hint="put the newer one back, or run kedge rebuild, which adds what the packs know",
                )

    def accept(self) -> None:
        if self._state is None:
            return
        with self._reading() as db:
            newest = newest_event(db)
        with self._state.alone():
            self._state.accept(*newest)

    # Keys

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        is_done = self._write(partial(self._writes.set_keyring, keyring, key_id, replacing, actor, lease_token))
        self.is_encrypted = self.is_encrypted or is_done
        return is_done

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str, envelope: str | None = None) -> bool:
        return self._write(partial(self._writes.reseal, record, replacing, actor, envelope))

    def integrity_problems(self) -> Problems:
        with self._reading() as db:
            return integrity_problems(db)
