"""What errors tell users to do can be done: the options that they name are options of the function that was called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kedge
from kedge.pipeline.inbox import parse_run_key
from kedge.pipeline.schedules import schedule

Function = Callable[..., object]


@kedge.pipeline
def takes_any(value: object) -> None:
    """Never begins."""


@kedge.step
def any_step(value: object) -> None:
    """Never begins."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as manager:
        yield manager


def check_options(hint: str | None, function: Function) -> None:
    assert hint
    for name, named in {"kedge.register(": kedge.register, "run.step(": kedge.Run.step}.items():
        function = named if name in hint else function
    assert set(re.findall(r"(\w+)=", hint)) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "name", ["called", "decorated step", "map", "map by key", "schedule", "start", "step", "submit", "submit_call"]
)
def test_what_to_do_about_a_value_that_cannot_be_saved(store: kedge.CheckpointManager, name: str) -> None:
    odd, queue = object(), kedge.queue("q", store=store)
    with pytest.raises(kedge.UnsupportedType) as caught, kedge.run("r", store=store, progress=False) as run:
        calls: dict[str, tuple[Function, Callable[[], object]]] = {
            "called": (takes_any.at, lambda: takes_any.at(store=store)(odd)),
            "decorated step": (takes_any.at, lambda: any_step(odd)),
            "map": (run.map, lambda: run.map(print, [odd])),
            "map by key": (run.map, lambda: run.map(print, [1], key=lambda _: odd)),
            "schedule": (schedule, lambda: schedule(queue, "s", takes_any, odd, every_s=60)),
            "start": (kedge.start, lambda: kedge.start(takes_any, odd)),
            "step": (run.step, lambda: run.step("s", print, odd)),
            "submit": (queue.submit, lambda: queue.submit(takes_any, odd)),
            "submit_call": (queue.submit_call, lambda: queue.submit_call(takes_any, [odd])),
        }
        function, call = calls[name]
        call()
    check_options(caught.value.hint, function)


@pytest.mark.parametrize(
    ("key", "hint"),
    [("a:inbox", "use another key"), ("x" * 123, "use at most 122 characters")],
    ids=["reserved", "long"],
)
def test_a_run_key_that_leaves_no_room_for_its_inbox_is_refused(key: str, hint: str) -> None:
    with pytest.raises(kedge.errors.InvalidName) as refused:
        parse_run_key(key)
    assert refused.value.hint == hint
