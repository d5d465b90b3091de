"""Steps that write to the user's own PostgreSQL exactly once, wherever the process dies."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kedge
from kedge import CheckpointManager
from kedge.pipeline.history import delete_run
from kedge.pipeline.session import Session

if TYPE_CHECKING:
    import psycopg

    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")]


@pytest.fixture
def url(postgres: "Cluster") -> str:
    import psycopg

    url = postgres.empty_database()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DROP TABLE IF EXISTS booking, kedge_steps")
        db.execute("CREATE TABLE booking (seat int)")
    return url


@pytest.fixture
def conn(url: str) -> "Iterator[psycopg.Connection[Any]]":
    import psycopg

    with psycopg.connect(url) as db:
        yield db


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def book(conn: "psycopg.Connection[Any]", seat: int) -> dict[str, int]:
    conn.execute("INSERT INTO booking VALUES (%s)", (seat,))
    return {"seat": seat}


def booked(conn: "psycopg.Connection[Any]") -> list[int]:
    with conn.transaction():
        return [seat for (seat,) in conn.execute("SELECT seat FROM booking").fetchall()]


class Killed(BaseException):
    """Nothing that is done for errors is done for a kill."""


def test_what_a_step_wrote_before_a_kill_is_not_written_again(
    store: CheckpointManager, conn: "psycopg.Connection[Any]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the commit, before the step's own record; and before the commit, behind the writes."""

    def attempt(work: Any = book) -> Any:
        with kedge.run("r", store=store, progress=False) as run:
            return run.transaction(conn).step("book", work, 7)

    def dies(conn: "psycopg.Connection[Any]", seat: int) -> None:
        book(conn, seat)
        raise Killed

    with pytest.raises(Killed):
        attempt(dies)
    assert booked(conn) == []
    with monkeypatch.context() as patched:
        patched.setattr(Session, "save", lambda *_, **__: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            attempt()
    assert booked(conn) == [7]
    assert attempt() == {"seat": 7}
    assert attempt(dies) == {"seat": 7}  # saved as any step
    assert booked(conn) == [7]
    delete_run(store, "r")
    attempt()  # another run, though it has the same key
    assert booked(conn) == [7, 7]


def test_of_two_owners_one_commits(store: CheckpointManager, conn: "psycopg.Connection[Any]", url: str) -> None:
    """The first is suspended in its transaction until the second has committed."""
    import psycopg

    inside, may_go = threading.Event(), threading.Event()

    def slow(conn: "psycopg.Connection[Any]", seat: int) -> dict[str, int]:
        inside.set()
        may_go.wait()
        return book(conn, seat)

    answers: list[Any] = []
    with kedge.run("r", store=store, progress=False) as run, psycopg.connect(url) as other:
        own = run.transaction(conn)
        row = (run.identity, "step")
        suspended = threading.Thread(target=lambda: answers.append(own._once(row, slow, (7,), {})))
        suspended.start()
        inside.wait()
        answers.append(run.transaction(other)._once(row, book, (7,), {}))
        may_go.set()
        suspended.join()
    assert answers == [{"seat": 7}, {"seat": 7}]
    assert booked(conn) == [7]


def test_the_connection_may_have_rows_of_any_kind(store: CheckpointManager, url: str) -> None:
    import psycopg

    with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as conn, kedge.run("r", store=store) as run:
        assert run.transaction(conn).step("book", book, 7) == {"seat": 7}
        with conn.transaction():
            assert conn.execute("SELECT seat FROM booking").fetchall() == [{"seat": 7}]


def test_errors_of_the_function_leave_nothing(store: CheckpointManager, conn: "psycopg.Connection[Any]") -> None:
    import psycopg

    with kedge.run("r", store=store, progress=False) as run:
        transaction = run.transaction(conn)
        tries: list[int] = []

        def fragile(conn: "psycopg.Connection[Any]", seat: int) -> dict[str, int]:
            tries.append(seat)
            result = book(conn, seat)
            if len(tries) == 1:
                raise ConnectionError("no network")
            return result

        assert transaction.step("book", fragile, 8, retries=kedge.Retry(times=1, delay_s=0, jitter=0)) == {"seat": 8}
        assert booked(conn) == [8]
        with pytest.raises(kedge.UnsupportedType):
            transaction.step("odd result", lambda conn, seat: book(conn, seat) and object(), 9)
        with pytest.raises(psycopg.errors.UniqueViolation):  # of the user's own table
            transaction.step(
                "twice", lambda conn: [conn.execute("CREATE UNIQUE INDEX ON booking (seat)"), book(conn, 8)]
            )
        assert booked(conn) == [8]
        conn.execute("SELECT 1")
        with pytest.raises(kedge.Conflict, match="in a transaction"):
            transaction.step("open", book, 10)
        conn.rollback()
        with pytest.raises(kedge.Validation, match=r"takes a psycopg\.Connection"):
            run.transaction("postgresql://…")  # type: ignore[arg-type]
    assert booked(conn) == [8]


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
@pytest.mark.parametrize("autocommit", [False, True])
def test_a_function_that_ends_the_transaction_is_refused(
    store: CheckpointManager, conn: "psycopg.Connection[Any]", ending: str, autocommit: bool
) -> None:
    conn.autocommit = autocommit

    def ends(conn: "psycopg.Connection[Any]", seat: int) -> dict[str, int]:
        result = book(conn, seat)
        conn.execute(ending)  # type: ignore[call-overload]
        return result

    with kedge.run("r", store=store, progress=False) as run, pytest.raises(kedge.Conflict, match="ended the transact"):
        run.transaction(conn).step("book", ends, 7, retries=3)
    with conn.transaction():
        assert conn.execute("SELECT count(*) FROM kedge_steps").fetchone() == (0,)


def test_connections_may_have_any_cursor_and_rows(store: CheckpointManager, url: str) -> None:
    import psycopg
    from psycopg.rows import dict_row

    with (
        psycopg.connect(url, row_factory=dict_row, cursor_factory=psycopg.RawCursor) as conn,
        kedge.run("r", store=store, progress=False) as run,
    ):
        rows = run.transaction(conn).step("book", lambda conn: conn.execute("SELECT 7 AS seat").fetchall())
    assert rows == [{"seat": 7}]


def test_what_keeps_a_transaction_from_beginning_is_named(store: CheckpointManager, url: str) -> None:
    import psycopg

    async def coroutine(_: object) -> None: ...

    with kedge.run("r", store=store, progress=False) as run:
        with psycopg.connect(url, autocommit=True) as conn:
            with pytest.raises(kedge.Validation, match="takes no coroutine function"):
                run.transaction(conn).step("coroutine", coroutine)
            conn.execute("REVOKE CREATE ON SCHEMA public FROM public; DROP ROLE IF EXISTS guest; CREATE ROLE guest")
            conn.execute("SET ROLE guest")
            with pytest.raises(kedge.NotAllowed, match="may not create it") as refused:
                run.transaction(conn).step("guest", book, 7)
            assert "CREATE TABLE" in str(refused.value.hint)
        with pytest.raises(kedge.Conflict, match="connection is closed"):
            run.transaction(conn).step("closed", book, 7)


def test_the_program_of_the_document_books_once(postgres: "Cluster", tmp_path: Path) -> None:
    import psycopg

    url = postgres.empty_database()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE seats (id int, taken boolean DEFAULT false)")
        db.execute("INSERT INTO seats (id) VALUES (12), (13)")
    text = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
    program = text.partition('```python title="book.py"\n')[2].partition("```")[0]
    assert "postgresql://user@db/shop" in program
    (tmp_path / "book.py").write_text(program.replace("postgresql://user@db/shop", url))
    for _ in range(2):
        subprocess.run([sys.executable, "book.py"], cwd=tmp_path, check=True, timeout=100)
    with psycopg.connect(url) as db:
        assert db.execute("SELECT id, taken FROM seats ORDER BY id").fetchall() == [(12, True), (13, False)]
        assert db.execute("SELECT count(*) FROM kedge_steps").fetchone() == (1,)
