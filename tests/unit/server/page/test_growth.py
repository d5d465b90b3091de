"""What the page says grew: by bars of time and by job, read once and then only what is new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import kedge
from kedge.ports import NewCheckpoint
from kedge.server.page import growth as growth_page
from kedge.server.page.charts import stacked_bars
from kedge.server.page.growth import Growth

DAY_US = 86_400_000_000
NOW = 1_800_000_000.0


def save(store: kedge.CheckpointManager, job: str, days_ago: float, stored_bytes: int) -> str:
    index = store.store.index
    template = replace(NewCheckpoint.of(*index.read(store.save("template", "step", 1))), job=job)
    created = int(NOW * 1e6 - days_ago * DAY_US)
    record = replace(template, id=f"{job}_{created}", created_us=created, stored_bytes=stored_bytes)  # type: ignore[arg-type]
    return index.commit([record], actor="test")[0].id


def test_growth_is_counted_by_day_and_by_job(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        first = save(store, "a", 3.2, 100)
        save(store, "a", 3.1, 50)
        save(store, "b", 0.0, 7)
        growth = Growth()

        def look(span: str = "") -> dict[str, int]:
            return dict(growth.look(store, [*store.jobs("a"), *store.jobs("b")], span, now=NOW).added)

        assert growth.look(store, store.jobs("a"), now=NOW).span == "week"
        assert look() == {"a": 150, "b": 7}
        assert look("day") == {"b": 7}
        save(store, "a", 0.01, 1000)  # only this one is read
        assert look() == {"a": 1150, "b": 7}
        store.delete("a", first)
        assert look() == {"a": 1050, "b": 7}
        bars = growth.look(store, store.jobs("a"), "month", now=NOW).bars
        assert [bar["a"] for bar in bars if bar] == [50, 1000]


def test_every_save_is_counted_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth_page, "_PAGE", 10)
    monkeypatch.setattr(growth_page, "_READ_AT_ONCE", 20)
    with kedge.open(tmp_path / "store") as store:
        for n in range(57):
            store.save("a", f"s{n}", n)
        growth = Growth()
        counted = [growth.look(store, store.jobs(), "day") for _ in range(4)]
        assert [grown.saves["a"] for grown in counted] == [20, 40, 57, 57]
        assert [grown.is_partial for grown in counted] == [True, True, False, False]
        store.save("a", "another", 1)
        assert growth.look(store, store.jobs(), "day").saves["a"] == 58
        assert growth.look(store, store.jobs(), "day").added["a"] == store.jobs()[0].stored_bytes


def test_bars_are_stacked_and_an_empty_chart_is_none() -> None:
    assert stacked_bars([("monday", [0, 0]), ("tuesday", [0])], "bytes") == ""
    drawn = stacked_bars([("<monday>", [30, 0, 10]), ("tuesday", [0, 5, 0])], "a & b")
    assert "<title>&lt;monday&gt;</title>" in drawn
    assert (drawn.count("<rect"), drawn.count("part-2"), 'aria-label="a &amp; b"' in drawn) == (3, 1, True)
