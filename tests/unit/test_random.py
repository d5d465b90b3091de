"""The generator that users seed is theirs: Kedge draws nothing from it, so that their programs stay reproducible."""

from __future__ import annotations

import ast
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import kedge
from kedge.index.sqlite.database import connect, run_alone
from kedge.pipeline.retry import Retry

SOURCES = Path(kedge.__file__).parent
OURS = {"Random", "SystemRandom", "getstate", "setstate"}  # generators of one's own, and what a training saves


def drawn(text: str) -> list[int]:
    """Lines that draw from the generator of the module `random`."""
    tree, lines = ast.parse(text), list[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            lines += [node.lineno for name in node.names if name.name not in OURS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            lines += [node.lineno] if node.attr not in OURS else []
    return lines


def test_nothing_is_drawn_from_the_generator_of_users() -> None:
    found = {str(path.relative_to(SOURCES)): drawn(path.read_text()) for path in SOURCES.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.mutant
@pytest.mark.parametrize("line", ["import random\nrandom.random()", "from random import shuffle"])
def test_who_draws_from_it_is_noticed(line: str) -> None:
    assert drawn(line)


def test_what_waits_draws_from_its_own(tmp_path: Path) -> None:
    path, before = str(tmp_path / "database"), random.getstate()
    assert 0 < Retry(times=3, jitter=0.5).wait_s(1) <= 1
    with closing(connect(path, 0)) as holder, closing(connect(path, 0)) as other:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            run_alone(other, "BEGIN IMMEDIATE", 0.02)
    assert random.getstate() == before
