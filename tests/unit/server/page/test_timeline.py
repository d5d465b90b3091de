"""Runs as the page draws them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus
from kedge.pipeline.history import Explanation, StepHistory
from kedge.pipeline.items import FailedItem, MapItems
from kedge.server.page.items import _CELLS, grid_of
from kedge.server.page.timeline import Span, timeline

START = datetime(2026, 1, 1, tzinfo=UTC)


def record(seq: int, at_s: float = 0.0, **metadata: object) -> Checkpoint:
    return Checkpoint(
        CheckpointId(f"c{seq}"), "run", seq, "map", CheckpointLevel.SUBSTEP, None, START + timedelta(seconds=at_s),
        CheckpointStatus.CREATED, 10, 10, "", "kedge1", "1.0", metadata=metadata,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "total", "failed", "label", "paths"),
    [
        ([[0, 3]], 3, [], "3 of 3 done, 0 failed", {"done": "M0 8h48"}),
        ([[0, 1], [2, 1]], 4, [1], "2 of 4 done, 1 failed",
         {"done": "M0 8h16M32 8h16", "failed": "M16 8h16", "pending": "M48 8h16"}),
        ([[0, 61]], 61, [], "61 of 61 done, 0 failed", {"done": "M0 8h960M0 24h16"}),
    ],
)  # fmt: skip
def test_each_item_has_a_cell_in_its_place(
    places: list[list[int]], total: int, failed: list[int], label: str, paths: dict[str, str]
) -> None:
    done = sum(count for _, count in places)
    items = MapItems("map", [record(1, items=done, at=places, of=total)], done)
    items.failed = {str(n): FailedItem(str(n), "e", "", 1, "c1", n) for n in failed}
    drawn = str(grid_of(items).cells)
    assert f'aria-label="{label}"' in drawn
    for look, path in paths.items():
        assert f'<path class="{look}" d="{path}"/>' in drawn


def test_the_cells_of_a_large_map_are_bounded() -> None:
    records = [record(n, items=1000, at=[[n * 1000, 1000]], of=200_000) for n in range(100)]
    items = MapItems("map", records, 100_000)
    items.failed = {str(n): FailedItem(str(n), "e", "", 1, "c1", n) for n in range(0, 100_000, 150)}
    grid = grid_of(items)
    assert (grid.total, grid.per_cell) == (200_000, -(-200_000 // _CELLS))
    assert len(grid.cells) < 15_000
    assert len(grid.failures) == 20


def test_a_timeline_nests_stages_and_shows_the_newest_session() -> None:
    paths = {("a", "one"): (1.0, 1), ("a", "b", "two"): (3.0, 1), ("three",): (100.0, 2)}
    histories = {
        path: StepHistory(path, [record(n, at, kind="step", seconds=1.0, session=session)])
        for n, (path, (at, session)) in enumerate(paths.items())
    }
    steps = [Explanation("/".join(path), "ran", "", "c", 1.0, 1) for path in paths]
    line = timeline(steps, histories, [])
    assert [(row.name, row.depth) for row in line.rows] == [("a", 0), ("one", 1), ("b", 1), ("two", 2), ("three", 0)]
    assert (line.shown, line.whole) == (Span(99.0, 100.0), Span(0.0, 100.0))
    assert ["rect" in row.track for row in line.rows] == [False, False, False, False, True]
    first = timeline(steps, histories, [], session=1)
    assert first.shown == Span(0.0, 3.0)
    assert [row.took for row in first.rows] == ["3 s", "1 s", "1 s", "1 s", "1 s"]
    assert [f"{n} s</text>" in first.axis for n in ("0.0", "0.5", "3.0")] == [True, True, True]
    zoomed = timeline(steps, histories, [], chosen=Span(1.5, 3.5))
    assert [row.name for row in zoomed.rows] == ["a", "b", "two"]
    assert timeline([], {}, []).shown is None


@pytest.mark.parametrize(
    "span", [Span(0.0, 0.0), Span(-1e10, 1e10), Span(59.9, 60.1), Span(0.0, 1e-9), Span(1e10, 1e10 + 2e-6)]
)
def test_any_span_has_an_axis(span: Span) -> None:
    steps = [Explanation("a", "ran", "", "c", 1.0, 1)]
    line = timeline(steps, {("a",): StepHistory(("a",), [record(1, 1.0, seconds=1.0, session=1)])}, [], chosen=span)
    assert line.axis.count("<text") <= 18


@pytest.mark.parametrize(
    ("span", "texts"),
    [
        (Span(0.0, 3e-5), ["0 µs", "5 µs", "30 µs"]),
        (Span(0.0, 0.0014), ["0.0 ms", "0.5 ms", "1.0 ms"]),
        (Span(0.0, 0.3), ["0 ms", "50 ms", "300 ms"]),
        (Span(0.9, 1.1), ["0.90 s", "1.10 s"]),
    ],
)
def test_short_spans_are_in_small_units(span: Span, texts: list[str]) -> None:
    steps = [Explanation("a", "ran", "", "c", 1.0, 1)]
    line = timeline(steps, {("a",): StepHistory(("a",), [record(1, 1.0, seconds=1.0, session=1)])}, [], chosen=span)
    assert [f">{text}</text>" in line.axis for text in texts] == [True] * len(texts)
