"""A PostgreSQL server that holds a store: connections, migrations, and its errors as ours.

Safe behind pgbouncer in transaction mode: nothing is prepared there, no session is relied on, every table is named with
its schema. A server that is away for a moment (a restart, a failover) is waited for.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib.resources import files
from itertools import count
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakSet

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format, TransactionStatus

from kedge.blobs.backoff import Backoff
from kedge.errors import (
    Corrupted,
    NoSpace,
    NotFound,
    ReadOnly,
    StorageError,
    Unavailable,
    Validation,
)
from kedge.ports import FORMAT_VERSION, is_older, unsupported
from kedge.version import __version__

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"
Plans = Literal["each", "once"]  # prepared statements are planned at each use, or once
T = TypeVar("T")

CHANNEL = "kedge"  # NOTIFY says the namespace in which something happened
MAX_CONNECTIONS = 16  # of one process, besides those with which large saves write
FROZEN_MS = 10_000  # a process that is suspended in a transaction keeps its locks: the server ends it
_PREPARED_AFTER = 3  # uses of a statement
_PLAN_CACHE: dict[Plans, str] = {"each": "force_custom_plan", "once": "force_generic_plan"}
_unpooled: WeakSet[Connection] = WeakSet()  # connections to the server itself

# What a database may set for its connections: values with which Kedge breaks promises, and what it sets instead.
# Behind a lock each statement must see what was committed before (I5), and what is answered must be durable (I1).
_SETTINGS = {
    "default_transaction_isolation": (("repeatable read", "serializable"), "read committed"),
    "synchronous_commit": (("off",), "on"),
}

STORE = (
    0x6B656467  # "kedg": the advisory lock of a migration; with a second number, those of the store and of namespaces
)
_PLACEHOLDER = re.compile("%s|%%")
_MIGRATION = re.compile(r"(\d{3})\.sql")


class Server:
    """Connections to one database, lent for one statement or one transaction each. Thread-safe; survives fork."""

    def __init__(self, url: str, *, backoff: Backoff | None = None) -> None:
        self.name = _without_secrets(url)
        self.backoff = backoff or Backoff()
        self._url = url
        self._is_closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # signal handlers save, too
        self._idle = _no_connections()  # by how they plan; under the lock; another dictionary after each break
        self._inherited: list[Connection] = []  # of the parent process: kept, unused, so that nothing closes them
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)

    @contextmanager
    def lend(self, *, plans: Plans = "each", is_counted: bool = True) -> Iterator[Connection]:
        """A connection in autocommit mode. When one breaks, none that was made before is lent again.

        Who needs others while it has this one is not counted: those who have all of them would wait for each other.

        It plans each prepared statement at each use, as the sizes of tables change. One that plans "once" is for calls
        of functions that name no table: a third of what the server does for such a call would be to plan it.
        """
        self.check_open()
        self._leave_parent()
        with self._places if is_counted else nullcontext(), self.translated():
            with self._lock:
                idle = self._idle
                connection = idle[plans].pop() if idle[plans] else None
            connection = connection or _connect(self._url, plans)
            try:
                yield connection
            except BaseException as error:
                connection.close()  # with whatever was under way on it
                if isinstance(error, psycopg.OperationalError):
                    self.distrust()
                raise
            is_sound = connection.info.transaction_status == TransactionStatus.IDLE
            with self._lock:
                has_room = len(idle[plans]) < MAX_CONNECTIONS
                if is_reusable := is_sound and has_room and idle is self._idle and not self._is_closed:
                    idle[plans].append(connection)
            if not is_reusable:
                connection.close()

    def run(self, action: Callable[[Connection], T]) -> T:
        """What may be done twice without harm, tried again while the server is away."""

        def attempt() -> T:
            with self.lend() as connection:
                return action(connection)

        return self.backoff.run(attempt)

    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.run(lambda db: run_prepared(db, sql, parameters).fetchall())

    def one(self, sql: str, *parameters: object) -> tuple[Any, ...] | None:
        rows = self.all(sql, *parameters)
        return rows[0] if rows else None

    @contextmanager
    def listening(self) -> Iterator[Callable[[float], str]]:
        """A function that waits until somebody notifies of events, or for so many seconds: in which namespace, or "".

        On a connection of its own, which is listened to as long as the block runs.
        """
        self.check_open()
        with self.translated(), _connect(self._url) as connection:
            connection.execute(f"LISTEN {CHANNEL}")

            def listen(timeout_s: float) -> str:
                with self.translated():
                    return next((notice.payload for notice in connection.notifies(timeout=timeout_s, stop_after=1)), "")

            yield listen

    def migrate(self, *, create: bool = True) -> tuple[int, int]:
        """Take the steps of the schema that were not taken yet, in one transaction; refuse a newer format (I8).

        Answers which format it had, 0 for none, and which it has. A step within a format only adds what an older
        Kedge can do without, so that machines need not be upgraded at the same time.
        """
        try:
            return self._migrate(_migrations(), create=create)
        except ReadOnly as error:
            raise ReadOnly(error.message, hint="run kedge migrate as the owner of the tables, once") from error

    def _migrate(self, steps: list[tuple[int, str]], *, create: bool) -> tuple[int, int]:
        with self.translated(), _connect(self._url) as db, db.transaction():
            end_if_suspended(db)
            form, step = _version(db)
            if form == 0 and not create:
                raise NotFound(f"there is no store in {self.name}", hint="check --store or $KEDGE_STORE")
            written_by = _written_by(db) if form else ""
            if form > FORMAT_VERSION:
                raise unsupported(f"the store in {self.name} (format {form})", written_by)
            if step >= steps[-1][0]:
                if is_older(written_by, __version__):
                    db.execute("UPDATE kedge.meta SET value = %s WHERE key = 'written_by'", (__version__,))
                return form, form
            db.execute("SELECT pg_advisory_xact_lock(%s)", (STORE,))
            form, step = _version(db)  # another process may have been faster
            if form == 0:
                db.execute("CREATE SCHEMA kedge")
            for number, text in steps:
                if number > step:
                    db.execute(text.encode())
            if form == 0:
                db.execute("INSERT INTO kedge.meta VALUES ('store_id', %s)", (os.urandom(16).hex(),))
                db.execute(
                    "INSERT INTO kedge.meta VALUES ('format', %s), ('encrypted', 'no'), ('written_by', %s)",
                    (str(FORMAT_VERSION), __version__),
                )
            db.execute(
                "INSERT INTO kedge.meta VALUES ('schema', %s) "
                "ON CONFLICT (key) DO UPDATE SET value = greatest(meta.value::int, excluded.value::int)::text",
                (str(steps[-1][0]),),
            )
            return form, form or FORMAT_VERSION

    def is_encrypted(self) -> bool:
        """Whether the store has a keyring in some namespace."""
        row = self.one("SELECT value FROM kedge.meta WHERE key = 'encrypted'")
        return row is not None and row[0] == "yes"

    def written_by(self) -> str:
        """The newest Kedge that has opened the store."""
        return self.run(_written_by)

    def close(self) -> None:
        self._leave_parent()
        self._is_closed = True
        self.distrust()

    def check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"{self.name} is closed", hint="open the store again")

    def _leave_parent(self) -> None:
        """After a fork, in the child: connections of the parent stay the parent's, and so do its locks."""
        if self._pid != os.getpid():
            self._inherited += [connection for some in self._idle.values() for connection in some]
            self._idle = _no_connections()
            self._lock = threading.RLock()
            self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
            self._pid = os.getpid()

    def distrust(self) -> None:
        """After one connection broke: the server may have gone away from the others too."""
        with self._lock:
            idle, self._idle = self._idle, _no_connections()
        for connection in (connection for some in idle.values() for connection in some):
            connection.close()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """The server's errors leave as ours; no raw one escapes an adapter."""
        try:
            yield
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise typed(error, self.name) from error


