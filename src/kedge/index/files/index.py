"""The index as readable files: <dir>/<job>/<level>/<id>.json, and a journal that is the truth.

Each process has the whole index in memory (SQLite without a file) and follows the journal: it applies what others have
appended before it reads or writes. A write runs in memory under the journal's lock; its changed rows are appended as
SQL and synced, and only then is it acknowledged (I1). After that the readable files get their names (`shown_files`). A
file that a crash left out is written when the store is next opened.

For stores of one machine and some ten thousand checkpoints: opening reads all of them, each process keeps them in
memory, and every save syncs separately.
"""

from __future__ import annotations

import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kedge.blobs import group_files
from kedge.blobs.direct import sync_directory
from kedge.blobs.reserve import Reserve
from kedge.errors import CheckpointError, Corrupted, NoSpace, StorageError, storage_errors
from kedge.index.group_commit import Save
from kedge.index.rows import CHECKPOINT, FORGET_PACKS, late_manifests
from kedge.index.sqlite.database import (
    connect,
    is_encrypted,
    is_unsigned,
    migrate,
    sign,
    translated,
    written_by,
)
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.leases import check_holder
from kedge.index.sqlite.read_only import read_only_error
from kedge.index.sqlite.writes import Writes
from kedge.model import Checkpoint
from kedge.ports import References
from kedge.ports.record import SEQ_BITS, checkpoint_of

from .journal import MEND, Journal
from .shown_files import DEFAULT, INSIDE, ShownFiles

T = TypeVar("T")

_NO_NAMESPACE = 0  # until something is written, the journal does not have our namespace
_COMPACT_OVER_BYTES = 1 << 20
_COMPACT_AT = 4  # times the size of a new one

View = Callable[[bytes], dict[str, object]]  # what to show of a manifest


