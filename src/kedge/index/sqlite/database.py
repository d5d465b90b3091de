"""Opening index.sqlite, and saying in our own errors what SQLite says in its own."""

from __future__ import annotations

import os
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kedge.blobs.group_files import OWN_FILE, share
from kedge.errors import Corrupted, NoSpace, ReadOnly, StorageError, Validation, storage_error, storage_errors
from kedge.ports import is_older, unsupported
from kedge.version import __version__

APPLICATION_ID = 0x6B656467  # "kedg"

_PAGE_BYTES = 4096
_SHARED_MEMORY_BYTES = 64 * 1024
_NO_SHARED_MEMORY = 4874  # SQLITE_IOERR_SHMSIZE: a full disk says this, and not SQLITE_FULL, when a database is opened

_LOOK_AGAIN_S = (0.0002, 0.001)
_MOST_LOOKS = 4  # times that, when somebody has looked as often
_dice = random.SystemRandom()  # not the generator that users seed

_MIGRATION = re.compile(r"(\d{3})\.sql")
_SCRIPTS = Path(__file__).with_name("sql")  # importlib.resources would take longer to import than to read all of it


@cache
def migrations() -> list[tuple[int, str]]:
    """(version, SQL) of every schema step, in order; read once, because descriptors may run out later."""
    with storage_errors("read", _SCRIPTS):
        scripts = [(m[1], f) for f in _SCRIPTS.iterdir() if (m := _MIGRATION.fullmatch(f.name))]
        return sorted((int(version), file.read_text()) for version, file in scripts)


def connect(path: str | None, busy_timeout_s: float, *, create: bool = True) -> sqlite3.Connection:
    """A connection that syncs at every commit (I1). Transactions are begun and ended by hand."""
    if create and path is not None:
        _make_own(path)
    place = ":memory:" if path is None else f"{Path(path).absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        place,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=busy_timeout_s,
        cached_statements=256,
    )
    try:
        run_alone(connection, "PRAGMA journal_mode=WAL", busy_timeout_s)  # SQLite does not wait for who creates it too
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _make_own(path: str) -> None:
    """SQLite would let everybody read it. Its other files get the mode of this one."""
    with suppress(FileExistsError):  # not opened: closing it again would drop locks that SQLite holds here
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWN_FILE))


def share_files(path: str | None) -> None:
    """Where a group shares the store: SQLite gives its other files the mode of the database, but not the group."""
    if path is not None:
        try:
            for suffix in ("", "-wal", "-shm"):
                share(path + suffix)
        except OSError as error:
            raise storage_error("share", path, error) from error


def run_alone(connection: sqlite3.Connection, sql: str, wait_s: float) -> bool:
    """What needs the write lock, as soon as nobody else has it, where SQLite does not wait by itself; whether we did.

    SQLite would look again after 1, 2, 5, … 100 ms, while a commit takes one or two: of several processes that write
    all the time, whoever has lost a few times hardly gets a turn. So we look again sooner, but not so often that who
    looks keeps who writes from the processor.
    """
    until = 0.0
    looks = 0
    while True:
        try:
            connection.execute(sql)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            until = until or time.monotonic() + wait_s
            if time.monotonic() >= until:
                raise
            looks = min(looks + 1, _MOST_LOOKS)
            time.sleep(looks * _dice.uniform(*_LOOK_AGAIN_S))
        else:
            return looks > 0


def begin_alone(connection: sqlite3.Connection) -> None:
    """Begin a transaction that writes, on a connection that for anything else waits as SQLite does."""
    wait_ms = connection.execute("PRAGMA busy_timeout").fetchone()[0]
    connection.execute("PRAGMA busy_timeout=0")
    try:
        run_alone(connection, "BEGIN IMMEDIATE", wait_ms / 1000)
    finally:
        connection.execute(f"PRAGMA busy_timeout={wait_ms}")


def migrate(connection: sqlite3.Connection, path: str, store_id: str | None) -> None:
    """Bring the schema to the newest version, in one transaction; refuse a newer one and foreign databases (I8)."""
    steps = migrations()
    newest = steps[-1][0]
    connection.execute("BEGIN")  # one moment for all that is read, while another process may be making it
    try:
        have = _version(connection, path)
        if is_newest := have == newest:
            _check_schema(connection, path, "".join(text for _, text in steps))
    finally:
        connection.execute("ROLLBACK")
    if is_newest:
        return
    begin_alone(connection)
    try:
        have = _version(connection, path)  # another process may have been faster
        if have > newest:
            raise unsupported(f"{path} (format {have})", written_by(connection))
        for version, text in steps:
            if version > have:
                for statement in _statements(text):
                    connection.execute(statement)
        if have == 0:
            said = (("store_id", store_id or os.urandom(16).hex()), ("encrypted", "no"), ("written_by", __version__))
            connection.executemany("INSERT INTO meta VALUES (?, ?)", said)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={newest}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def is_encrypted(connection: sqlite3.Connection) -> bool:
    row = connection.execute("SELECT value FROM meta WHERE key = 'encrypted'").fetchone()
    return row is not None and row[0] == "yes"


