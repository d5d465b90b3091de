"""LangGraph's long-term memory in a store: what its own store in memory does, and durably."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
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

from kedge.integrations.langgraph import KedgeStore, memories
from kedge.integrations.langgraph.recall import Entry
from kedge.integrations.langgraph.vectors import closeness


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


def test_namespaces_may_be_lists(store: KedgeStore) -> None:
    namespace: Any = ["users", "7"]
    store.put(namespace, "likes", {"colour": "blue"})
    for prefix in (["users"], namespace, []):
        assert [item.key for item in store.search(prefix)] == ["likes"]  # type: ignore[arg-type]
    assert store.get(namespace, "likes") == store.get(("users", "7"), "likes")
    assert store.list_namespaces(prefix=["users"]) == [("users", "7")]  # type: ignore[arg-type]
    assert store.list_namespaces(suffix=["7"]) == [("users", "7")]  # type: ignore[arg-type]
    store.delete(namespace, "likes")
    assert store.search(()) == []


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
        patch.setattr(store.manager.catalogue, "delete", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
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
    store.put(("a",), "k", {"n": 1, "text": "x"})
    with pytest.raises(Validation, match=r"\$regex"):
        store.search(("a",), filter={"n": {"$regex": "x"}})
    with pytest.raises(Validation, match=r"\$or"):
        store.search(("a",), filter={"$or": [{"n": 1}]})
    assert store.search(("a",), filter={"text": {"$gt": 5}}) == []
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


# Search


def test_a_filter_is_decided_by_the_rows(store: KedgeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(30):
        store.put(("a",), f"k{n}", {"n": n, "even": n % 2 == 0, "deep": {"n": n}, "long": "x" * 500})
    loaded: list[str] = []
    load = Entry.state
    monkeypatch.setattr(Entry, "state", lambda entry, manager: loaded.append(entry.item) or load(entry, manager))
    assert [item.value["n"] for item in store.search(("a",), filter={"n": {"$lt": 3}})] == [2, 1, 0]
    assert len(loaded) == 3
    assert len(store.search(("a",), filter={"even": True}, limit=4)) == 4
    assert len(loaded) == 7
    assert [item.key for item in store.search(("a",), filter={"deep": {"n": 7}})] == ["k7"]  # only the value tells
    assert [item.key for item in store.search(("a",), filter={"n": 7, "missing": None})] == ["k7"]


def test_a_filter_takes_a_path_as_sqlite_store_does_where_no_field_has_that_name(store: KedgeStore) -> None:
    store.put(("a",), "nested", {"user": {"access-level": "high", "n": 1}})
    store.put(("a",), "flat", {"user.n": 1, "user": "x"})
    store.put(("a",), "neither", {"user": None})
    assert [item.key for item in store.search(("a",), filter={"user.access-level": "high"})] == ["nested"]
    assert [item.key for item in store.search(("a",), filter={"user.n": {"$gte": 1}})] == ["flat", "nested"]
    assert [item.key for item in store.search(("a",), filter={"user.n.deeper": 1})] == []


def test_a_query_without_an_index_is_no_filter(store: KedgeStore) -> None:
    theirs = InMemoryStore()
    for each in (store, theirs):
        each.put(("a",), "k", {"text": "x"})
    assert items(store.search(("a",), query="anything")) == items(theirs.search(("a",), query="anything"))


def embed(texts: list[str]) -> list[list[float]]:
    """Letters that texts have in common make them alike."""
    return [[float(text.count(letter)) for letter in "abcdefgh"] for text in texts]


@pytest.mark.parametrize("index", [{"text_fields": ["b"]}, {"text_fields": "b"}, {"fields": "b"}, {"fields": ["b"]}])
def test_fields_are_named_as_in_other_stores(index: Any) -> None:
    with KedgeStore("memory:", index={"dims": 8, "embed": embed, **index}) as store:
        store.put(("a",), "1", {"a": "abba", "b": "hhhh"})
        (item,) = store.search(("a",), query="hhhh")
        assert item.score == pytest.approx(1.0)
    with pytest.raises(Validation, match="fields is a int"):
        KedgeStore("memory:", index={"dims": 8, "embed": embed, "fields": 7})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("fields", [["$"], ["text"], ["text", "notes[*]"]])
def test_memories_are_found_by_meaning_as_in_the_store_in_memory(tmp_path: Path, fields: list[str]) -> None:
    index: Any = {"dims": 8, "embed": embed, "fields": fields}
    theirs = InMemoryStore(index=index)
    with KedgeStore(tmp_path, index=index) as ours:
        for each in (ours, theirs):
            each.put(("docs",), "1", {"text": "aab", "notes": ["h", "gg"]})
            each.put(("docs",), "2", {"text": "bbc", "notes": ["aaa"]})
            each.put(("docs",), "3", {"text": "dd", "kind": "other"})
            each.put(("docs",), "4", {"text": "ab"}, index=False)
            each.put(("docs",), "5", {"text": "zz", "title": "aaab"}, index=["title"])
    with KedgeStore(tmp_path, index=index) as ours:  # the vectors are in the store
        for query, options in (
            ("aab", {}),
            ("gg", {"limit": 2}),
            ("ab", {"offset": 1}),
            ("d", {"filter": {"kind": "other"}}),
        ):
            expected = [(item.key, item.score) for item in theirs.search(("docs",), query=query, **options)]
            scored = [(item.key, item.score) for item in ours.search(("docs",), query=query, **options)]
            assert [score for _, score in scored] == pytest.approx([score for _, score in expected], abs=1e-6)
            assert {key for key, score in scored if score} == {key for key, score in expected if score}
        found = asyncio.run(ours.asearch(("docs",), query="aab", limit=1))
        assert found[0].score == pytest.approx(theirs.search(("docs",), query="aab", limit=1)[0].score, abs=1e-6)


def test_an_asynchronous_function_makes_the_vectors_in_the_loop_of_its_caller() -> None:
    loops = []

    async def embed_later(texts: list[str]) -> list[list[float]]:
        loops.append(asyncio.get_running_loop())
        return embed(texts)

    async def use() -> None:
        with KedgeStore("memory:", index={"dims": 8, "embed": embed_later}) as store:
            await store.aput(("docs",), "1", {"text": "aab"})
            (item,) = await store.asearch(("docs",), query="aab")
            assert item.score is not None
            assert loops == [asyncio.get_running_loop()] * 2
            with pytest.raises(ValueError, match="async"):
                store.put(("docs",), "2", {"text": "b"})

    asyncio.run(use())


def test_without_numpy_vectors_are_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with KedgeStore("memory:", index={"dims": 8, "embed": embed}) as store:
        store.put(("docs",), "1", {"text": "aab"})
        store.put(("docs",), "2", {"text": "zz"})
        expected = [(item.key, item.score) for item in store.search(("docs",), query="ab")]
        monkeypatch.setitem(sys.modules, "numpy", None)
        found = [(item.key, item.score) for item in store.search(("docs",), query="ab")]
    assert [key for key, _ in found] == [key for key, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)


def by_length(texts: list[str]) -> list[list[float]]:
    return [[1.0, float(len(text)), *[0.0] * 1500] for text in texts]  # too long to stand in the tree


def test_of_what_is_not_close_only_the_vectors_are_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with KedgeStore("memory:", index={"dims": 1502, "embed": by_length, "fields": ["text"]}) as store:
        for n in range(1, 31):
            store.put(("docs",), f"k{n}", {"text": "x" * n, "deep": {"n": n % 2}})
        store.search(("docs",), query="x" * 9)
        loaded: list[str] = []
        load = Entry.state
        monkeypatch.setattr(Entry, "state", lambda entry, manager: loaded.append(entry.item) or load(entry, manager))
        assert [item.key for item in store.search(("docs",), query="x" * 9, limit=2)] == ["k9", "k10"]
        assert len(loaded) == 2
        fitting = store.search(("docs",), query="x" * 9, filter={"deep": {"n": 0}}, limit=2, offset=1)
        assert [item.key for item in fitting] == ["k8", "k12"]
        store.put(("docs",), "k9", {"text": "x" * 30, "deep": {"n": 1}})
        assert [item.key for item in store.search(("docs",), query="x" * 9, limit=2)] == ["k10", "k8"]


def test_an_item_that_is_replaced_or_deleted_during_a_search_is_found_as_it_is_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with KedgeStore("memory:", index={"dims": 1502, "embed": by_length, "fields": ["text"]}) as store:
        for n in range(1, 6):
            store.put(("docs",), f"k{n}", {"text": "x" * n, "n": n})

        gone: set[str] = set()
        load = Entry.state

        def state(entry: Entry, manager: kedge.CheckpointManager) -> Any:
            if entry.row.id in gone:  # as after gc
                raise kedge.NotFound(entry.row.id)
            return load(entry, manager)

        def compare(*arguments: Any) -> Any:
            gone.update(
                row.id for row in store.manager.list("memory:docs") if row.metadata["key"] in ("k2", "k3", "k4")
            )
            store.delete(("docs",), "k3")
            store.put(("docs",), "k2", {"text": "y", "n": 20})
            store.put(("docs",), "k4", {"text": "y", "n": 0})
            return closeness(*arguments)

        monkeypatch.setattr(Entry, "state", state)
        monkeypatch.setattr(memories, "closeness", compare)
        results = store.search(("docs",), query="xxx", filter={"n": {"$gt": 1}})
        assert [(item.key, item.value["n"]) for item in results] == [("k5", 5), ("k2", 20)]


def test_embeddings_of_another_length_are_refused() -> None:
    with KedgeStore("memory:", index={"dims": 3, "embed": embed}) as store:
        with pytest.raises(Validation, match="8 dimensions"):
            store.put(("docs",), "1", {"text": "aab"})
        assert store.search(("docs",)) == []


# Expiry


def test_an_item_expires_lives_longer_when_read_and_goes(store: KedgeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    store.put(("a",), "short", {"n": 1}, ttl=10)
    store.put(("a",), "long", {"n": 2}, ttl=60)
    store.put(("a",), "always", {"n": 3})
    now += 9 * 60
    assert store.get(("a",), "short") is not None
    now += 9 * 60
    assert len(store.search(("a",), refresh_ttl=False)) == 3, "read, it lives ten minutes more"
    now += 2 * 60
    assert store.get(("a",), "short") is None
    assert {item.key for item in store.search(("a",), refresh_ttl=False)} == {"long", "always"}
    now += 60 * 60
    assert asyncio.run(store.asweep_ttl()) == 2
    assert [item.key for item in store.search(())] == ["always"]
    assert len(store.manager.list("memory:a")) == 1


def test_the_default_of_the_store_and_the_time_of_a_new_item(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    with KedgeStore("memory:", ttl={"default_ttl": 5, "refresh_on_read": False}) as store:
        store.put(("a",), "k", {"n": 1})
        now += 4 * 60
        assert store.get(("a",), "k") is not None
        now += 2 * 60
        assert store.get(("a",), "k") is None
        store.put(("a",), "k", {"n": 2}, ttl=None)
        now += 600 * 60
        assert store.get(("a",), "k").value == {"n": 2}  # type: ignore[union-attr]
