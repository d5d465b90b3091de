"""What a check says of checkpoints and chunks, compared with what it has seen, inside its write transaction.

A check reads for minutes while others delete, collect, heal, move and encrypt anew. What it says holds only for rows
that still are what it has read: everything else is left alone, and looked at again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from kedge.index.rows import find_chunks
from kedge.ports import Chunk, Seen
from kedge.ports.record import CheckpointRow

# A chunk row that still says what a reader was told: the same place and, where the bytes are in it, the same bytes.
_AS_SEEN = (
    "ns_no = ? AND digest = ? AND size_bytes = ? AND stored_bytes = ? AND encoding = ? AND base IS ? AND offset = ? "
    "AND data IS ? AND pack_no IS (SELECT no FROM pack WHERE name = ?)"
)


def stands(db: sqlite3.Connection, ns_no: int, look: Seen, present: tuple[CheckpointRow, str] | None) -> bool:
    """Whether a checkpoint, of which that was found, and what was wrong with it still are as they were seen."""
    row, seen = present[0] if present else None, look.checkpoint
    if row is None or row.digest.hex() != seen.digest or row.status != seen.status:
        return False
    if not look.chunks and not look.missing:
        return True
    sql = f"SELECT 1 FROM chunk WHERE {_AS_SEEN}"
    if any(db.execute(sql, _place(ns_no, chunk)).fetchone() for chunk in look.chunks):
        return True
    names = list(dict.fromkeys(look.missing))
    return len(list(find_chunks(db, ns_no, "digest", names))) < len(names)


def mark_damaged(db: sqlite3.Connection, ns_no: int, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
    sql = f"UPDATE chunk SET is_damaged = ? WHERE {_AS_SEEN}"
    return [chunk.digest for chunk in chunks if db.execute(sql, (int(is_damaged), *_place(ns_no, chunk))).rowcount]


def _place(ns_no: int, c: Chunk) -> tuple[object, ...]:
    return ns_no, c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base, c.offset, c.data, c.pack
