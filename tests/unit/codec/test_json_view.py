"""The JSON view of any state, and plain JSON as a state."""

import collections
import dataclasses
import datetime as dt
import json
import pathlib
import uuid
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge import codec
from kedge.codec.json_view import from_json, to_json_view
from kedge.errors import UnsupportedType, Validation
from tests.parts import library
from tests.strategies import equal, states

nan, inf = float("nan"), float("inf")
identifier = uuid.UUID(int=1)


@codec.register("tests.jsonview.Model", version=2)
@dataclasses.dataclass
class Model:
    a: int
    b: object = None


VIEWS = [
    (None, None),
    (True, True),
    (2**70, 2**70),
    (-1.5, -1.5),
    ("ø", "ø"),
    ([1, [2]], [1, [2]]),
    ({"a": {"b": []}}, {"a": {"b": []}}),
    (nan, {"$type": "float", "value": "nan"}),
    (-inf, {"$type": "float", "value": "-inf"}),
    (complex(1, inf), {"$type": "complex", "real": 1.0, "imag": {"$type": "float", "value": "inf"}}),
    ((1, (2,)), {"$type": "tuple", "items": [1, {"$type": "tuple", "items": [2]}]}),
    ({3, 1, 2}, {"$type": "set", "items": [1, 2, 3]}),
    (frozenset("ba"), {"$type": "frozenset", "items": ["a", "b"]}),
    (collections.deque([1], 5), {"$type": "deque", "items": [1], "maxlen": 5}),
    ({1: 2, "a": (3,)}, {"$type": "dict", "items": [[1, 2], ["a", {"$type": "tuple", "items": [3]}]]}),
    ({"$type": "tuple"}, {"$type": "dict", "items": [["$type", "tuple"]]}),
    (collections.OrderedDict(a=1), {"$type": "OrderedDict", "items": [["a", 1]]}),
    (collections.Counter("aab"), {"$type": "Counter", "items": [["a", 2], ["b", 1]]}),
    (collections.defaultdict(list, a=[1]), {"$type": "defaultdict", "items": [["a", [1]]]}),
    (b"abc", {"$type": "bytes", "size_bytes": 3, "base64": "YWJj"}),
    (bytearray(b"abc"), {"$type": "bytearray", "size_bytes": 3, "base64": "YWJj"}),
    (range(1, 9, 2), {"$type": "range", "start": 1, "stop": 9, "step": 2}),
    (slice(1, None), {"$type": "slice", "start": 1, "stop": None, "step": None}),
    (Decimal("1.50"), {"$type": "Decimal", "value": "1.50"}),
    (Fraction(1, 3), {"$type": "Fraction", "numerator": 1, "denominator": 3}),
    (identifier, {"$type": "UUID", "value": str(identifier)}),
    (pathlib.PurePosixPath("/a"), {"$type": "PurePosixPath", "value": "/a"}),
    (dt.date(2020, 1, 2), {"$type": "date", "value": "2020-01-02"}),
    (dt.time(1, 2, fold=1), {"$type": "time", "value": "01:02:00", "fold": 1}),
    (dt.timedelta(-1, 5), {"$type": "timedelta", "days": -1, "seconds": 5, "microseconds": 0}),
    (dt.UTC, {"$type": "timezone", "value": "UTC"}),
    (ZoneInfo("Europe/Oslo"), {"$type": "ZoneInfo", "value": "Europe/Oslo"}),
    (
        dt.datetime(2020, 1, 2, tzinfo=ZoneInfo("Europe/Oslo")),
        {"$type": "datetime", "value": "2020-01-02T00:00:00+01:00", "zone": "Europe/Oslo"},
    ),
    (
        Model(1, (2,)),
        {
            "$type": "tests.jsonview.Model",
            "version": 2,
            "fields": {"a": 1, "b": {"$type": "tuple", "items": [2]}},
        },
    ),
]


def plain_dicts(children):
    return st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), children)


