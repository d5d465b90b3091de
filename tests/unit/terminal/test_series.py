"""Numbers of metadata as series, and drawn."""

from __future__ import annotations

import click
import pytest

import kedge
from kedge.terminal.plot import draw, number
from kedge.terminal.series import Point, Series, numbers_in, place_between, series_of


def series(*values: float) -> Series:
    return Series("j", "loss", [Point(n, f"s{n}", f"c{n}", value) for n, value in enumerate(values, 1)])


def test_numbers_are_found_by_path_and_nothing_else_is_one() -> None:
    metadata = {
        "loss": 1,
        "eval": {"acc": 0.5, "by": {"de": 2}},
        "ok": True,
        "nan": float("nan"),
        "infinite": float("-inf"),
        "too large": 10**400,
        "text": "3",
        "list": [1],
    }
    assert dict(numbers_in(metadata)) == {"loss": 1.0, "eval.acc": 0.5, "eval.by.de": 2.0}


def test_the_newest_checkpoints_of_a_job_are_read() -> None:
    with kedge.open("memory:") as store:
        for n in range(5):
            store.save("j", f"s{n}", None, metadata={"loss": n} if n != 3 else {"other": 1})
        found = series_of(store, "j", most=3)
        assert {name: [p.value for p in each.points] for name, each in found.items()} == {"loss": [2, 4], "other": [1]}
        assert found["loss"].points[0].checkpoint == store.list("j")[2].id
        with pytest.raises(kedge.NotFound, match="nobody"):
            series_of(store, "nobody")


def test_of_equals_the_first_is_best() -> None:
    assert series(2, 1, 3, 1, 3).best("min").seq == 2
    assert series(2, 1, 3, 1, 3).best("max").seq == 3


@pytest.mark.parametrize("most", [10, 11, 240])
@pytest.mark.parametrize("count", [1, 12, 240, 241, 5000])
def test_thinned_series_keep_their_extremes_and_their_ends(count: int, most: int) -> None:
    values = [float(n % 7) for n in range(count)]
    values[count // 2] = 1000
    values[count // 3] = -1000
    whole = series(*values)
    points = whole.thinned(most)
    assert len(points) <= most
    assert (points[0], points[-1]) == (whole.points[0], whole.points[-1])
    assert [p.seq for p in points] == sorted({p.seq for p in points})
    assert {min(values), max(values)} <= {p.value for p in points}


def test_a_curve_is_as_wide_and_high_as_asked() -> None:
    lines = [click.unstyle(line) for line in draw([series(3, 1, 2), series(1, 1)], 60, 8)]
    assert len(lines) == 8 + 2
    assert max(map(len, lines)) == 60
    assert lines[0].startswith("3 │")
    assert lines[7].startswith("1 │")
    assert "⠁" <= max("".join(lines)) <= "⣿"
    assert len(list(draw([series(5)], 20, 3))) == 5  # one point, no span


@pytest.mark.parametrize(
    "values", [(1.7e308, -1.7e308, 0), (5e-324, 0), (-1e308, 1e308, 1.7e308), (10**18, 10**18 + 1)]
)
def test_a_curve_of_any_finite_numbers_is_drawn(values: tuple[float, ...]) -> None:
    places = [place_between(min(values), max(values), value) for value in values]
    assert all(0 <= place <= 1 for place in places)
    assert len(list(draw([series(*values)], 40, 4))) == 4 + 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.06769, "0.06769"),
        (43_998.4, "43,998"),
        (-1e6, "-1,000,000"),
        (9_999.4, "9999"),
        (2.5e12, "2.5e+12"),
        (0, "0"),
    ],
)
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text
