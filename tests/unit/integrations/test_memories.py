"""LangGraph's long-term memory in a store: what its own store in memory does, and durably."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kedge
from kedge.errors import Conflict, UnsupportedType, Validation
from tests.parts import require

require("module:langgraph")
from langgraph.store.base import GetOp, InvalidNamespaceError, PutOp
from langgraph.store.memory import InMemoryStore

from kedge.integrations.langgraph import KedgeStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KedgeStore]:
    with KedgeStore(tmp_path / "store") as made:
        yield made


labels = st.sampled_from(["a", "b", "é@+", "a" * 90, "users"])
namespaces = st.lists(labels, min_size=1, max_size=3).map(tuple)
keys = st.sampled_from(["k", "another key", "ü/..", "x" * 300])
values = st.dictionaries(st.sampled_from(["n", "name"]), st.one_of(st.integers(-3, 3), st.text(max_size=3)), max_size=2)
puts = st.tuples(namespaces, keys, st.one_of(st.none(), values, values))


def items(found: list[Any]) -> set[tuple[Any, ...]]:
    return {(item.namespace, item.key, tuple(sorted(item.value.items()))) for item in found}


@settings(max_examples=40)
@given(st.lists(puts, max_size=12), namespaces, st.integers(-3, 3))
def test_it_answers_as_the_store_in_memory_does(
    changes: list[tuple[tuple[str, ...], str, dict[str, Any] | None]], prefix: tuple[str, ...], number: int
) -> None:
    theirs = InMemoryStore()
    with KedgeStore("memory:") as ours:
        for namespace, key, value in changes:
            for store in (ours, theirs):
                store.put(namespace, key, value) if value is not None else store.delete(namespace, key)
        for namespace, key, _ in changes:
            one, other = ours.get(namespace, key), theirs.get(namespace, key)
            assert (one and (one.value, one.key, one.namespace)) == (
                other and (other.value, other.key, other.namespace)
            )
        for wanted in (None, {"n": number}, {"n": {"$ne": number}}):
            assert items(ours.search((), filter=wanted, limit=99)) == items(theirs.search((), filter=wanted, limit=99))
            assert items(ours.search(prefix, filter=wanted, limit=99)) == items(
                theirs.search(prefix, filter=wanted, limit=99)
            )
        there = {item.namespace for item in theirs.search((), limit=99)}  # they go on listing what is empty
        assert set(ours.list_namespaces(limit=99)) == there
        assert set(ours.list_namespaces(max_depth=1, limit=99)) == {namespace[:1] for namespace in there}
        wanted_prefix = {namespace for namespace in there if namespace[: len(prefix)] == prefix}
        assert set(ours.list_namespaces(prefix=prefix, limit=99)) == wanted_prefix


def test_a_memory_survives_and_keeps_the_time_of_its_first_version(tmp_path: Path) -> None:
    with KedgeStore(tmp_path / "store") as store:
        store.put(("users", "7"), "likes", {"colour": "blue"})
        first = store.get(("users", "7"), "likes")
        store.put(("users", "7"), "likes", {"colour": "green", "tuple": (1, 2)})
    with KedgeStore(tmp_path / "store") as store:
        found = store.get(("users", "7"), "likes")
        assert found is not None
        assert first is not None
        assert found.value == {"colour": "green", "tuple": (1, 2)}
        assert found.created_at == first.created_at < found.updated_at
        assert [item.key for item in store.search(("users",))] == ["likes"]
        assert len(store.manager.list("memory:users@7")) == 1  # what was replaced is gone


def test_newest_first_in_pages(store: KedgeStore) -> None:
    for n in range(5):
        store.put(("a", str(n % 2)), f"k{n}", {"n": n})
    found = [store.search(("a",), limit=2, offset=at) for at in (0, 2, 4)]
    assert [[item.value["n"] for item in page] for page in found] == [[4, 3], [2, 1], [0]]


def test_stopped_between_saving_and_deleting_the_new_value_counts(store: KedgeStore) -> None:
    store.put(("a",), "k", {"n": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.manager, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.put(("a",), "k", {"n": 2})
    assert store.get(("a",), "k").value == {"n": 2}  # type: ignore[union-attr]
    assert items(store.search(("a",))) == {(("a",), "k", (("n", 2),))}
    store.delete(("a",), "k")
    assert store.get(("a",), "k") is None


def test_many_writers_of_one_item_leave_one_value(store: KedgeStore) -> None:
    def write(who: int) -> None:
        for n in range(5):
            store.put(("a",), "k", {"who": who, "n": n})

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.search(("a",))) == 1
    store.put(("a",), "k", {})
    assert len(store.manager.list("memory:a")) == 1


def test_bad_input_changes_nothing(store: KedgeStore) -> None:
    with pytest.raises(InvalidNamespaceError):
        store.batch([PutOp(("a.b",), "k", {})])
    with pytest.raises(UnsupportedType):
        store.put(("a",), "k", {"x": object()})
    with pytest.raises(Validation):
        store.batch([PutOp(("a",), "", {})])
    with pytest.raises(Validation):
        store.batch([PutOp(("a",), "k", ["no dictionary"])])  # type: ignore[arg-type]
    with pytest.raises(Validation, match="by meaning"):
        store.search(("a",), query="what does she like?")
    store.put(("a",), "k", {"n": 1, "text": "x"})
    with pytest.raises(Validation, match=r"\$regex"):
        store.search(("a",), filter={"n": {"$regex": "x"}})
    assert store.search(("a",), filter={"text": {"$gt": 5}}) == []
    with pytest.raises(NotImplementedError):
        store.put(("a",), "other", {}, ttl=5)
    assert [job.name for job in store.manager.jobs()] == ["memory:a"]


def test_a_pinned_memory_is_not_deleted_and_its_old_value_does_not_come_back(store: KedgeStore) -> None:
    store.put(("a",), "k", {"n": 1})
    store.manager.pin(store.manager.list("memory:a")[0].id)
    store.put(("a",), "k", {"n": 2})
    with pytest.raises(Conflict, match="pinned"):
        store.delete(("a",), "k")
    assert store.get(("a",), "k").value == {"n": 2}  # type: ignore[union-attr]


def test_jobs_of_others_are_no_memories(store: KedgeStore) -> None:
    store.manager.save("memory:mine", "step", {})
    assert store.search(()) == []
    assert store.list_namespaces() == []


def test_async_and_encrypted(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store", key=bytes(32), encrypt_names=True) as manager:
        store = KedgeStore(manager)
        asyncio.run(store.aput(("users",), "secret-key", {"word": "secret-value"}))
        assert asyncio.run(store.abatch([GetOp(("users",), "secret-key")]))[0].value == {"word": "secret-value"}  # type: ignore[union-attr]
        store.close()  # the manager is the caller's
        manager.jobs()
    kept = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert b"secret-" not in kept
