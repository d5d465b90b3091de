"""What a workload and a namespace may keep is bounded."""

import pytest

import kedge
from kedge.containers.runtime.bounds import keep_within


def save(store: kedge.CheckpointManager, key: str) -> None:
    keep_within(store, key)
    store.save(f"container:{key}", "s", {"key": key})


def test_the_last_generations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_KEEP_LAST", "3")
    with kedge.open("memory:") as store:
        for _ in range(30):
            save(store, "team+web+main")
        assert 3 <= len(store.list("container:team+web+main")) <= 6  # a save tidies up now and then
        store.set_retention("container:team+web+main", kedge.RetentionPolicy(keep_last=5))  # an administrator's stays
        for _ in range(30):
            save(store, "team+web+main")
        assert 5 <= len(store.list("container:team+web+main")) <= 10
        monkeypatch.setenv("KEDGE_KEEP_LAST", "0")
        for _ in range(12):
            save(store, "team+all+main")
        assert len(store.list("container:team+all+main")) == 12


def test_a_namespace_with_too_many_gets_no_new_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_NAMESPACE_GENERATIONS", "4")
    with kedge.open("memory:") as store:
        for number in range(4):
            save(store, f"team+web-{number}+main")
        with pytest.raises(kedge.Conflict, match="namespace team"):
            save(store, "team+one-more+main")
        save(store, "team+web-0+main")  # those it has go on
        save(store, "other+web-0+main")
        save(store, "alone")
        monkeypatch.setenv("KEDGE_NAMESPACE_GENERATIONS", "many")
        with pytest.raises(kedge.Validation, match="KEDGE_NAMESPACE_GENERATIONS"):
            save(store, "team+one-more+main")
