"""A new journal for a `files:` store, killed anywhere while it is made: run again, everything is there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kedge
import kedge.care.repair_files
from kedge.care.repair_files import refile
from tests.torture.children import Child, Report
from tests.torture.races import Background, gate_before

pytestmark = [pytest.mark.faults]

STAGES = ("_begin", "rebuild", "_put_aside", "os.link", "sync_directory")


def make(report: Report, connection: Any, place: str, stage: str, is_careless: bool) -> None:
    """Killed right after a stage."""

    def and_die(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            function(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    begin = kedge.care.repair_files._begin

    def careless(journal: Any, new: Path) -> bool:
        is_complete = begin(journal, new)
        journal.path.unlink()
        return is_complete

    if is_careless:
        kedge.care.repair_files._begin = careless
    name = f"kedge.care.repair_files.{stage}"
    real = getattr(os, stage[3:]) if stage.startswith("os.") else getattr(kedge.care.repair_files, stage)
    with mock.patch(name, and_die(real)):
        refile(Path(place), actor="tests")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    place = tmp_path_factory.mktemp("refiling") / "store"
    with kedge.open(f"files:{place}") as store:
        states: dict[str, object] = {}
        for state in ({"tuple": (1, 2)}, {"n": 1}, os.urandom(100_000), {"n": 2}, [3]):
            states[store.save("job", "step", state)] = state
        store.store.backlog = None  # what is small is in the journal alone
    journal = place / ".kedge" / "journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:-400] + b"?" * 100 + data[-300:])
    return place, states


def die_and_look(
    damaged: tuple[Path, dict[str, object]], place: Path, stage: str, *, is_careless: bool = False
) -> None:
    shutil.copytree(damaged[0], place)
    assert Child(make, str(place), stage, is_careless).drain() == -signal.SIGKILL
    refile(place, actor="tests")
    with kedge.open(f"files:{place}") as store:
        assert {c.id: store.load(c.id) for c in store.list("job")} == damaged[1]
        assert store.verify().is_ok
    assert not list(place.glob(".kedge/rebuilt-*"))


@pytest.mark.parametrize("stage", STAGES)
def test_killed_anywhere(damaged: tuple[Path, dict[str, object]], tmp_path: Path, stage: str) -> None:
    die_and_look(damaged, tmp_path / "store", stage)


def test_a_new_journal_that_cannot_take_its_place(damaged: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    """Where no file can have two names, for example: the old one is still there, and the next try finds all."""
    place = tmp_path / "store"
    shutil.copytree(damaged[0], place)
    with (
        mock.patch("kedge.care.repair_files.os.link", side_effect=PermissionError(errno.EPERM, "x")),
        pytest.raises(kedge.StorageError, match="cannot put the new journal in place of"),
    ):
        refile(place, actor="tests")
    refile(place, actor="tests")
    with kedge.open(f"files:{place}") as store:
        assert {c.id: store.load(c.id) for c in store.list("job")} == damaged[1]


def damage_the_end(place: Path) -> None:
    """Of the last transaction but one: what is behind it is whole, so that it is no half-written end."""
    journal = place / ".kedge" / "journal"
    data = journal.read_bytes()
    last = data.rindex(b"\n-- ")
    journal.write_bytes(data[: last - 20] + b"?" * 10 + data[last - 10 :])


KEYS: dict[str, dict[str, Any]] = {"plain": {}, "encrypted": {"key": bytes(range(32))}}


@pytest.mark.parametrize("how", KEYS)
def test_a_reader_beside_a_repair_waits_for_it(tmp_path: Path, how: str) -> None:
    """What looks damaged to it is read again when nobody writes: the new journal is there then."""
    place, url = tmp_path / "store", f"files:{tmp_path / 'store'}"
    with kedge.open(url, **KEYS[how]) as store, kedge.open(url, **KEYS[how]) as reader:
        states: dict[str, object] = {store.save("job", "step", {"n": n}): {"n": n} for n in range(4)}
        damage_the_end(place)
        asked, flock = threading.Event(), fcntl.flock

        def noting(*args: Any) -> None:
            asked.set()
            flock(*args)

        with gate_before(kedge.care.repair_files, "_put_in_place") as gate:
            repairing = Background(refile, place, actor="tests", master=_master(how))
            gate.wait_until_reached()
            with mock.patch("kedge.index.files.journal.fcntl.flock", noting):
                reading = Background(lambda: {c.id: reader.load(c.id) for c in reader.list("job")})
                assert asked.wait(60), "it did not wait for the repair"
            gate.open()
            repairing.result()
            assert reading.result() == states


def test_damage_that_nobody_repairs_is_told_each_time(tmp_path: Path) -> None:
    url = f"files:{tmp_path / 'store'}"
    with kedge.open(url) as store, kedge.open(url) as reader:
        for n in range(4):
            store.save("job", "step", {"n": n})
        damage_the_end(tmp_path / "store")
        for _ in range(2):
            with pytest.raises(kedge.Corrupted, match="is damaged at"):
                reader.list("job")


@pytest.mark.parametrize("how", KEYS)
def test_a_store_that_is_open_follows_to_a_journal_that_numbers_all_anew(tmp_path: Path, how: str) -> None:
    place, url = tmp_path / "store", f"files:{tmp_path / 'store'}"
    names = [f"job-{n}" for n in range(5, 0, -1)]
    with kedge.open(url, **KEYS[how]) as store, kedge.open(url, namespace="last", **KEYS[how]) as tenant:
        saved = {name: store.save(name, "step", {"of": name}) for name in names}
        theirs = {name: tenant.save(name, "step", {"theirs": name}) for name in names}
        assert {name: store.list(name)[0].id for name in names} == saved
        assert {name: tenant.list(name)[0].id for name in names} == theirs
        journal = place / ".kedge" / "journal"
        lines = journal.read_bytes().split(b"\n-- ")
        journal.write_bytes(b"\n-- ".join(lines[:3]) + b"\n")  # what came first, the ID of the store among it
        refile(place, actor="tests", master=_master(how))
        assert {name: store.list(name)[0].id for name in names} == saved
        assert {name: tenant.list(name)[0].id for name in names} == theirs
        assert [store.load(i) for i in saved.values()] == [{"of": name} for name in names]
        assert store.list("job-1")[0].seq + 1 == store.get(store.save("job-1", "step", 1)).seq
        assert tenant.verify().is_ok
        assert store.verify().is_ok


def test_a_damaged_copy_of_the_keyring_stops_no_repair(tmp_path: Path) -> None:
    place, key = tmp_path / "store", KEYS["encrypted"]
    with kedge.open(f"files:{place}", **key) as store:
        state = os.urandom(100_000)
        saved = store.save("job", "step", state)
    (place / ".kedge" / "journal").unlink()
    (place / ".kedge" / "keyrings").write_text('{"default": "{}"}')
    refile(place, actor="tests", master=_master("encrypted"))
    with kedge.open(f"files:{place}", **key) as store:
        assert store.load(saved) == state  # its pack has the keys too


def _master(how: str) -> Any:
    if how == "plain":
        return None
    from kedge.crypto import parse_master

    return parse_master(KEYS[how]["key"])


@pytest.mark.mutant
def test_a_journal_given_up_too_early_is_noticed(damaged: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        die_and_look(damaged, tmp_path / "store", "_find_keys", is_careless=True)
