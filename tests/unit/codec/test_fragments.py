"""Trees put together from encoded values: what `codec.fragments` says of the format holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge import codec
from kedge.codec.fragments import (
    MAX_FRAGMENT_BYTES,
    NotAFragment,
    decode_fragment,
    dict_head,
    encode_fragment,
    is_plain_dict,
    items_at,
    list_head,
    open_fields,
    text_bytes,
    value_at,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def items_of(fragment: bytes) -> list[bytes] | None:
    """Of a list that is all of the fragment."""
    items, end = items_at(fragment)
    if items is not None and end != len(fragment):
        raise NotAFragment
    return items


def fields_of(fragment: bytes) -> list[tuple[bytes, bytes]]:
    count, at = open_fields(fragment)
    fields = []
    for _ in range(count):
        name, at = value_at(fragment, at)
        value, at = value_at(fragment, at)
        fields.append((name, value))
    assert at == len(fragment)
    return fields


def no_buffer(number: int) -> bytes:
    raise AssertionError(number)


@given(st.lists(VALUES, max_size=40), st.dictionaries(st.text(), VALUES, max_size=40))
def test_a_tree_of_fragments_is_the_tree_of_their_values(items: list[Any], fields: dict[str, Any]) -> None:
    parts = [dict_head(2), encode_fragment("items"), list_head(len(items)), *map(encode_fragment, items)]
    parts += [encode_fragment("fields"), dict_head(len(fields))]
    parts += [encode_fragment(part) for field in fields.items() for part in field]
    state = codec.decode(b"".join(parts), no_buffer)
    assert codec.encode(state) == codec.encode({"items": items, "fields": fields})


@given(VALUES)
def test_a_fragment_is_a_value(value: Any) -> None:
    assert codec.encode(decode_fragment(encode_fragment(value))) == codec.encode(value)


@pytest.mark.parametrize("levels", [0, 1, 196, 197, 198, 199, 200, 300])
def test_a_fragment_stands_anywhere_or_is_refused(levels: int) -> None:
    value: Any = []
    for _ in range(levels):
        value = [value]
    try:
        fragment = encode_fragment(value)
    except NotAFragment:
        assert levels >= codec.PART_DEPTH - 3
    else:
        assert codec.decode(b"\x91\x91\x91" + fragment, no_buffer) == [[[value]]]


@pytest.mark.parametrize("value", [np.zeros(1 << 18), "x" * MAX_FRAGMENT_BYTES, b"x" * (2 * MAX_FRAGMENT_BYTES)])
def test_what_is_large_is_no_fragment(value: object) -> None:
    with pytest.raises(NotAFragment):
        encode_fragment(value)


@pytest.mark.parametrize("text", ["plain", "é" * 300, b"\x00\xff" * 300, "x" * 70_000, "half \ud800 of a character"])
def test_a_text_stands_there_unbroken(text: str | bytes) -> None:
    assert text_bytes(text) in encode_fragment({"a": [1, text]})


@pytest.mark.parametrize(
    "text", ["", "plain", "é" * 300, "\U0001f600" * 70_000, "x" * (MAX_FRAGMENT_BYTES // 2), "half \ud800 of one"]
)
def test_a_text_alone_has_the_bytes_that_it_has_in_a_state(text: str) -> None:
    assert list_head(1) + encode_fragment(text) == codec.encode([text]).tree
    assert decode_fragment(encode_fragment(text)) == text


@pytest.mark.parametrize("length", [0, 1, 15, 16, 70_000])
def test_a_dictionary_is_known_by_its_head(length: int) -> None:
    assert is_plain_dict(encode_fragment({str(n): n for n in range(length)}))
    assert not is_plain_dict(encode_fragment({n: n for n in range(length)})) or not length
    assert not is_plain_dict(encode_fragment([0] * length))
    assert not is_plain_dict(encode_fragment({"\ud800": 1}))


@given(st.lists(VALUES, max_size=40), st.dictionaries(st.text(), VALUES, max_size=40))
def test_what_was_put_together_is_taken_apart(items: list[Any], fields: dict[str, Any]) -> None:
    assert items_of(encode_fragment(items)) == [encode_fragment(item) for item in items]
    expected = [(encode_fragment(name), encode_fragment(value)) for name, value in fields.items()]
    assert fields_of(encode_fragment(fields)) == expected


@given(VALUES)
def test_only_lists_have_items_and_only_plain_dictionaries_fields(value: Any) -> None:
    fragment = encode_fragment(value)
    assert (items_of(fragment) is not None) == (type(value) is list)
    if not (type(value) is dict and all(type(key) is str for key in value)):
        with pytest.raises(NotAFragment):
            fields_of(fragment)


@given(st.lists(VALUES, min_size=1, max_size=20), st.data())
def test_what_is_cut_off_or_too_long_is_no_fragment(items: list[Any], data: st.DataObject) -> None:
    fragment = encode_fragment(items)
    for wrong in (fragment[: data.draw(st.integers(1, len(fragment) - 1))], fragment + b"\xc0", b"\x91\xc1"):
        with pytest.raises(NotAFragment):
            items_of(wrong)


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65535, 65536])
def test_values_of_every_length_are_found(size: int) -> None:
    values = ["x" * size, b"x" * size, list(range(min(size, 70000))), {str(n): n for n in range(min(size, 300))}]
    values += [-1, -200, 1 << 20, 1 << 40, -(1 << 40), 1 << 63, 1.5, None, True, 1 << 70, (1, 2)]
    assert items_of(encode_fragment(values)) == [encode_fragment(value) for value in values]
