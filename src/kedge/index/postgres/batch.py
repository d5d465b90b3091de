"""Saves that wait together, committed in one round trip by a function of the server (`sql/002.sql`).

The server numbers them, checks leases, parents and chunks, and inserts all of them or none. What it cannot decide by
itself (a job that is new, a lease that must be ended, anything that will be refused) it leaves alone: then nothing has
happened, and `writes` does them one by one, and finds out for each what is the matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ormsgpack

from kedge.index.group_commit import Save
from kedge.index.rows import LAST_SEQ, columns_of
from kedge.index.transactions import now_us
from kedge.model import Checkpoint
from kedge.ports import Chunk, NewCheckpoint

from .server import Array, Connection

# What the function takes for each save, chunk and tag, in its order.
_OF_SAVE = (
    *("text", "bigint", "text", "text", "text", "text", "bigint", "text", "bigint", "bigint", "bytea", "text", "text"),
    *("text", "boolean", "text", "boolean", "bytea", "text", "bytea", "bigint", "text", "bytea"),
)
_OF_TAG = ("integer", "text", "text")
_OF_CHUNK = ("bytea", "bigint", "bigint", "smallint", "bytea", "integer", "bigint", "bytea")
_SAVE = f"SELECT kedge.save_1({', '.join(['%s'] * (3 + len(_OF_SAVE) + len(_OF_TAG) + 1 + len(_OF_CHUNK) + 1))})"


def commit_together(db: Connection, saves: Sequence[Save], ns_no: int, namespace: str) -> list[list[Checkpoint]] | None:
    """What was saved, durably; None if nothing was, because some of it must be looked at by itself.

    What psycopg raises goes to the caller. If the connection is still there then, nothing has been committed.
    """
    records = [(record, save.actor) for save in saves for record in save.records]
    keys = {record.key_id for record, _ in records}
    if len(keys) != 1 or any(record.seq is not None or record.takes_key_from is not None for record, _ in records):
        return None
    rows = [_values(record, actor, ns_no) for record, actor in records]
    tags = [(n, *tag) for n, (record, _) in enumerate(records, 1) for tag in record.tags.items()]
    answer = db.execute(
        _SAVE,
        (
            ns_no, namespace, keys.pop() or None,
            *_columns(_OF_SAVE, rows), *_columns(_OF_TAG, tags), *_placed([record for record, _ in records]),
        ),
        binary=True,
    ).fetchone()  # fmt: skip
    if answer is None or answer[0] is None:
        return None
    saved = (
        record.saved(number & LAST_SEQ, record.digest.hex())
        for number, (record, _) in zip(answer[0], records, strict=True)
    )
    return [[next(saved) for _ in save.records] for save in saves]


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
