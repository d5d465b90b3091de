"""What a memory remembers of its items is what the store has, whoever changes it."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts import require

require("module:langgraph")

from kedge import Conflict
from kedge.index.sqlite.index import SqliteIndex
from kedge.integrations.langgraph import KedgeStore, recall

Stores = tuple[KedgeStore, KedgeStore]


@pytest.fixture(params=["small", "large"])
def stores(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    """Two processes at one store; of what is "large", nothing is remembered."""
    if request.param == "large":
        monkeypatch.setattr(recall, "_MOST_JOB_BYTES", 0)
        monkeypatch.setattr(recall, "_PAGE", 3)
    with KedgeStore(tmp_path / "store") as ours, KedgeStore(tmp_path / "store") as theirs:
        yield ours, theirs


def shown(store: KedgeStore) -> list[tuple[str, Any]]:
    return [(item.key, item.value) for item in store.search(("a",), limit=1000)]


def test_changes_of_others_are_seen(stores: Stores) -> None:
    ours, theirs = stores
    assert shown(ours) == []
    theirs.put(("a",), "k", {"n": 1})
    theirs.put(("a",), "l", {"n": 2})
    assert shown(ours) == [("l", {"n": 2}), ("k", {"n": 1})]
    theirs.put(("a",), "k", {"n": 3})
    assert shown(ours) == [("k", {"n": 3}), ("l", {"n": 2})]
    theirs.delete(("a",), "l")
    assert shown(ours) == [("k", {"n": 3})]
    theirs.put(("a",), "m", {"n": 4})
    theirs.delete(("a",), "k")
    assert shown(ours) == [("m", {"n": 4})]
    theirs.delete(("a",), "m")
    assert shown(ours) == []


def test_a_deletion_beside_a_version_that_was_left_behind_is_seen(stores: Stores) -> None:
    """As many rows as before: one was deleted, and one more is there because its writer was stopped."""
    ours, theirs = stores
    for key in "kl":
        theirs.put(("a",), key, {"n": 1})
    assert len(shown(ours)) == 2
    theirs.delete(("a",), "k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.manager.catalogue, "delete", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            theirs.put(("a",), "l", {"n": 2})
    assert len(ours.manager.list("memory:a")) == 2
    assert shown(ours) == [("l", {"n": 2})]


def test_a_deletion_beside_an_item_with_a_pinned_older_version_is_seen(stores: Stores) -> None:
    """As many rows as items that were read: one of those has two, and the other none."""
    ours, theirs = stores
    theirs.put(("a",), "k", {"n": 1})
    theirs.manager.pin(theirs.manager.list("memory:a")[0].id)
    theirs.put(("a",), "k", {"n": 2})
    theirs.put(("a",), "l", {"n": 3})
    assert shown(ours) == [("l", {"n": 3}), ("k", {"n": 2})]
    theirs.delete(("a",), "l")
    assert shown(ours) == [("k", {"n": 2})]


def test_a_deletion_is_seen_although_a_version_goes_while_the_rest_is_read(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = stores
    for key in "kl":
        theirs.put(("a",), key, {"n": 1})
    assert len(shown(ours)) == 2
    older = theirs.manager.list("memory:a")[1].id
    theirs.manager.pin(older)
    theirs.put(("a",), "l", {"n": 2})
    theirs.manager.pin(older, False)
    theirs.delete(("a",), "k")
    assert len(theirs.manager.list("memory:a")) == 2  # of "l"
    read = ours.manager.catalogue.list_stored

    def interrupted(*args: Any, **options: Any) -> Any:
        theirs.manager.delete("memory:a", older)
        return read(*args, **options)

    monkeypatch.setattr(ours.manager.catalogue, "list_stored", interrupted)
    assert shown(ours) == [("l", {"n": 2})]


@pytest.mark.parametrize("seed", range(6))
def test_any_changes_by_two_processes_give_what_a_third_one_reads(stores: Stores, tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    for n in range(60):
        store, key = rnd.choice(stores), rnd.choice("klmno")
        rows = store.manager.list("memory:a")
        if rows and rnd.random() < 0.3:
            row = rnd.choice(rows)
            store.manager.pin(row.id, not row.is_pinned)  # an unpinned older version is left behind
        try:
            if rows and rnd.random() < 0.2:
                store.manager.delete("memory:a", rnd.choice(rows).id)  # an older version may come to light
            store.put(("a",), key, rnd.choice([None, {"n": n}, {"n": n}]))  # type: ignore[arg-type]
        except Conflict:
            pass  # a pinned item is not deleted
        if rnd.random() < 0.5:
            with KedgeStore(tmp_path / "store") as fresh:
                assert shown(stores[0]) == shown(stores[1]) == shown(fresh)


def test_what_another_process_has_prolonged_is_found(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = stores
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    theirs.put(("a",), "k", {"n": 1}, ttl=10)
    assert len(ours.search(("a",), refresh_ttl=False)) == 1
    now += 9 * 60
    assert theirs.get(("a",), "k") is not None
    now += 9 * 60
    assert len(ours.search(("a",), refresh_ttl=False)) == 1
    now += 9 * 60
    assert ours.search(("a",), refresh_ttl=False) == []


def test_what_a_caller_changes_is_its_own(stores: Stores) -> None:
    ours, _ = stores
    ours.put(("a",), "k", {"list": [1], "deep": {"n": 1}})
    for _ in range(3):
        (item,) = ours.search(("a",))
        assert item.value == {"list": [1], "deep": {"n": 1}}
        item.value["list"].append(2)
        item.value["deep"].clear()
        item.value["more"] = 1


def test_an_unchanged_memory_is_searched_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    fetch = SqliteIndex._fetch

    def counted(self: Any, db: Any, sql: str, *parameters: object) -> Any:
        statements.append(sql)
        return fetch(self, db, sql, *parameters)

    with KedgeStore(tmp_path / "store") as store:
        for n in range(30):
            store.put(("a", str(n % 3)), f"k{n}", {"n": n})
        store.search(("a",))
        monkeypatch.setattr(SqliteIndex, "_fetch", counted)
        assert [item.key for item in store.search(("a",), filter={"n": {"$gt": 27}})] == ["k29", "k28"]
        assert all("FROM main.job" in sql or "main.event" in sql for sql in statements)
        statements.clear()
        store.put(("a", "0"), "k0", {"n": 100})
        statements.clear()
        assert [item.key for item in store.search(("a",), filter={"n": {"$gt": 28}})] == ["k0", "k29"]
        assert len([sql for sql in statements if "main.checkpoint" in sql]) <= 3
        statements.clear()
        assert store.get(("a", "1"), "k1") is not None
        assert len([sql for sql in statements if "main.event" not in sql]) == 1


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "_MOST_BYTES", 5000)
    with KedgeStore(tmp_path / "store") as store:
        for n in range(20):
            store.put(("a", str(n)), "k", {"text": "x" * 1000})
        for _ in range(2):
            assert len(store.search(("a",), limit=100)) == 20
