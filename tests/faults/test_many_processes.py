"""I3, I4, I5: eight processes of eight threads on one store, with leases and gc: all counted once, nothing lost."""

from pathlib import Path

import pytest

from tests.torture.many_processes import crowd

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_a_crowd(tmp_path: Path) -> None:
    numbers = crowd(str(tmp_path / "store"), processes=8, threads=8, saves=6, counts=1)
    assert numbers["saves"] == 8 * 8 * 7
    assert numbers["counted under lease"] == 64
