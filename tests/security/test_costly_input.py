"""Input that is cheap to send and dear to read. What is refused here would take time that grows with its square.

Nothing is timed: each input is one that would run for minutes, beyond every limit of the test run.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import ormsgpack
import pytest
from fastapi.testclient import TestClient

import kedge
from kedge import codec
from kedge.codec.json_view import from_json
from kedge.codec.kinds import Tag
from kedge.store.manifest import Manifest, pack_manifest
from kedge.store.wire import SAVE_TYPE
from tests.server.conftest import client_of
from tests.server.test_transfer import body_of

PRIME = (1 << 61) - 1  # Python's hash of a number is the number modulo this
MANY = 50_000


def integer(value: int) -> Any:
    return ormsgpack.Ext(Tag.INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def structure(tag: int, items: list[Any]) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(tag, ormsgpack.packb(items)))


def alike() -> list[Any]:
    """Integers with one hash."""
    return [integer(PRIME * (16 + n)) for n in range(MANY)]


def uuids() -> list[Any]:
    return [ormsgpack.Ext(Tag.UUID, (PRIME * (16 + n)).to_bytes(16, "big") + b"\0") for n in range(MANY)]


def tuples() -> list[Any]:
    return [ormsgpack.Ext(Tag.TUPLE, ormsgpack.packb([each])) for each in alike()]


def pairs(keys: list[Any]) -> list[Any]:
    return [part for key in keys for part in (key, 1)]


def fraction(bits: int) -> bytes:
    parts = [integer((1 << bits) + 1), integer((1 << bits) - 1)]
    return ormsgpack.packb(ormsgpack.Ext(Tag.FRACTION, ormsgpack.packb(parts)))


TREES = {
    "set of integers": lambda: structure(Tag.SET, alike()),
    "frozenset of integers": lambda: structure(Tag.FROZENSET, alike()),
    "set of UUIDs": lambda: structure(Tag.SET, uuids()),
    "set of tuples": lambda: structure(Tag.SET, tuples()),
    "dict of integers": lambda: structure(Tag.DICT, pairs(alike())),
    "Counter of UUIDs": lambda: structure(Tag.COUNTER, pairs(uuids())),
    "OrderedDict of integers": lambda: structure(Tag.ORDERED_DICT, [None, *pairs(alike())]),
    "defaultdict of integers": lambda: structure(Tag.DEFAULT_DICT, ["None", *pairs(alike())]),
    "long fraction": lambda: fraction(1 << 25),
    "fraction just too long": lambda: fraction(1 << 14),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_takes_for_ever_is_refused(name: str) -> None:
    tree = TREES[name]()
    with pytest.raises(kedge.Corrupted):
        codec.decode(tree, lambda number: memoryview(b""))
    with pytest.raises(kedge.Corrupted):
        codec.outline(tree)


@pytest.mark.parametrize("name", ["set of integers", "long fraction"])
def test_an_upload_that_takes_for_ever_is_refused(tmp_path: Path, name: str) -> None:
    from kedge.server import create_app

    with client_of(create_app(tmp_path / "store")) as client:
        body = body_of([], pack_manifest(Manifest(TREES[name]())))
        answer = client.post("/api/v1/jobs/j/checkpoints", content=body, headers={"content-type": SAVE_TYPE})
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("digits", [4_301, 3 << 20])
@pytest.mark.parametrize("form", ["{}", "-{}", "[{}]", '{{"a": {}}}'])
def test_long_integers_in_json(digits: int, form: str) -> None:
    with pytest.raises(kedge.Validation):
        from_json(form.format("9" * digits))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from kedge.server import create_app

    with client_of(create_app(tmp_path_factory.mktemp("costly") / "store")) as client:
        yield client


BIG = "9" * 900_000
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/jobs/j/checkpoints", f'{{"step": "s", "state": {BIG}}}'),
        ("/api/v1/jobs/j/checkpoints", f'{{"step": "s", "metadata": {{"n": {BIG}}}}}'),
        ("/api/v1/runs/r/signals", f'{{"name": "go", "value": {BIG}}}'),
        ("/api/v1/executions", f'{{"correlation_id": "c", "workflow_name": "w", "input_data": {BIG}}}'),
        ("/api/v1/retention/plan", f'{{"policy": {{"keep_last": {BIG}}}}}'),
        ("/api/v1/jobs/j/lease", f'{{"holder": "h", "ttl_s": {BIG}}}'),
    ],
)
def test_long_integers_in_every_kind_of_body(client: TestClient, path: str, body: str) -> None:
    assert 400 <= client.post(path, content=body, headers=JSON).status_code < 500


@pytest.mark.parametrize("text", ["9" * 20_000, "1e" + "9" * 20_000, "0." + "9" * 20_000, "[" * 5_000])
@pytest.mark.parametrize("name", ["after", "limit", "cursor", "metadata"])
def test_long_numbers_in_addresses(client: TestClient, name: str, text: str) -> None:
    value = f"a={text}" if name == "metadata" else text
    answer = client.get("/api/v1/jobs/j/checkpoints", params={name: value})
    assert answer.status_code in (200, 422), answer.text[:200]


NESTED = {
    "lists": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "unclosed": "[" * 500_000,
    "mixed": '[{"a":' * 50_000,
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_nested_json(client: TestClient, text: str) -> None:
    with pytest.raises(kedge.Validation):
        from_json(text)
    body = f'{{"name": "go", "value": {text}}}'
    assert 400 <= client.post("/api/v1/runs/r/signals", content=body, headers=JSON).status_code < 500


@pytest.mark.parametrize(
    "state",
    [
        set(range(5000)),
        {n / 7 for n in range(5000)},
        {(n, -n): n for n in range(5000)},
        {10**30 + n: n for n in range(5000)},
        {UUID(int=n): n for n in range(5000)},
        Counter({Decimal(n): n + 1 for n in range(5000)}),
        OrderedDict((Fraction(n, 7), n) for n in range(5000)),
        defaultdict(int, {complex(n, 1): n for n in range(5000)}),
        Fraction(3**9000, 2**9000),
        {10**5000: 1, (10**5000,): 2},
    ],
    ids=lambda state: type(state).__name__,
)
def test_what_people_save_is_taken(tmp_path: Path, state: Any) -> None:
    with kedge.open(tmp_path / "store") as store:
        saved = store.save("j", "s", {"a": state})
        assert store.load(saved) == {"a": state}
        assert store.load(saved, only="a") == {"a": state}


def test_a_fraction_that_would_not_load_is_not_saved(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store, pytest.raises(kedge.UnsupportedType, match="numerator"):
        store.save("j", "s", Fraction(3**20_000, 2))


def test_texts_of_any_length_are_json() -> None:
    assert from_json(json.dumps("9" * 5000)) == "9" * 5000
