"""The index in SQLite: one file, many threads and processes, every commit synced (I1).

How the file is opened, shared and written to is in `sqlite_file`; what happens inside its transactions, in `writes`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kedge.errors import Corrupted, NoSpace
from kedge.index.group_commit import one_by_one
from kedge.index.rows import (
    BATCH,
    CHECKPOINT,
    CHUNK,
    EVENT,
    JOB,
    SEQ_BITS,
    checkpoint_of,
    chunk_of,
    event_of,
    find_chunks,
    job_of,
    metadata_filter,
)
from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus, Job, Lease
from kedge.ports import (
    CheckpointIds,
    Checkpoints,
    Chunk,
    Digests,
    EventChain,
    Events,
    Jobs,
    NewCheckpoint,
    Outcomes,
    PackUse,
    Problems,
    References,
    Seen,
)

from .closed_mark import has_event, newest_event
from .database import translated
from .file import SqliteFile
from .sweep import audit, integrity_problems, sweep
from .transactions import MAX_JOBS, check_holder
from .writes import missing

PAGE = 256  # rows a long walk reads at once
_LOOK_EVERY_S = 0.1  # for events of other processes


class SqliteIndex(SqliteFile):
    """`ports.Index` in a SQLite file."""

    row_bytes = 896  # fits without a page of its own

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        return self._write(partial(self._writes.commit, records, actor))

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        if self._path is None:
            return one_by_one(self, saves)
        self._check_room()
        outcomes = self._group.run_each([partial(self._writes.commit, (record,), actor) for record, actor in saves])
        return [outcome if isinstance(outcome, BaseException) else outcome[0] for outcome in outcomes]

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._find(checkpoint_id, "1")[0]

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        return self._find(checkpoint_id, "manifest")

    def _find(self, checkpoint_id: str, extra: str) -> tuple[Checkpoint, Any]:
        with self._reading() as db:
            row = db.execute(f"SELECT {CHECKPOINT}, {extra} FROM checkpoint WHERE id = ?", (checkpoint_id,)).fetchone()
            job = (
                row
                and db.execute(
                    "SELECT name FROM job WHERE no = ? AND ns_no = ?", (row[0] >> SEQ_BITS, self._ns)
                ).fetchone()
            )
        if not job:
            raise missing(checkpoint_id)
        return checkpoint_of(job[0], row), row[15]

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
        with self._reading() as db:
            if (span := self._span(db, job)) is None:
                return None
            row = db.execute(
                f"SELECT {CHECKPOINT}, manifest FROM checkpoint WHERE row BETWEEN ? AND ? AND status != 'corrupted' "
                + ("AND level = ? " if level else "")
                + "ORDER BY row DESC LIMIT 1",
                (*span, str(level)) if level else span,
            ).fetchone()
        return None if row is None else (checkpoint_of(job, row), row[15])

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        found: dict[str, tuple[Checkpoint, bytes]] = {}
        with self._reading() as db:
            for start in range(0, len(keys), BATCH):
                some = keys[start : start + BATCH]
                marks = ",".join("?" * len(some))
                rows = db.execute(
                    f"SELECT {CHECKPOINT}, manifest, key FROM idempotency JOIN checkpoint USING (row) "
                    f"WHERE job_no = (SELECT no FROM job WHERE ns_no = ? AND name = ?) AND key IN ({marks})",
                    (self._ns, job, *some),
                )
                found.update({row[16]: (checkpoint_of(job, row), row[15]) for row in rows})
        return found

    def find_next(self, job: str, after: int, limit: int) -> dict[str, tuple[Checkpoint, bytes]]:
        with self._reading() as db:
            if (span := self._span(db, job)) is None:
                return {}
            rows = db.execute(
                f"SELECT {CHECKPOINT}, manifest, key FROM checkpoint JOIN idempotency USING (row) "
                "WHERE row BETWEEN ? AND ? ORDER BY row",
                (span[0] + after + 1, min(span[0] + after + limit, span[1])),
            ).fetchall()
        return {row[16]: (checkpoint_of(job, row), row[15]) for row in rows}

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        found: dict[str, tuple[str, bytes]] = {}
        with self._reading() as db:
            for start in range(0, len(checkpoint_ids), BATCH):
                some = checkpoint_ids[start : start + BATCH]
                rows = db.execute(
                    "SELECT id, key, request_digest FROM checkpoint JOIN idempotency USING (row) "
                    f"JOIN job ON no = job_no WHERE id IN ({','.join('?' * len(some))}) AND ns_no = ?",
                    (*some, self._ns),
                )
                found.update({row[0]: (row[1], row[2]) for row in rows})
        return found

    def _span(self, db: sqlite3.Connection, job: str) -> tuple[int, int] | None:
        """First and last possible row of a job, whose number is its for ever."""
        number = self._numbers.get(job)
        if number is None:
            found = db.execute("SELECT no FROM job WHERE ns_no = ? AND name = ?", (self._ns, job)).fetchone()
            if found is None:
                return None
            if len(self._numbers) >= MAX_JOBS:
                self._numbers.clear()
            number = self._numbers[job] = found[0]
        return number << SEQ_BITS, (number + 1 << SEQ_BITS) - 1

    def list(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Checkpoints:
        conditions, parameters = metadata_filter(metadata or {})
        with self._reading() as db:
            if (span := self._span(db, job)) is None:
                return []
            # Kept inside the job: the rows beyond are those of other jobs, of other namespaces too.
            first = span[0] + max(after or 0, 0) + 1
            last = span[1] if before is None else min(span[0] + before - 1, span[1])
            if level is not None:
                conditions.append("level = ?")
                parameters.append(str(level))
            for name, value in (tags or {}).items():
                conditions.append("row IN (SELECT row FROM tag WHERE job_no = ? AND name = ? AND value = ?)")
                parameters += [span[0] >> SEQ_BITS, name, value]
            where = " AND ".join(["row BETWEEN ? AND ?", *conditions])
            order = "ASC" if after is not None or limit is None else "DESC"
            rows = db.execute(
                f"SELECT {CHECKPOINT} FROM checkpoint WHERE {where} ORDER BY row {order} LIMIT ?",
                (first, last, *parameters, -1 if limit is None else limit),
            ).fetchall()
        return [checkpoint_of(job, row) for row in (rows if order == "ASC" else reversed(rows))]

    def job(self, name: str) -> Job | None:
        row = self._one(f"SELECT {JOB} FROM job WHERE ns_no = ? AND name = ?", self._ns, name)
        return None if row is None else job_of(row)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        # Names are ASCII, so the names with a prefix are those between it and it followed by the last character.
        rows = self._all(
            f"SELECT {JOB} FROM job WHERE ns_no = ? AND name > ? AND name >= ? AND name < ? ORDER BY name LIMIT ?",
            self._ns, after, prefix, prefix + "\x7f", -1 if limit is None else limit,
        )  # fmt: skip
        return [job_of(row) for row in rows]

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self._write(partial(self._writes.delete, checkpoint_ids, even_pinned, actor), is_urgent=True)

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        return self._write(partial(self._writes.update, checkpoint_id, is_pinned, tags, status, actor))

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        return self._write(partial(self._writes.mark, seen, status, actor), is_urgent=True) if seen else []

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self._write(partial(self._writes.set_retention, job, policy_json, actor))

    # Leases, events

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self._write(partial(self._writes.acquire_lease, job, holder, ttl_s))

    def renew_lease(self, lease: Lease) -> None:
        self._write(partial(self._writes.renew_lease, lease))

    def release_lease(self, lease: Lease) -> None:
        self._write(partial(self._writes.release_lease, lease))

    def append_event(self, action: str, *, actor: str, job: str | None = None, detail: str = "{}") -> None:
        self._write(partial(self._writes.event, action, actor, job, None, detail), is_urgent=True)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        order = "DESC" if newest else "ASC"
        rows = self._all(
            f"SELECT {EVENT} FROM event WHERE id > ? AND id < ? AND ns_no = ? ORDER BY id {order} LIMIT ?",
            after, 2**63 - 1 if before is None else before, self._ns, limit,
        )  # fmt: skip
        return [event_of(row) for row in (reversed(rows) if newest else rows)]

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

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        with self._reading() as db:
            chunks = map(chunk_of, find_chunks(db, self._ns, CHUNK, digests))
            return {chunk.digest: chunk for chunk in chunks}

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        return self._walk(self._all, after, with_chunks)

    def _walk(
        self, fetch: Callable[..., Sequence[Any]], after: int = 0, with_chunks: bool = True
    ) -> Iterator[tuple[int, Checkpoint, bytes]]:
        condition = "AND has_chunks " if with_chunks else ""
        while True:
            rows = fetch(
                f"SELECT {CHECKPOINT}, manifest, (SELECT name FROM job WHERE no = row >> 32 AND ns_no = ?) "
                f"FROM checkpoint WHERE row > ? {condition}ORDER BY row LIMIT {PAGE}",
                self._ns, after,
            )  # fmt: skip
            for row in rows:
                if row[16] is not None:  # else of another namespace
                    yield row[0], checkpoint_of(row[16], row), row[15]
            if not rows:
                return
            after = rows[-1][0]

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
                manifests = partial(self._walk, partial(_fetch, connection))
                stop = (lambda: False) if is_last else (lambda: self._pool.is_paused)
                if (swept := sweep(connection, self._ns, manifests, references, stop, check)) is not None:
                    return swept
        raise AssertionError("the last sweep never stops")

    def packs(self) -> Sequence[PackUse]:
        rows = self._all(
            "SELECT pack.name, count(*), sum(stored_bytes) FROM chunk JOIN pack ON pack.no = pack_no GROUP BY pack_no"
        )
        return [PackUse(*row) for row in rows]

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        rows = self._all(
            f"SELECT {CHUNK} FROM chunk WHERE pack_no = (SELECT no FROM pack WHERE name = ?) AND ns_no = ? "
            "ORDER BY offset",
            pack, self._ns,
        )  # fmt: skip
        return [chunk_of(row) for row in rows]

    def is_pack_used(self, pack: str) -> bool:
        found = self._one("SELECT 1 FROM chunk WHERE pack_no = (SELECT no FROM pack WHERE name = ?) LIMIT 1", pack)
        return found is not None

    def condemn(self, pack: str) -> bool:
        self._check_identity()  # what a repaired index names, the one it replaced may not (I3)
        return not self.is_pack_used(pack)  # gc asks while it holds the pack's lock: nobody is about to name it

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> Digests:
        return self._write(partial(self._writes.mark_damaged, chunks, is_damaged), is_urgent=True) if chunks else []

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str) -> int:
        return self._write(partial(self._writes.relocate, chunks, from_pack), is_urgent=True)

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

    def keyring(self) -> str | None:
        row = self._one("SELECT value FROM meta WHERE key = ?", f"keyring:{self.namespace}")
        return None if row is None else row[0]

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        is_done = self._write(partial(self._writes.set_keyring, keyring, key_id, replacing, actor, lease_token))
        self.is_encrypted = self.is_encrypted or is_done
        return is_done

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str) -> bool:
        return self._write(partial(self._writes.reseal, record, replacing, actor))

    def totals(self) -> Mapping[str, int]:
        of_jobs = self._one(
            "SELECT count(*), total(checkpoints), total(size_bytes), total(stored_bytes) FROM job WHERE ns_no = ?",
            self._ns,
        )
        of_chunks = self._one(
            "SELECT count(*), total(size_bytes), total(stored_bytes), total(length(data)) FROM chunk WHERE ns_no = ?",
            self._ns,
        )
        names = (
            "jobs",
            "checkpoints",
            "size_bytes",
            "stored_bytes",
            "chunks",
            "plain_bytes",
            "chunk_bytes",
            "inline_bytes",
        )
        return {name: int(value) for name, value in zip(names, (*of_jobs, *of_chunks), strict=True)}

    def integrity_problems(self) -> Problems:
        with self._reading() as db:
            return integrity_problems(db)


def _fetch(connection: sqlite3.Connection, sql: str, *parameters: object) -> Sequence[Any]:
    return connection.execute(sql, parameters).fetchall()
