"""Reading from an index in a database, in statements that SQLite and PostgreSQL share.

They are written in SQLite's dialect, with tables as `main.table`; `postgres.dialect` translates them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from kedge.errors import NotFound
from kedge.model import Checkpoint, Job
from kedge.ports import ALL, Checkpoints, Chunk, Events, Jobs, PackUse, SavedRow, Selection, Unrecorded
from kedge.ports.record import LAST_SEQ, checkpoint_of, record_from_row

from .rows import BATCH, CHECKPOINT, CHUNK, EVENT, JOB, Row, chunk_of, event_of, job_of

PAGE = 256  # rows per read of a long walk
NO_LIMIT = 1 << 62

Conditions = tuple[list[str], list[object]]  # with their parameters
Fetch = Callable[..., Sequence[Row]]  # (statement, *parameters)
Keyed = dict[str, tuple[Checkpoint, bytes]]

_OF_JOB = 'main.checkpoint c JOIN main.job j ON j.no = c."row" >> 32'
_SAVED = (
    f"SELECT {CHECKPOINT}, j.name, has_chunks, manifest, i.key, i.request_digest FROM {_OF_JOB} "
    'LEFT JOIN main.idempotency i ON i."row" = c."row"'
)
_TOTALS = ("jobs", "checkpoints", "size_bytes", "stored_bytes", "chunks", "plain_bytes", "chunk_bytes", "inline_bytes")


class FirstRow(NamedTuple):
    """An SQL expression for a job's number << 32: the row before its first one."""

    sql: str
    parameters: tuple[object, ...]


def _within(base: FirstRow, first: int, last: int) -> tuple[str, tuple[object, ...]]:
    """Return a condition for these sequence numbers. Rows beyond them belong to other jobs, even other namespaces."""
    bounds = (*base.parameters, first, *base.parameters, min(last, LAST_SEQ))
    return f'"row" BETWEEN {base.sql} + ? AND {base.sql} + ?', bounds


