"""docs/coming-from.md: every name it lists imports, and every old name is listed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DOCUMENT = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
ROWS = re.findall(r"^\| .*? \| `(kedge\.legacy\.[\w.]+)` \| (.*?) \|$", DOCUMENT, re.MULTILINE)


def find(name: str) -> object:
    """The object of a dotted name, wherever its module ends."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_both_sides_exist(old: str, new: str) -> None:
    assert find(old) is not None
    names = re.findall(r"`([\w.]+)`", new)
    assert names
    for name in names:
        assert find(name) is not None


@pytest.mark.parametrize("module", ["artemis", "jobs", "core", "unified", "arch"])
def test_everything_public_is_listed(module: str) -> None:
    listed = {old.rpartition(".")[2] for old, _ in ROWS if f".{module}." in old}
    aliases = {"NotFound", "Corrupted", "Validation", "DefaultCheckpointValidator"}
    assert set(importlib.import_module(f"kedge.legacy.{module}").__all__) - aliases == listed
