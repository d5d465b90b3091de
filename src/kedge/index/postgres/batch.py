"""Saves and leases that wait together, committed in one round trip by functions of the server (`sql/002.sql`, `003`).

The server numbers the saves, checks leases, parents and chunks, and inserts all of them or none. What it cannot decide
by itself (a job that is new, a lease that must be ended, anything that will be refused) it leaves alone: then nothing
has happened, and `writes` does them one by one, and finds out for each what is the matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ormsgpack

from kedge.index.group_commit import Save
from kedge.index.rows import LAST_SEQ, columns_of
from kedge.index.transactions import held, now_us
from kedge.model import Lease
from kedge.ports import Chunk, NewCheckpoint

from .server import Array, Connection
from .writes import PostgresWrites

# What the function takes for each save, chunk and tag, in its order.
_OF_SAVE = (
    *("text", "bigint", "text", "text", "text", "text", "bigint", "text", "bigint", "bigint", "bytea", "text", "text"),
    *("text", "boolean", "text", "boolean", "bytea", "text", "bytea", "bigint", "text", "bytea"),
)
_OF_TAG = ("integer", "text", "text")
_OF_CHUNK = ("bytea", "bigint", "bigint", "smallint", "bytea", "integer", "bigint", "bytea")
_SAVE = f"kedge.save_1({', '.join(['%s'] * (3 + len(_OF_SAVE) + len(_OF_TAG) + 1 + len(_OF_CHUNK) + 1))})"
_LEASE = "kedge.lease_1(%s, %s, %s, %s::bigint, %s, %s::float8, %s, %s)"

Outcome = tuple[Any] | Exception | None  # a result, a refusal; None: nothing was done


@dataclass(frozen=True, slots=True)
class TakeLease:
    job: str
    holder: str
    ttl_s: float

    def __call__(self, writes: PostgresWrites) -> Lease:
        return writes.acquire_lease(self.job, self.holder, self.ttl_s)

    def parameters(self, ns_no: int, namespace: str) -> tuple[object, ...]:
        return _lease_parameters(ns_no, namespace, "lease", self.job, None, self.holder, self.ttl_s)

    def outcome(self, answer: Sequence[str], namespace: str) -> Outcome:
        if len(answer) == 1:
            return (Lease(self.job, int(answer[0]), self.holder, self.ttl_s),)
        token, holder, left_s = answer
        return held(self.job, namespace, int(token), holder, float(left_s))


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    lease: Lease

    def __call__(self, writes: PostgresWrites) -> None:
        writes.release_lease(self.lease)

    def parameters(self, ns_no: int, namespace: str) -> tuple[object, ...]:
        lease = self.lease
        return _lease_parameters(ns_no, namespace, "release", lease.job, lease.token, lease.holder, None)

    def outcome(self, answer: Sequence[str] | None, namespace: str) -> Outcome:
        return (None,)


def _lease_parameters(
    ns_no: int, namespace: str, action: str, job: str, token: int | None, holder: str, ttl_s: float | None
) -> tuple[object, ...]:
    at_us = now_us()
    entry = ormsgpack.packb((at_us, ns_no, holder, action, job, None))[1:]  # of `chain_of`, but number and detail
    return ns_no, namespace, job, token, holder, ttl_s, at_us, entry


Quick = Save | TakeLease | ReleaseLease


def commit_together(db: Connection, operations: Sequence[Quick], ns_no: int, namespace: str) -> list[Outcome]:
    """What became of each, durably; the saves among them are all done, or none is.

    What psycopg raises goes to the caller. If the connection is still there then, nothing has been committed.
    """
    saves = [operation for operation in operations if isinstance(operation, Save)]
    leases = [operation for operation in operations if not isinstance(operation, Save)]
    records = [(record, save.actor) for save in saves for record in save.records]
    of_saves = _save_parameters(records, ns_no, namespace)
    calls = [_SAVE] * bool(of_saves) + [_LEASE] * len(leases)
    parameters = [*of_saves, *(value for lease in leases for value in lease.parameters(ns_no, namespace))]
    answers: Sequence[Any] | None = None
    if calls:  # one statement: a process that is suspended in between would keep the lock of its namespace
        answers = db.execute(f"SELECT {', '.join(calls)}", parameters, binary=True).fetchone()
    rest = iter(answers or ())
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
    return outcomes


def _save_parameters(records: Sequence[tuple[NewCheckpoint, str]], ns_no: int, namespace: str) -> list[Any]:
    """[] if there are none, or some that must be looked at by themselves."""
    keys = {record.key_id for record, _ in records}
    if len(keys) != 1 or any(record.seq is not None or record.takes_key_from is not None for record, _ in records):
        return []
    rows = [_values(record, actor, ns_no) for record, actor in records]
    tags = [(n, *tag) for n, (record, _) in enumerate(records, 1) for tag in record.tags.items()]
    placed = _placed([record for record, _ in records])
    return [ns_no, namespace, keys.pop() or None, *_columns(_OF_SAVE, rows), *_columns(_OF_TAG, tags), *placed]


def _values(new: NewCheckpoint, actor: str, ns_no: int) -> tuple[Any, ...]:
    at_us = now_us()
    entry = ormsgpack.packb((at_us, ns_no, actor, "save", new.job, new.id, "{}"))[1:]  # of `chain_of`, but its number
    key = (new.idempotency_key, new.request_digest)
    return (new.job, new.lease_token, *columns_of(new), *key, at_us, actor, entry)


def _placed(records: Sequence[NewCheckpoint]) -> list[Array | None]:
    """Packs, new chunks, and those that must be there."""
    chunks: dict[bytes, Chunk] = {}
    reused: set[bytes] = set()
    for record in records:
        for chunk in record.new_chunks:
            chunks.setdefault(chunk.digest, chunk)
        reused.update(record.reused_chunks)
    packs = sorted({chunk.pack for chunk in chunks.values()} - {""})
    place = {pack: n for n, pack in enumerate(packs, 1)}
    rows = [
        (c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base, place.get(c.pack), c.offset, c.data)
        for c in sorted(chunks.values(), key=lambda chunk: chunk.digest)
    ]
    return [
        Array("text", packs) if packs else None,
        *_columns(_OF_CHUNK, rows),
        Array("bytea", sorted(reused)) if reused else None,
    ]


def _columns(kinds: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[Array | None]:
    """An array for each column; None, which the server takes for NULLs, where there is nothing."""
    columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
    return [
        Array(kind, column) if any(value is not None for value in column) else None
        for kind, column in zip(kinds, columns, strict=True)
    ]
