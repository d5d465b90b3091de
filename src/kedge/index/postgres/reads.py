"""What is read from the index in PostgreSQL. Readers see the newest state and wait for nobody (I6)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from kedge.errors import ReadOnly, StorageError
from kedge.index.event_chain import prove_chain
from kedge.index.reads import Conditions, SqlReads
from kedge.index.rows import Row
from kedge.model import EventChain
from kedge.ports import Events, Problems, Selection

from .dialect import for_postgres
from .server import Array, Server

# Tags are in the row of a checkpoint, and in a table by which they are found.
_LOST_TAGS = (
    'WITH said AS (SELECT c.id, c."row", t.key AS name, t.value FROM main.checkpoint c '
    'JOIN main.job j ON j.no = c."row" >> 32, json_each_text(c.tags::json) t '
    "WHERE j.ns_no = ? AND c.tags IS NOT NULL) "
    "SELECT coalesce(said.id, 'of row ' || tag.\"row\") FROM said FULL JOIN "
    "(SELECT tag.* FROM main.tag JOIN main.job j ON j.no = job_no WHERE j.ns_no = ?) tag "
    'ON tag."row" = said."row" AND tag.name = said.name AND tag.value = said.value '
    'WHERE said.id IS NULL OR tag."row" IS NULL LIMIT 20'
)
_LOOK_FIRST_S, _LOOK_EVERY_S = 0.03, 1.0  # for events that nobody told us of
_AWAITED_S = 5.0  # so long writers tell of what they commit, from each look on, until they have told of something
_AWAIT = (
    "INSERT INTO kedge.awaited VALUES (%s, clock_timestamp() + make_interval(secs => %s)) "
    "ON CONFLICT (ns_no) DO UPDATE SET until = excluded.until RETURNING ns_no"
)
_NUMBERED_AT_ONCE = 2_000
_FOLDED_AT_ONCE = 100  # jobs


class PostgresReads(SqlReads):
    """The half of `ports.Index` that changes nothing."""

    _JOBS = "main.counted"

    def __init__(self, server: Server, namespace: str) -> None:
        self.namespace = namespace
        self._server = server
        store = server.one("SELECT value FROM kedge.meta WHERE key = 'store_id'")
        if store is None:
            raise StorageError(f"there is no store in {server.name}", hint="open it with create=True")
        self.store_id: str = store[0]
        if (number := self._number()) is None:
            server.all("INSERT INTO kedge.namespace (name) VALUES (%s) ON CONFLICT DO NOTHING RETURNING no", namespace)
            number = self._number()
        assert number is not None
        self._ns = number
        self.is_encrypted = server.is_encrypted()
        self.written_by = server.written_by()

    def _number(self) -> int | None:
        row = self._server.one("SELECT no FROM kedge.namespace WHERE name = %s", self.namespace)
        return None if row is None else row[0]

    def _reading(self) -> AbstractContextManager[Server]:
        return nullcontext(self._server)  # each statement by itself, tried again while the server is away

    def _fetch(self, db: Server, sql: str, *parameters: object) -> Sequence[Row]:
        return db.all(for_postgres(sql), *parameters)

    def _among(self, column: str, values: Sequence[str] | Sequence[bytes]) -> tuple[str, Sequence[object]]:
        return f"{column} = ANY(?)", [Array("bytea" if column == "digest" else "text", values)]

    def _metadata_filter(self, wanted: Selection) -> Conditions:
        conditions: list[str] = []
        parameters: list[object] = []
        for names, value in wanted.metadata_paths():
            kind = "null" if value is None else "boolean" if isinstance(value, bool) else "number"
            kind = "string" if isinstance(value, str) else kind
            member = "metadata::json #>> ?::text[]"
            # CASE, because conditions joined by AND may be evaluated in any order, and not every text is a number.
            test = {"null": "true", "string": f"({member}) = ?", "boolean": f"({member})::boolean = ?"}.get(
                kind, f"({member})::{'float8' if isinstance(value, float) else 'numeric'} = ?"
            )
            conditions.append(f"CASE WHEN json_typeof(metadata::json #> ?::text[]) = ? THEN {test} ELSE false END")
            parameters += [names, kind] if value is None else [names, kind, names, value]
        return conditions, parameters

    def number_events(self) -> None:
        """Number what has been committed, durably: before anybody reads a number, or counts on having read all."""
        with suppress(ReadOnly):  # who may not write reads what others have numbered
            while self._server.all("SELECT kedge.number_1(%s, %s)", self._ns, _NUMBERED_AT_ONCE)[0][0]:
                pass

    def tidy(self) -> None:
        """Number events, and take what was deleted off the counters of jobs."""
        self.number_events()
        with suppress(ReadOnly):
            self._server.all("SELECT kedge.fold_1(%s)", _FOLDED_AT_ONCE)

    def _newest_event(self, db: Server) -> int:
        self.tidy()
        ((last_event,),) = self._fetch(db, "SELECT last_event FROM main.namespace WHERE no = ?", self._ns)
        return int(last_event)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        self.number_events()
        return super().events(after, limit, newest=newest, before=before)

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Hears of it through LISTEN, once writers know that somebody waits.

        Looks by itself too: soon, because who was about to commit did not know yet, and then now and then, because
        pgbouncer may keep the word from us.
        """
        if self.events(after, 1):
            return True
        if timeout_s <= 0:
            return False
        until, look_in_s = time.monotonic() + timeout_s, _LOOK_FIRST_S
        with self._server.listening() as listen:
            while True:
                self._server.all(_AWAIT, self._ns, _AWAITED_S)
                if self.events(after, 1):
                    return True
                left = until - time.monotonic()
                if left <= 0:
                    return False
                is_told = listen(min(left, look_in_s)) == self.namespace
                look_in_s = _LOOK_FIRST_S if is_told else min(look_in_s * 4, _LOOK_EVERY_S)

    def audit(self, until: int | None = None) -> EventChain:
        """The chain of this namespace."""
        self.number_events()
        return prove_chain(self._entries(2**63 - 1 if until is None else until))

    def _entries(self, until: int) -> Iterator[Row]:
        last = 0
        while rows := self._all(
            "SELECT id, at_us, ns_no, actor, action, job, checkpoint, detail, chain FROM main.event "
            "WHERE ns_no = ? AND id > ? AND id <= ? ORDER BY id LIMIT 1000",
            self._ns, last, until,
        ):  # fmt: skip
            yield from rows
            last = rows[-1][0]

    def integrity_problems(self) -> Problems:
        """Jobs whose counters are off, and breaks in the chain of events; the pages are the server's own affair."""
        wrong = self._all(
            'SELECT name FROM main.counted AS job LEFT JOIN (SELECT ("row" >> 32)::integer AS no, count(*) AS n, '
            'sum(size_bytes) AS size, sum(stored_bytes) AS stored, max("row" & 4294967295) AS last '
            "FROM main.checkpoint GROUP BY 1) counted USING (no) "
            "WHERE ns_no = ? AND (checkpoints <> coalesce(n, 0) "
            "OR job.size_bytes <> coalesce(size, 0) OR job.stored_bytes <> coalesce(stored, 0) "
            "OR last_seq < coalesce(last, 0))",
            self._ns,
        )
        problems = [f"the counters of job {name} do not match its checkpoints" for (name,) in wrong]
        problems += [
            f"the tags of checkpoint {id_} do not match what finds it by them"
            for (id_,) in self._all(_LOST_TAGS, self._ns, self._ns)
        ]
        if (broken_at := self.audit().broken_at) is not None:
            problems.append(f"the event log was altered at entry {broken_at}")
        return problems
