"""I1, I9: every mutating system call of an operation may be the last one, or fail."""

from pathlib import Path

import pytest

from tests.torture.syscalls import inject_all

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.requires("strace")]


@pytest.mark.parametrize(
    ("operation", "sample"),
    [
        ("create", 15),
        ("save small", 9),
        ("save packed", 15),
        ("save arrays", 12),
        ("save tree", 6),
        ("delete", 6),
        ("gc", 18),
    ],
)
def test_every_call_killed_and_failed(tmp_path: Path, operation: str, sample: int) -> None:
    numbers = inject_all(tmp_path / "stores", operation, sample=sample)
    assert numbers["injected"] > 0
    assert numbers["killed"] > 0


def test_every_call_killed_while_rows_are_recorded_in_packs(tmp_path: Path) -> None:
    """Every call, not a sample: what the index says is recorded must be in packs, whenever the process dies."""
    numbers = inject_all(tmp_path / "stores", "record", faults=("KILL",))
    assert numbers["killed"] > 5
