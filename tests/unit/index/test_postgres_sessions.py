"""PostgreSQL: what a database's own settings may not change, and transactions of processes that are suspended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kedge
from kedge.errors import LeaseLost, StorageError
from kedge.index.postgres import server
from kedge.model import Checkpoint
from kedge.testing.index_suite import chunk, record, references, save, with_chunks
from tests.unit.index.test_postgres import bouncer, index, open_index, sql, url
from tests.unit.index.test_postgres_locks import prepare, take_over, uncommitted, waits

if TYPE_CHECKING:
    from kedge.index.postgres.index import PostgresIndex

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")]

__all__ = ["bouncer", "index", "url"]  # fixtures

SETTINGS = {"default_transaction_isolation": "repeatable read", "synchronous_commit": "off"}


@pytest.fixture
def hasty(url: str) -> Iterator[str]:
    """A database whose owner wants other transactions than Kedge needs: for programs of their own, say."""
    for name, value in SETTINGS.items():
        sql(url, f"ALTER DATABASE postgres SET {name} = '{value}'")
    yield url
    for name in SETTINGS:
        sql(url, f"ALTER DATABASE postgres RESET {name}")


def test_a_save_that_writes_waits_for_no_connection_of_another_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it writes it asks what there is already: as many savers as there are connections waited for ever."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    array = np.random.default_rng(7).integers(0, 1 << 62, 6_000_000)
    ended = list[bool]()

    def work() -> None:
        with kedge.open(url) as store:
            store.save("large", "step", {"array": array})
            ended.append(np.array_equal(store.restore("large")["array"], array))  # type: ignore[index]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(120)
    assert ended == [True]


def test_what_a_check_saw_behind_its_lock_is_what_there_is(hasty: str) -> None:
    """In a transaction that repeats its reads it would be what there was before the lock (I5)."""
    with closing(open_index(hasty)) as first, closing(open_index(hasty)) as second:
        there, refused = prepare(first), list[LeaseLost]()

        def late() -> None:
            with pytest.raises(LeaseLost) as error:
                save(second, record("leased", lease_token=1))
            refused.append(error.value)

        thread = threading.Thread(target=late)
        with uncommitted(first, take_over(there)):
            thread.start()
            assert waits(hasty, thread)
        thread.join()
        assert len(refused) == 1


def test_a_commit_is_durable_when_it_is_answered(hasty: str) -> None:
    with closing(open_index(hasty)) as index, index._server.lend() as db:
        assert [db.execute(f"SHOW {name}").fetchone() for name in SETTINGS] == [("read committed",), ("on",)]
    sql(hasty, "ALTER DATABASE postgres SET synchronous_commit = 'local'")  # where a replica may be behind
    with closing(open_index(hasty)) as index, index._server.lend() as db:
        assert db.execute("SHOW synchronous_commit").fetchone() == ("local",)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pooler_in_front_of_such_a_database_is_refused(hasty: str, bouncer: str, name: str) -> None:
    """Nothing can be set there for longer than a transaction."""
    for other in SETTINGS.keys() - {name}:
        sql(hasty, f"ALTER DATABASE postgres RESET {other}")
    with pytest.raises(StorageError, match=name):
        kedge.open(bouncer)


def test_gc_that_is_suspended_at_the_end_of_its_sweep_keeps_nobody_out(
    index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.index.postgres.server.FROZEN_MS", 2000)
    (first,) = save(index, with_chunks(chunk("kept")))
    late: list[Checkpoint] = []
    locked, go = threading.Event(), threading.Event()

    def suspended(checkpoint_id: str, manifest: bytes) -> Any:
        if sql(url, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"):
            locked.set()
            assert go.wait(60)
        elif checkpoint_id == first.id and not late:
            late.extend(save(index, with_chunks(chunk("late"), job="late")))  # is looked at again behind the lock
        return references(checkpoint_id, manifest)

    swept: list[tuple[int, int]] = []
    other = open_index(url)
    gc = threading.Thread(target=lambda: swept.append(other.sweep(suspended)))
    gc.start()
    assert locked.wait(60)
    save(index, record())  # waits until the server ends the transaction
    go.set()
    gc.join(60)
    assert swept == [(0, 0)]  # it began again
    other.close()
