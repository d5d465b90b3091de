"""What waits together, committed in one round trip by functions of the server (`sql/002.sql`).

The statement first takes the locks of all that it changes (`locks`), so that what does not touch is not waited for.
The server numbers the saves, checks leases, parents and chunks, and inserts all of them or none. What it cannot decide
by itself (a lease that must be ended, anything that will be refused) it leaves alone: then nothing has happened, and
`writes` does them one by one, and finds out for each what is the matter. What a save does besides (`Then`) is done in
the same statement, if the saves are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from kedge.index.group_commit import Save
from kedge.index.transactions import held
from kedge.model import MAX_TAGS, Checkpoint, CheckpointId, Lease, now_us
from kedge.ports import CheckpointIds, Chunk, NewCheckpoint, Provided, Unmet, Update
from kedge.ports.record import LAST_SEQ, checkpoint_of, columns_of

from .locks import Lock, ascending, of_checkpoint, of_job
from .server import Array, Connection, run_prepared
from .writes import PostgresWrites

# What the function takes for each save, chunk and tag, in its order.
_OF_SAVE = (
    *("text", "bigint", "text", "text", "text", "text", "bigint", "text", "bigint", "bigint", "bytea", "text", "text"),
    *("text", "boolean", "text", "boolean", "bytea", "text", "bytea", "bigint", "text"),
)
_OF_TAG = ("integer", "text", "text")
_OF_CHUNK = ("bytea", "bigint", "bigint", "smallint", "bytea", "integer", "bigint", "integer")
_SAVE_ONE = f"kedge.save_one_1({', '.join(['%s'] * (3 + len(_OF_SAVE) + 2))})"
_SAVE = f"kedge.save_1({', '.join(['%s'] * (3 + len(_OF_SAVE) + len(_OF_TAG) + 1 + len(_OF_CHUNK) + 2))})"

_LOCK = "(SELECT kedge.lock_1(%s, %s, %s, %s) OFFSET 0) l"

MOST_DELETED = 8  # by the function; more are deleted statement by statement

Outcome = tuple[Any] | Exception | None  # a result, a refusal; None: nothing was done


class Committed(NamedTuple):
    """What became of a batch, and whether somebody waits for its events."""

    outcomes: Sequence[Outcome]
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class TakeLease:
    job: str
    holder: str
    ttl_s: float
    sql: ClassVar[str] = "lease_1(%s, %s, %s, %s, %s::float8, %s)"

    def __call__(self, writes: PostgresWrites) -> Lease:
        return writes.acquire_lease(self.job, self.holder, self.ttl_s)

    def locks(self, ns_no: int) -> Iterator[Lock]:
        yield of_job(ns_no, self.job)

    def parameters(self, ns_no: int, at_us: int) -> tuple[object, ...]:
        return self.job, self.holder, self.ttl_s, at_us

    def outcome(self, answer: Sequence[str], namespace: str) -> Outcome:
        if len(answer) == 1:
            return (Lease(self.job, int(answer[0]), self.holder, self.ttl_s),)
        token, holder, left_s = answer
        return held(self.job, namespace, int(token), holder, float(left_s))


@dataclass(frozen=True, slots=True)
class RenewLease:
    lease: Lease
    sql: ClassVar[str] = "renew_1(%s, %s, %s, %s, %s::float8, %s)"

    def __call__(self, writes: PostgresWrites) -> None:
        writes.renew_lease(self.lease)

    def locks(self, ns_no: int) -> Iterator[Lock]:
        yield of_job(ns_no, self.lease.job)

    def parameters(self, ns_no: int, at_us: int) -> tuple[object, ...]:
        return self.lease.job, self.lease.token, self.lease.ttl_s, at_us

    def outcome(self, answer: bool, namespace: str) -> Outcome:
        return (None,) if answer else None


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    job: str
    token: int
    sql: ClassVar[str] = "release_1(%s, %s, %s, %s, %s)"

    def __call__(self, writes: PostgresWrites) -> None:
        writes.end_lease(self.job, self.token)

    def locks(self, ns_no: int) -> Iterator[Lock]:
        yield of_job(ns_no, self.job)

    def parameters(self, ns_no: int, at_us: int) -> tuple[object, ...]:
        return self.job, self.token, at_us

    def outcome(self, answer: bool | None, namespace: str) -> Outcome:
        return None if answer is None else (None,)


@dataclass(frozen=True, slots=True)
class Retag:
    checkpoint_id: str
    update: Update
    actor: str
    sql: ClassVar[str] = "tag_1(%s, %s, %s, %s, %s, %s, %s)"

    def __call__(self, writes: PostgresWrites) -> Checkpoint:
        return writes.update(self.checkpoint_id, self.update, self.actor)

    def locks(self, ns_no: int) -> Iterator[Lock]:
        yield of_checkpoint(self.checkpoint_id)

    def parameters(self, ns_no: int, at_us: int) -> tuple[object, ...]:
        return self.checkpoint_id, json.dumps(dict(self.update.tags or {})), MAX_TAGS, at_us, self.actor

    def outcome(self, answer: tuple[Any, ...] | None, namespace: str) -> Outcome:
        return None if answer is None else (checkpoint_of(answer[-1], answer[:-1]),)


@dataclass(frozen=True, slots=True)
class Delete:
    checkpoint_ids: Sequence[str]
    even_pinned: bool
    actor: str
    sql: ClassVar[str] = "delete_1(%s, %s, %s, %s, %s, %s)"

    def __call__(self, writes: PostgresWrites) -> CheckpointIds:
        return writes.delete(self.checkpoint_ids, self.even_pinned, self.actor)

    def locks(self, ns_no: int) -> Iterator[Lock]:
        return map(of_checkpoint, self.checkpoint_ids)

    def parameters(self, ns_no: int, at_us: int) -> tuple[object, ...]:
        ids = Array("text", tuple(dict.fromkeys(self.checkpoint_ids)))
        return ids, self.even_pinned, at_us, self.actor

    def outcome(self, answer: list[str] | None, namespace: str) -> Outcome:
        return None if answer is None else ([CheckpointId(gone) for gone in answer],)


@dataclass(frozen=True, slots=True)
class SaveIf:
    """A save without chunks that is made if something is so."""

    record: NewCheckpoint
    provided: Provided
    actor: str
    sql: ClassVar[str] = f"save_if_1({', '.join(['%s'] * (12 + len(_OF_SAVE) + 2))})"

    @classmethod
    def of(cls, operation: Quick) -> Quick:
        """The same as such a save, where it is one."""
        if isinstance(operation, Save) and len(operation.records) == 1:
            (record,) = operation.records
            if record.provided is not None and record.then is None and _is_alone(record):
                return cls(record, record.provided, operation.actor)
        return operation

    def locks(self, ns_no: int) -> Iterator[Lock]:
        yield from (of_job(ns_no, name) for name in self.provided.absent_jobs)
        if self.provided.marks is not None:
            yield of_checkpoint(self.provided.marks.checkpoint_id)

    def parameters(self, ns_no: int, at_us: int) -> tuple[object, ...]:
        new, takes, marks = self.record, self.provided.takes, self.provided.marks
        absent = (*self.provided.absent_jobs, *([new.job] if takes else ()))
        return (
            Array("text", absent), *(self.provided.absent_tag or (None, None)),
            *((takes.holder, takes.ttl_s) if takes else (None, None)),
            *((marks.checkpoint_id, _json(marks.seen), _json(marks.tags)) if marks else (None, None, None)), MAX_TAGS,
            new.key_id or None, *_values(new, self.actor), *_tags(new),
        )  # fmt: skip

    def outcome(self, answer: Sequence[int] | None, namespace: str) -> Outcome:
        if not answer:
            return None if answer is None else Unmet()
        return ([self.record.saved(answer[0] & LAST_SEQ, self.record.digest.hex())],)


Quick = Save | SaveIf | TakeLease | RenewLease | ReleaseLease | Retag | Delete


def commit_together(db: Connection, operations: Sequence[Quick], ns_no: int, namespace: str) -> Committed:
    """What became of each, durably; the saves among them are all done, or none is.

    What psycopg raises goes to the caller. If the connection is still there then, nothing has been committed.
    """
    operations = [SaveIf.of(operation) for operation in operations]
    others = [operation for operation in operations if not isinstance(operation, Save)]
    records = [(record, op.actor) for op in operations if isinstance(op, Save) for record in op.records]
    save, of_saves = _save_parameters(records, ns_no, namespace)
    behind = list(_behind(records)) if of_saves else []
    calls = ["saved"] * bool(of_saves) + [f"kedge.{other.sql}" for other in others]
    calls += [f"CASE WHEN saved IS NOT NULL THEN kedge.{other.sql} END" for other in behind]
    if not calls:
        return Committed([None] * len(operations), False)
    at_us, given = now_us(), list[object]()
    for other in (*others, *behind):
        given += (ns_no, namespace, *other.parameters(ns_no, at_us))
    within = f"(SELECT {save} AS saved FROM {_LOCK} OFFSET 0) s" if of_saves else _LOCK
    sql = f"SELECT {', '.join(calls)}, kedge.is_awaited_1(%s) FROM {within}"
    saves = [record for record, _ in records if of_saves] + [op.record for op in others if isinstance(op, SaveIf)]
    is_plain = any(not record.key_id for record in saves)
    locks = [lock for operation in (*others, *behind) for lock in operation.locks(ns_no)]
    locks += [lock for record in saves for lock in _locks_of(record, ns_no)]
    # One statement: a process that is suspended in between would keep the locks.
    row = run_prepared(db, sql, [*given, ns_no, *of_saves, ns_no, is_plain, *ascending(locks)]).fetchone()
    assert row is not None
    *answers, is_awaited = row
    rest = iter(answers)
    numbers: Sequence[int] | None = next(rest) if of_saves else None
    saved = (
        record.saved(number & LAST_SEQ, record.digest.hex())
        for number, (record, _) in zip(numbers or (), records, strict=numbers is not None)
    )
    outcomes: list[Outcome] = []
    for operation in operations:
        if not isinstance(operation, Save):
            outcomes.append(operation.outcome(next(rest), namespace))
        else:
            outcomes.append(None if numbers is None else ([next(saved) for _ in operation.records],))
    return Committed(outcomes, is_awaited)


def lane_of(operation: object) -> int:
    """The same number for what changes the same job, or else the same checkpoint."""
    if isinstance(operation, Save):
        return hash(operation.records[0].job)
    if isinstance(operation, TakeLease | ReleaseLease):
        return hash(operation.job)
    if isinstance(operation, RenewLease):
        return hash(operation.lease.job)
    return hash(operation.checkpoint_id) if isinstance(operation, Retag) else 0


def _locks_of(record: NewCheckpoint, ns_no: int) -> Iterator[Lock]:
    yield of_job(ns_no, record.job)
    if record.parent is not None:
        yield of_checkpoint(record.parent, is_shared=True)


def _behind(records: Sequence[tuple[NewCheckpoint, str]]) -> Iterator[Delete | ReleaseLease]:
    """What saves do besides, in the same transaction."""
    for record, actor in records:
        if record.then is not None:
            if record.then.delete:
                yield Delete(record.then.delete, True, actor)
            if record.then.releases_lease and record.lease_token is not None:
                yield ReleaseLease(record.job, record.lease_token)


def _save_parameters(records: Sequence[tuple[NewCheckpoint, str]], ns_no: int, namespace: str) -> tuple[str, list[Any]]:
    """The function and its parameters; none if there are no saves, or some that must be looked at by themselves."""
    keys = {record.key_id for record, _ in records}
    if len(keys) != 1 or any(r.provided is not None or not _is_usual(r) for r, _ in records):
        return "", []
    if len(records) == 1 and _is_alone(records[0][0]):
        ((record, actor),) = records
        return _SAVE_ONE, [ns_no, namespace, keys.pop() or None, *_values(record, actor), *_tags(record)]
    rows = [_values(record, actor) for record, actor in records]
    tags = [(n, *tag) for n, (record, _) in enumerate(records, 1) for tag in record.tags.items()]
    placed = _placed([record for record, _ in records])
    heads = (ns_no, namespace, keys.pop() or None)
    return _SAVE, [*heads, *_columns(_OF_SAVE, rows), *_columns(_OF_TAG, tags), *placed]


def _is_alone(record: NewCheckpoint) -> bool:
    """Whether a save is all in its row."""
    return _is_usual(record) and not (record.new_chunks or record.reused_chunks)


def _is_usual(record: NewCheckpoint) -> bool:
    return record.seq is None and record.takes_key_from is None


def _tags(record: NewCheckpoint) -> list[Array | None]:
    return [Array("text", part) if part else None for part in (record.tags.keys(), record.tags.values())]


def _json(tags: Mapping[str, str]) -> str:
    return json.dumps(dict(tags))


def _values(new: NewCheckpoint, actor: str) -> tuple[object, ...]:
    key = (new.idempotency_key, new.request_digest)
    return (new.job, new.lease_token, *columns_of(new), *key, now_us(), actor)


def _placed(records: Sequence[NewCheckpoint]) -> list[Array | bytes | None]:
    """Packs, new chunks, and those that must be there."""
    chunks: dict[bytes, Chunk] = {}
    reused: set[bytes] = set()
    for record in records:
        for chunk in record.new_chunks:
            chunks.setdefault(chunk.digest, chunk)
        reused.update(record.reused_chunks)
    packs = sorted({chunk.pack for chunk in chunks.values()} - {""})
    place = {pack: n for n, pack in enumerate(packs, 1)}
    new = sorted(chunks.values(), key=lambda chunk: chunk.digest)
    starts = accumulate((len(chunk.data or b"") for chunk in new), initial=1)
    rows = [
        (c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base, place.get(c.pack), c.offset,
         None if c.data is None else start)
        for c, start in zip(new, starts, strict=False)
    ]  # fmt: skip
    return [
        Array("text", packs) if packs else None,
        *_columns(_OF_CHUNK, rows),
        b"".join([chunk.data for chunk in new if chunk.data is not None]),
        Array("bytea", sorted(reused)) if reused else None,
    ]


def _columns(kinds: Sequence[str], rows: Sequence[tuple[object, ...]]) -> list[Array | None]:
    """An array for each column; None, which the server takes for NULLs, where there is nothing."""
    columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
    return [
        _repeated(kind, column) if kind != "bytea" and column[:1] == column[-1:] else _column(kind, column)
        for kind, column in zip(kinds, columns, strict=True)
    ]


def _column(kind: str, column: tuple[object, ...]) -> Array | None:
    return None if all(value is None for value in column) else Array(kind, column)


_repeated = lru_cache(256)(_column)  # what is the same in all saves of a batch is so in the next one, too
