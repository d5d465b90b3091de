"""States of thousands of levels: the same comes back, hostile ones are bounded, views say where they stop."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ormsgpack
import pytest

import kedge
from kedge import codec
from kedge.codec.json_view import to_json_view
from kedge.errors import Corrupted, UnsupportedType

WRAP: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: [value],
    "dict": lambda value: {"k": value, "n": 1},
    "pairs": lambda value: {1: value},
    "tuple": lambda value: ("x", value),
    "deque": lambda value: collections.deque([value], maxlen=3),
}


def nested(levels: int, wrap: Callable[[Any], Any], innermost: object) -> Any:
    value: Any = innermost
    for _ in range(levels):
        value = wrap(value)
    return value


def shape(value: Any) -> list[tuple[type, int]]:
    """Type and length of each level, and the innermost value; a comparison would recurse."""
    levels: list[Any] = []
    while isinstance(value, list | dict | tuple | collections.deque) and value:
        levels.append((type(value), len(value)))
        value = next(iter(value.values())) if isinstance(value, dict) else list(value)[-1]
    return [*levels, value]


def round_trip(state: object) -> Any:
    encoded = codec.encode(state)
    return codec.decode(encoded.tree, lambda n: bytes(encoded.buffers[n]))  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", [201, 240, 1000, 9_800])
@pytest.mark.parametrize("name", WRAP)
def test_deep_states_come_back(name: str, levels: int) -> None:
    for innermost in (1, "\ud800", 2**70, b"x" * 5000):
        state = nested(levels, WRAP[name], innermost)
        assert shape(round_trip(state)) == shape(state)


def test_wide_and_deep_with_arrays(tmp_path: Path) -> None:
    import numpy as np

    state = [nested(n, WRAP["dict"], np.arange(2000) + n) for n in range(150, 400, 5)]
    with kedge.open(tmp_path) as manager:
        loaded: Any = manager.load(manager.save("job", "step", state))
    assert len(loaded) == len(state)
    for n, value in enumerate(loaded):
        *levels, innermost = shape(value)
        assert len(levels) == 150 + 5 * n
        assert np.array_equal(innermost, np.arange(2000) + 150 + 5 * n)


@kedge.register("deep.Node", version=1)
@dataclass
class Node:
    number: int
    below: Node | None


def test_a_long_linked_list_of_a_registered_type() -> None:
    node: Node | None = None
    for number in range(3000):
        node = Node(number, node)
    loaded = round_trip(node)
    numbers = []
    while loaded is not None:
        numbers.append(loaded.number)
        loaded = loaded.below
    assert numbers == list(range(2999, -1, -1))


def test_shallow_states_are_written_as_before() -> None:
    for levels in (1, codec.PART_DEPTH):
        state = nested(levels, WRAP["dict"], 1)
        assert codec.encode(state).tree == ormsgpack.packb(state)


def test_a_long_cycle_is_told() -> None:
    bottom: list[Any] = []
    state = nested(700, WRAP["list"], bottom)
    bottom += [state, state]  # two, so that following them all would never end
    with pytest.raises(UnsupportedType, match="contains itself"):
        codec.encode(state)


def test_more_than_the_limit_is_refused() -> None:
    with pytest.raises(UnsupportedType, match="more than 10,000 levels deep"):
        codec.encode(nested(codec.MAX_DEPTH + 1, WRAP["list"], 1))


# Hostile trees


def tree_of(*parts: object) -> bytes:
    packed = ormsgpack.packb([[0, [], part] for part in parts])
    return ormsgpack.packb(ormsgpack.Ext(43, packed))


def link(number: object, *, wraps: int = 0) -> bytes:
    return b"\x91" * wraps + ormsgpack.packb(ormsgpack.Ext(44, ormsgpack.packb(number)))


def no_fetch(_: int) -> bytes:
    raise AssertionError("nothing is to be fetched")


@pytest.mark.parametrize(
    "tree",
    [
        tree_of(),
        tree_of(1),
        tree_of(link(0)),  # itself
        tree_of(link(2), b"\xc0"),
        tree_of(link(-1), b"\xc0"),
        tree_of(link("1"), b"\xc0"),
        tree_of(b"\x92" + link(1) * 2, b"\xc0"),  # twice
        tree_of(link(1), link(1)),
        tree_of(link(2), link(1), link(0)),  # in a circle
        tree_of(tree_of(b"\xc0")),  # one inside of another
        tree_of(b"\x92" + link(1) + tree_of(b"\xc0"), b"\xc0"),
        tree_of(b"\x91" * 300 + b"\xc0"),
        tree_of(*(link(n + 1, wraps=150) for n in range(200)), b"\xc0"),  # 30,000 levels
        link(1),
        ormsgpack.packb([ormsgpack.Ext(43, b"\x90")]),
        ormsgpack.packb(ormsgpack.Ext(43, ormsgpack.packb([[0, [None], b"\xc0"]]))),
        ormsgpack.packb(ormsgpack.Ext(43, ormsgpack.packb({"a": 1}))),
    ],
)
def test_hostile_parts_are_corrupted(tree: bytes) -> None:
    with pytest.raises(Corrupted):
        codec.decode(tree, no_fetch)
    with pytest.raises(Corrupted):
        codec.outline(tree)


def test_a_bomb_of_parts_costs_what_it_weighs() -> None:
    """Two links in each of many parts to the next one would be 2 ** 90 values."""
    bomb = tree_of(*(b"\x92" + link(n + 1) * 2 for n in range(90)), b"\xc0")
    with pytest.raises(Corrupted):  # or it would never end
        codec.decode(bomb, no_fetch)


# Views


def test_views_say_where_they_stop(tmp_path: Path) -> None:
    import numpy as np

    def state(number: int, text: str) -> object:
        array = np.arange(2000)
        array[7] = number
        return nested(1000, WRAP["dict"], [array, text])

    with kedge.open(tmp_path) as manager:
        ids = [manager.save("job", "step", state(*content)) for content in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))]
        assert not manager.diff(ids[0], ids[1]).changes
        assert manager.diff(ids[0], ids[2]).changes  # in an array alone
        assert manager.diff(ids[0], ids[3]).changes
        assert "levels down" in str(to_json_view(manager.outline(ids[0])))
        assert "levels down" in str(to_json_view(manager.load(ids[0])))
        part: Any = manager.load(ids[0], only=["k/k/n"])
        assert part == {"k": {"k": {"n": 1}}}
        whole: Any = manager.load(ids[0], only=["k/k/k"])
        assert len(shape(whole)) == 1002
