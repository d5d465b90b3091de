"""Runs as the page draws them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus
from kedge.pipeline.items import MapItems
from kedge.server.page.runs import _CELLS, _grid


def record(seq: int, items: int) -> Checkpoint:
    return Checkpoint(
        CheckpointId(f"c{seq}"), "run", seq, "map", CheckpointLevel.SUBSTEP, None, datetime(2026, 1, 1, tzinfo=UTC),
        CheckpointStatus.CREATED, 10, 10, "", "kedge1", "1.0", metadata={"items": items},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "each", "per_cell", "cells"),
    [(3, 1, 1, 3), (2, 5, 1, 10), (10 * _CELLS, 1, 10, _CELLS), (2, 5 * _CELLS, 10, _CELLS), (0, 0, 1, 0)],
)
def test_a_map_has_a_bounded_number_of_cells_however_it_was_kept(
    records: int, each: int, per_cell: int, cells: int
) -> None:
    found = MapItems("map", [record(n, each) for n in range(1, records + 1)], done=records * each)
    grid = _grid(found)
    assert (grid.per_cell, len(grid.cells)) == (per_cell, cells)
    linked = [cell.checkpoint for cell in grid.cells if cell.checkpoint]
    assert linked == list(dict.fromkeys(linked))
    assert linked[:1] == (["c1"] if records else [])