class TestView:
    @pytest.mark.parametrize(("state", "view"), VIEWS, ids=lambda value: type(value).__name__)
    def test_of_each_type(self, state, view):
        assert equal(to_json_view(state), view)
        assert equal(to_json_view(codec.outline(codec.encode(state).tree)), view)

    @given(states(), st.none() | st.integers(0, 3), st.none() | st.integers(0, 3))
    def test_of_any_state_is_json_and_the_same_for_its_outline(self, state, max_items, max_string):
        view = to_json_view(state, max_items=max_items, max_string=max_string)
        outline = codec.outline(codec.encode(state).tree)
        assert equal(view, to_json_view(outline, max_items=max_items, max_string=max_string))
        assert equal(json.loads(json.dumps(view, allow_nan=False)), view)

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | plain_dicts(s)))
    def test_of_plain_states_is_the_state(self, state):
        assert equal(to_json_view(state), state)
        assert equal(from_json(json.dumps(state)), state)

    def test_arrays_are_summarised(self):
        np = library("numpy")
        state = {"a": np.zeros((2, 3), "f4"), "s": np.float32(1.5), "n": np.float64("nan"), "o": np.array([None, 1])}
        view = {
            "a": {"$type": "ndarray", "dtype": "<f4", "shape": [2, 3], "size_bytes": 24},
            "s": {"$type": "numpy scalar", "dtype": "<f4", "shape": [], "value": 1.5},
            "n": {"$type": "numpy scalar", "dtype": "<f8", "shape": [], "value": {"$type": "float", "value": "nan"}},
            "o": {
                "$type": "numpy.ndarray",
                "version": 1,
                "fields": {"dtype": "object", "shape": {"$type": "tuple", "items": [2]}, "items": [None, 1]},
            },
        }
        assert to_json_view(state) == view
        assert to_json_view(codec.outline(codec.encode(state).tree)) == view

    def test_long_bytes_are_summarised_in_an_outline(self):
        outline = codec.outline(codec.encode([b"x" * 5000]).tree)
        assert to_json_view(outline) == [{"$type": "bytes", "size_bytes": 5000}]
        view = to_json_view(outline, fields_of=lambda summary: {"ordinals": list(summary.ordinals)})
        assert view == [{"$type": "bytes", "size_bytes": 5000, "ordinals": [0]}]

    def test_integers_beyond_what_python_writes(self):
        view = to_json_view([10**5000])
        assert view == [{"$type": "int", "hex": hex(10**5000)}]
        json.dumps(view)

    def test_what_is_left_out_is_counted(self):
        state = {
            "list": [*range(5)],
            "dict": {1: 1, 2: 2, 3: 3},
            "text": "abcdef",
            "bytes": b"abcdef",
            "set": {1, 2, 3},
        }
        assert to_json_view(state, max_items=2, max_string=3) == {
            "list": [0, 1, {"$truncated": 3}],
            "dict": {"$type": "dict", "items": [[1, 1], [2, 2], {"$truncated": 1}]},
            "$truncated": 3,
        }
        assert to_json_view(state, max_string=3)["text"] == {"$type": "str", "value": "abc", "$truncated": 3}
        assert to_json_view(state, max_string=3)["bytes"] == {
            "$type": "bytes",
            "size_bytes": 6,
            "base64": "YWJj",
            "$truncated": 3,
        }
        assert to_json_view(state, max_items=2)["dict"] == {
            "$type": "dict",
            "items": [[1, 1], [2, 2], {"$truncated": 1}],
        }
        assert to_json_view({1, 2, 3}, max_items=1) == {"$type": "set", "items": [1, {"$truncated": 2}]}
        assert to_json_view([], max_items=0) == []
        assert to_json_view([1], max_items=0) == [{"$truncated": 1}]

    def test_of_the_deepest_state(self):
        state = None
        for _ in range(codec.PART_DEPTH):
            state = (state,)
        json.dumps(to_json_view(state))

    def test_of_what_cannot_be_saved(self):
        with pytest.raises(UnsupportedType):
            to_json_view([object()])


class TestFromJson:
    @pytest.mark.parametrize(
        ("text", "state"),
        [
            ("null", None),
            (' {"a": [1, 2.5, "x", true, null]} ', {"a": [1, 2.5, "x", True, None]}),
            (b'{"\xc3\xb8": 1}', {"ø": 1}),
            (b"\xef\xbb\xbf[1]", [1]),
            ("[" * codec.PART_DEPTH + "]" * codec.PART_DEPTH, None),
            ('"\\ud800"', "\ud800"),
            ("-0.0", -0.0),
            ("1e3", 1000.0),
            (str(2**70), 2**70),
        ],
    )
    def test_of_json(self, text, state):
        loaded = from_json(text)
        assert state is None or equal(loaded, state)
        codec.encode(loaded)

    @pytest.mark.parametrize("digits", [4000, 4299, 4300])
    @pytest.mark.parametrize("sign", ["", "-"])
    def test_of_long_integers(self, digits, sign):
        value = from_json(f"[{sign}1{'0' * (digits - 2)}7]")[0]
        assert value == (10 ** (digits - 1) + 7) * (-1 if sign else 1)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "not JSON: .* at line 1, column 1"),
            ('{"a": 1,\n "b": }', "line 2, column 7"),
            ("[1] [2]", "Extra data"),
            ('{"a": 1, "b": {"x": 1, "y": 2, "x": 3}}', "the key 'x' twice"),
            ('{"a": 1, "a": 1}', "the key 'a' twice"),
            ("NaN", "NaN is not JSON"),
            ("[-Infinity]", "-Infinity is not JSON"),
            ("1e999", "1e999 is beyond a float"),
            (b"\xff", "not UTF-8: .* at byte 0"),
            ("[" * 201 + "]" * 201, "more than 200 levels deep"),
            ('{"a":' * 201 + "1" + "}" * 201, "more than 200 levels deep"),
            ("[" * 100_000, "more than 200 levels deep"),
            ("{'a': 1}", "not JSON"),
        ],
    )
    def test_of_anything_else(self, text, message):
        with pytest.raises(Validation, match=message):
            from_json(text)

    @given(st.text() | st.binary())
    def test_of_any_text(self, text):
        try:
            codec.encode(from_json(text))
        except Validation:
            pass
