"""A new journal for a `files:` store, killed anywhere while it is made: run again, everything is there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import holdfast
import holdfast.refiling
from holdfast.refiling import refile
from tests.torture.children import Child, Report

pytestmark = [pytest.mark.faults]

STAGES = ("_begin", "rebuild", "_put_aside", "os.link", "sync_folder")


def make(report: Report, connection: Any, place: str, stage: str, is_careless: bool) -> None:
    """Killed right after a stage."""

    def and_die(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            function(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    begin = holdfast.refiling._begin

    def careless(journal: Any, new: Path) -> bool:
        is_complete = begin(journal, new)
        journal.path.unlink()
        return is_complete

    if is_careless:
        holdfast.refiling._begin = careless
    name = f"holdfast.refiling.{stage}"
    real = getattr(os, stage[3:]) if stage.startswith("os.") else getattr(holdfast.refiling, stage)
    with mock.patch(name, and_die(real)):
        refile(Path(place), actor="tests")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    place = tmp_path_factory.mktemp("refiling") / "store"
    with holdfast.open(f"files:{place}") as store:
        states: dict[str, object] = {}
        for state in ({"tuple": (1, 2)}, {"n": 1}, os.urandom(100_000), {"n": 2}, [3]):
            states[store.save("job", "step", state)] = state
    journal = place / ".holdfast" / "journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:-400] + b"?" * 100 + data[-300:])
    return place, states


def die_and_look(
    damaged: tuple[Path, dict[str, object]], place: Path, stage: str, *, is_careless: bool = False
) -> None:
    shutil.copytree(damaged[0], place)
    assert Child(make, str(place), stage, is_careless).drain() == -signal.SIGKILL
    refile(place, actor="tests")
    with holdfast.open(f"files:{place}") as store:
        assert {c.id: store.load(c.id) for c in store.list("job")} == damaged[1]
        assert store.verify().is_ok
    assert not list(place.glob(".holdfast/rebuilt-*"))


@pytest.mark.parametrize("stage", STAGES)
def test_killed_anywhere(damaged: tuple[Path, dict[str, object]], tmp_path: Path, stage: str) -> None:
    die_and_look(damaged, tmp_path / "store", stage)


def test_a_new_journal_that_cannot_take_its_place(damaged: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    """Where no file can have two names, for example: the old one is still there, and the next try finds all."""
    place = tmp_path / "store"
    shutil.copytree(damaged[0], place)
    with (
        mock.patch("holdfast.refiling.os.link", side_effect=PermissionError(errno.EPERM, "x")),
        pytest.raises(holdfast.StorageError, match="cannot put the new journal in place of"),
    ):
        refile(place, actor="tests")
    refile(place, actor="tests")
    with holdfast.open(f"files:{place}") as store:
        assert {c.id: store.load(c.id) for c in store.list("job")} == damaged[1]


@pytest.mark.mutant
def test_a_journal_given_up_too_early_is_noticed(damaged: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        die_and_look(damaged, tmp_path / "store", "_find_keys", is_careless=True)