def typed(error: BaseException, name: str) -> BaseException:
    """The CheckpointError for an error of psycopg; any other error as it is."""
    text = f"{name}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, UnicodeEncodeError | psycopg.DataError):
        return Validation(f"the index cannot hold this value: {error}", hint="use valid Unicode and 64-bit integers")
    if isinstance(error, psycopg.errors.DiskFull):
        return NoSpace(text, hint="free some space on the database server, then run it again")
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction | psycopg.errors.InsufficientPrivilege):
        return ReadOnly(text, hint="check the rights of the database user, and that the server is not a standby")
    if isinstance(error, psycopg.errors.DataCorrupted | psycopg.errors.IndexCorrupted):
        return Corrupted(text, hint="see the log of the database server; restore it from a backup")
    if isinstance(error, psycopg.errors.InvalidPassword | psycopg.errors.InvalidAuthorizationSpecification):
        return StorageError(text, hint="check the user and the password of the database")
    if isinstance(error, psycopg.errors.InvalidCatalogName):
        return StorageError(text, hint="create the database first: createdb NAME")
    if isinstance(error, psycopg.OperationalError | psycopg.errors.IdleInTransactionSessionTimeout):
        return Unavailable(text, hint="check that the database can be reached, then run it again")
    if isinstance(error, psycopg.Error):
        return StorageError(text, hint="see the log of the database server")
    return error


class Array:
    """A parameter: an array in the server's own binary form. psycopg's way takes ten times as long."""

    __slots__ = ("data",)

    def __init__(self, kind: str, values: Collection[Any]) -> None:
        oid, form = _ELEMENTS[kind]
        header = struct.pack(">iiIii", 1, 0, oid, len(values), 1) if values else struct.pack(">iiI", 0, 0, oid)
        if form is not None:
            size = form.size - 4  # each is preceded by its length
            parts = [_NULL if value is None else form.pack(size, value) for value in values]
        else:
            if kind == "text":
                values = [None if value is None else value.encode() for value in values]
            parts = []
            for value in values:
                parts += (_NULL,) if value is None else (len(value).to_bytes(4, "big"), value)
        self.data = header + b"".join(parts)


