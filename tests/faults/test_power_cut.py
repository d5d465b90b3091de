"""I1: an acknowledged save survives a power cut, on a real file system that loses what was not synced."""

from pathlib import Path

import pytest

from tests.torture.ledger import Violation
from tests.torture.power_cut import power_cuts

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.requires("power_cut"),
    pytest.mark.xdist_group("power"),
]


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    numbers = power_cuts(tmp_path / "disk", cuts=8)
    assert numbers["acknowledged"] > 0


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", ["index not synced", "nothing synced"])
def test_without_syncs_much_is_lost(tmp_path: Path, mutant: str) -> None:
    """The same cuts find a store that does not sync: the test above could fail."""
    with pytest.raises(Violation):
        power_cuts(tmp_path / "disk", cuts=8, mutant=mutant)
