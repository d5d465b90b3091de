"""Diff: what is found, how it is told, and how little is read for it."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kedge
from kedge.chunks import Entry
from kedge.codec import BufferSummary, TypeSummary
from kedge.diff import MAX_CHANGES, ArrayDelta, ChangeKind, Diff, TextDelta, diff, tables
from kedge.diff import arrays as diff_arrays
from kedge.diff.states import StoredState
from kedge.errors import Validation
from kedge.files import Tree
from kedge.store.chunk_reader import ChunkReader
from kedge.store.local import local_store

MIB = 1 << 20


@kedge.register("test.diff.Point")
@dataclass
class Point:
    x: int
    y: object = None


def paths(result: Diff) -> dict[str, str]:
    return {change.path: str(change.kind) for change in result.changes}


def only_delta(result: Diff) -> ArrayDelta:
    (change,) = result.changes
    assert change.kind is ChangeKind.CHANGED
    assert isinstance(change.detail, ArrayDelta)
    return change.detail


def diff_values(old: object, new: object, *, max_changes: int = MAX_CHANGES) -> Diff:
    """The diff of two states, each saved in a store of its own."""
    with kedge.open("memory:") as manager:
        sides = [manager.store.catalogue.read(manager.save("job", "step", state)) for state in (old, new)]
        return diff(local_store(manager.store, "a diff"), *sides, max_changes=max_changes)


@pytest.fixture
def manager() -> Iterator[kedge.CheckpointManager]:
    with kedge.open("memory:") as opened:
        yield opened


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the chunks that are read from here on."""
    sizes: list[int] = []
    read = ChunkReader.read

    def watch(self: ChunkReader, wanted: Sequence[tuple[Entry, memoryview]], **options: Any) -> None:
        sizes.extend(entry.size_bytes for entry, _ in wanted)
        read(self, wanted, **options)

    monkeypatch.setattr(ChunkReader, "read", watch)
    return sizes


# Trees


def test_each_kind_of_change_has_its_path() -> None:
    old = {"same": 1, "gone": 2, "model": {"layers": [{"w": 1}, {"w": 2}]}, "kind": 3}
    new = {"same": 1, "model": {"layers": [{"w": 1}, {"w": 5}]}, "kind": "3", "new": None}
    result = diff_values(old, new)
    assert paths(result) == {
        "gone": "removed",
        "model/layers/1/w": "changed",
        "kind": "type_changed",
        "new": "added",
    }
    assert (result.added, result.removed, result.changed, result.left_out) == (1, 1, 2, 0)
    by_path = {change.path: change for change in result.changes}
    assert (by_path["model/layers/1/w"].old, by_path["model/layers/1/w"].new) == (2, 5)
    assert by_path["kind"].detail == "int → str"


def test_integers_that_python_does_not_write_are_compared_and_told() -> None:
    long = 7**5500  # more digits than Python writes, fewer bits than a fraction may have
    for value in (long, [long], {long: 1}, {(long,): 1}, {long}, Fraction(long, 3), range(long), slice(long)):
        assert diff_values(value, value).is_empty
        found = diff_values([value], [0])
        assert not found.is_empty
        assert len(json.dumps(found.to_json())) < 2000
    assert not diff_values([Fraction(long, 5)], [Fraction(long, 3)]).is_empty
    assert not diff_values({long, (long, 1)}, {long + 1, (long, 2)}).is_empty


def test_the_state_itself_has_an_empty_path() -> None:
    assert paths(diff_values(1, 2)) == {"": "changed"}
    assert diff_values(1, 1).is_empty


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (1, True),
        (1, 1.0),
        (0, None),
        ([1], (1,)),
        ({"a": 1}, OrderedDict(a=1)),
        ({1}, frozenset({1})),
        (b"x", "x"),
        (b"x", bytearray(b"x")),
        (1.0, np.float64(1.0)),
        (Decimal(1), 1),
        (Point(1), {"x": 1, "y": None}),
    ],
    ids=repr,
)
def test_equal_values_of_other_types_are_a_difference(old: object, new: object) -> None:
    assert paths(diff_values({"v": old}, {"v": new})) == {"v": "type_changed"}
    assert not diff_values([old, 0], [new, 1]).is_empty