_NULL = b"\xff\xff\xff\xff"
_ELEMENTS = {
    "bigint": (20, struct.Struct(">iq")),
    "integer": (23, struct.Struct(">ii")),
    "smallint": (21, struct.Struct(">ih")),
    "boolean": (16, struct.Struct(">i?")),
    "text": (25, None),
    "bytea": (17, None),
}


class _ArrayDumper(Dumper):
    format = Format.BINARY  # and of no type: the server knows which it expects

    def dump(self, obj: Array) -> bytes:
        return obj.data


psycopg.adapters.register_dumper(Array, _ArrayDumper)


def end_if_suspended(db: Connection) -> None:
    """The server ends this transaction if the process stops in it, so that it keeps nobody waiting for its locks."""
    db.execute(f"SET LOCAL idle_in_transaction_session_timeout = {FROZEN_MS}")


def _no_connections() -> dict[Plans, list[Connection]]:
    return {"each": [], "once": []}


def _connect(url: str, plans: Plans = "each") -> Connection:
    # A server that vanished without a word is noticed after half a minute, not after the kernel's quarter of an hour.
    connection = psycopg.connect(
        url, autocommit=True, prepare_threshold=None, connect_timeout=10, keepalives_idle=30, tcp_user_timeout=30_000
    )
    try:
        _set_up(connection, plans)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: Connection, plans: Plans) -> None:
    row = connection.execute(
        f"SELECT pg_backend_pid(), {', '.join(['current_setting(%s)'] * len(_SETTINGS))}", tuple(_SETTINGS)
    ).fetchone()
    assert row is not None
    backend, *values = row
    settings = dict(zip(_SETTINGS, values, strict=True))
    wrong = {name: good for name, (bad, good) in _SETTINGS.items() if settings[name] in bad}
    if backend == connection.info.backend_pid:
        # Plans last while tables grow. The rest is set in any case: so it stays when the server is configured anew.
        fixed = {"plan_cache_mode": _PLAN_CACHE[plans], **settings, **wrong}
        named = [part for pair in fixed.items() for part in pair]
        connection.execute(f"SELECT {', '.join(['set_config(%s, %s, false)'] * len(fixed))}", named)
        _unpooled.add(connection)
    elif wrong:  # a pooler answers for another process, and nothing can be set there
        name, good = wrong.popitem()
        raise StorageError(
            f"{name} is {settings[name]!r} behind this pooler: saves that returned could be lost",
            hint=f"ALTER ROLE … SET {name} = '{good}', then restart the pooler",
        )


def run_prepared(db: Connection, sql: str, parameters: Sequence[object]) -> psycopg.Cursor[tuple[Any, ...]]:
    """Execute a statement that is used again and again: prepared, if no pooler is in between.

    Only such are prepared, each alone: of those in a pipeline that fails psycopg believes what was not done.
    """
    db.prepare_threshold = _PREPARED_AFTER if db in _unpooled else None
    try:
        # psycopg reads a long text with %s anew at each use, in Python: that of a batch takes it milliseconds.
        return psycopg.RawCursor(db).execute(_numbered(sql), parameters, binary=True)
    finally:
        db.prepare_threshold = None


@lru_cache(1024)
def _numbered(sql: str) -> str:
    """With the server's own names for parameters, $1 and so on, where psycopg writes %s."""
    numbers = count(1)
    return _PLACEHOLDER.sub(lambda match: "%" if match[0] == "%%" else f"${next(numbers)}", sql)


def _version(db: Connection) -> tuple[int, int]:
    """Format of the store, and the newest step of the schema that was taken; 0 if there is none."""
    # The catalog as this statement sees it. to_regclass would ask a cache that may not have heard of who was faster.
    is_there = db.execute("SELECT 1 FROM pg_tables WHERE schemaname = 'kedge' AND tablename = 'meta'").fetchone()
    if is_there is None:
        return 0, 0
    said: dict[str, str] = dict(
        db.execute("SELECT key, value FROM kedge.meta WHERE key IN ('format', 'schema')").fetchall()
    )
    return int(said.get("format", 0)), int(said.get("schema", 1))


def _written_by(db: Connection) -> str:
    row = db.execute("SELECT value FROM kedge.meta WHERE key = 'written_by'").fetchone()
    return row[0] if row else ""


def _migrations() -> list[tuple[int, str]]:
    """(number, SQL) of every step of the schema, in order."""
    folder = files("kedge.index.postgres").joinpath("sql")
    scripts = [(m[1], f) for f in folder.iterdir() if (m := _MIGRATION.fullmatch(f.name))]
    return sorted((int(version), file.read_text()) for version, file in scripts)


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url).partition("?")[0]
