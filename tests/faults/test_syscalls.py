"""I1, I9: every mutating system call of an operation may be the last one, or fail."""

from pathlib import Path

import pytest

from tests.torture.syscalls import inject_all

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.requires("strace")]


@pytest.mark.parametrize(
    ("operation", "sample"),
    [
        ("create", 6),
        ("save small", 3),
        ("save packed", 6),
        ("save arrays", 6),
        ("save many", 3),
        ("delete", 3),
        ("gc", 9),
        ("rewrite", 3),
        ("files save packed", 3),
        ("files rewrite", 3),
        ("files gc", 3),
        ("memory", 3),
        ("repair", 3),
        ("copy", 3),
        ("export over another", 3),
        ("restore tree of files", 3),
        ("restore files of processes", 3),
        ("share", 3),
        ("new key", 3),
        ("work", 3),
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
