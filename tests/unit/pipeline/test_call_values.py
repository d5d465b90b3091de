"""What a run says of its arguments and its result: in a few words, without credentials, whoever carried it out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.pipeline.call_values import arguments_of, result_of
from kedge.pipeline.consumer import Worker
from kedge.pipeline.fork import fork, plan_fork
from kedge.pipeline.history import find_run
from kedge.pipeline.keys import previews


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as manager:
        yield manager


@kedge.pipeline
def train(rate: float, api_key: str = "", *, options: dict[str, Any] | None = None) -> dict[str, Any]:
    kedge.current_run().step("learn", lambda: rate)
    return {"loss": rate / 2, "token": "sk-9", "where": "https://user:pw@host/x"}


ARGUMENTS = {"rate": "0.5", "api_key": "(not shown)", "options": "{'password': (not shown), 'depth': 3}"}
RESULT = {"loss": "0.25", "token": "(not shown)", "where": "'https://…@host/x'"}
CALL = ((0.5, "sk-1"), {"options": {"password": "p", "depth": 3}})


def shown(store: kedge.CheckpointManager, key: str) -> tuple[Any, Any]:
    run = find_run(store, key)
    return arguments_of(store, run), result_of(store, run)


def test_a_call_says_what_it_was_given_and_returned(store: kedge.CheckpointManager) -> None:
    args, kwargs = CALL
    train.at("r", store=store, progress=False, signals=False)(*args, **kwargs)
    given, returned = shown(store, "r")
    assert (dict(given.texts), given.whole) == (ARGUMENTS, "")
    assert (dict(returned.texts), returned.whole) == (RESULT, "")
    assert "sk-" not in str([(record.metadata, store.load(record.id)) for record in store.list("r")])


def test_a_run_of_a_queue_leads_to_the_values_themselves(store: kedge.CheckpointManager) -> None:
    args, kwargs = CALL
    kedge.queue("q", store=store).submit(train, *args, key="r", **kwargs)
    Worker(store, ["q"], {train.name: train}, lease_s=60).serve(until_empty=True)
    given, returned = shown(store, "r")
    assert (dict(given.texts), dict(returned.texts)) == (ARGUMENTS, RESULT)
    state: Any = store.load(given.whole)
    assert state["call"]["args"] == list(args)
    assert store.load(returned.whole)["result"]["token"] == "sk-9"  # type: ignore[index]
    plan = plan_fork(store, "r", "learn", new_key="r2", arguments={"rate": 0.1})
    fork(store, plan)
    assert shown(store, "r2")[0].texts == {**ARGUMENTS, "rate": "0.1"}


def test_runs_in_the_background_recoverable_ones_and_coroutines(store: kedge.CheckpointManager) -> None:
    assert kedge.start(train, 0.5, key="b", store=store).result(timeout_s=600)["loss"] == 0.25

    @kedge.pipeline(recover=True)
    async def wait(seconds: int) -> list[int]:
        return [seconds]

    asyncio.run(wait.at("w", store=store, progress=False, signals=False)(3))
    assert shown(store, "b")[0].texts == {"rate": "0.5"}
    assert tuple(value.texts for value in shown(store, "w")) == ({"seconds": "3"}, {"": "[3]"})


def test_what_is_no_call_or_has_not_ended_says_nothing(store: kedge.CheckpointManager) -> None:
    with kedge.run("block", store=store, progress=False, signals=False):
        assert shown(store, "block") == (None, None)
    assert shown(store, "block") == (None, None)

    @kedge.pipeline
    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        broken.at("broken", store=store, progress=False, signals=False)()
    given, returned = shown(store, "broken")
    assert given.texts == {}
    assert returned is None


def test_a_result_that_no_state_can_hold_is_named_by_its_type(store: kedge.CheckpointManager) -> None:
    @kedge.pipeline
    def opaque() -> object:
        return object()

    opaque.at("r", store=store, progress=False, signals=False)()
    assert shown(store, "r")[1].texts == {"": "object"}


def test_odd_records_break_nothing(store: kedge.CheckpointManager) -> None:
    train.at("r", store=store, progress=False, signals=False)(0.5)
    newest = store.list("r", tags={"kind": "run"})[-1]
    odd = {**newest.metadata, "given": 5, "returned": [1], "session": 2}
    store.save("r", "run completed", {}, level="pipeline", tags={"kind": "run"}, metadata=odd)
    assert shown(store, "r") == (None, None)


def test_previews_are_short() -> None:
    many = previews({f"a{n}": "x" * 10_000 for n in range(1000)})
    assert many["…"] == "1,000 in all"
    assert len(str(many)) < 6000
    assert previews({}) == {"": "{}"}
    assert previews({1: 2}) == {"": "{1: 2}"}
    assert previews(Path("x")) == {"": type(Path("x")).__name__}
