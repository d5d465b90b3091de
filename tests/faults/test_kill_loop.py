"""I1, I3: an acknowledged save survives kill -9, with several savers and gc at work."""

from pathlib import Path

import pytest

from tests.torture.kill_loop import kill_loop

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_acknowledged_is_lost(tmp_path: Path, seed: int) -> None:
    numbers = kill_loop(str(tmp_path / "store"), rounds=8, seed=seed)
    assert numbers["kills"] >= 24
    assert numbers["acknowledged"] > 0


def test_nothing_that_one_process_committed_for_another_is_lost(tmp_path: Path) -> None:
    """Processes that save little, and nothing else at the same time, commit for each other."""
    numbers = kill_loop(str(tmp_path / "store"), rounds=6, savers=4, threads=1, kinds=("small",))
    assert numbers["kills"] >= 30
    assert numbers["acknowledged"] > 0
