"""I2: whatever is damaged, a load answers exactly what was saved or raises a typed error."""

from pathlib import Path

import pytest

from tests.torture.bitflips import flip

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_damage_is_never_loaded(tmp_path: Path) -> None:
    """And verify finds what a load would meet, except in SQLite's log: damage there looks like a commit cut short."""
    seen = flip(tmp_path / "subject", count=15)
    print(dict(seen))
    assert seen["refused"] > 0
    assert seen["exact"] > 0
    assert seen["unfound"] == seen["unfound in sqlite-wal"]
