"""A store behind a service answers as the directory does, but for named differences that docs/service.md lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge
from kedge.server import create_app
from tests.server.conftest import listening
from tests.server.store_cases import CASES, COVERED

# Case → what docs/service.md says of it. Where both sides come to agree, the test fails: the sentence has to go.
DIFFERENCES = {
    "a_mapped_load": "mapped loads",
    "a_copy_that_follows": "`sync --follow`",
    "keys": "changes of keys",
    "a_rebuilt_index": "`rebuild`",
    "a_policy_for_a_job_that_is_not_there_yet": "A policy is saved only with a job that exists",
    "who_did_it": "The actor is the token's name",
    "values_of_a_diff": "`diff` tells arrays and what changed in them in words",
}

_OWN = re.compile(r"[\w@+.:-]*_\d{10}_[0-9a-f]{8}|\d+:[0-9a-f]{64}|vm:\d+[\w:.-]*|0x[0-9a-f]+")
_CHANGING = {"stored_bytes", "seconds", "took_s", "digest", "id", "holder", "took", "elapsed_s"}


def plain(value: Any) -> Any:
    """A value as it can be compared: without times, IDs and what the shape of packs decides."""
    if isinstance(value, BaseException):
        message = getattr(value, "message", str(value))
        return [type(value).__name__, plain(message), plain(getattr(value, "hint", ""))]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tobytes()]
    if isinstance(value, date):
        return "a time"
    if isinstance(value, str):
        return _OWN.sub("…", value)
    if isinstance(value, Path):
        return "a path"
    if is_dataclass(value):
        return [
            type(value).__name__,
            *(plain(getattr(value, f.name)) for f in fields(value) if f.name not in _CHANGING),
        ]
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return [plain(entry) for entry in value]
    return value


def outcome(store: kedge.CheckpointManager, case: str, folder: Path) -> Any:
    folder.mkdir()
    try:
        return plain(CASES[case](store, folder))
    except Exception as error:  # compared, too
        return plain(error)
    finally:
        with suppress(kedge.CheckpointError):
            store.close()


def both(case: str, folder: Path) -> tuple[Any, Any]:
    """The outcome with a directory, and with a directory behind a service."""
    here = outcome(kedge.open(folder / "here"), case, folder / "for-here")
    with ExitStack() as stack:
        behind = stack.enter_context(kedge.open(folder / "there"))
        url = stack.enter_context(listening(create_app(behind)))
        return here, outcome(kedge.open(url), case, folder / "for-there")


@pytest.mark.parametrize("case", [case for case in CASES if case not in DIFFERENCES])
def test_alike(case: str, tmp_path: Path) -> None:
    here, there = both(case, tmp_path)
    assert here == there


@pytest.mark.parametrize("case", DIFFERENCES)
def test_named_differences(case: str, tmp_path: Path) -> None:
    here, there = both(case, tmp_path)
    assert here != there
    document = " ".join((Path(__file__).parents[2] / "docs" / "service.md").read_text().split())
    assert DIFFERENCES[case] in document.partition("What differs over HTTP")[2].partition("## ")[0]


def test_every_public_method_has_a_case() -> None:
    public = {name for name in dir(kedge.CheckpointManager) if not name.startswith("_")}
    assert public - COVERED.keys() == set()
    assert COVERED.keys() - public == set()
