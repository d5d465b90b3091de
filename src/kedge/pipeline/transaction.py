"""Steps that write to a PostgreSQL of the user's, exactly once: with a row for the step in the same transaction.

    look      for the row of the step: if it is there, the transaction was committed, and the row has the result
    work      the function, then the row, under a primary key made of run and step
    commit    what the function wrote and the row, or neither
    save      the result, as that of any step

Killed before the commit, nothing has happened; behind it, the row answers. Of two owners of the run, one of which was
suspended, only one can commit: the other meets the primary key, is rolled back, and gets the result of the first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, LiteralString, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from kedge import codec
from kedge.errors import Conflict, Corrupted, NotAllowed, Validation

from .keys import digest_of, step_key
from .place import place_in
from .retry import Retry
from .step import Call, parse_options, parse_version

if TYPE_CHECKING:
    from .run import Run

Connection = psycopg.Connection[Any]
R = TypeVar("R")
TABLE = "kedge_steps"
CREATE = (
    f"CREATE TABLE IF NOT EXISTS {TABLE} (run text NOT NULL, step text NOT NULL, result bytea NOT NULL, "
    "created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (run, step))"
)
_INSERT = f"INSERT INTO {TABLE} SELECT %s, %s, %s WHERE txid_current() = %s"  # not if this is another transaction
_CREATING = 0x6B656473  # advisory lock, for one transaction: "keds"
_IN_ONE_PIECE = 1 << 62  # bytes


class Transaction:
    """What `run.transaction(conn)` gives."""

    def __init__(self, run: Run, conn: Connection) -> None:
        if not isinstance(conn, psycopg.Connection):
            raise Validation(
                f"run.transaction takes a psycopg.Connection (got {type(conn).__name__})", hint="psycopg.connect(…)"
            )
        self._run = run
        self._conn = conn

    def step(
        self,
        name: str,
        function: Callable[..., R],
        /,
        *args: object,
        retries: int | Retry = 0,
        version: str | int | None = None,
        **kwargs: object,
    ) -> R:
        """The result of `function(conn, *args, **kwargs)`, as `run.step`: what it writes with `conn`, it writes once.

        The transaction is this step's: Conflict if one is open on the connection. The function neither commits nor
        rolls back. Its result is kept in the table `kedge_steps` of the database too, which is made if there is none.
        """
        if inspect.iscoroutinefunction(function):
            raise Validation(f"step {name}: a transaction takes no coroutine function", hint="use an ordinary function")
        inputs = {"args": list(args), "kwargs": kwargs}
        path = place_in(self._run).below(name).path
        full_version = f"{self._run.version}/{parse_version(version)}"
        row = (self._run.identity, step_key(path, full_version, {"inputs": digest_of(inputs, f"step {name}")}))
        options = parse_options(retries, None, "process", version)
        return self._run.call(name, Call(lambda: self._once(row, function, args, kwargs), (), {}, options, inputs))

    def _once(
        self, row: tuple[str, str], function: Callable[..., R], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> R:
        conn = self._conn
        if conn.closed:
            raise Conflict("the connection is closed", hint="open another one with psycopg.connect(…)")
        if conn.info.transaction_status != TransactionStatus.IDLE:
            raise Conflict("the connection is in a transaction", hint="commit it first, or use another connection")
        if (saved := self._saved(row)) is not None:
            earlier: R = saved[0]
            return earlier
        try:
            with conn.transaction():
                ((number,),) = self._execute("SELECT txid_current()")
                result = function(conn, *args, **kwargs)
                encoded = codec.encode(result, out_of_band_bytes=_IN_ONE_PIECE)
                values = (*row, bytes(encoded.tree), number)
                if not self._execute(_INSERT, values).rowcount:
                    raise Conflict(
                        f"{function!r} ended the transaction of its step: what it wrote may be committed",
                        hint="take COMMIT and ROLLBACK out of it, and look at the database before you resume the run",
                    )
        except psycopg.errors.UniqueViolation:
            if (saved := self._saved(row)) is None:
                raise  # of a table of the user's
            first: R = saved[0]
            return first
        return result

    def _saved(self, row: tuple[str, str]) -> tuple[Any] | None:
        with self._conn.transaction():
            if self._execute("SELECT to_regclass(%s)", (TABLE,)).fetchone() == (None,):
                self._create()
            saved = self._execute(f"SELECT result FROM {TABLE} WHERE run = %s AND step = %s", row).fetchone()
        return None if saved is None else (codec.decode(saved[0], _no_buffers),)

    def _create(self) -> None:
        self._execute("SELECT pg_advisory_xact_lock(%s)", (_CREATING,))
        try:
            self._execute(CREATE)
        except psycopg.errors.InsufficientPrivilege as error:
            raise NotAllowed(
                f"table {TABLE}: this database user may not create it ({error.diag.message_primary})",
                hint=f"have it created once: {CREATE}",
            ) from error

    def _execute(self, sql: LiteralString, values: tuple[object, ...] = ()) -> psycopg.Cursor[TupleRow]:
        """With a cursor of Kedge's own: that of the connection may give dictionaries, or take other placeholders."""
        return psycopg.Cursor(self._conn, row_factory=psycopg.rows.tuple_row).execute(sql, values)


def _no_buffers(number: int) -> bytes:
    raise Corrupted(f"a row of {TABLE} is not what Kedge wrote", hint="delete the row, and the step runs again")
