"""gc's part of the index, and the index's check of itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kedge.index.event_chain import prove_chain
from kedge.index.rows import FORGET_PACKS, late_manifests
from kedge.model import Checkpoint, EventChain
from kedge.ports import References
from kedge.ports.record import LAST_SEQ, SEQ_BITS

from .database import begin_alone

_AT_ONCE = 200  # chunk rows deleted in one transaction

# Tags are in the row of a checkpoint, and in a table by which they are found.
_TAGS = "json_each(CASE WHEN json_valid(c.tags) THEN c.tags ELSE '{}' END) t"
_LOST_TAGS = (
    f"SELECT c.id FROM checkpoint c, {_TAGS} WHERE c.tags IS NOT NULL AND NOT EXISTS (SELECT 1 FROM tag "
    f"WHERE job_no = c.row >> {SEQ_BITS} AND name = t.key AND value = t.value AND tag.row = c.row) "
    "UNION SELECT coalesce(c.id, 'of row ' || tag.row) FROM tag LEFT JOIN checkpoint c USING (row) "
    f"WHERE NOT EXISTS (SELECT 1 FROM {_TAGS} WHERE name = t.key AND value = t.value) LIMIT 20"
)

Manifests = Callable[[], Iterator[tuple[int, Checkpoint, bytes]]]


def sweep(
    db: sqlite3.Connection,
    ns_no: int,
    manifests: Manifests,
    references: References,
    should_stop: Callable[[], bool],
    check: Callable[[sqlite3.Connection], None],
) -> tuple[int, int] | None:
    """Delete the chunk rows that no manifest names (I3); None if it was told to stop before.

    `check` raises, in a transaction that is about to delete, if that is not to be.

    Marks go to temporary tables, in a file of SQLite's own, so that memory stays bounded. Writers go on meanwhile;
    what they commit is found through their events, inside each transaction that deletes. Those are small: writers
    wait little, and a log of bounded length is enough, also on a disk that is nearly full.
    """
    db.execute("CREATE TEMP TABLE mark (digest BLOB PRIMARY KEY) WITHOUT ROWID")
    try:
        seen = db.execute("SELECT coalesce(max(id), 0) FROM event").fetchone()[0]
        for _, checkpoint, manifest in manifests():
            if should_stop():
                return None
            _mark(db, references(checkpoint.id, manifest))
        db.execute(
            "CREATE TEMP TABLE unnamed AS SELECT digest FROM chunk WHERE ns_no = ? AND digest NOT IN temp.mark",
            (ns_no,),
        )
        last = count = size = 0
        while True:
            with _transaction(db):
                check(db)
                seen = _mark_late(db, ns_no, seen, references)
                rows = db.execute(
                    "SELECT rowid, digest FROM temp.unnamed WHERE rowid > ? ORDER BY rowid LIMIT ?", (last, _AT_ONCE)
                ).fetchall()
                if not rows:
                    db.execute(FORGET_PACKS)
                    return count, size
                last = rows[-1][0]
                for _, digest in rows:
                    gone = db.execute(
                        "DELETE FROM chunk WHERE ns_no = ? AND digest = ? AND digest NOT IN temp.mark "
                        "RETURNING stored_bytes",
                        (ns_no, digest),
                    ).fetchall()
                    count, size = count + len(gone), size + sum(stored for (stored,) in gone)
    finally:
        db.execute("DROP TABLE IF EXISTS temp.mark")
        db.execute("DROP TABLE IF EXISTS temp.unnamed")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    begin_alone(db)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk has ended it already
            db.execute("ROLLBACK")
        raise


def _mark_late(db: sqlite3.Connection, ns_no: int, seen: int, references: References) -> int:
    """Mark what was committed since event `seen`, and the bases of chunks; answers the newest event."""
    for checkpoint_id, manifest in db.execute(late_manifests(), (ns_no, seen)).fetchall():
        _mark(db, references(checkpoint_id, manifest))
    db.execute(  # there are none, or few: a small index has them
        "INSERT OR IGNORE INTO temp.mark SELECT base FROM chunk WHERE ns_no = ? AND base IS NOT NULL", (ns_no,)
    )
    return int(db.execute("SELECT coalesce(max(id), 0) FROM event").fetchone()[0])


def _mark(db: sqlite3.Connection, digests: Iterable[bytes]) -> None:
    db.executemany("INSERT OR IGNORE INTO temp.mark VALUES (?)", ((digest,) for digest in digests))


def integrity_problems(db: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong with the file, jobs whose counters are off, breaks in the chain of events."""
    problems = [f"SQLite: {text}" for (text,) in db.execute("PRAGMA integrity_check(20)") if text != "ok"]
    if problems:
        return problems
    # The rows of each job, looked up where they lie: joined with all rows counted, it would be jobs times jobs.
    wrong = db.execute(
        "SELECT name FROM job WHERE (checkpoints, size_bytes, stored_bytes, 1) IS NOT (SELECT count(*), "
        "coalesce(sum(c.size_bytes), 0), coalesce(sum(c.stored_bytes), 0), "
        f"coalesce(max(c.row & {LAST_SEQ}), 0) <= job.last_seq FROM checkpoint c "
        f"WHERE c.row BETWEEN job.no << {SEQ_BITS} AND (job.no << {SEQ_BITS}) + {LAST_SEQ})"
    )
    problems += [f"the counters of job {name} do not match its checkpoints" for (name,) in wrong]
    problems += [
        f"the tags of checkpoint {id_} do not match what finds it by them" for (id_,) in db.execute(_LOST_TAGS)
    ]
    if (broken_at := audit(db).broken_at) is not None:
        problems.append(f"the event log was altered at entry {broken_at}")
    return problems


def audit(db: sqlite3.Connection, until: int | None = None) -> EventChain:
    """One chain goes through the events of all namespaces."""
    entries = "SELECT id, at_us, ns_no, actor, action, job, checkpoint, detail, chain FROM event"
    last = 2**63 - 1 if until is None else until
    return prove_chain(db.execute(f"{entries} WHERE id <= ? ORDER BY id", (last,)))