def test_floats_are_compared_exactly() -> None:
    nan = float("nan")
    assert diff_values({"a": nan, "b": [nan], "c": (nan, {nan: 1})}["b"], [nan]).is_empty
    assert not diff_values([0.0], [-0.0]).is_empty
    assert not diff_values({"x": 0.0}, {"x": -0.0}).is_empty
    assert not diff_values([nan], [1.0]).is_empty


def test_dictionaries_with_any_keys() -> None:
    old = {1: "a", (1, "x"): "b", None: "c", "1": "d"}
    new = {1: "A", (1, "x"): "B", None: "C", "1": "d"}
    assert paths(diff_values(old, new)) == {"1": "changed", "(1, 'x')": "changed", "None": "changed"}
    assert paths(diff_values({1: 0}, {"1": 0})) in ({"1": "added"}, {"1": "removed"})
    assert diff_values({1: 0}, {True: 0}).added == 1


def test_the_order_of_a_dictionary_is_no_difference() -> None:
    assert diff_values({"a": 1, "b": 2}, {"b": 2, "a": 1}).is_empty


def test_sets_tell_their_elements() -> None:
    result = diff_values({"tags": {"a", "b", 1}}, {"tags": {"b", "c", 1}})
    assert paths(result) == {"tags/a": "removed", "tags/c": "added"}


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_an_insertion_in_a_list_is_one_change(kind: type) -> None:
    old, new = list(range(100)), [*range(40), "new", *range(40, 100)]
    assert paths(diff_values({"l": kind(old)}, {"l": kind(new)})) == {"l/40": "added"}
    assert paths(diff_values({"l": kind(new)}, {"l": kind(old)})) == {"l/40": "removed"}


def test_lists_are_matched_by_content_then_compared_inside() -> None:
    old = [{"id": n, "v": [n]} for n in range(20)]
    new = [{"id": 99, "v": []}, *({"id": n, "v": [n]} for n in range(20) if n != 7), {"id": 100, "v": []}]
    new[15] = {"id": 15, "v": [15, "more"]}
    assert paths(diff_values(old, new)) == {"0": "added", "7": "removed", "15/v/1": "added", "20": "added"}


def test_long_lists_need_bounded_work() -> None:
    old = [n % 7 for n in range(100_000)]
    new = [n % 5 for n in range(100_001)]
    result = diff_values(old, new, max_changes=10)
    assert len(result.changes) == 10
    assert result.left_out == result.added + result.removed + result.changed - 10 > 1000


