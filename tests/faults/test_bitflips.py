"""I2: whatever is damaged, a load answers exactly what was saved or raises a typed error."""

from pathlib import Path

import pytest

import kedge
from kedge.care.repair import repair
from tests.torture.bitflips import flip

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_damage_is_never_loaded(tmp_path: Path) -> None:
    """And verify finds what a load would meet, except in SQLite's log: damage there looks like a commit cut short."""
    seen = flip(tmp_path / "subject", count=15)
    print(dict(seen))
    assert seen["refused"] > 0
    assert seen["exact"] > 0
    assert seen["unfound"] == seen["unfound in sqlite-wal"]


def test_a_damaged_definition_of_a_table_is_noticed(tmp_path: Path) -> None:
    """Without its key a table still works, and gives and takes what it never should."""
    with kedge.open(tmp_path / "store") as store:
        saved = store.save("job", "step", {"n": 1})
    index = tmp_path / "store" / "index.sqlite"
    index.write_bytes(index.read_bytes().replace(b"id INTEGER PRIMARY KEY", b"id INTEGES PRIMARY KEY", 1))
    with pytest.raises(kedge.Corrupted, match="did not make"):
        kedge.open(tmp_path / "store")
    repair(tmp_path / "store", actor="tester")
    with kedge.open(tmp_path / "store") as store:
        assert store.load(saved) == {"n": 1}
