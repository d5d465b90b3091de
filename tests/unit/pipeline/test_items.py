"""What the records of a map tell of its items, and trying one of them again."""

from collections.abc import Callable

import pytest

import kedge
from kedge.errors import NotFound
from kedge.pipeline.failure import StepFailed
from kedge.pipeline.items import find_item, maps_of, retry_items
from kedge.pipeline.session import Session


class Work:
    """A map of 30 items, of which 4, 13 and 22 fail until they are healed."""

    def __init__(self, store: kedge.CheckpointManager, key: Callable[[int], object] | None = str) -> None:
        self.store, self.key = store, key
        self.healed: set[int] = set()
        self.tried: list[int] = []

    def __call__(self, n: int) -> int:
        self.tried.append(n)
        if n % 9 == 4 and n not in self.healed:
            raise ValueError(f"row {n}")
        return 2 * n

    def run(self, **options: object) -> list[object]:
        self.tried = []
        with kedge.run("r", store=self.store, progress=False, signals=False) as run:
            return run.map(self, range(30), name="m", key=self.key, workers=2, **{"on_error": "collect", **options})  # type: ignore[no-any-return, arg-type]


@pytest.fixture
def work() -> Work:
    return Work(kedge.open("memory:"))


@pytest.mark.parametrize("key", [str, None])
def test_an_item_is_found_by_its_key_and_by_its_place(key: Callable[[int], object] | None) -> None:
    work = Work(kedge.open("memory:"), key)
    work.run()
    (items,) = maps_of(work.store, "r")
    assert (items.done, items.total) == (27, 30)
    assert sorted(item.number or 0 for item in items.failed.values()) == [4, 13, 22]
    for n in (0, 7, 29):
        for found in (find_item(work.store, items, number=n), find_item(work.store, items, key=str(n))):
            assert (found.status, found.number) == ("done", n)
            assert found.record is not None
            state = work.store.load(found.record.id)
            assert state["results"][found.index] == 2 * n  # type: ignore[index, call-overload]
    failed = find_item(work.store, items, number=13)
    assert (failed.status, failed.failures[-1][0].error) == ("failed", "ValueError: row 13")
    assert find_item(work.store, items, number=99).status == "pending"
    with pytest.raises(NotFound, match="no item x"):
        find_item(work.store, items, key="x")
    work.healed = {13}
    work.run()
    (items,) = maps_of(work.store, "r")
    healed = find_item(work.store, items, number=13)
    assert (healed.status, healed.number, len(healed.failures)) == ("done", 13, 1)


def test_one_failed_item_is_tried_again_and_the_others_stay(work: Work) -> None:
    work.run()
    work.healed = {4, 13, 22}
    with pytest.raises(NotFound, match="m/5"):
        retry_items(work.store, "r", ["m/13", "m/5"])
    assert retry_items(work.store, "r", ["m/13"])
    results = work.run()
    assert work.tried == [13]
    assert results[13] == 26
    assert isinstance(kept := results[4], kedge.ItemError)
    assert (kept.key, kept.error) == ("4", "ValueError: row 4")
    work.run()  # that was asked for once
    assert sorted(work.tried) == [4, 22]


class Killed(BaseException):
    """Nothing that is done for errors is done for a kill."""


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_choice_of_items_outlives_its_session(work: Work, monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    """It is killed, or told to pause, after it has learned of the choice."""
    work.run()
    work.healed = {4, 13, 22}
    retry_items(work.store, "r", ["m/13"])
    with pytest.MonkeyPatch.context() as patch:
        error = Killed() if is_killed else kedge.Paused("SIGTERM")
        with pytest.raises(type(error)), kedge.run("r", store=work.store, progress=False, signals=False) as run:
            run.begin()
            run.progress(1, 2)  # a record that says how far messages were read
            if is_killed:
                patch.setattr(Session, "record", lambda *args, **options: None)
            raise error
    work.run()
    assert work.tried == [13]
    work.run()  # that was asked for once
    assert sorted(work.tried) == [4, 22]


def test_failures_that_stay_still_end_a_map_that_allows_none(work: Work) -> None:
    work.run()
    retry_items(work.store, "r", ["m/22"])
    work.healed = {22}
    with pytest.raises(StepFailed, match="row"):
        work.run(on_error="stop")
    assert work.tried == [22]
