"""Saves that wait together, in one statement, which outside a transaction is one of its own.

Python lets other threads run whenever SQLite works, and waits for its turn afterwards: a statement for each row of each
save would be a hand-over for each. So the rows of all saves go to a view, whose trigger writes what belongs to a save.

Numbers come from memory. They are right if nobody else has written meanwhile, which the statement proves: the number of
its first event is free, and each job ends where we know it to end. Whatever is wrong, it changes nothing, and `writes`
does the same saves one by one, and finds out for each what is the matter.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain

from kedge.index.rows import Row
from kedge.ports.record import CheckpointRow

MAX_ROWS = 512  # of one statement

_CHECKPOINT = (*CheckpointRow._fields, "has_chunks", "manifest")
_COLUMNS = ("event", "at_us", "ns_no", "actor", "job", "chain", "key", "request_digest", *_CHECKPOINT)
_NOTHING = (0,) * len(_COLUMNS)  # a row that is none; Python binds numbers faster than None

_VIEW = (
    f"CREATE TEMP VIEW IF NOT EXISTS new_save ({', '.join(_COLUMNS)}) AS SELECT {', '.join(['NULL'] * len(_COLUMNS))}"
)
_TRIGGER = f"""
CREATE TEMP TRIGGER IF NOT EXISTS save INSTEAD OF INSERT ON new_save WHEN new.row > 0 BEGIN
    INSERT INTO event VALUES
        (new.event, new.at_us, new.ns_no, new.actor, 'save', new.job, new.id, '{{}}', new.chain);
    SELECT RAISE(ABORT, 'no parent') WHERE new.parent IS NOT NULL AND NOT EXISTS
        (SELECT 1 FROM checkpoint c JOIN job j ON j.no = c.row >> 32 WHERE c.id = new.parent AND j.ns_no = new.ns_no);
    UPDATE job SET last_seq = last_seq + 1, checkpoints = checkpoints + 1, size_bytes = size_bytes + new.size_bytes,
        stored_bytes = stored_bytes + new.stored_bytes, updated_us = new.created_us
        WHERE no = new.row >> 32 AND last_seq = (new.row & 0xffffffff) - 1;
    SELECT RAISE(ABORT, 'another number') WHERE changes() = 0;
    INSERT INTO checkpoint VALUES ({", ".join(f"new.{name}" for name in _CHECKPOINT)});
    INSERT INTO idempotency SELECT new.row >> 32, new.key, new.row, new.request_digest WHERE new.key IS NOT NULL;
    INSERT INTO tag SELECT new.row >> 32, key, value, new.row FROM json_each(new.tags);
END"""
PREPARATION = (_VIEW, _TRIGGER)  # of a connection; nobody else sees it


def insert(db: sqlite3.Connection, rows: Sequence[Row]) -> bool:
    """Insert all of these saves; False, and nothing, if others write or have written, or one of them is refused."""
    count = 1 << (len(rows) - 1).bit_length()  # a few statements, each of which stays prepared
    values = tuple(chain.from_iterable(rows)) if len(rows) > 1 else rows[0]
    try:
        db.execute(_statement(count), values + _NOTHING * (count - len(rows)))
    except (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, UnicodeError, OverflowError):
        return False
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


@cache
def _statement(rows: int) -> str:
    marks = f"({', '.join('?' * len(_COLUMNS))})"
    return f"INSERT INTO temp.new_save VALUES {', '.join([marks] * rows)}"
