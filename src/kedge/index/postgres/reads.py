"""What is read from the index in PostgreSQL. Readers see the newest state and wait for nobody (I6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kedge.errors import StorageError, Validation
from kedge.index.rows import CHECKPOINT, EVENT, JOB, SEQ_BITS, Row, checkpoint_of, chunk_of, event_of, job_of
from kedge.index.sqlite.transactions import chain_of
from kedge.index.sqlite.writes import missing
from kedge.model import Checkpoint, CheckpointLevel, Job
from kedge.ports import Checkpoints, Chunk, EventChain, Events, Jobs, PackUse, Problems

from .server import Array, Server

PAGE = 256  # rows a long walk reads at once
BATCH = 1000  # keys or digests in one statement
_LOOK_EVERY_S = 1.0  # for events that nobody told us of

_CHECKPOINT = ", ".join(f'c."{name.strip()}"' for name in CHECKPOINT.split(","))
_CHUNK = 'digest, size_bytes, stored_bytes, encoding, (SELECT name FROM kedge.pack WHERE no = pack_no), "offset", data'
_FROM = 'kedge.checkpoint c JOIN kedge.job j ON j.no = c."row" >> 32'


class PostgresReads:
    """The half of `ports.Index` that changes nothing."""

    def __init__(self, server: Server, namespace: str) -> None:
        self.namespace = namespace
        self._server = server
        store = server.one("SELECT value FROM kedge.meta WHERE key = 'store_id'")
        if store is None:
            raise StorageError(f"there is no store in {server.name}", hint="open it with create=True")
        self.store_id: str = store[0]
        if (found := self._number()) is None:
            server.all("INSERT INTO kedge.namespace (name) VALUES (%s) ON CONFLICT DO NOTHING RETURNING no", namespace)
            found = self._number()
        assert found is not None
        self._ns: int = found
        self.is_encrypted = server.is_encrypted()

    def _number(self) -> int | None:
        row = self._server.one("SELECT no FROM kedge.namespace WHERE name = %s", self.namespace)
        return None if row is None else row[0]

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._find(checkpoint_id, "")[0]

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        checkpoint, row = self._find(checkpoint_id, ", manifest")
        return checkpoint, row[16]

    def _find(self, checkpoint_id: str, extra: str) -> tuple[Checkpoint, Row]:
        row = self._one(
            f"SELECT {_CHECKPOINT}, j.name{extra} FROM {_FROM} WHERE id = %s AND ns_no = %s", checkpoint_id, self._ns
        )
        if row is None:
            raise missing(checkpoint_id)
        return checkpoint_of(row[15], row), row

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
        if (span := self._span(job)) is None:
            return None
        row = self._one(
            f'SELECT {_CHECKPOINT}, manifest FROM kedge.checkpoint c WHERE "row" BETWEEN %s AND %s '
            f"AND status <> 'corrupted' {'AND level = %s ' if level else ''}ORDER BY \"row\" DESC LIMIT 1",
            *span, *([str(level)] if level else []),
        )  # fmt: skip
        return None if row is None else (checkpoint_of(job, row), row[15])

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        found: dict[str, tuple[Checkpoint, bytes]] = {}
        for start in range(0, len(keys), BATCH):
            for row in self._all(
                f"SELECT {_CHECKPOINT}, manifest, key FROM kedge.idempotency "
                'JOIN kedge.checkpoint c USING ("row") '
                "WHERE job_no = (SELECT no FROM kedge.job WHERE ns_no = %s AND name = %s) AND key = ANY(%s)",
                self._ns, job, [*keys[start : start + BATCH]],
            ):  # fmt: skip
                found[row[16]] = (checkpoint_of(job, row), row[15])
        return found

    def find_next(self, job: str, after: int, limit: int) -> dict[str, tuple[Checkpoint, bytes]]:
        if (span := self._span(job)) is None:
            return {}
        rows = self._all(
            f'SELECT {_CHECKPOINT}, manifest, key FROM kedge.checkpoint c JOIN kedge.idempotency USING ("row") '
            'WHERE "row" BETWEEN %s AND %s ORDER BY "row"',
            span[0] + after + 1, min(span[0] + after + limit, span[1]),
        )  # fmt: skip
        return {row[16]: (checkpoint_of(job, row), row[15]) for row in rows}

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        found: dict[str, tuple[str, bytes]] = {}
        for start in range(0, len(checkpoint_ids), BATCH):
            rows = self._all(
                'SELECT id, key, request_digest FROM kedge.checkpoint JOIN kedge.idempotency USING ("row") '
                "JOIN kedge.job ON no = job_no WHERE id = ANY(%s) AND ns_no = %s",
                [*checkpoint_ids[start : start + BATCH]], self._ns,
            )  # fmt: skip
            found.update({row[0]: (row[1], row[2]) for row in rows})
        return found

    def _span(self, job: str) -> tuple[int, int] | None:
        """First and last possible row of a job."""
        found = self._one("SELECT no FROM kedge.job WHERE ns_no = %s AND name = %s", self._ns, job)
        return None if found is None else (found[0] << SEQ_BITS, (found[0] + 1 << SEQ_BITS) - 1)

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
        conditions, parameters = _metadata_filter(metadata or {})
        if (span := self._span(job)) is None:
            return []
        # Kept inside the job: the rows beyond are those of other jobs, of other namespaces too.
        first = span[0] + max(after or 0, 0) + 1
        last = span[1] if before is None else min(span[0] + before - 1, span[1])
        if level is not None:
            conditions.append("level = %s")
            parameters.append(str(level))
        for name, value in (tags or {}).items():
            conditions.append('"row" IN (SELECT "row" FROM kedge.tag WHERE job_no = %s AND name = %s AND value = %s)')
            parameters += [span[0] >> SEQ_BITS, name, value]
        where = " AND ".join(['"row" BETWEEN %s AND %s', *conditions])
        order = "ASC" if after is not None or limit is None else "DESC"
        rows = self._all(
            f'SELECT {_CHECKPOINT} FROM kedge.checkpoint c WHERE {where} ORDER BY "row" {order} LIMIT %s',
            first, last, *parameters, limit,
        )  # fmt: skip
        return [checkpoint_of(job, row) for row in (rows if order == "ASC" else reversed(rows))]

    def job(self, name: str) -> Job | None:
        row = self._one(f"SELECT {JOB} FROM kedge.job WHERE ns_no = %s AND name = %s", self._ns, name)
        return None if row is None else job_of(row)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        rows = self._all(
            f"SELECT {JOB} FROM kedge.job WHERE ns_no = %s AND name > %s AND name >= %s AND name < %s "
            "ORDER BY name LIMIT %s",
            self._ns, after, prefix, prefix + "\x7f", limit,
        )  # fmt: skip
        return [job_of(row) for row in rows]

    # Events

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        order = "DESC" if newest else "ASC"
        rows = self._all(
            f"SELECT {EVENT} FROM kedge.event WHERE ns_no = %s AND id > %s AND id < %s ORDER BY id {order} LIMIT %s",
            self._ns, after, 2**63 - 1 if before is None else before, limit,
        )  # fmt: skip
        return [event_of(row) for row in (reversed(rows) if newest else rows)]

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Hears of it through LISTEN; looks now and then too, because pgbouncer may keep that from us."""
        if self.events(after, 1):
            return True
        if timeout_s <= 0:
            return False
        until = time.monotonic() + timeout_s
        with self._server.listening() as listen:
            while not self.events(after, 1):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                listen(min(left, _LOOK_EVERY_S))
        return True

    def audit(self, until: int | None = None) -> EventChain:
        """The chain of this namespace, a page at a time."""
        chain, expected = bytes(32), 1
        while rows := self._all(
            "SELECT id, at_us, ns_no, actor, action, job, checkpoint, detail, chain FROM kedge.event "
            "WHERE ns_no = %s AND id >= %s AND id <= %s ORDER BY id LIMIT 1000",
            self._ns, expected, 2**63 - 1 if until is None else until,
        ):  # fmt: skip
            for number, *entry, stored in rows:
                following = chain_of(chain, number, *entry)
                if number != expected or following != stored:
                    return EventChain(expected - 1, chain.hex(), expected)
                chain, expected = following, expected + 1
        return EventChain(expected - 1, chain.hex())

    # Chunks, packs, keys, the whole

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        found: dict[bytes, Chunk] = {}
        for start in range(0, len(digests), BATCH):
            for row in self._all(
                f"SELECT {_CHUNK} FROM kedge.chunk WHERE ns_no = %s AND digest = ANY(%s)",
                self._ns, Array("bytea", digests[start : start + BATCH]),
            ):  # fmt: skip
                found[row[0]] = chunk_of(row)
        return found

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        return self._walk(self._all, after, with_chunks)

    def _walk(
        self, fetch: Callable[..., Sequence[Row]], after: int = 0, with_chunks: bool = True
    ) -> Iterator[tuple[int, Checkpoint, bytes]]:
        condition = "AND has_chunks " if with_chunks else ""
        while rows := fetch(
            f'SELECT {_CHECKPOINT}, manifest, j.name FROM {_FROM} WHERE ns_no = %s AND "row" > %s {condition}'
            f'ORDER BY "row" LIMIT {PAGE}',
            self._ns, after,
        ):  # fmt: skip
            for row in rows:
                yield row[0], checkpoint_of(row[16], row), row[15]
            after = rows[-1][0]

    def packs(self) -> Sequence[PackUse]:
        rows = self._all(
            "SELECT name, count(*), sum(stored_bytes)::bigint FROM kedge.chunk JOIN kedge.pack ON no = pack_no "
            "GROUP BY name"
        )
        return [PackUse(*row) for row in rows]

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        rows = self._all(
            f"SELECT {_CHUNK} FROM kedge.chunk WHERE ns_no = %s AND pack_no = "
            '(SELECT no FROM kedge.pack WHERE name = %s) ORDER BY "offset"',
            self._ns, pack,
        )  # fmt: skip
        return [chunk_of(row) for row in rows]

    def is_pack_used(self, pack: str) -> bool:
        sql = "SELECT 1 FROM kedge.chunk WHERE pack_no = (SELECT no FROM kedge.pack WHERE name = %s) LIMIT 1"
        return self._one(sql, pack) is not None

    def keyring(self) -> str | None:
        row = self._one("SELECT value FROM kedge.meta WHERE key = %s", f"keyring:{self.namespace}")
        return None if row is None else row[0]

    def totals(self) -> Mapping[str, int]:
        of_jobs = self._one(
            "SELECT count(*), sum(checkpoints), sum(size_bytes), sum(stored_bytes) FROM kedge.job WHERE ns_no = %s",
            self._ns,
        )
        of_chunks = self._one(
            "SELECT count(*), sum(size_bytes), sum(stored_bytes), sum(length(data)) FROM kedge.chunk WHERE ns_no = %s",
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
        return {
            name: int(value or 0) for name, value in zip(names, (*(of_jobs or ()), *(of_chunks or ())), strict=True)
        }

    def integrity_problems(self) -> Problems:
        """Jobs whose counters are off, and breaks in the chain of events; the pages are the server's own affair."""
        wrong = self._all(
            'SELECT name FROM kedge.job LEFT JOIN (SELECT ("row" >> 32)::integer AS no, count(*) AS n, '
            'sum(size_bytes) AS size, sum(stored_bytes) AS stored, max("row" & 4294967295) AS last '
            "FROM kedge.checkpoint GROUP BY 1) counted USING (no) "
            "WHERE ns_no = %s AND (checkpoints <> coalesce(n, 0) "
            "OR job.size_bytes <> coalesce(size, 0) OR job.stored_bytes <> coalesce(stored, 0) "
            "OR last_seq < coalesce(last, 0))",
            self._ns,
        )
        problems = [f"the counters of job {name} do not match its checkpoints" for (name,) in wrong]
        if (broken_at := self.audit().broken_at) is not None:
            problems.append(f"the event log was altered at entry {broken_at}")
        return problems

    def _one(self, sql: str, *parameters: object) -> Row | None:
        rows = self._all(sql, *parameters)
        return rows[0] if rows else None

    def _all(self, sql: str, *parameters: object) -> Sequence[Row]:
        return self._server.all(sql, *parameters)


def _metadata_filter(metadata: Mapping[str, object]) -> tuple[list[str], list[object]]:
    """Conditions and parameters for {"a.b": value}: the path and the value are bound, types are compared too."""
    conditions: list[str] = []
    parameters: list[object] = []
    for path, value in metadata.items():
        parts = path.split(".")
        if not all(parts):
            raise Validation(f"{path!r} is not a metadata path", hint='use names joined by dots, such as "model.name"')
        if value is not None and not isinstance(value, str | int | float):
            raise Validation(
                f"metadata can't be filtered by a {type(value).__name__}", hint="use text, numbers, booleans or None"
            )
        kind = "null" if value is None else "boolean" if isinstance(value, bool) else "number"
        kind = "string" if isinstance(value, str) else kind
        found = "metadata::json #>> %s::text[]"
        # CASE, because conditions joined by AND may be evaluated in any order, and not every text is a number.
        test = {"null": "true", "string": f"({found}) = %s", "boolean": f"({found})::boolean = %s"}.get(
            kind, f"({found})::{'float8' if isinstance(value, float) else 'numeric'} = %s"
        )
        conditions.append(f"CASE WHEN json_typeof(metadata::json #> %s::text[]) = %s THEN {test} ELSE false END")
        parameters += [parts, kind] if value is None else [parts, kind, parts, value]
    return conditions, parameters
