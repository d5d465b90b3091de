"""I1: of all the disks that a power cut may leave, each keeps what was promised."""

from pathlib import Path

import pytest

from tests.torture.crash_states import explore

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.requires("strace")]


@pytest.mark.parametrize(("life", "limit"), [("create", 120), ("save", 60), ("gc", 80)])
def test_every_disk_keeps_what_was_promised(tmp_path: Path, life: str, limit: int) -> None:
    numbers = explore(tmp_path / "trace", life, limit=limit)
    assert numbers["syncs"] > 3
    assert numbers["disks"] > 20
    assert numbers["opened"] < numbers["disks"]  # the rest reads like one of those
