"""Saved views, spending over time, and comparisons of metadata and pictures."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.pipeline.history import CALLS
from kedge.process.workflow import Workflows
from kedge.server import create_app
from kedge.server.page import spending
from kedge.server.page.comparison import changed_facts
from kedge.server.page.spending import Spending
from tests.e2e.page_data import fill_job
from tests.server.conftest import client_of

SAME = {"Sec-Fetch-Site": "same-origin"}


def test_a_view_is_saved_listed_and_deleted(client: TestClient) -> None:
    address = "/search?q=loss&kind=job"
    form = {"name": "Losses", "address": address}
    assert client.post("/views", data=form, headers=SAME, follow_redirects=False).headers["location"] == address
    assert client.post("/views", data=form, headers=SAME).status_code == 409
    shown = client.get("/search").text
    assert "Losses" in shown
    assert "q=loss&amp;kind=job" in shown
    view = shown.partition('name="id" value="')[2].partition('"')[0]
    client.post("/views/delete", data={"id": view}, headers=SAME)
    assert "Losses" not in client.get("/search").text
    assert client.post("/views/delete", data={"id": view}, headers=SAME).status_code == 404


@pytest.mark.parametrize("address", ["https://evil.example/", "//evil.example/", "javascript:alert(1)", "", "/a\r\nb"])
def test_a_view_leads_nowhere_else(client: TestClient, address: str) -> None:
    assert client.post("/views", data={"name": "x", "address": address}, headers=SAME).status_code == 422
    assert "Saved views" not in client.get("/search").text


def test_readers_save_no_view_and_namespaces_have_their_own(
    store: kedge.CheckpointManager, make_token: Callable[..., str]
) -> None:
    form = {"name": "mine", "address": "/runs"}
    reader, one, other = (
        {"Authorization": f"Bearer {make_token(name, scope, namespace)}"}
        for name, scope, namespace in (("r", "read", "default"), ("a", "write", "default"), ("b", "write", "other"))
    )
    with client_of(create_app(store)) as client:
        assert client.post("/views", data=form, headers=reader).status_code == 403
        assert client.post("/views", data=form, headers=one, follow_redirects=False).status_code == 303
        assert "mine" in client.get("/search", headers=reader).text
        assert "mine" not in client.get("/search", headers=other).text


def test_spending_reads_each_record_once(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "_PAGE", 2)
    monkeypatch.setattr(spending, "_READ_AT_ONCE", 4)
    known = Spending()
    assert known.look(store)["total"].paid == 0
    for n in range(5):
        store.save(CALLS, "call", None, metadata={"model": f"m{n % 2}", "run": "r", "paid": 1, "spent": "0.5"})
    looks = [known.look(store) for _ in range(3)]
    assert [(look["total"].paid, look["is_partial"]) for look in looks] == [(4, True), (5, False), (5, False)]
    assert looks[-1]["total"].spent == Decimal("2.5")
    assert list(looks[-1]["by_model"]) == ["m0", "m1"]  # the dearest first
    assert "rect" in looks[-1]["chart"]
    assert looks[-1]["highest"] == "$2.50"
    first = store.list(CALLS)[0]
    store.delete(CALLS, first.id)
    assert [known.look(store)["total"].paid for _ in range(2)][-1] == 4


def test_spending_remembers_only_so_much(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are chosen by writers: what is too much is summed, and no dollar is lost."""
    for name, value in {"_SHOWN": 2, "_KEPT": 4, "_MINUTES": 4}.items():
        monkeypatch.setattr(spending, name, value)
    known = Spending()
    for n in range(30):
        store.save(CALLS, "call", None, metadata={"model": f"m{n}", "run": f"r{n}", "paid": 1, "spent": str(n)})
    look = known.look(store, "year")
    assert look["total"].spent == sum(range(30))
    assert look["highest"] == "$435.00"
    assert look["has_others"]
    for names, others in (("by_model", "other_models"), ("by_run", "other_runs")):
        assert list(look[names]) == [names[3] + "29", names[3] + "28"]
        assert look[others].spent == sum(range(28))
        assert look[others].paid == 28
    assert max(len(known.models.bills), len(known.runs.bills), len(known.minutes)) <= 4


def test_metadata_and_tags_are_compared() -> None:
    old: dict[str, Any] = {"loss": 0.5, "same": 1, "gone": "x", "nested": {"a": 1}}
    new: dict[str, Any] = {"loss": 0.25, "same": 1, "new": None, "nested": {"a": 2}}
    assert changed_facts("metadata", old, new) == [
        ("metadata", "loss", "0.5", "0.25"),
        ("metadata", "gone", "x", ""),
        ("metadata", "nested", json.dumps({"a": 1}), json.dumps({"a": 2})),
        ("metadata", "new", "", "null"),
    ]


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 3), (16, 16, 4), (16, 16, 1)])
def test_pictures_have_a_difference(
    client: TestClient, store: kedge.CheckpointManager, dtype: str, shape: tuple[int, ...]
) -> None:
    first = np.zeros(shape, dtype)
    second = first.copy()
    second[3, 5] = 9
    old, new = (store.save("pictures", "s", {"p": each, "n": 1}) for each in (first, second))
    page = client.get(f"/compare?id={old}&id={new}").text
    assert page.count("/compare/difference.png") == 1
    assert page.count("thumbnail.png") == 2
    drawn = client.get(f"/compare/difference.png?old={old}&new={new}&path=p")
    assert (drawn.status_code, drawn.headers["content-type"]) == (200, "image/png")
    grey = np.frombuffer(unpacked(drawn.content), "uint8").reshape(16, 17)[:, 1:]  # a byte for the filter of each row
    assert {(int(y), int(x)) for y, x in np.argwhere(grey)} == {(3, 5)}
    wrong = client.get(f"/compare/difference.png?old={old}&new={new}&path=n")
    assert wrong.status_code in (404, 422)


