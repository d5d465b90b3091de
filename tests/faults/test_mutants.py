"""A test that cannot fail is a bug: each safeguard, taken out, must be noticed by the test that is named for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import kedge
from tests.faults import test_gc_races as gc_races
from tests.torture import bitflips, crash_states, mutants, syscalls
from tests.torture.ledger import Violation

pytestmark = [pytest.mark.faults, pytest.mark.mutant]


def crash(life: str, mutant: str, folder: Path) -> None:
    """tests/faults/test_crash_states.py"""
    crash_states.explore(folder, life, mutant=mutant)


@pytest.mark.slow
@pytest.mark.requires("strace")
@pytest.mark.parametrize(
    ("mutant", "life"),
    [
        ("pack not synced", "save"),
        ("pack directory not synced", "save"),
        ("index not synced", "save"),
        ("marker not synced", "create"),
        ("store directory not synced", "create"),
        ("names above the store not synced", "create"),
        ("compaction not synced", "gc"),
    ],
)
def test_crash_states_notice(tmp_path: Path, mutant: str, life: str) -> None:
    with pytest.raises(Violation):
        crash(life, mutant, tmp_path / "trace")


@pytest.mark.slow
@pytest.mark.requires("strace")
def test_kills_while_recording_notice(tmp_path: Path) -> None:
    """tests/faults/test_syscalls.py"""
    with pytest.raises(Violation):
        syscalls.inject_all(tmp_path / "stores", "record", faults=("KILL",), mutant="recorded before it is durable")


RACES: dict[str, Callable[..., None]] = {
    "reused chunks not checked": gc_races.test_chunks_removed_right_after_they_were_found,
    "late saves not marked": gc_races.test_chunks_reused_while_gc_is_marking,
    "packs not locked": gc_races.test_a_pack_whose_save_is_not_committed_yet,
    "packs unlocked before the commit": gc_races.test_a_pack_whose_save_is_not_committed_yet,
    "pack removed unasked": gc_races.test_a_pack_named_since_gc_looked,
    "reader does not ask again": gc_races.test_a_reader_of_a_pack_that_is_rewritten,
}


@pytest.mark.parametrize("mutant", RACES)
def test_gc_races_notice(tmp_path: Path, mutant: str) -> None:
    place = str(tmp_path / "store")
    test = RACES[mutant]
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    with kedge.open(place) as user, kedge.open(place) as other, mutants.applied(mutant):
        arguments = {"user": user, "other": other, "place": place}
        with pytest.raises((AssertionError, kedge.CheckpointError)):
            test(**{name: arguments[name] for name in names})


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> bitflips.Subject:
    return bitflips.Subject(tmp_path_factory.mktemp("flips") / "subject", leave_log=False)


@pytest.mark.parametrize("mutant", ["chunk digest not checked", "manifest digest not checked"])
def test_bitflips_notice(subject: bitflips.Subject, mutant: str) -> None:
    """One bit of a state in a row of the index, one of each pack's first chunk."""
    if mutant.startswith("manifest"):
        offset = (subject.template / "index.sqlite").read_bytes().index("step 1 ✓".encode())
        damages = [bitflips.Damage("index.sqlite", offset, "bit 0")]
    else:
        damages = [bitflips.Damage(file, 5000, "bit 3") for file in subject.sizes if file.startswith("packs/")]
    assert {subject.examine(damage) for damage in damages} == {"refused"}
    with mutants.applied(mutant):
        for damage in damages:
            with pytest.raises(Violation):
                subject.examine(damage)


def test_a_stale_lease_is_noticed(tmp_path: Path) -> None:
    """tests/security/test_bad_input.py::test_leases_of_others"""
    bad_input = _import("tests.security.test_bad_input")
    with kedge.open(tmp_path / "store") as store, mutants.applied("lease token not checked"):
        store.save("job", "first", 1)
        with pytest.raises(pytest.fail.Exception):
            bad_input.test_leases_of_others(store, tmp_path / "store")


def _import(name: str) -> ModuleType:
    import importlib

    return importlib.import_module(name)


def test_every_mutant_has_its_test() -> None:
    named = {*RACES, "lease token not checked"}
    named |= {"copies not in order", "place noted before the copies"}  # test_copies.py
    named |= {"lease token not checked by PostgreSQL"}  # test_machines_faults.py
    named |= {"old data key forgotten at once"}  # test_rekey.py
    # test_process_queue.py
    named |= {
        "answered before it is committed",
        "saves of ended processes committed",
        "unanswered saves not looked for",
    }
    named |= {"lease of keys not checked"}  # test_key_races.py
    named |= {"packs without records removed"}  # test_wrong_key.py
    named |= {"recorded before it is durable"}  # test_kills_while_recording_notice
    for function in (test_crash_states_notice, test_bitflips_notice):
        for mark in function.pytestmark:  # type: ignore[attr-defined]
            if mark.name == "parametrize":
                named |= {case if isinstance(case, str) else case[0] for case in mark.args[1]}
    assert named | {"nothing synced"} == mutants.MUTANTS.keys()  # that one is the power cut's
