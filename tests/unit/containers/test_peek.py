"""Asking a store in a directory without opening it: never another answer than opening it gives."""

import os
import sqlite3
from pathlib import Path

import pytest

import kedge
from kedge import ports
from kedge.containers import peek
from kedge.containers.peek import has_checkpoints
from kedge.index.sqlite import database
from kedge.store import directory as embedded


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEDGE_KEY", "KEDGE_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> str:
    path = tmp_path / "store"
    with kedge.open(path) as store:
        store.save("container:web", "one", {"a": 1})
    return str(path)


def test_it_knows_the_same_store(tmp_path: Path) -> None:
    assert (ports.FORMAT_VERSION, embedded.MARKER, embedded.INDEX, database.APPLICATION_ID) == (
        peek.FORMAT, peek.MARKER, peek.INDEX, peek.APPLICATION_ID,
    )  # fmt: skip
    assert has_checkpoints(str(tmp_path / "none"), "container:web") is False


def test_what_is_kept_and_what_is_not(store: str) -> None:
    assert has_checkpoints(store, "container:web") is True
    assert has_checkpoints(f"file:{store}", "container:web") is True
    assert has_checkpoints(store, "container:we") is False
    assert has_checkpoints(store, "container:web", "other") is False
    with kedge.open(store) as manager:  # others at work: what they committed is seen, their log is left alone
        kept = manager.save("container:new", "one", {"a": 1})
        assert has_checkpoints(store, "container:new") is True
        manager.delete("container:new", kept)
        assert has_checkpoints(store, "container:new") is False
        first = manager.take_lease("container:first", "who is being frozen", 60)
        assert has_checkpoints(store, "container:first") is True
        manager.break_lease(first)
        assert has_checkpoints(store, "container:first") is False
        assert manager.list("container:web")


@pytest.mark.parametrize(
    "url",
    ["postgresql://host/db", "memory:", "files:/tmp/x", "there", "s3://bucket", "/a%20b", "/a?mode=rw", "/a#b"],
)
def test_what_is_no_plain_directory_is_not_judged(url: str) -> None:
    assert has_checkpoints(url, "container:web") is None


def test_an_encrypted_store_is_not_judged(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = os.urandom(32)
    with kedge.open(tmp_path / "sealed", key=key, encrypt_names=True) as manager:
        manager.save("container:web", "one", {"a": 1})
    assert has_checkpoints(str(tmp_path / "sealed"), "container:web") is None
    monkeypatch.setenv("KEDGE_KEY_FILE", "/etc/key")  # opening a plain store with a key is an error, and said
    assert has_checkpoints(store, "container:web") is None


def test_a_store_that_is_not_as_it_should_be_is_not_judged(tmp_path: Path, store: str) -> None:
    other = tmp_path / "other"
    kedge.open(other).close()
    marker, index = Path(store, "kedge-store"), Path(store, "index.sqlite")
    text, data = marker.read_bytes(), index.read_bytes()
    for damaged in (b"", text[:40], text.replace(b"format: 1", b"format: 3"), text.replace(b"index.", b"index-2.")):
        marker.write_bytes(damaged)
        assert has_checkpoints(store, "container:web") is None
    marker.write_bytes(text)
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        Path(store, name).unlink(missing_ok=True)
    for wrong in (b"", b"no database at all", data[:512], (other / "index.sqlite").read_bytes()):
        index.write_bytes(wrong)
        assert has_checkpoints(store, "container:web") is None
    index.unlink()
    assert has_checkpoints(store, "container:web") is None
    assert not index.exists()
    index.write_bytes(data)
    with sqlite3.connect(index) as newer:
        newer.execute("PRAGMA user_version=7")
    newer.close()
    assert has_checkpoints(store, "container:web") is None
    (tmp_path / "foreign").mkdir()
    assert has_checkpoints(str(tmp_path / "foreign"), "container:web") is None
