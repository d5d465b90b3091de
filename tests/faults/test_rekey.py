"""Changing keys: killed at any moment nothing is lost and the next call goes on; savers beside it lose nothing."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli import cli
from kedge.errors import CheckpointError
from tests.parts import require

require("module:cryptography")
from kedge.crypto import new_master_text
from tests.torture.ledger import Violation
from tests.torture.rekey import kill_rekeys

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

KEY = bytes(range(32))
SEED = 5  # two changes of keys that rewrite, the first of them of both keys, and die while they do

CHILD = """
import os, signal, sys
import kedge
import kedge.blobs.packs, kedge.index.sqlite.writes
place, point, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
where = {
    "keyring": (kedge.index.sqlite.writes.Writes, "set_keyring"),
    "row": (kedge.index.sqlite.writes.Writes, "reseal"),
    "chunks": (kedge.blobs.packs.PackWriter, "commit"),
    "copy of the keyring": (os, "replace"),
}[point]
real, seen = getattr(*where), [0]
def counted(*args, **kwargs):
    seen[0] += 1
    if seen[0] == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
store = kedge.open(place, key=bytes(range(32)))
setattr(*where, counted)
store.rekey(rewrite=True)
"""
POINTS = [("keyring", 1), ("row", 1), ("chunks", 2), ("row", 3), ("keyring", 2), ("copy of the keyring", 1)]


def fill(store: kedge.CheckpointManager) -> dict[str, object]:
    draw = random.Random(4)
    shared = draw.randbytes(150_000)
    values: list[object] = [
        {"n": 1},
        draw.randbytes(100_000),
        {"a": shared},
        {"b": shared, "c": 1},
        list(range(20_000)),
    ]
    return {store.save("j", "s", value, tags={"n": "x"}): value for value in values}


@pytest.mark.parametrize(("point", "count"), POINTS)
def test_killed_anywhere_nothing_is_lost_and_it_goes_on(tmp_path: Path, point: str, count: int) -> None:
    with kedge.open(tmp_path / "s", key=KEY) as store:
        states = fill(store)
    child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "s"), point, str(count)], check=False)
    assert child.returncode == -9
    with kedge.open(tmp_path / "s", key=KEY) as store:
        assert {i: store.load(i) for i in states} == states
        between = random.Random(9).randbytes(90_000)
        states[store.save("j", "s", between)] = between
        assert store.verify().is_ok
        store.gc()
        assert {i: store.load(i) for i in states} == states
        assert store.rekey(rewrite=True).unreadable == ()
        store.gc()
        assert not (store.encryption or {})["old_data_keys"]
        assert {i: store.load(i) for i in states} == states
        assert store.verify().is_ok


@pytest.mark.parametrize(("point", "count"), [("keyring", 2), ("row", 1), ("keyring", 3)])
def test_the_same_command_goes_on(tmp_path: Path, point: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place, old, new = str(tmp_path / "s"), tmp_path / "old", tmp_path / "new"
    old.write_text(new_master_text())
    new.write_text(new_master_text())
    monkeypatch.setenv("KEDGE_KEY_FILE", str(old))
    with kedge.open(place) as store:
        states = fill(store)
    words = ["rekey", "--store", place, "--new-key", f"file:{new}", "--rewrite"]
    killed = CHILD.replace("key=bytes(range(32))", "").replace("store.rekey(", f"store.rekey('file:{new}', ")
    child = subprocess.run([sys.executable, "-c", killed, place, point, str(count)], check=False)
    assert child.returncode == -9
    checked = CliRunner().invoke(cli, ["check", "--store", place, "--key", f"file:{new}"])
    assert ("old data key is still in use" in checked.stdout) == ((point, count) != ("keyring", 2))
    again = CliRunner().invoke(cli, words)
    assert again.exit_code == 0, again.output
    assert "continuing" in again.stderr
    with kedge.open(place, key=f"file:{new}") as store:
        assert not (store.encryption or {})["old_data_keys"]
        assert {i: store.load(i) for i in states} == states


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
def test_killed_at_random_writes_to_a_database(postgres: Cluster) -> None:
    """The short form of `./dev torture rekey`."""
    numbers = kill_rekeys(postgres.empty_database(), rounds=2, seed=SEED)
    assert numbers["kills"] == 2


@pytest.mark.mutant
def test_an_old_key_that_is_dropped_too_early_would_show(tmp_path: Path) -> None:
    with pytest.raises(Violation):
        kill_rekeys(str(tmp_path / "s"), rounds=1, seed=SEED, mutant="old data key forgotten at once")


def race(place: Path) -> dict[str, object]:
    """Saves, copies and gc of a second process's kind while keys change twice; what was acknowledged."""
    kept: dict[str, object] = {}
    failed: list[BaseException] = []
    start = threading.Event()
    with kedge.open(place, key=KEY) as store, kedge.open(place, key=KEY) as other:
        kept |= fill(store)

        def save() -> None:
            draw = random.Random(7)
            start.wait()
            try:
                for n in range(30):
                    value: object = draw.randbytes(80_000) if n % 3 else {"n": n}
                    kept[other.save("j", "s", value)] = value
                    if n % 10 == 5:
                        copied = other.copy("j", f"copy-{n}")
                        kept[copied[-1].id] = other.load(copied[-1].id)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        start.set()
        for _ in range(2):
            store.rekey(rewrite=True)
            store.gc()
        thread.join()
        if failed:
            raise failed[0]
        store.rekey(rewrite=True)
        store.gc()
    return kept


