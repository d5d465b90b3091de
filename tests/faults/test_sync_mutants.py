"""Every sync, rename and conditional put of Kedge has a test that notices when it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import test_durable_names as durable_names
from tests.torture.sync_mutants import CAUGHT, named
from tests.torture.sync_sites import find_sites, removed

pytestmark = pytest.mark.faults


def test_all_of_them_are_in_the_table() -> None:
    missing = sorted(find_sites().keys() - named())
    assert not missing, (
        f"name the tests that notice when these are missing, in tests/torture/sync_mutants.py: {missing}"
    )


def test_their_tests_exist() -> None:
    root = Path(__file__).parents[2]
    for test in CAUGHT:
        file, _, name = test.partition("::")
        assert not name or f"def {name}(" in (root / file).read_text(), test


@pytest.mark.mutant
@pytest.mark.parametrize("call", ["fsync", "replace", "sync_directory"])
def test_a_missing_one_is_noticed(tmp_path: Path, call: str) -> None:
    """The others: ./dev torture sync_mutants."""
    site = find_sites()[f"containers/archive/export.py replace_file {call}"]
    with removed(site), pytest.raises(AssertionError):
        durable_names.test_an_archive(tmp_path)
