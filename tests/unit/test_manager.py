"""What holds for every method of a CheckpointManager."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.errors import Conflict

KEY = bytes(range(32))
CALLS: dict[str, Callable[[kedge.CheckpointManager], Any]] = {
    "save": lambda store: store.save("j", "s", 1),
    "save_async": lambda store: store.save_async("j", "s", 1),
    "load": lambda store: store.load("x"),
    "load_latest": lambda store: store.load_latest("j"),
    "list": lambda store: store.list("j"),
    "walk": lambda store: list(store.walk("j")),
    "jobs": lambda store: store.jobs(),
    "exists": lambda store: store.exists("x"),
    "delete": lambda store: store.delete("j", "x"),
    "pin": lambda store: store.pin("x"),
    "lease": lambda store: store.lease("j").__enter__(),
    "events": lambda store: store.events(),
    "stats": lambda store: store.stats(),
    "verify": lambda store: store.verify(),
    "gc": lambda store: store.gc(),
    "rebuild": lambda store: store.rebuild(),
    "rekey": lambda store: store.rekey(rewrite=True),
    "encryption": lambda store: store.encryption,
    "copy_to": lambda store: store.copy_to(kedge.open("memory:")),
    "run": lambda store: kedge.run("r", store=store).__enter__(),
}


@pytest.mark.parametrize("scheme", ["memory:", "file:", "files:"])
def test_a_closed_store_refuses_everything_alike(tmp_path: Path, scheme: str) -> None:
    store = kedge.open(scheme if scheme == "memory:" else f"{scheme}{tmp_path}/s")
    view = store.acting_as("ada")
    store.close()
    for call in CALLS.values():
        for closed in (store, view):
            with pytest.raises(Conflict, match="is closed"):
                call(closed)
    store.close()


def test_a_store_is_not_copied_to_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with kedge.open(tmp_path / "s") as store, kedge.open(f"file:{tmp_path}/link") as same:
        store.save("j", "s", 1)
        for target in (store, same):
            with pytest.raises(Conflict, match="to itself"):
                store.copy_to(target)
        with kedge.open("memory:") as memory:
            assert store.copy_to(memory).copied == 1


@pytest.mark.parametrize("name", ["", "\ud800", 7])
def test_a_step_name_that_is_not_too_long_is_not_to_be_shortened(name: Any) -> None:
    with kedge.open("memory:") as store, pytest.raises(kedge.errors.InvalidName) as refused:
        store.save("j", name, 1)
    assert "shorten" not in refused.value.hint


def test_urls_that_name_nothing() -> None:
    with pytest.raises(kedge.errors.Validation, match="names no directory") as refused:
        kedge.open("files:")
    assert "http://" in refused.value.hint


def test_the_newest_is_found_in_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "one", 1)
        store.save("job", "two", 2, level="stage")
        looks, look = list[object](), store.catalogue.list_stored
        monkeypatch.setattr(store.catalogue, "list", lambda *_: pytest.fail("it looks twice"))
        monkeypatch.setattr(store.catalogue, "list_stored", lambda *asked: looks.append(asked) or look(*asked))
        for level, state in ((None, 2), ("stage", 2), ("step", 1)):
            latest = store.load_latest("job", level=level)
            assert latest is not None
            assert latest[1] == state
        assert len(looks) == 3


def test_what_is_marked_as_damaged_need_not_open_to_be_passed_over(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store", key=KEY) as store:
        store.save("job", "one", 1)
        damaged = store.save("job", "two", 2)
        store.set_status(damaged, "corrupted")
    with closing(sqlite3.connect(tmp_path / "store" / "index.sqlite", isolation_level=None)) as index:
        index.execute("UPDATE checkpoint SET manifest = zeroblob(length(manifest)) WHERE id = ?", (damaged,))
    with kedge.open(tmp_path / "store", key=KEY) as store:
        with pytest.warns(UserWarning, match=f"{damaged}.*passed over"):
            latest = store.load_latest("job")
        assert latest is not None
        assert latest[1] == 1