def test_registered_types_are_compared_by_field_and_not_constructed(
    manager: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = manager.save("job", "a", {"p": Point(1, [1, 2]), "q": Point(0)})
    b = manager.save("job", "b", {"p": Point(2, [1, 3]), "q": Point(0)})

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("constructed")

    monkeypatch.setattr(Point, "__init__", refuse)
    assert paths(manager.diff(a, b)) == {"p/x": "changed", "p/y/1": "changed"}


def test_values_of_the_standard_library() -> None:
    old = {"at": datetime(2025, 1, 1, tzinfo=UTC), "d": Decimal("1.0"), "r": range(3), "c": 1 + 2j}
    new = {"at": datetime(2025, 1, 2, tzinfo=UTC), "d": Decimal("1.00"), "r": range(4), "c": 1 + 3j}
    assert paths(diff_values(old, new)) == dict.fromkeys(old, "changed")
    assert diff_values(old, dict(old)).is_empty


def test_changes_beyond_the_limit_are_counted() -> None:
    old, new = dict.fromkeys("abcdef", 0), dict.fromkeys("abcdef", 1)
    result = diff_values(old, new, max_changes=2)
    assert [change.path for change in result.changes] == ["a", "b"]
    assert (result.changed, result.left_out) == (6, 4)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(Validation):
            diff_values(1, 2, max_changes=wrong)  # type: ignore[arg-type]


# Text


def test_long_text_is_shown_as_a_unified_diff() -> None:
    lines = [f"line {n}" for n in range(5000)]
    changed = [*lines[:2500], "inserted", *lines[2500:4000], "other", *lines[4001:]]
    (change,) = diff_values({"t": "\n".join(lines)}, {"t": "\n".join(changed)}).changes
    assert isinstance(change.detail, TextDelta)
    assert [line for line in change.detail.lines if line[0] in "+-"] == ["+inserted", "-line 4000", "+other"]
    assert change.detail.lines[0] == "@@ -2498,6 +2498,7 @@"
    assert change.detail.lines_left_out == 0


def test_a_text_diff_is_bounded() -> None:
    old, new = ("\n".join(f"{word} {n}" * 99 for n in range(9000)) for word in ("old", "new"))
    (change,) = diff_values(old, new).changes
    assert isinstance(change.detail, TextDelta)
    assert len(str(change.detail)) < 20_000
    assert change.detail.lines_left_out > 8000
    assert "more lines" in str(change.detail)


def test_one_long_line_shows_where_it_changed() -> None:
    old = "x" * 5_000_000 + "old" + "y" * 1000
    (change,) = diff_values(old, old.replace("old", "new")).changes
    assert isinstance(change.detail, TextDelta)
    head, was, now = change.detail.lines
    assert head == "@@ character 5,000,001 @@"
    assert "old" in was
    assert "new" in now


def test_short_text_needs_no_diff() -> None:
    (change,) = diff_values("old", "new").changes
    assert (change.old, change.new, change.detail) == ("old", "new", "")


# Arrays


@pytest.mark.parametrize("dtype", ["f2", "<f4", ">f8", "c8", "i1", "<i4", ">i8", "u8", "?", "S3", "M8[s]"])
@pytest.mark.parametrize("shape", [(7,), (300, 50)])
def test_changed_elements_are_counted(dtype: str, shape: tuple[int, ...]) -> None:
    old = np.zeros(shape, dtype)
    new = old.copy()
    new.flat[[1, 5]] = np.ones(1, "i8").astype(dtype)
    delta = only_delta(diff_values({"w": old}, {"w": new}))
    assert (delta.elements, delta.elements_changed) == (old.size, 2)
    assert delta.max_abs_difference == (1 if np.dtype(dtype).kind in "iufc" else None)
    assert diff_values({"w": old}, {"w": old.copy()}).is_empty


def test_differences_of_integers_are_exact() -> None:
    low, high = np.array([-(2**63)]), np.array([2**63 - 1])
    assert only_delta(diff_values(low, high)).max_abs_difference == 2**64 - 1
    assert only_delta(diff_values(np.array([0], "u8"), np.array([2**64 - 1], "u8"))).max_abs_difference == 2**64 - 1


def test_nan_and_infinity_in_arrays() -> None:
    old = np.array([np.nan, 1.0, np.nan, np.inf])
    assert diff_values(old, old.copy()).is_empty
    delta = only_delta(diff_values(old, np.array([np.nan, np.nan, 2.0, np.inf])))
    assert (delta.elements_changed, delta.max_abs_difference) == (2, None)
    result = diff_values(old, np.array([np.nan, 1.5, np.nan, 3.0]))
    assert only_delta(result).max_abs_difference == np.inf
    json.dumps(result.to_json(), allow_nan=False)


def test_bfloat16_is_read_without_a_library_for_it() -> None:
    halves = np.array([1.0, -2.5], "f4").view("<u4") >> 16
    assert diff_arrays._numbers(halves.astype("<u2").view("u1"), "bfloat16", 2).tolist() == [1.0, -2.5]


def test_shape_and_dtype_changes_are_named() -> None:
    old = np.zeros((2, 3), "f4")
    assert "shape 2×3 → 3×2" in str(only_delta(diff_values(old, np.zeros((3, 2), "f4"))))
    assert "dtype <f4 → <f8" in str(only_delta(diff_values(old, np.zeros((2, 3), "f8"))))


def test_elements_that_straddle_chunks_are_counted_once(manager: kedge.CheckpointManager) -> None:
    old = np.zeros(300_000, [("a", "u1"), ("b", "u4"), ("c", "u2")])  # 7 bytes: 1 MiB is no multiple
    new = old.copy()
    straddling = MIB // 7
    new[straddling] = (255, 2**32 - 1, 2**16 - 1)
    new[straddling + 1]["b"] = 1
    a, b = manager.save("job", "a", old), manager.save("job", "b", new)
    delta = only_delta(manager.diff(a, b))
    assert (delta.elements, delta.elements_changed, delta.bytes_changed) == (300_000, 2, 8)


def test_a_difference_behind_the_border_of_a_chunk(manager: kedge.CheckpointManager) -> None:
    old = np.zeros(300_000, [("a", "u1"), ("b", "u4"), ("c", "u2")])
    new = old.copy()
    new[MIB // 7]["c"] = 1  # the element begins in the first chunk, which is the same in both
    new[MIB // 7 + 1]["a"] = 1
    a, b = manager.save("job", "a", old), manager.save("job", "b", new)
    delta = only_delta(manager.diff(a, b))
    assert (delta.elements_changed, delta.bytes_changed) == (2, 2)


def test_scalars_show_their_values() -> None:
    (change,) = diff_values({"loss": np.float32(0.5)}, {"loss": np.float32(0.25)}).changes
    assert change.to_json()["old"] == 0.5
    assert change.to_json()["new"] == 0.25
    (change,) = diff_values(np.array(3, ">i2"), np.array(-4, ">i2")).changes
    assert (change.to_json()["old"], change.to_json()["new"]) == (3, -4)


def test_byte_strings_short_and_long() -> None:
    assert only_delta(diff_values(b"abc", b"abd")).bytes_changed == 1
    assert only_delta(diff_values(b"abc" * 9000, b"abd" * 9000)).bytes_changed == 9000
    assert only_delta(diff_values(bytearray(5000), bytearray(b"x" * 5000))).bytes_changed == 5000
    result = diff_values({"b": b"abc"}, {"b": b"abc" * 9000})
    assert only_delta(result).note == "shape 3 → 27000"


def test_without_numpy_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    old = np.arange(100_000)
    new = old.copy()
    new[[3, 70_000]] += 1
    monkeypatch.setattr(diff_arrays, "_numpy", lambda: None)
    delta = only_delta(diff_values(old, new))
    assert (delta.elements_changed, delta.bytes_changed, delta.max_abs_difference) == (None, 2, None)
    assert str(delta) == "2 bytes differ"
    assert diff_values(old, old.copy()).is_empty
    assert only_delta(diff_values(b"abc", b"abd")).bytes_changed == 1


# Checkpoints


def test_equal_arrays_are_not_read(manager: kedge.CheckpointManager, read_bytes: list[int]) -> None:
    state = {"w": np.random.default_rng(1).random(1 << 20), "small": np.arange(2000), "n": 1}
    a = manager.save("job", "a", state)
    b = manager.save("job", "b", {**state, "n": 2})
    result = manager.diff(a, b)
    assert paths(result) == {"n": "changed"}
    assert read_bytes == []
    assert (result.bytes_changed, result.shared_bytes) == (0, (1 << 23) + 16_000)
    assert (result.old_id, result.new_id) == (a, b)
    same = manager.diff(a, a)
    assert same.is_empty
    assert same.shared_bytes == (1 << 23) + 16_000


def test_only_chunks_that_differ_are_read(manager: kedge.CheckpointManager, read_bytes: list[int]) -> None:
    old = np.random.default_rng(1).random((64, MIB // 8))
    new = old.copy()
    new[10, 5] += 4
    new[40, :] -= 1
    a, b = manager.save("job", "a", {"w": old}), manager.save("job", "b", {"w": new})
    delta = only_delta(manager.diff(a, b))
    assert delta.elements_changed == 1 + MIB // 8
    assert delta.max_abs_difference == pytest.approx(4)
    assert read_bytes == [MIB] * 4


def test_a_large_array_is_not_held_whole(manager: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    a = manager.save("job", "a", {"w": rng.random(64 * MIB // 8)})
    b = manager.save("job", "b", {"w": rng.random(64 * MIB // 8)})
    largest = 0
    read = StoredState.read

    def watch(self: Any, stream: int, start: int, stop: int) -> memoryview:
        nonlocal largest
        found = read(self, stream, start, stop)
        largest = max(largest, sum(map(len, self._recent.values())) + len(found))
        return found

    monkeypatch.setattr(StoredState, "read", watch)
    assert only_delta(manager.diff(a, b)).elements_changed == 64 * MIB // 8
    assert 0 < largest <= 8 * MIB


def test_many_small_arrays_share_a_read(manager: kedge.CheckpointManager, read_bytes: list[int]) -> None:
    old = {f"w{n}": np.random.default_rng(n).random(1000) for n in range(200)}
    new = {name: array + 1 for name, array in old.items()}
    a, b = manager.save("job", "a", old), manager.save("job", "b", new)
    result = manager.diff(a, b)
    assert result.changed == 200
    assert sum(read_bytes) <= 2 * sum(array.nbytes for array in old.values()) + 4 * MIB


def test_small_arrays_that_changed_places_in_the_same_chunk(manager: kedge.CheckpointManager) -> None:
    one, two = np.zeros(1000), np.ones(1000)
    a = manager.save("job", "a", {"x": one, "y": two})
    b = manager.save("job", "b", {"y": one, "x": two})
    assert paths(manager.diff(a, b)) == {"x": "changed", "y": "changed"}


def test_small_arrays_of_other_sizes_in_the_same_chunk(manager: kedge.CheckpointManager) -> None:
    both = np.random.default_rng(1).random(3000)
    a = manager.save("job", "a", [both[:1000], both[1000:]])
    b = manager.save("job", "b", [both[:2000], both[2000:]])
    result = manager.diff(a, b)
    assert result.changed == 2
    assert result.shared_bytes == 0


def test_an_array_that_grew_shares_its_beginning(manager: kedge.CheckpointManager) -> None:
    old = np.random.default_rng(1).random(4 * MIB // 8)
    a = manager.save("job", "a", {"w": old})
    b = manager.save("job", "b", {"w": np.concatenate([old, old[:100]])})
    result = manager.diff(a, b)
    assert only_delta(result).note.startswith("shape")
    assert (result.shared_bytes, result.bytes_changed) == (4 * MIB, 800)


def test_arrays_in_lists_are_matched_by_content(manager: kedge.CheckpointManager, read_bytes: list[int]) -> None:
    arrays = [np.random.default_rng(n).random(MIB // 8) for n in range(6)]
    a = manager.save("job", "a", arrays)
    b = manager.save("job", "b", [arrays[0], *arrays[2:], arrays[0] * 2])
    assert paths(manager.diff(a, b)) == {"1": "removed", "5": "added"}
    assert read_bytes == []


def test_a_tree_of_files_of_the_same_size(manager: kedge.CheckpointManager, tmp_path: Path) -> None:
    """Its content is a buffer, the table of its names and modes may be in the tree: both count."""
    (tmp_path / "file").write_bytes(bytes(5000))
    ids = [manager.save("job", "a", {"t": Tree(tmp_path)}) for _ in range(2)]
    assert manager.diff(ids[0], ids[1]).is_empty
    (tmp_path / "file").chmod(0o600)
    ids.append(manager.save("job", "b", {"t": Tree(tmp_path)}))
    assert paths(manager.diff(ids[1], ids[2])) == {"t": "changed"}
    (tmp_path / "file").write_bytes(b"x" * 5000)
    ids.append(manager.save("job", "c", {"t": Tree(tmp_path)}))
    assert manager.diff(ids[2], ids[3]).bytes_changed >= 5000


def test_runs_of_zeros(manager: kedge.CheckpointManager) -> None:
    old = np.zeros(4 * MIB, "u1")
    new = old.copy()
    new[-1] = 7
    a, b = manager.save("job", "a", old), manager.save("job", "b", new)
    delta = only_delta(manager.diff(a, b))
    assert (delta.elements_changed, delta.max_abs_difference) == (1, 7)


def test_a_damaged_chunk_is_named(manager: kedge.CheckpointManager) -> None:
    rng = np.random.default_rng(1)
    a = manager.save("job", "a", rng.random(MIB))
    b = manager.save("job", "b", rng.random(MIB))
    store = manager.store
    manifest = store.open(*store.index.read(a))
    place = store.index.locate([manifest.streams[0][0].digest])[manifest.streams[0][0].digest]
    blobs = store.reader._blobs
    read_into = blobs.read_into

    def flip(pack: str, offset: int, target: memoryview) -> None:
        read_into(pack, offset, target)
        at = place.offset + 100 - offset  # neighbours are read at once
        if pack == place.pack and 0 <= at < len(target):
            target[at] ^= 1

    blobs.read_into = flip  # type: ignore[method-assign]
    with pytest.raises(kedge.Corrupted, match=a):
        manager.diff(a, b)


def test_json_is_plain_and_bounded(manager: kedge.CheckpointManager) -> None:
    old = {"s": "x" * 10_000, "w": np.zeros(5000), "d": {"a": 1}, "f": float("inf"), "p": Point(1), "b": b"\xff"}
    new = {"s": "y" * 10_000, "w": np.ones(5000), "l": [1, 2], "f": float("nan"), "p": 3, "b": b"\xfe"}
    a, b = manager.save("job", "a", old), manager.save("job", "b", new)
    text = json.dumps(manager.diff(a, b).to_json(), allow_nan=False)
    assert len(text) < 5000
    found = {change["path"]: change for change in json.loads(text)["changes"]}
    assert found["w"]["elements_changed"] == 5000
    assert found["w"]["max_abs_difference"] == 1
    assert (found["w"]["old_bytes"], found["w"]["new_bytes"]) == (40_000, 40_000)
    assert found["d"]["old"] == "dict of 1"
    assert "new" not in found["d"]
    assert found["l"]["new"] == "list of 2"
    assert found["f"]["old"] == "inf"


# Properties

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
arrays = st.lists(st.integers(0, 3), max_size=6).map(lambda items: np.array(items, "i4"))
keys = st.text(max_size=3) | st.integers(0, 3)
states = st.recursive(
    scalars | arrays | st.sets(st.integers(0, 5)),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(state=states)
def test_a_state_does_not_differ_from_itself(state: object) -> None:
    assert diff_values(state, state).is_empty


def canonical(value: Any) -> object:
    """Equal for equal states only, by another way than the one under test."""
    if isinstance(value, dict):
        return "dict", sorted(((canonical(k), canonical(v)) for k, v in value.items()), key=repr)
    if isinstance(value, set):
        return "set", sorted(value)
    if isinstance(value, np.ndarray):
        return "array", value.tolist()
    if isinstance(value, list | tuple):
        return type(value).__name__, [canonical(item) for item in value]
    return type(value).__name__, repr(value)


@given(old=states, new=states)
def test_a_diff_is_empty_for_equal_states_only(old: object, new: object) -> None:
    result = diff_values(old, new)
    assert result.is_empty == (canonical(old) == canonical(new))
    assert result.is_empty == diff_values(new, old).is_empty
    json.dumps(result.to_json(), allow_nan=False)


@given(old=st.lists(st.integers(0, 4), max_size=12), new=st.lists(st.integers(0, 4), max_size=12))
def test_edits_of_a_list_can_be_applied(old: list[int], new: list[int]) -> None:
    """Removals by old number, then additions and changes by new number, lead from one to the other."""
    changes = diff_values(old, new).changes
    removed = {int(c.path) for c in changes if c.kind is ChangeKind.REMOVED}
    rebuilt = [item for n, item in enumerate(old) if n not in removed]
    for change in sorted((c for c in changes if c.kind is not ChangeKind.REMOVED), key=lambda c: int(c.path)):
        if change.kind is ChangeKind.ADDED:
            rebuilt.insert(int(change.path), change.new)  # type: ignore[arg-type]
        else:
            assert rebuilt[int(change.path)] == change.old
            rebuilt[int(change.path)] = change.new  # type: ignore[call-overload]
    assert rebuilt == new


@given(seed=st.integers(0, 10_000), item=st.sampled_from([1, 2, 3, 7, 8, 24]))
def test_counts_agree_with_numpy(seed: int, item: int) -> None:
    rng = random.Random(seed)
    old = np.frombuffer(rng.randbytes(item * 500), f"V{item}")
    data = bytearray(old.tobytes())
    for _ in range(rng.randrange(20)):
        data[rng.randrange(len(data))] ^= rng.randrange(256)
    new = np.frombuffer(bytes(data), f"V{item}")
    differs = np.frombuffer(old.tobytes(), "u1") != np.frombuffer(data, "u1")
    result = diff_values(old, new)
    if not differs.any():
        assert result.is_empty
        return
    delta = only_delta(result)
    assert delta.bytes_changed == int(differs.sum())
    assert delta.elements_changed == int(differs.reshape(-1, item).any(axis=1).sum())


def test_the_same_bytes_in_another_order_are_a_change() -> None:
    rows = np.arange(6.0).reshape(2, 3)
    columns = np.asfortranarray(rows.ravel().reshape(3, 2).T)
    assert rows.tobytes("A") == columns.tobytes("A")
    assert not np.array_equal(rows, columns)
    assert [change.path for change in diff_values({"a": rows}, {"a": columns}).changes] == ["a"]


# --- tables ---


@pytest.mark.requires("module:pandas", "module:pyarrow")
def test_columns_of_data_frames_have_their_names() -> None:
    import pandas as pd

    old = pd.DataFrame({"name": ["ada", "bob"], "age": [36, 41], "gone": [1.0, 2.0]})
    new = pd.DataFrame({"zip": [1, 2], "name": ["ada", "eve"], "age": [36, 42]})
    found = paths(diff_values({"customers": old}, {"customers": new}))
    assert found.pop("customers/columns/data/text") == "changed"
    assert found == {
        "customers/data/name/text": "changed",
        "customers/data/age": "changed",
        "customers/data/gone": "removed",
        "customers/data/zip": "added",
    }


@pytest.mark.requires("module:pandas")
@pytest.mark.parametrize(
    ("columns", "path"),
    [
        ([2020, 2021], "data/2021"),
        (range(10, 30, 10), "data/20"),
        ([("a", "x"), ("a", "y")], "data/1"),  # of two levels
        (["a", "a"], "data/1"),
    ],
)
def test_columns_without_a_name_of_their_own_have_their_number(columns: Sequence[Any], path: str) -> None:
    import pandas as pd

    labels = pd.MultiIndex.from_tuples(columns) if isinstance(columns[0], tuple) else columns
    frames = [pd.DataFrame([[1, n]], columns=labels) for n in (2, 3)]
    assert paths(diff_values(frames[0], frames[1])) == {path: "changed"}


@pytest.mark.requires("module:pandas", "module:pyarrow")
def test_columns_are_told_by_number_where_arrow_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd

    monkeypatch.setattr(tables, "_arrow", lambda: None)
    frames = [pd.DataFrame({"age": [n]}) for n in (1, 2)]
    assert paths(diff_values(frames[0], frames[1])) == {"data/0": "changed"}


@pytest.mark.requires("module:polars", "module:pyarrow")
@pytest.mark.parametrize("rows", [2, 3])
def test_tables_of_arrow_say_which_columns_changed(rows: int) -> None:
    import polars as pl
    import pyarrow as pa

    old = {"name": ["ada", "bob"], "age": [36, 41]}
    new = {"name": ["ada", "bob", "eve"][:rows], "age": [36, 42, 43][:rows]}
    for make in (pl.DataFrame, pa.table):
        told = str(only_delta(diff_values(make(old), make(new))))
        assert told.startswith("columns changed: age" if rows == 2 else "columns changed: name, age")


@pytest.mark.requires("module:pandas", "module:pyarrow")
def test_damaged_names_are_no_obstacle(manager: kedge.CheckpointManager) -> None:
    summary = BufferSummary("pyarrow.Table", "", (1, 1), 3, data=b"not")
    index = TypeSummary("pandas.Index", 1, {"data": {"text": summary, "na": "nan"}})
    frame = TypeSummary("pandas.DataFrame", 1, {"columns": index, "data": [1]})
    store = local_store(manager.store, "a diff")
    state = StoredState(store, *store.catalogue.read(manager.save("job", "step", None)))
    assert tables.named_columns(state, frame) is None