class SqlReads:
    """The reading methods of `ports.Index` that are the same in every database."""

    namespace: str
    written_by: str
    _ns: int
    _JOBS = "main.job"  # with correct counters

    # Implemented by each database

    def _reading(self) -> AbstractContextManager[Any]:
        """Open what `_fetch` reads from. All reads in one block see the same job numbers."""
        raise NotImplementedError

    def _fetch(self, db: Any, sql: str, *parameters: object) -> Sequence[Row]:
        raise NotImplementedError

    def _among(self, column: str, values: Sequence[str] | Sequence[bytes]) -> tuple[str, Sequence[object]]:
        """Return a condition and its parameters: the column has one of at most BATCH values."""
        raise NotImplementedError

    def _metadata_filter(self, wanted: Selection) -> Conditions:
        """Return conditions for {"a.b": value}: path and value are bound, and types are compared, too."""
        raise NotImplementedError

    def _newest_event(self, db: Any) -> int:
        """Return a number: all events of this namespace up to it are visible, and later ones get higher numbers."""
        raise NotImplementedError

    def _all(self, sql: str, *parameters: object) -> Sequence[Row]:
        with self._reading() as db:
            return self._fetch(db, sql, *parameters)

    def _where_among(
        self, db: object, sql: str, column: str, values: Sequence[str] | Sequence[bytes], *parameters: object
    ) -> list[Row]:
        """Return the rows whose column has one of any number of values: `sql` says {among} where it asks that."""
        rows: list[Row] = []
        for start in range(0, len(values), BATCH):
            among, operands = self._among(column, values[start : start + BATCH])
            rows += self._fetch(db, sql.format(among=among), *parameters, *operands)
        return rows

    def _one(self, sql: str, *parameters: object) -> Row | None:
        rows = self._all(sql, *parameters)
        return rows[0] if rows else None

    # Checkpoints

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._find(checkpoint_id, "NULL")[0]

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        return self._find(checkpoint_id, "manifest")

    def _find(self, checkpoint_id: str, extra: str) -> tuple[Checkpoint, Any]:
        sql = f"SELECT {CHECKPOINT}, j.name, {extra} FROM {_OF_JOB} WHERE c.id = ? AND ns_no = ?"
        with self._reading() as db:
            rows = self._fetch(db, sql, checkpoint_id, self._ns)
        for *columns, job, value in rows:
            return checkpoint_of(job, columns), value
        raise missing(checkpoint_id)

    def changed_jobs(self, after: int, limit: int) -> Sequence[tuple[int, str | None]] | None:
        return None

    def find(self, job: str, keys: Sequence[str] | range) -> Keyed:
        if isinstance(keys, range):
            return self._find_within(job, keys)
        sql = (
            f'SELECT {CHECKPOINT}, manifest, key FROM main.idempotency JOIN main.checkpoint c USING ("row") '
            "WHERE job_no = (SELECT no FROM main.job WHERE ns_no = ? AND name = ?) AND {among}"
        )
        with self._reading() as db:
            return _keyed(job, self._where_among(db, sql, "key", keys, self._ns, job))

    def _find_within(self, job: str, numbers: range) -> Keyed:
        with self._reading() as db:
            if (base := self._first_row(db, job)) is None:
                return {}
            is_within, bounds = _within(base, numbers.start, numbers.stop - 1)
            rows = self._fetch(
                db,
                f"SELECT {CHECKPOINT}, manifest, key FROM main.checkpoint c "
                f'JOIN main.idempotency USING ("row") WHERE {is_within} ORDER BY "row"',
                *bounds,
            )
        return _keyed(job, rows)

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        sql = (
            'SELECT id, key, request_digest FROM main.checkpoint JOIN main.idempotency USING ("row") '
            "JOIN main.job ON no = job_no WHERE ns_no = ? AND {among}"
        )
        with self._reading() as db:
            rows = self._where_among(db, sql, "id", checkpoint_ids, self._ns)
        return {checkpoint_id: (key, digest) for checkpoint_id, key, digest in rows}

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        return [checkpoint_of(job, row) for row in self._rows(CHECKPOINT, job, wanted)]

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[tuple[Checkpoint, bytes]]:
        rows = self._rows(f"{CHECKPOINT}, manifest", job, wanted)
        return [(checkpoint_of(job, columns), manifest) for *columns, manifest in rows]

    def _rows(self, columns: str, job: str, wanted: Selection) -> Sequence[Row]:
        """Return the rows for `list`, oldest first."""
        conditions, parameters = self._metadata_filter(wanted) if wanted.metadata else ([], [])
        tags, limit = wanted.tags, wanted.limit
        order = "ASC" if wanted.is_forward else "DESC"
        with self._reading() as db:
            if (base := self._first_row(db, job)) is None:
                return []
            last = LAST_SEQ if wanted.before is None else wanted.before - 1
            is_within, bounds = _within(base, max(wanted.after or 0, 0) + 1, last)
            if wanted.level is not None:
                conditions.append("level = ?")
                parameters.append(str(wanted.level))
            if wanted.is_intact:
                conditions.append("status <> 'corrupted'")
            # A page of one tag costs only the rows on it, however many have the tag (I6).
            is_only_condition = not conditions and [len(values) for values in tags.values()] == [1]
            page = f'ORDER BY "row" {order} LIMIT ?' if is_only_condition and limit is not None else ""
            for name, values in tags.items():
                is_wanted, operands = ("value = ?", values) if len(values) == 1 else self._among("value", values)
                conditions.append(
                    f'"row" IN (SELECT "row" FROM main.tag WHERE job_no = {base.sql} >> 32 AND name = ? '
                    f"AND {is_wanted} AND {is_within} {page})"
                )
                parameters += [*base.parameters, name, *operands, *bounds, *([limit] if page else [])]
            where = " AND ".join([is_within, *conditions])
            rows = self._fetch(
                db,
                f'SELECT {columns} FROM main.checkpoint c WHERE {where} ORDER BY "row" {order} LIMIT ?',
                *bounds, *parameters, NO_LIMIT if limit is None else limit,
            )  # fmt: skip
        return rows if order == "ASC" else rows[::-1]

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        return self._walk(self._all, after, with_chunks)

    def _walk(self, fetch: Fetch, after: int = 0, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        sql = (
            f'SELECT {CHECKPOINT}, j.name, manifest FROM {_OF_JOB} WHERE ns_no = ? AND "row" > ? '
            f'{"AND has_chunks " if with_chunks else ""}ORDER BY "row" LIMIT {PAGE}'
        )
        while rows := fetch(sql, self._ns, after):
            for *columns, job, manifest in rows:
                after = columns[0]
                yield after, checkpoint_of(job, columns), manifest

    # Jobs

    def newest(self, jobs: Sequence[str], tag: tuple[str, str] | None = None) -> dict[str, Checkpoint]:
        parameters: tuple[str, ...] = tag or ()
        if tag is None:
            first = "CAST(k.no AS bigint) << 32"
            of_job = f'main.checkpoint n WHERE n."row" BETWEEN {first} AND ({first}) + {LAST_SEQ}'
        else:
            of_job = "main.tag n WHERE n.job_no = k.no AND n.name = ? AND n.value = ?"
        sql = (
            f'SELECT {CHECKPOINT}, j.name FROM {_OF_JOB} WHERE c."row" IN ('
            f'SELECT (SELECT max(n."row") FROM {of_job}) FROM main.job k WHERE k.ns_no = ? AND {{among}})'
        )
        with self._reading() as db:
            rows = self._where_among(db, sql, "k.name", jobs, *parameters, self._ns)
        return {job: checkpoint_of(job, columns) for *columns, job in rows}

    def _first_row(self, db: Any, job: str) -> FirstRow | None:
        """Return where a job's rows begin; None if there is certainly no such job."""
        return FirstRow("(SELECT CAST(no AS bigint) << 32 FROM main.job WHERE ns_no = ? AND name = ?)", (self._ns, job))

    def job(self, name: str) -> Job | None:
        row = self._one(f"SELECT {JOB} FROM {self._JOBS} WHERE ns_no = ? AND name = ?", self._ns, name)
        return None if row is None else job_of(row)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        # Names are ASCII: those with a prefix are between the prefix and the prefix plus the last character.
        rows = self._all(
            f"SELECT {JOB} FROM {self._JOBS} WHERE ns_no = ? AND name > ? AND name >= ? AND name < ? "
            "ORDER BY name LIMIT ?",
            self._ns, after, prefix, prefix + "\x7f", NO_LIMIT if limit is None else limit,
        )  # fmt: skip
        return [job_of(row) for row in rows]

    # Events

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        order = "DESC" if newest else "ASC"
        rows = self._all(
            f"SELECT {EVENT} FROM main.event WHERE ns_no = ? AND id > ? AND id < ? ORDER BY id {order} LIMIT ?",
            self._ns, after, 2**63 - 1 if before is None else before, limit,
        )  # fmt: skip
        return [event_of(row) for row in (reversed(rows) if newest else rows)]

    # Chunks, packs, keys, the whole

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        sql = f"SELECT {CHUNK} FROM main.chunk WHERE ns_no = ? AND {{among}}"
        with self._reading() as db:
            rows = self._where_among(db, sql, "digest", digests, self._ns)
        return {chunk.digest: chunk for chunk in (chunk_of(row, self.written_by) for row in rows)}

    def packs(self) -> Sequence[PackUse]:
        rows = self._all(
            "SELECT name, count(*), CAST(sum(stored_bytes) AS bigint) FROM ("
            "SELECT pack_no, stored_bytes FROM main.chunk WHERE pack_no IS NOT NULL "
            "UNION ALL SELECT pack_no, stored_bytes FROM main.record) named "
            "JOIN main.pack ON no = pack_no GROUP BY name"
        )
        return [PackUse(*row) for row in rows]

    def unrecorded(self, limit: int) -> Unrecorded:
        with self._reading() as db:
            mark = self._fetch(db, "SELECT value FROM main.meta WHERE key = ?", f"recorded:{self.namespace}")
            after = int(mark[0][0]) if mark else 0
            newest = self._newest_event(db)  # before the events are read: no event up to it comes later
            events = self._fetch(
                db,
                "SELECT id, checkpoint FROM main.event WHERE ns_no = ? AND id > ? AND action IN ('save', 'reseal') "
                "ORDER BY id LIMIT ?",
                self._ns, after, limit,
            )  # fmt: skip
            ids = list(dict.fromkeys(checkpoint for _, checkpoint in events))
            sql = (
                f"{_SAVED} WHERE ns_no = ? AND {{among}} "
                'AND NOT EXISTS (SELECT 1 FROM main.record r WHERE r."row" = c."row") ORDER BY c."row"'
            )
            rows = self._where_among(db, sql, "id", ids, self._ns)
            chunks = self._fetch(
                db,
                f"SELECT {CHUNK} FROM main.chunk WHERE ns_no = ? AND pack_no IS NULL AND NOT is_damaged LIMIT ?",
                self._ns, limit,
            )  # fmt: skip
        up_to = events[-1][0] if len(events) == limit else newest
        return Unrecorded(
            list(_saved(rows)),
            [chunk_of(row, self.written_by) for row in chunks],
            up_to if up_to > after else 0,
            newest,
        )

    def recorded_in(self, pack: str) -> Sequence[SavedRow]:
        rows = self._all(
            f'{_SAVED} JOIN main.record r ON r."row" = c."row" '
            "WHERE r.pack_no = (SELECT no FROM main.pack WHERE name = ?) AND ns_no = ?",
            pack, self._ns,
        )  # fmt: skip
        return list(_saved(rows))

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        rows = self._all(
            f"SELECT {CHUNK} FROM main.chunk WHERE pack_no = (SELECT no FROM main.pack WHERE name = ?) AND ns_no = ? "
            'ORDER BY "offset"',
            pack, self._ns,
        )  # fmt: skip
        return [chunk_of(row, self.written_by) for row in rows]

    def keyring(self) -> str | None:
        row = self._one("SELECT value FROM main.meta WHERE key = ?", f"keyring:{self.namespace}")
        return None if row is None else row[0]

    def closed_namespaces(self) -> Mapping[str, str]:
        row = self._one("SELECT value FROM main.meta WHERE key = 'locked'")
        return {} if row is None else json.loads(row[0])

    def totals(self) -> Mapping[str, int]:
        of_jobs = self._one(
            f"SELECT count(*), sum(checkpoints), sum(size_bytes), sum(stored_bytes) FROM {self._JOBS} WHERE ns_no = ?",
            self._ns,
        )
        of_chunks = self._one(
            "SELECT count(*), sum(size_bytes), sum(stored_bytes), sum(length(data)) FROM main.chunk WHERE ns_no = ?",
            self._ns,
        )
        numbers = (*(of_jobs or ()), *(of_chunks or ()))
        return {name: int(number or 0) for name, number in zip(_TOTALS, numbers, strict=True)}


def missing(checkpoint_id: str) -> NotFound:
    return NotFound(f"checkpoint {checkpoint_id} not found", hint="kedge list JOB shows what exists")


def _saved(rows: Iterable[Row]) -> Iterator[SavedRow]:
    for *columns, job, has_chunks, manifest, key, request_digest in rows:
        with suppress(ValueError, KeyError, TypeError):  # no save can have written it: no loss for a pack
            saved = record_from_row(job, columns, has_chunks=bool(has_chunks), manifest=manifest)
            if key is not None:
                saved = replace(saved, idempotency_key=key, request_digest=request_digest)
            yield saved, saved.digest


def _keyed(job: str, rows: Iterable[Row]) -> Keyed:
    return {key: (checkpoint_of(job, columns), manifest) for *columns, manifest, key in rows}