def unpacked(png: bytes) -> bytes:
    import struct
    import zlib

    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    return zlib.decompress(data)


def test_changes_are_filtered_by_their_path(client: TestClient, store: kedge.CheckpointManager) -> None:
    old = store.save("j", "s", {"model": {"lr": 1}, "loss": 1}, metadata={"epoch": 1})
    new = store.save("j", "s", {"model": {"lr": 2}, "loss": 2}, metadata={"epoch": 2})
    shown = client.get(f"/compare?id={old}&id={new}&only=MODEL").text
    assert "model/lr" in shown
    assert ">loss<" not in shown
    assert "1 with “" in shown
    assert "Metadata and tags" in shown
    assert "No change there" in client.get(f"/compare?id={old}&id={new}&only=zebra").text


def test_an_execution_goes_by_the_name_people_gave_it(client: TestClient, store: kedge.CheckpointManager) -> None:
    workflows = Workflows(store)
    execution = workflows.start_workflow_execution("order-77", "refund")
    workflows.create_checkpoint(execution, "pay out", "billing", {"amount": 120}, approval_required=True, expires_s=900)
    assert f'<a href="/executions/{execution}"><bdi>order-77</bdi></a>' in client.get("/runs").text
    assert f'of <a href="/executions/{execution}"><bdi>refund order-77</bdi></a>' in client.get("/approvals").text
    shown = client.get(f"/executions/{execution}").text
    assert '<li class="kept"' in shown  # it waits
    assert "approval pending" in shown
    texts = re.sub(r"<[^>]*>", "", shown)
    assert re.search(r"\d{4}-\d\d-\d\dT", texts) is None, "times are for people"


def test_a_checkpoint_names_the_one_before(client: TestClient, store: kedge.CheckpointManager) -> None:
    first = store.save("train", "epoch 1", {"n": 1})
    second = store.save("train", "epoch 2", {"n": 2}, parent=first)
    assert (
        f'Follows <a href="/checkpoints/{first}">#1 <bdi>epoch 1</bdi></a>' in client.get(f"/checkpoints/{second}").text
    )


def test_storage_says_what_it_looked_at(client: TestClient, store: kedge.CheckpointManager) -> None:
    store.save("train", "one", {"w": np.arange(100_000)})
    store.delete("gone", store.save("gone", "one", {}))
    shown = client.get("/storage").text
    assert "1 pack, and the index" in shown
    assert "were looked at" not in shown


def test_a_page_of_a_long_log_is_small(client: TestClient, store: kedge.CheckpointManager) -> None:
    fill_job(store, "nightly-training-of-the-large-model", 3000)
    shown = client.get("/activity").content
    assert b"Older" in shown
    assert len(shown) <= 50_000


def test_a_page_of_a_long_history_is_small(client: TestClient, store: kedge.CheckpointManager) -> None:
    fill_job(store, "nightly-training-of-the-large-model", 300)
    shown = client.get("/jobs/nightly-training-of-the-large-model").content
    assert b"Older" in shown
    assert len(shown) <= 50_000


def test_many_changes_come_in_parts_and_are_all_looked_through(
    client: TestClient, store: kedge.CheckpointManager
) -> None:
    old = store.save("j", "s", {f"key-{n:05d}": n for n in range(3000)})
    new = store.save("j", "s", {f"key-{n:05d}": n + 1 for n in range(3000)})
    address, keys = f"/compare?id={old}&id={new}", []
    first = client.get(address).text
    assert len(first) <= 50_000
    assert "1 to 100 of 3,000" in first
    link = re.search(r'href="([^"]+)">More changes', first)
    assert link is not None
    for page in (first, client.get("/compare" + html.unescape(link[1])).text):
        keys += re.findall(r"<code><bdi>(key-[0-9]+)<", page)
    assert keys == [f"key-{n:05d}" for n in range(200)]
    assert "key-02999" in client.get(f"{address}&only=02999").text
    assert "More changes" not in client.get(f"{address}&start=2900").text


def test_charts_of_many_numbers_are_small_and_each_alone_has_more_points(
    client: TestClient, store: kedge.CheckpointManager
) -> None:
    names = ("loss", "accuracy", "f1", "rate", "tokens")
    saves = [
        store.save_async(job, f"step {n}", n, metadata={name: n % 17 + len(name) for name in names})
        for job in ("one", "two", "three")
        for n in range(60)
    ]
    for saved in saves:
        saved.result()
    address = "/jobs/one/numbers?with=two&with=three"
    shown = client.get(address).text
    assert len(shown) <= 50_000
    assert shown.count("<polyline") == 15
    assert shown.count('class="dot"') <= 15 * 3  # the lowest, the highest, the newest
    assert len(client.get(f"{address}&metric=loss").text) <= 50_000
    alone = client.get("/jobs/one/numbers?metric=loss").text
    assert len(alone) <= 50_000
    assert alone.count('class="dot"') == 60


def test_charts_of_any_numbers_are_drawn_and_their_command_is_one_word_each(
    client: TestClient, store: kedge.CheckpointManager
) -> None:
    for value in (1.7e308, -1.7e308, 10**400, 0):
        store.save("odd", "step", None, metadata={"loss; rm -rf ~": value})
    page = client.get("/jobs/odd/numbers", params={"metric": "loss; rm -rf ~"})
    assert page.status_code == 200
    assert "--metric &#39;loss; rm -rf ~&#39;" in page.text
    (drawn,) = re.findall(r'<polyline[^>]* points="([^"]*)"', page.text)
    assert re.fullmatch(r"([0-9.]+,[0-9.]+ ?){3}", drawn)
