"""Whoever can write a store's files, and has no key, cannot make its owner read or write something plain."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import kedge
from kedge.blobs.pack_file import header
from kedge.care.repair import repair
from kedge.store.record import RECORD_MAGIC
from tests.parts import require
from tests.security.test_forged_records import forged

require("module:cryptography")
from kedge.crypto import new_keyring, parse_master, seal_keyring

KEY, THEIRS = bytes(range(32)), bytes(range(1, 33))
SECRET = {"secret": os.urandom(200_000)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    with kedge.open(place, key=KEY) as store:
        store.save("job", "large", SECRET)
        store.save("job", "small", 1)
    return place


def alter(place: Path, *statements: str, **values: object) -> None:
    with closing(sqlite3.connect(place / "index.sqlite", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement, values)


FORGET_KEYS = "DELETE FROM meta WHERE key LIKE 'key%'"
DOWNGRADES = {
    "said to be plain": ["UPDATE meta SET value = 'no' WHERE key = 'encrypted'"],
    "without keys": [FORGET_KEYS],
    "said to be plain, without keys": ["UPDATE meta SET value = 'no' WHERE key = 'encrypted'", FORGET_KEYS],
}


@pytest.mark.parametrize("how", DOWNGRADES)
def test_a_store_that_is_said_to_be_plain(place: Path, how: str) -> None:
    """Its owner, who gives a key, reads what was saved or an error, and writes nothing that others can read."""
    alter(place, *DOWNGRADES[how])
    try:
        with kedge.open(place, key=KEY) as store:
            try:
                assert store.load(store.list("job")[0].id) == SECRET
            except kedge.CheckpointError:
                pass
            store.save("other", "step", "written after the attack")
    except kedge.CheckpointError:
        pass
    found = b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())
    assert b"written after the attack" not in found


def test_keys_of_the_attacker(place: Path) -> None:
    with closing(sqlite3.connect(place / "index.sqlite")) as db:
        store_id = db.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()[0]
    theirs = new_keyring(store_id, "default", hides_names=False)
    text = seal_keyring(theirs, parse_master(THEIRS), store_id)
    alter(place, "UPDATE meta SET value = :text WHERE key = 'keyring:default'", text=text)
    with pytest.raises(kedge.Validation, match="key"):
        kedge.open(place, key=KEY)


@pytest.mark.parametrize("encoding", [0, 1, 4, 5, 6])  # plain, compressed, a difference from another chunk
def test_chunks_that_are_said_to_be_something_else(place: Path, encoding: int) -> None:
    alter(place, "UPDATE chunk SET encoding = :encoding", encoding=encoding)
    with kedge.open(place, key=KEY) as store:
        large = store.list("job")[0]
        with pytest.raises(kedge.CheckpointError) as caught:
            store.load(large.id)
        assert isinstance(caught.value, kedge.Corrupted | kedge.UnsupportedFormat)


@pytest.mark.parametrize("kind", [1, 2])
def test_plain_records_for_a_rebuild(place: Path, kind: int) -> None:
    """Written into the packs, also into one that says to be of the format before records were bound to it."""
    for path in (place / "packs").iterdir():
        data = bytearray(path.read_bytes())
        if kind == 1:
            data[:4096] = header(path.stem, 1)
        path.write_bytes(data + forged(kind, path.stem if kind == 2 else "", "default").ljust(4096, b"\0"))
        assert RECORD_MAGIC in data
    for part in place.glob("index*"):
        part.unlink()
    repair(place, actor="t", master=parse_master(KEY))
    with kedge.open(place, key=KEY) as store:
        assert "forged" not in [job.name for job in store.jobs()]
        store.rebuild()
        assert "forged" not in [job.name for job in store.jobs()]
