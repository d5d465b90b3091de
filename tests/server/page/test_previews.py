"""What a policy would delete, previewed a part of the history at a time."""

from __future__ import annotations

import html
import re

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server.page import previews
from kedge.server.page.previews import Previews

POLICY = kedge.RetentionPolicy(keep_last=3)


def filled(store: kedge.CheckpointManager, count: int = 10, job: str = "j") -> list[str]:
    return [store.save(job, f"s{n}", n) for n in range(count)]


def whole(client: TestClient, address: str) -> tuple[str, int]:
    """The last of the answers that follow each other, and how many they were."""
    for count in range(1, 100):
        page = client.get(address).text
        following = re.search(r'data-hx-get="([^"]+)" data-hx-trigger="load delay', page)
        if following is None:
            return page, count
        assert "Delete" not in page, "what is not known yet cannot be deleted"
        address = html.unescape(following[1])
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    "address",
    ["/jobs/j/cleanup?keep_last=3", "/jobs/j/retention?keep_last=3&part=plan", "/retention?keep_last=3&part=plan"],
)
def test_a_long_history_is_previewed_in_parts(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(previews, "_READ_AT_ONCE", 4)
    filled(store)
    page, count = whole(client, address)
    assert count == 3
    assert "7 checkpoints go" in page
    assert "3 stay" in page
    store.save("j", "more", 1)
    assert "8 checkpoints go" in whole(client, address)[0]


def test_it_tells_what_the_plan_tells(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "_READ_AT_ONCE", 7)
    ids = filled(store, 20)
    filled(store, 5, "k")
    store.pin(ids[4])
    for job in ("j", None):
        memory, plan = Previews(), store.apply(POLICY, job=job)
        preview = memory.look(store, POLICY, job)
        assert preview.read < preview.total
        while not preview.is_complete:
            preview = memory.look(store, POLICY, job)
        assert (preview.going, preview.staying) == (len(plan.delete), len(plan.keep))
        assert preview.frees_bytes == plan.frees_bytes
        assert {c.id for c in preview.doomed} == {c.id for c in plan.delete}
        assert {v.checkpoint.id: v.reasons for v in preview.kept} == {v.checkpoint.id: v.reasons for v in plan.keep}
    memory = Previews()
    while not memory.look(store, POLICY, None).is_complete:
        pass
    whole_store = memory.look(store, POLICY, None)
    assert whole_store.by_job == [("j", 16, 4), ("k", 2, 3)]
    numbers = [c.seq for c in whole_store.doomed if c.job == "j"]
    assert numbers == sorted(numbers)


def test_what_changes_meanwhile_begins_it_anew_once_it_was_told(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previews, "_READ_AT_ONCE", 6)
    ids, memory = filled(store), Previews()
    assert not memory.look(store, POLICY, "j").is_complete
    store.pin(ids[0])  # a store that is never quiet comes to an end, too
    first = memory.look(store, POLICY, "j")
    assert first.is_complete
    while not (second := memory.look(store, POLICY, "j")).is_complete:
        assert second is not first
    assert (second.going, memory.look(store, POLICY, "j")) == (6, second)


def test_one_that_nobody_looked_at_for_long_begins_anew(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previews, "_READ_AT_ONCE", 4)
    filled(store)
    memory = Previews()
    assert memory.look(store, POLICY, "j").read == 4
    assert memory.look(store, POLICY, "j").read == 8
    monkeypatch.setattr(previews, "_FORGOTTEN_S", -1.0)
    assert memory.look(store, POLICY, "j").read == 4


def test_few_are_remembered(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "_MOST", 2)
    filled(store)
    memory = Previews()
    first = memory.look(store, POLICY, "j")
    for keep in (4, 5):
        memory.look(store, kedge.RetentionPolicy(keep_last=keep), "j")
    assert memory.look(store, POLICY, "j") is not first
