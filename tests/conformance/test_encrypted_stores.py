"""What a manager does is the same, plain, encrypted and with names hidden, on every kind of store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.errors import Conflict, LeaseHeld, NotFound
from tests.parts import require
from tests.unit.crypto.test_encryption import KEY, NAMES, fill, same, states

require("module:cryptography")

Open = Callable[..., kedge.CheckpointManager]
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "encrypted": {"key": KEY},
    "hidden": {"key": KEY, "encrypt_names": True},
}


@pytest.fixture(
    params=[
        "directory",
        "memory",
        "files",
        "kept memory",
        pytest.param("postgres", marks=[pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")]),
        pytest.param("packs", marks=[pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")]),
        pytest.param("s3", marks=[pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres", "s3")]),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    if request.param == "memory":
        return "memory:"
    if request.param in ("files", "kept memory"):
        return f"{'files' if request.param == 'files' else 'memory'}:{tmp_path / 'store'}"
    database = str(request.getfixturevalue("postgres").empty_database())
    if request.param == "postgres":
        return database
    if request.param == "packs":
        return f"{database}&blobs=file:{tmp_path / 'packs'}"
    request.getfixturevalue("s3")
    return f"{database}&blobs=s3://kedge/encrypted-{next(_count)}"


_count = itertools.count()


@pytest.fixture(params=HOW)
def store(request: pytest.FixtureRequest, url: str) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(url, **HOW[request.param]) as opened:
        yield opened


def test_a_manager_does_the_same(store: kedge.CheckpointManager, tmp_path: Path) -> None:
    job, step = NAMES
    ids = fill(store)
    before = states(store, ids)
    assert [c.id for c in store.list(job)] == list(ids.values())
    assert {c.step for c in store.list(job, limit=3)} == {step}
    assert [c.id for c in store.list(job, tags={"tag-name": "prod-env"})] == [ids["small"], ids["text"]]
    assert [c.id for c in store.list(job, metadata={"loss-figure": 7}, limit=1)] == [ids["small"]]
    assert store.list(job, metadata={"loss-figure": "7"}) == []
    assert [j.name for j in store.jobs(prefix="pay")] == [job]
    assert store.jobs(after=job) == []
    found = store.load_by_key(job, "retry-key-7")
    assert found is not None
    assert (found[0].id, found[1]) == (ids["small"], {"password": "hunter2"})
    with pytest.raises(Conflict, match="retry-key-7"):
        store.save(job, step, "another", idempotency_key="retry-key-7")
    assert same(store.load(ids["large"], mapped=True), before["large"])
    assert same(store.load(ids["large"], only="a"), {"a": before["large"]["a"]})  # type: ignore[index]
    with store.lease(job) as lease:
        with pytest.raises(LeaseHeld, match=job):
            store.save(job, step, 1)
        leased = store.save(job, step, 1, lease=lease)
    assert store.diff(ids["small"], leased).changes
    assert store.resume_from(ids["text"], "branch")[0].parent == ids["text"]
    assert [c.step for c in store.copy(job, "copy")] == [step] * 7
    assert [c.step for c in store.copy(job, "copy")] == [step] * 7  # nothing twice
    assert len(store.list("copy")) == 7
    store.save_async("later", step, before["large"]).result()
    note = [e for e in store.events(limit=1000) if e.action == "note"]
    assert [(e.job, e.actor, e.detail) for e in note] == [(job, store.actor, '{"who": "hunter2"}')]
    with kedge.run("nightly", store=store) as run:
        assert run.step("add", lambda a, b: a + b, 1, 2) == 3
    with kedge.run("nightly", store=store) as run:
        assert run.step("add", lambda a, b: a - b, 1, 2) == 3
    store.delete(job, ids["zeros"])
    with pytest.raises(NotFound):
        store.load(ids.pop("zeros"))
    store.gc()
    assert store.verify().problems == ()
    with kedge.open(tmp_path / "there", key=None if store.encryption else KEY) as there:  # the other kind
        assert store.copy_to(there).damaged == ()
        assert store.copy_to(there, mirror=True).copied == 0
        assert all(same(there.load(i), before[name]) for name, i in ids.items())
        assert there.verify().problems == ()
    if store.encryption:
        store.rekey(rewrite=True)
        store.gc()
        assert store.verify().problems == ()
    assert all(same(store.load(i), before[name]) for name, i in ids.items())
