"""Each row of the table in SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_limit_has_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for who, *_, proof in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", proof)
        assert tests, who
        for name in tests:
            assert "def test_" in (ROOT / name).read_text(), (who, name)
