"""What a check says of checkpoints and chunks on PostgreSQL, compared with what it has seen: see `sqlite.marks`."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.ports import Chunk, Seen

from .server import Array, Connection

_CHUNK = ("bytea", "bigint", "bigint", "smallint", "bytea", "text", "bigint", "bytea")
_GIVEN = (
    "unnest(%s::bytea[], %s::bigint[], %s::bigint[], %s::smallint[], %s::bytea[], %s::text[], %s::bigint[], "
    '%s::bytea[]) AS u (digest, size_bytes, stored_bytes, encoding, base, pack, "offset", data) '
    "LEFT JOIN kedge.pack p ON p.name = u.pack"
)
# Chunk rows that still say what a reader was told: the same place and, where the bytes are in them, the same bytes.
_AS_SEEN = (
    "c.ns_no = %s AND c.digest = u.digest AND c.size_bytes = u.size_bytes AND c.stored_bytes = u.stored_bytes "
    'AND c.encoding = u.encoding AND c."offset" = u."offset" AND c.data IS NOT DISTINCT FROM u.data '
    "AND c.base IS NOT DISTINCT FROM u.base AND c.pack_no IS NOT DISTINCT FROM p.no"
)


def standing(db: Connection, ns_no: int, seen: Sequence[Seen]) -> list[Seen]:
    """Those checkpoints that, with what was wrong with them, still are as they were seen."""
    rows = db.execute(
        'SELECT id, digest, status FROM kedge.checkpoint JOIN kedge.job ON no = "row" >> 32 '
        "WHERE id = ANY(%s) AND ns_no = %s",
        ([look.checkpoint.id for look in seen], ns_no),
    ).fetchall()
    now = {checkpoint_id: (bytes(digest).hex(), status) for checkpoint_id, digest, status in rows}
    return [
        look
        for look in seen
        if now.get(look.checkpoint.id) == (look.checkpoint.digest, str(look.checkpoint.status))
        and (not (look.chunks or look.missing) or _lie(db, ns_no, look.chunks) or _lack(db, ns_no, look.missing))
    ]


def mark_damaged(db: Connection, ns_no: int, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
    changed = db.execute(
        f"UPDATE kedge.chunk c SET is_damaged = %s FROM {_GIVEN} WHERE {_AS_SEEN} RETURNING c.digest",
        (is_damaged, *_places(chunks), ns_no),
    )
    return [bytes(digest) for (digest,) in changed.fetchall()]


def _lie(db: Connection, ns_no: int, chunks: Sequence[Chunk]) -> bool:
    """Whether any of these rows is as it was seen."""
    if not chunks:
        return False
    sql = f"SELECT 1 FROM kedge.chunk c, ({_GIVEN}) WHERE {_AS_SEEN} LIMIT 1"
    return db.execute(sql, (*_places(chunks), ns_no)).fetchone() is not None


def _lack(db: Connection, ns_no: int, names: Sequence[bytes]) -> bool:
    """Whether any of these names has no row."""
    wanted = list(dict.fromkeys(names))
    row = db.execute(
        "SELECT count(*) FROM kedge.chunk WHERE ns_no = %s AND digest = ANY(%s)", (ns_no, Array("bytea", wanted))
    ).fetchone()
    return row is not None and row[0] < len(wanted)


def _places(chunks: Sequence[Chunk]) -> list[Array]:
    rows = [
        (c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base, c.pack or None, c.offset, c.data)
        for c in chunks
    ]
    return list(map(Array, _CHUNK, zip(*rows, strict=True)))