def mark_encrypted(connection: sqlite3.Connection) -> None:
    """In a transaction: say that some namespace has a keyring."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('encrypted', 'yes')")


def written_by(connection: sqlite3.Connection) -> str:
    """The newest Kedge that has opened the index for writing."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
    return row[0] if row else ""


def is_unsigned(connection: sqlite3.Connection) -> bool:
    """Whether no Kedge as new as this one has opened the index for writing."""
    return is_older(written_by(connection), __version__)


def sign(connection: sqlite3.Connection) -> None:
    """Say that this Kedge writes here."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('written_by', ?)", (__version__,))


def overwrite_deleted(connection: sqlite3.Connection) -> None:
    """What is deleted or replaced is overwritten: after a change of keys nothing under the old ones stays (I10)."""
    connection.execute("PRAGMA secure_delete=ON")


def _version(connection: sqlite3.Connection, path: str) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if application != APPLICATION_ID and not (version == 0 and empty):
        raise Corrupted(f"{path} is a database, but not of Kedge", hint="put the right index.sqlite back")
    return version


def _check_schema(connection: sqlite3.Connection, path: str, text: str) -> None:
    """What made the tables is text in the file, and a bit of it decides what a column is or what is unique (I2)."""
    made = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
    if len(made) != text.count("CREATE ") or not all(sql in text for sql in made):
        raise Corrupted(f"{path} has tables that Kedge did not make", hint="run kedge check --repair")


def _statements(text: str) -> Iterator[str]:
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


TRANSLATED = (sqlite3.Error, UnicodeError, OverflowError)


@contextmanager
def translated(path: str) -> Iterator[None]:
    """SQLite's errors leave as ours; no raw one escapes an adapter."""
    try:
        yield
    except TRANSLATED as error:
        raise typed(error, path) from error


def typed(error: BaseException, path: str) -> BaseException:
    """The CheckpointError for an error of SQLite; any other error as it is."""
    if isinstance(error, UnicodeDecodeError):  # not even the message of SQLite can be read
        return Corrupted(f"{path} holds text that is none: {error}", hint="run kedge check --repair")
    if isinstance(error, UnicodeEncodeError | OverflowError):  # from binding a value
        return Validation(f"the index cannot hold this value: {error}", hint="use valid Unicode and 64-bit integers")
    if not isinstance(error, sqlite3.Error):
        return error
    extended = getattr(error, "sqlite_errorcode", 0)
    code = sqlite3.SQLITE_FULL if extended == _NO_SHARED_MEMORY and _is_full(path) else extended & 0xFF
    text = f"{path}: {error}"
    if code == sqlite3.SQLITE_CANTOPEN:
        code = _why_not_opened(path)
    if isinstance(error, sqlite3.OperationalError) and not extended:
        code = sqlite3.SQLITE_CORRUPT  # of the driver itself: text that is not UTF-8, which nobody wrote
    if code == sqlite3.SQLITE_FULL:
        return NoSpace(text, hint="free some space (kedge cleanup, kedge gc), then run it again")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ReadOnly(text, hint="check the owner and mode of the directory and that its disk is mounted read-write")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageError(text, hint="another process has been writing for very long; try again, or stop it")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupted(text, hint="run kedge check --repair")
    return StorageError(text, hint="see the system log for the device; run kedge check before relying on this store")


def _is_full(path: str) -> bool:
    try:
        disk = os.statvfs(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _SHARED_MEMORY_BYTES


def _why_not_opened(path: str) -> int:
    """SQLite's code for what keeps it from making its files beside `path`, which it does not tell by itself."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        disk = os.statvfs(folder)
    except OSError:
        return sqlite3.SQLITE_CANTOPEN
    if disk.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
        return sqlite3.SQLITE_READONLY
    return sqlite3.SQLITE_CANTOPEN if disk.f_favail or not disk.f_files else sqlite3.SQLITE_FULL


def refuse_full_small_blocks(path: str) -> None:
    """NoSpace where opening would kill the process.

    SQLite maps a file of shared memory and has one block of each page allocated. Where blocks are smaller than pages,
    on a full disk, touching the rest of a page is SIGBUS.
    """
    try:
        disk = os.statvfs(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return  # opening tells why
    if disk.f_bsize < _PAGE_BYTES and disk.f_bavail * disk.f_frsize < _SHARED_MEMORY_BYTES:
        raise NoSpace(
            f"{path}: no space for the memory that processes share", hint=f"free {_SHARED_MEMORY_BYTES:,} bytes"
        )
