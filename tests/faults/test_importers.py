"""Imports killed in the middle, and safeguards of importing taken out: the tests named for them must notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kedge
from kedge.legacy.importers import bring, directory, folder, geo_core, old_pickle_child, writer
from tests.legacy.importers import test_formats as formats
from tests.legacy.importers import test_hostile as hostile
from tests.legacy.importers.writers import jobs
from tests.waiting import wait_for

pytestmark = pytest.mark.faults


def test_an_import_that_is_killed_goes_on(tmp_path: Path) -> None:
    old, place = tmp_path / "old", tmp_path / "store"
    for n in range(1500):
        jobs.write(old, jobs.checkpoint(f"job{n % 3}", "s", n, n))
    words = [sys.executable, "-m", "kedge", "import", str(old), "--store", str(place), "--json"]
    kept = 0
    for more in (1, 500):  # once early, once later
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda p=process, n=kept + more: p.poll() is not None or count(place) >= n, "nothing is imported")
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = count(place)
    with kedge.open(place) as store:
        report = bring(str(old), store)
        assert report.imported + report.present == 1500
        assert report.present == kept
        for part in range(3):
            assert [store.load(c.id) for c in store.list(f"job{part}")] == list(range(part, 1500, 3))
        assert store.verify().is_ok


def count(place: Path) -> int:
    if not (place / "kedge-store").exists():
        return 0
    with kedge.open(place, create=False) as store:
        return sum(job.checkpoints for job in store.jobs())


# --- mutants ---


def _follow_links() -> Any:
    real = folder.list_folder

    def follow(path: str, shown: str) -> folder.Listing:
        found = real(path, shown)
        links = [name for name in os.listdir(path) if os.path.islink(os.path.join(path, name))]
        files = {
            name: folder.Entry(os.path.realpath(os.path.join(path, name)), name, name, 1)
            for name in links
            if os.path.isfile(os.path.join(path, name))
        }
        return folder.Listing(found.path, found.shown, found.files | files, found.folders, ())

    return mock.patch.multiple(folder, list_folder=follow), mock.patch.multiple(geo_core, list_folder=follow)


def _any_name_is_harmless() -> Any:
    """The reader of pickles as the old systems had it; in this process, where a test can see what it does."""
    import pickle

    return (mock.patch.object(old_pickle_child.Reader, "find_class", pickle.Unpickler.find_class),)


def _random_keys() -> Any:
    def drawn(_: object) -> str:
        return os.urandom(8).hex()

    return (mock.patch.object(writer, "digest", drawn),)


def _foreign_jobs_are_ours() -> Any:
    return (mock.patch.object(writer.Writer, "_is_foreign", return_value=False),)


def _no_checksums() -> Any:
    real = geo_core.checkpoint

    def unchecked(name: str, about: Any, *rest: Any, **extra: Any) -> Any:
        return real(name, {**about, "checksum": None, "validation_checksum": None}, *rest, **extra)

    return (mock.patch.object(geo_core, "checkpoint", unchecked),)


def _order_of_names() -> Any:
    return (mock.patch.dict(directory._SORTS, {"jobs": lambda document: 0}),)


MUTANTS: dict[str, tuple[Callable[[], Any], Callable[..., None]]] = {
    "links followed": (_follow_links, hostile.test_links_are_not_followed),
    "keys drawn at random": (_random_keys, formats.test_checkpoints_of_jobs),
    "continued jobs added to": (_foreign_jobs_are_ours, formats.test_a_card_that_was_continued_here_is_left_alone),
    "checksums not compared": (_no_checksums, formats.test_core_without_a_registry_and_with_damage),
    "order of names": (_order_of_names, formats.test_checkpoints_of_jobs),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(tmp_path: Path, name: str) -> None:
    make, test = MUTANTS[name]
    old = tmp_path / "old"
    old.mkdir()
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    with kedge.open(tmp_path / "store") as store:
        given = {"old": old, "store": store, "tmp_path": tmp_path}
        patches = make()
        for patch in patches:
            patch.start()
        try:
            with pytest.raises(AssertionError):
                test(**{arg: given[arg] for arg in names})
        finally:
            for patch in patches:
                patch.stop()


@pytest.mark.mutant
def test_a_reader_without_a_list_is_noticed(tmp_path: Path) -> None:
    """What the list keeps from happening does happen without it: the gadgets are real."""
    import pickle

    mark = tmp_path / "mark"
    data = pickle.dumps(hostile.gadgets(str(mark))["posix.system"])
    assert old_pickle_child.read(data, frozenset())[0] == old_pickle_child.OK  # it is data
    assert not mark.exists()
    (patch,) = _any_name_is_harmless()
    with patch:
        old_pickle_child.read(data, frozenset())
    assert mark.exists()
