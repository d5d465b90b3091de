"""Random histories on every kind of store: the short form of `./dev torture histories`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.torture.histories.controller import run_history
from tests.torture.histories.history import History, Listener, Seen
from tests.torture.histories.model import problems
from tests.torture.histories.places import Servers

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.slow]

_OPERATIONS = 60


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a history says of its servers is not for the tests that come after it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("kind", ["dir", "files", "memory", "http"])
def test_no_history_breaks_a_promise(tmp_path: Path, kind: str, is_encrypted: bool) -> None:
    with ExitStack() as stack:
        _run(kind, tmp_path, Servers(tmp_path, stack), is_encrypted)


@pytest.mark.requires("postgres", "s3")
@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize("kind", ["postgres", "postgres+s3"])
def test_no_history_of_many_machines_breaks_a_promise(tmp_path: Path, kind: str, postgres: Cluster) -> None:
    with ExitStack() as stack:
        servers = Servers(tmp_path, stack, postgres)
        _run(kind, tmp_path / "plain", servers, is_encrypted=False)
        _run(kind, tmp_path / "sealed", servers, is_encrypted=True)


# The model: each promise broken once, in the smallest history that shows it. A step is who, what was asked, and what
# was answered: a dictionary, the name of an error, or None where no answer came. Each begins after the one before.

Step = tuple[str, str, dict[str, object], "dict[str, object] | str | None"]


def saved(checkpoint_id: str, **args: object) -> Step:
    return "a", "save", {"job": "job", "mark": f"mark {checkpoint_id}", **args}, {"id": checkpoint_id}


def listed(*shown: Seen) -> Step:
    return "b", "list", {"job": "job"}, {"seen": list(shown)}


def shown(checkpoint_id: str, seq: int = 1, **changes: Any) -> Seen:
    return replace(Seen(checkpoint_id, "job", seq, f"mark {checkpoint_id}", None, 10, "digest", "valid"), **changes)


DELETED: Step = ("b", "delete", {"job": "job", "id": "x"}, {"deleted": True})

BROKEN: dict[str, tuple[str, list[Step]]] = {
    "lost": ("not in a later listing", [saved("x"), listed()]),
    "lost in spite of a deletion that was refused": (
        "not in a later listing",
        [saved("x"), ("b", "delete", {"job": "job", "id": "x"}, "Conflict"), listed()],
    ),
    "lost to a cleanup that keeps it": (
        "not in a later listing",
        [saved("x"), listed(shown("x")), ("b", "cleanup", {"job": "job", "keep": 2}, {"count": 0}), listed()],
    ),
    "not found": ("is not found", [saved("x"), ("b", "load", {"id": "x"}, "NotFound")]),
    "not the latest": ("as the latest", [saved("x"), ("b", "latest", {"job": "job"}, {"latest": None})]),
    "back again": ("was deleted, and shown", [saved("x"), DELETED, listed(shown("x"))]),
    "loaded after it was deleted": ("was deleted, and shown", [saved("x"), DELETED, ("b", "load", {"id": "x"}, {})]),
    "deleted twice": ("was deleted 2 times", [saved("x"), DELETED, DELETED]),
    "deleted although pinned": (
        "was pinned",
        [saved("x"), ("b", "pin", {"id": "x", "pinned": True}, {}), DELETED],
    ),
    "changed": ("then", [saved("x"), listed(shown("x")), listed(shown("x", digest="another"))]),
    "called damaged": ("called damaged", [saved("x"), listed(shown("x", status="corrupted"))]),
    "one number for two": (
        "has number 1",
        [saved("x"), saved("y"), listed(shown("x"), shown("y"))],
    ),
    "numbers against the order": (
        "has a lower number",
        [saved("x"), saved("y"), listed(shown("x", 2), shown("y", 1))],
    ),
    "from nowhere": ("come from 0 saves", [listed(shown("x"))]),
    "in doubt, and there twice": (
        "2 checkpoints of job come from 1 saves",
        [
            ("a", "save", {"job": "job", "mark": "m"}, None),
            listed(shown("x", 1, mark="m"), shown("y", 2, mark="m")),
        ],
    ),
    "one key for two": (
        "both saved under key k",
        [saved("x", mark="m", key="k"), saved("y", mark="m", key="k")],
    ),
    "a stale lease": (
        "after b took another",
        [("b", "take", {"job": "job"}, {"token": 2}), saved("x", token=1)],
    ),
    "a lease that had not run out": (
        "had not run out",
        [
            ("a", "take", {"job": "job"}, {"token": 1}),
            ("a", "save", {"job": "job", "mark": "m", "token": 1}, "LeaseLost"),
        ],
    ),
    "an error without a cause": ("Unavailable", [("a", "look", {}, "Unavailable")]),
    "an error that is not ours": ("UNTYPED", [("a", "look", {}, "UNTYPED KeyError")]),
    "damage": ("Corrupted", [saved("x"), ("b", "load", {"id": "x"}, "Corrupted")]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_noticed(name: str) -> None:
    what, steps = BROKEN[name]
    assert [problem for problem in problems(history_of(steps)) if what in problem.what]


def test_a_history_without_fault() -> None:
    steps: list[Step] = [
        saved("x"),
        saved("y"),
        listed(shown("x", 1), shown("y", 2)),
        DELETED,
        ("b", "load", {"id": "x"}, "NotFound"),
        ("a", "delete", {"job": "job", "id": "y"}, None),  # may have happened, or not
        listed(),
        listed(shown("y", 2)),
        ("a", "save", {"job": "job", "mark": "m"}, None),
        listed(shown("z", 3, mark="m")),
    ]
    assert problems(history_of(steps)) == []


def history_of(steps: list[Step]) -> History:
    history = History()
    for n, (worker, name, args, answer) in enumerate(steps, 1):
        listener = Listener(history, worker)
        listener.note(("begin", n, name, args), n * 0.01)
        if isinstance(answer, dict):
            listener.note(("end", n, answer), n * 0.01 + 0.005)
        elif answer is not None:
            listener.note(("error", n, answer, "text"), n * 0.01 + 0.005)
    return history


def _run(kind: str, folder: Path, servers: Servers, is_encrypted: bool) -> None:
    numbers = run_history(
        kind, 1, folder / "history", servers,
        is_encrypted=is_encrypted, operations=_OPERATIONS, rounds=1, with_repair=False,
    )  # fmt: skip
    assert numbers["operations"] >= _OPERATIONS
