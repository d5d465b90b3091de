"""Tables on the page of a checkpoint: data frames, lists of records, the first elements of arrays."""

from __future__ import annotations

import numpy as np
import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server.page import tables
from tests.parts import library


def cells(page: str) -> list[list[str]]:
    """The rows of the table, its head first."""
    rows = page.partition("<table")[2].partition("</table>")[0].split("<tr>")[1:]
    return [[cell.partition("</bdi>")[0] for cell in row.split("<bdi>")[1:]] for row in rows]


def saved(store: kedge.CheckpointManager, value: object) -> str:
    return f"/checkpoints/{store.save('j', 'step', {'value': value})}"


def test_a_list_of_records_is_a_table_and_still_a_tree(client: TestClient, store: kedge.CheckpointManager) -> None:
    place = saved(store, [{"id": 1, "label": "<b>"}, {"id": 2, "note": "x" * 200, "deep": {"a": [1]}}])
    assert f"{place}/table?path=value" in client.get(place).text
    page = client.get(f"{place}/table?path=value").text
    assert cells(page)[:2] == [["id", "label", "note", "deep"], ["1", "&lt;b&gt;", "", ""]]
    assert len(cells(page)[2][2]) == 80
    assert f"{place}/level?path=value" in page
    assert "&lt;b&gt;" in client.get(f"{place}/level?path=value").text


@pytest.mark.parametrize("value", [[{"id": 1}], [{"id": 1}, 2], [{}, {}], [{1: 2}, {1: 3}], [], "text", 7])
def test_what_is_no_table_is_shown_as_what_it_is(
    client: TestClient, store: kedge.CheckpointManager, value: object
) -> None:
    place = saved(store, value)
    assert "table?path" not in client.get(place).text
    assert client.get(f"{place}/table?path=value").status_code == 404
    assert client.get(f"{place}/table?path=nothing").status_code == 404


def test_frames_are_tables(client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas, polars, arrow = (library(name) for name in ("pandas", "polars", "pyarrow"))
    frame = pandas.DataFrame({"score": [0.5, 1.5], "name": ["a", None]}, index=pandas.Index(["x", "y"], name="key"))
    for value, wanted in (
        (frame, [["key", "score", "name"], ["x", "0.5", "a"]]),
        (frame["score"], [["key", "score"], ["x", "0.5"]]),
        (polars.DataFrame({"a": [1, 2], "b": ["x", None]}), [["a", "b"], ["1", "x"]]),
        (polars.Series("a", [1, 2]), [["a"], ["1"]]),
        (arrow.table({"a": [1, 2], "b": ["x", "y"]}), [["a", "b"], ["1", "x"]]),
    ):
        place = saved(store, value)
        assert "table?path=value" in client.get(place).text
        assert cells(client.get(f"{place}/table?path=value").text)[:2] == wanted
    monkeypatch.setattr(tables, "_FRAME_BYTES", 100)
    assert "up to 0 MiB are shown" in client.get(f"{saved(store, frame)}/table?path=value").text


def test_a_long_table_shows_its_beginning(client: TestClient, store: kedge.CheckpointManager) -> None:
    records = [{f"column {k}": n for k in range(30)} for n in range(1000)]
    page = client.get(f"{saved(store, records)}/table?path=value").text
    assert (len(cells(page)), len(cells(page)[0])) == (101, 20)
    assert "The first 100 of 1,000 rows, 20 of 30 columns." in page


@pytest.mark.parametrize(
    ("array", "wanted", "cut"),
    [
        (np.array([np.nan, 1.0, np.inf]), [["0", "1", "2"], ["nan", "1", "inf"]], ""),
        (np.arange(400).reshape(20, 20), [list("0123456789"), list("0123456789")], "The first 10 of 20 rows, 10 of 20"),
        (np.asfortranarray([[1, 2], [3, 4], [5, 6]]), [["0", "1"], ["1", "2"]], ""),
        (np.array(["a", "bb"]), [["0", "1"], ["a", "bb"]], ""),
        (np.array([True, False]), [["0", "1"], ["True", "False"]], ""),
        (np.array([1 + 2j]), [["0"], ["1+2j"]], ""),
        (np.arange(50), [[str(n) for n in range(20)]] * 2, "The first 20 of 50 elements."),
        (np.zeros((0, 4)), [], ""),
        (np.array(7.0), [], ""),
        (np.zeros((2, 3, 4)), [], ""),
        (np.array(["", ""]), [["0", "1"], ["", ""]], ""),
    ],
)
def test_the_first_elements_of_an_array_are_shown(
    client: TestClient, store: kedge.CheckpointManager, array: np.ndarray, wanted: list[list[str]], cut: str
) -> None:
    answer = client.get(f"{saved(store, array)}/array?path=value")
    assert answer.status_code == 200
    assert cells(answer.text)[:2] == wanted
    assert cut in answer.text
