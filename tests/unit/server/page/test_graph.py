"""The graph of a history: lanes that branch, meet, and go on over pages."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus
from kedge.server.page.graph import MAX_LANES, Row, draw, lanes_of, lay_out


def checkpoint(seq: int, parent: str | None = None) -> Checkpoint:
    return Checkpoint(
        CheckpointId(f"c{seq}"), "job", seq, f"step {seq}", CheckpointLevel.STEP,
        CheckpointId(parent) if parent else None, datetime(2026, 1, 1, tzinfo=UTC), CheckpointStatus.CREATED,
        10, 10, "", "kedge1", "1.0",
    )  # fmt: skip


def rows_of(*parents: str | None) -> list[Row]:
    """Rows of c1, c2, … with these parents, newest first."""
    history = [checkpoint(n, parent) for n, parent in enumerate(parents, 1)]
    return lay_out(history[::-1], [], None)[0]


def test_a_line_stays_in_its_lane() -> None:
    rows = rows_of(None, None, "c2")
    assert [row.lane for row in rows] == [0, 0, 0]
    assert [row.above for row in rows] == [(), (0,), (0,)]
    assert [row.has_below for row in rows] == [True, True, False]


def test_a_branch_has_a_lane_of_its_own_until_it_meets_its_parent() -> None:
    # c3 follows c2; c4 branches off c2 and is the newest.
    newest, third, second, first = rows_of(None, None, None, "c2")
    assert (newest.lane, third.lane) == (0, 1)
    assert third.through == (0,)  # the line from c4 to c2 passes it
    assert second.above == (0, 1)  # both end there
    assert (first.lane, first.above, first.through) == (0, (0,), ())


def test_a_parent_in_another_job_leaves_its_lane_open() -> None:
    rows, left = lay_out([checkpoint(2, "elsewhere"), checkpoint(1)], [], None)
    assert [row.lane for row in rows] == [0, 1]
    assert left == ["elsewhere"]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 20))
def test_pages_go_on_where_the_last_one_ended(follows: list[int], at_once: int) -> None:
    history = [checkpoint(n + 1, f"c{f}" if 0 < f <= n else None) for n, f in enumerate(follows)][::-1]
    whole, left_whole = lay_out(history, [], None)
    lanes: list[str] = []
    paged: list[Row] = []
    for start in range(0, len(history), at_once):
        page = history[start : start + at_once]
        older = history[start + at_once].id if start + at_once < len(history) else None
        rows, lanes = lay_out(page, lanes, older)
        paged += rows
    if len(left_whole) < MAX_LANES and all(row.lane < MAX_LANES - 1 for row in whole):
        assert paged == whole
    assert all(0 <= lane < MAX_LANES for row in paged for lane in (row.lane, *row.above, *row.through))
    assert all(str(draw(row, lanes_of(paged))).startswith("<svg") for row in paged)