def test_savers_beside_it_lose_nothing(tmp_path: Path) -> None:
    kept = race(tmp_path / "s")
    with kedge.open(tmp_path / "s", key=KEY) as store:
        assert {i: store.load(i) for i in kept} == kept
        assert store.verify().is_ok


def test_the_key_is_checked_at_commit_for_a_reason(tmp_path: Path) -> None:
    """The mutant: a save under a key that is gone by then is acknowledged, and nobody can read it."""
    place = tmp_path / "s"
    with kedge.open(place, key=KEY) as store, kedge.open(place, key=KEY) as other:
        fill(store)
        store.rekey(rewrite=True)
        with mock.patch("kedge.index.sqlite.writes.Writes._check_key", return_value=None):
            saved = other.save("j", "s", {"n": 2})
        with pytest.raises(CheckpointError):
            store.load(saved)


def test_repair_and_rebuild_bring_an_encrypted_store_back(tmp_path: Path) -> None:
    from kedge.care.repair import repair
    from kedge.crypto import parse_master
    from kedge.errors import Validation

    place = tmp_path / "s"
    with kedge.open(place, key=KEY, encrypt_names=True) as store:
        states = fill(store)
        large = {i: s for i, s in states.items() if isinstance(s, bytes | list) or "n" not in str(s)[:5]}
        deleted = next(iter(large))
        store.save("j", "s", 1, idempotency_key="k")
        store.delete("j", deleted)
        del large[deleted], states[deleted]
    with pytest.raises(Validation, match="no key was given"):
        repair(place, actor="t")
    report = repair(place, actor="t", master=parse_master(KEY))
    assert (report.corrupted, report.is_index_complete) == ((), True)
    with kedge.open(place, key=KEY) as store:
        assert {i: store.load(i) for i in states} == states
        assert store.verify().is_ok
        assert store.list("j")[0].tags == {"n": "x"}
        before = store.list("j")[-1].id
        assert store.save("j", "s", 1, idempotency_key="k") == before
    for path in place.glob("index*"):
        path.unlink()
    (place / "keyrings").unlink()
    report = repair(place, actor="t", master=parse_master(KEY))  # from the packs alone
    with kedge.open(place, key=KEY) as store:
        in_packs = {i: s for i, s in large.items() if store.exists(i)}
        assert in_packs
        assert {i: store.load(i) for i in in_packs} == in_packs
        assert store.rebuild().added == 0
        assert store.verify().is_ok
