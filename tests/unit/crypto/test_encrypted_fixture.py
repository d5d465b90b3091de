"""I8 and I10: an encrypted store opens for ever, with its key, and every value in it is what it was."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.errors import Validation
from tests.fixtures.format_1 import values
from tests.fixtures.format_1_encrypted import ARCHIVE, KEY
from tests.parts import require
from tests.strategies import equal

require("module:cryptography")


@pytest.fixture(params=["readable", "hidden"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


@pytest.fixture
def store(place: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(place, create=False, key=KEY) as opened:
        yield opened


def test_every_value_is_what_it_was(store: kedge.CheckpointManager, place: Path) -> None:
    assert store.verify(deep=True).problems == ()
    found = {c.step: c.id for c in store.list("values")}
    for name, value in values().items():
        assert equal(store.load(found[name]), value), name
    first, second, fourth = store.list("history")[:3]
    assert (first.tags, second.metadata) == (
        {"kind": "first", "env": "prod"},
        {"loss": 0.25, "model": {"name": "small"}},
    )
    assert store.list("history", tags={"env": "prod"}) == [first]
    assert store.list("history", metadata={"model.name": "small"}) == [second]
    assert store.save("history", "fourth", 4, level="substep", idempotency_key="key-4") == fourth.id
    with kedge.open(place, namespace="tenant-2", create=False, key=KEY) as tenant:
        assert [c.step for c in tenant.list("values")] == ["tenant"]


def test_it_goes_on_being_used(store: kedge.CheckpointManager, place: Path) -> None:
    assert (store.encryption or {})["encrypts_names"] == (place.name == "hidden")
    assert bool((store.encryption or {})["old_data_keys"]) == (place.name == "hidden")
    store.save("history", "today", {"blob": bytes(range(256)) * 400})
    assert store.rekey(rewrite=True).unreadable == ()
    store.gc()
    assert store.verify(deep=True).problems == ()
    assert store.restore("history") == {"blob": bytes(range(256)) * 400}
    with pytest.raises(Validation):
        kedge.open(place)