class FilesIndex(SqliteIndex):
    """`ports.Index` in a directory. `view` returns what a readable file shows of a state."""

    def __init__(self, folder: Path, *, namespace: str = DEFAULT, view: View = lambda _: {}) -> None:
        self._folder = folder
        self._view = view
        self._journal = Journal(folder / INSIDE)
        self._shown = ShownFiles(folder)
        self._room = Reserve(folder / INSIDE)
        self._is_read_only = not _is_writable(self._journal.path)
        self._snapshot_bytes = 0
        self._is_settled = False
        super().__init__(None, namespace=namespace)
        self._name = str(folder)
        try:
            if self._is_read_only:
                self._catch_up()
                self._settle()
            else:
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        with self._memory_lock, self._journal.locked():
            if self._journal.exists():
                self._catch_up()
            else:
                self._prepare()
                self._replace_journal()
            self._settle()
            self._complete_files()
            with storage_errors("write", self._name):
                self._room.refill()

    def close(self) -> None:
        super().close()
        self._journal.close()

    # Following the journal

    def _prepare(self) -> None:
        """Record each changed row of each table as SQL for the same change. Like the database, this is in memory."""
        db = self._connection
        db.execute("PRAGMA temp_store=MEMORY")
        db.execute("CREATE TEMP TABLE change (sql TEXT, row INTEGER, id TEXT, level TEXT)")
        for table, columns, keys in _tables(db):
            seen = {"NEW": "NEW.row, NEW.id, NEW.level", "OLD": "OLD.row, OLD.id, OLD.level"}
            new, old = (seen[side] if table == "checkpoint" else "NULL, NULL, NULL" for side in ("NEW", "OLD"))
            for event in ("INSERT", "UPDATE"):
                db.execute(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} BEGIN "
                    f"INSERT INTO change VALUES ({_replacing(table, columns, 'NEW.')}, {new}); END"
                )
            where = "||' AND '||".join(f"'{key}='||{_quoted('OLD.' + key)}" for key in keys)
            db.execute(
                f"CREATE TEMP TRIGGER {table}_DELETE AFTER DELETE ON main.{table} BEGIN "
                f"INSERT INTO change VALUES ('DELETE FROM {table} WHERE '||{where}||';', {old}); END"
            )

    def _catch_up(self) -> None:
        """Apply what others have committed. Called with the lock of the memory."""
        if not self._journal.has_more():
            return
        is_other, transactions = self._journal.read()
        try:
            if is_other:
                self._start_over()
                self._snapshot_bytes = len(transactions[0]) if transactions else 0
            self._apply(transactions)
            if is_other:
                self._find_namespace()
        except BaseException:
            self._journal.close()  # memory has a part of it: the next read starts again
            raise
        if transactions or is_other:
            self._writes.forget()

    def _apply(self, transactions: Iterable[str]) -> None:
        self._connection.set_authorizer(_only_rows)
        try:
            for sql in transactions:
                self._connection.executescript(f"BEGIN;\n{sql}COMMIT;")
        except (sqlite3.Error, ValueError) as error:
            raise Corrupted(f"{self._journal.path} holds what no index writes: {error}", hint=MEND) from error
        finally:
            self._connection.set_authorizer(None)
        self._connection.execute("DELETE FROM temp.change")

    def _find_namespace(self) -> None:
        """Find our namespace's number: a repair may have made another journal, which has new numbers."""
        db = self._connection
        row = db.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()
        if self._is_settled and row is not None and row[0] != self.store_id:
            raise StorageError(
                f"the store at {self._folder} was replaced by another one while it was open",
                hint="close this store and open the right one",
            )
        number = db.execute("SELECT no FROM namespace WHERE name = ?", (self.namespace,)).fetchone()
        self._ns = number[0] if number else _NO_NAMESPACE
        self._numbers.clear()
        self._writes.use(db, self._ns)

    def _start_over(self) -> None:
        """Start with an empty database, for a journal that is read from its beginning."""
        self._connection.close()
        self._connection = connect(None, 0)
        migrate(self._connection, self._name, None)
        for table, _, _ in _tables(self._connection):
            self._connection.execute(f"DELETE FROM {table}")
        self._prepare()
        self._writes.use(self._connection, _NO_NAMESPACE)

    def _settle(self) -> None:
        """Find our namespace's number and the store's ID after reading the journal."""
        db = self._connection
        is_new = db.execute("SELECT 1 FROM namespace WHERE name = ?", (self.namespace,)).fetchone() is None
        self._ns = self._namespace_no()
        if not self._is_read_only:
            if is_unsigned(db):
                sign(db)
                is_new = True
            if is_new:
                self._publish()
        self.store_id = db.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()[0]
        self.is_encrypted = is_encrypted(db)
        self.written_by = written_by(db)
        self._writes = Writes(db, self._name, self._ns, self.namespace, 0)
        self._is_settled = True

    @contextmanager
    def _lent(self) -> Iterator[sqlite3.Connection]:
        with self._memory_lock:
            self._check_open()
            self._catch_up()
            with super()._lent() as db:
                yield db

    def _check_writable(self) -> None:
        super()._check_writable()
        if self._is_read_only:
            raise read_only_error(self._name)

    def _write(self, operation: Callable[[], T] | Save, *, is_urgent: bool = False) -> T:
        self._check_writable()
        if not is_urgent and not self._room.is_whole and not self._room.refill():
            raise NoSpace(f"{self._name}: the disk is full", hint="kedge cleanup and kedge gc free some space")
        try:
            return self._write_once(operation)
        except NoSpace:
            if not is_urgent or not self._room.release():
                raise
        return self._write_once(operation)

    def make_room(self) -> bool:
        return self._room.release()

    def _write_once(self, operation: Callable[[], T] | Save) -> T:
        with self._memory_lock, translated(self._name):
            self._check_open()
            with self._journal.locked():
                self._catch_up()
                if self._ns == _NO_NAMESPACE:
                    self._ns = self._namespace_no()
                    self._writes.use(self._connection, self._ns)
                    self._publish()
                result = self._run(operation)
                self._publish()
        return result

    def _publish(self) -> None:
        """Make what memory has committed durable, then readable; on failure, roll memory back, too."""
        db = self._connection
        drafts: dict[Path, Path | None] = {}
        try:
            rows = db.execute("SELECT sql, row, id, level FROM temp.change ORDER BY rowid").fetchall()
            if not rows:
                return
            db.execute("DELETE FROM temp.change")
            for number, (id_, level) in {row: (i, lv) for _, row, i, lv in rows if row is not None}.items():
                self._draft(drafts, number, id_, level)
            if self._journal.must_be_replaced():
                self._replace_journal()
            else:
                self._journal.append("".join(f"{sql}\n" for sql, *_ in rows))
        except BaseException:
            self._journal.close()
            self._shown.discard(drafts)
            self._catch_up()
            raise
        self._finish(drafts)

    def _finish(self, drafts: dict[Path, Path | None]) -> None:
        """Finish after a durable commit. A failure cannot undo it, and must not look like a refusal."""
        try:
            self._shown.place(drafts)
            if self._journal.position > max(_COMPACT_OVER_BYTES, _COMPACT_AT * self._snapshot_bytes):
                self._replace_journal()
        except NoSpace:
            return  # the shorter journal can wait until there is space
        except StorageError as error:
            warnings.warn(f"saved, but not shown until the store is opened again: {error}", stacklevel=2)

    def _replace_journal(self) -> None:
        """Write a journal of the current rows, without their history."""
        db = self._connection
        lines = [
            sql
            for table, columns, _ in _tables(db)
            for (sql,) in db.execute(f"SELECT {_replacing(table, columns, '')} FROM {table}")
        ]
        payload = "".join(f"{line}\n" for line in lines)
        self._journal.replace(payload)
        self._snapshot_bytes = len(payload)
        db.execute("DELETE FROM temp.change")

    def scrub(self) -> None:
        """Write a journal of the current rows, which tells nothing of earlier ones."""
        self._check_writable()
        with self._memory_lock, self._journal.locked():
            self._check_open()
            self._catch_up()
            self._replace_journal()

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        """Mark beside writers, in memory. Then one write checks what was saved meanwhile, and deletes (I3)."""
        self._check_writable()
        with self._memory_lock, self._journal.locked():
            self._shown.present()  # removes what killed writers left
        newest = "SELECT id, chain FROM event ORDER BY id DESC LIMIT 1"
        seen, chain = self._one(newest) or (0, None)
        marked = {
            digest for _, checkpoint, manifest in self.manifests() for digest in references(checkpoint.id, manifest)
        }

        def delete() -> tuple[int, int]:
            db = self._connection
            check_holder(self._ns, self.namespace, lease_token, db)
            now = db.execute("SELECT chain FROM event WHERE id = ?", (seen,)).fetchone()
            late: Iterable[tuple[str, bytes]] = db.execute(late_manifests(), (self._ns, seen)).fetchall()
            if (now and now[0]) != chain:  # the journal was rewritten, and its event numbers belong to other changes
                late = ((checkpoint.id, manifest) for _, checkpoint, manifest in self.manifests())
            for checkpoint_id, manifest in late:
                marked.update(references(checkpoint_id, manifest))
            chunks = db.execute("SELECT digest, stored_bytes, base FROM chunk WHERE ns_no = ?", (self._ns,)).fetchall()
            marked.update(base for _, _, base in chunks if base is not None)
            gone = [(digest, size) for digest, size, _ in chunks if digest not in marked]
            db.executemany("DELETE FROM chunk WHERE ns_no = ? AND digest = ?", [(self._ns, d) for d, _ in gone])
            db.execute(FORGET_PACKS)
            return len(gone), sum(size for _, size in gone)

        return self._write(delete, is_urgent=True)

    # Readable files

    def _draft(self, drafts: dict[Path, Path | None], number: int, checkpoint_id: str, level: str) -> None:
        """Prepare the readable file of a checkpoint, or its removal."""
        namespace, job = self._connection.execute(
            "SELECT namespace.name, job.name FROM job JOIN namespace ON namespace.no = ns_no WHERE job.no = ?",
            (number >> SEQ_BITS,),
        ).fetchone()
        path = self._shown.path_of(namespace, job, level, checkpoint_id)
        drafts[path] = None
        sql = f"SELECT {CHECKPOINT}, manifest FROM checkpoint c WHERE row = ? AND id = ?"
        for *columns, manifest in self._connection.execute(sql, (number, checkpoint_id)):
            drafts[path] = self._shown.draft(path, self._text(checkpoint_of(job, columns), manifest))

    def _text(self, checkpoint: Checkpoint, manifest: bytes) -> bytes:
        shown = checkpoint.to_json()
        del shown["stored_bytes"]  # of the index, not of the state
        try:
            shown |= self._view(manifest)
        except CheckpointError as error:
            shown["state_unreadable"] = error.message
        return (json.dumps(shown, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")

    def _complete_files(self) -> None:
        """Write the files that a crash left out, and remove those of deleted checkpoints."""
        rows = self._connection.execute(
            "SELECT checkpoint.row, checkpoint.id, level, namespace.name, job.name FROM checkpoint "
            f"JOIN job ON job.no = row >> {SEQ_BITS} JOIN namespace ON namespace.no = ns_no"
        ).fetchall()
        wanted = {self._shown.path_of(ns, job, level, id_): (row, id_, level) for row, id_, level, ns, job in rows}
        present = self._shown.present()
        self._shown.remove_strays(present - wanted.keys())
        for path in wanted.keys() - present:
            drafts: dict[Path, Path | None] = {}
            try:
                self._draft(drafts, *wanted[path])
            except NoSpace:
                return  # the journal has it; the file can wait until there is space
            self._shown.place(drafts)


def _is_writable(journal: Path) -> bool:
    """Return whether a store can be written or created here."""
    with storage_errors("open", journal):
        return group_files.is_writable(journal.parent) and (os.access(journal, os.W_OK) or not journal.exists())


def _tables(db: Any) -> list[tuple[str, list[str], list[str]]]:
    """Return (table, columns, key columns) of the schema, whatever its version."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY rowid")]
    tables = []
    for name in names:
        columns = db.execute(f"PRAGMA table_info({name})").fetchall()
        tables.append((name, [c[1] for c in columns], [c[1] for c in columns if c[5]]))
    return tables


_ROWS = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT}
_FUNCTIONS = {"quote", "hex", "instr", "typeof", "char"}


def _only_rows(action: int, first: str | None, second: str | None, database: str | None, _: str | None) -> int:
    """Allow a journal, which may come from anywhere, only to change rows (I7)."""
    is_allowed = (
        (action in _ROWS and database in ("main", "temp", None))
        or action == sqlite3.SQLITE_TRANSACTION
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
    )
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _replacing(table: str, columns: Iterable[str], side: str) -> str:
    values = "||','||".join(_quoted(side + column) for column in columns)
    return f"'REPLACE INTO {table} VALUES('||{values}||');'"


def _quoted(column: str) -> str:
    """Return SQL for a value as an SQL literal. quote() would cut off text at U+0000."""
    cast = f"'CAST(X'''||hex({column})||''' AS TEXT)'"
    return f"CASE WHEN typeof({column}) = 'text' AND instr({column}, char(0)) THEN {cast} ELSE quote({column}) END"


def make_folder(folder: Path) -> None:
    """Create the directory of a store and its inner directory, with durable names."""
    with storage_errors("make", folder):
        group_files.make_store_folder(folder)
        group_files.make_folder(folder / INSIDE)
        sync_directory(folder)
        for parent in folder.parents:
            if os.access(parent, os.R_OK):
                sync_directory(parent)
