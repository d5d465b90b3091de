"""Any state as JSON, for the service, the page and people; and plain JSON as a state.

None, bool, int, float, str, list and dict with str keys are JSON's own. Everything else is an object with a "$type", so
that nothing is ambiguous. A dictionary with a key that begins with "$" is shown as pairs. Arrays are summarised. The
view is for reading; it cannot be loaded again.

    {"$type": "tuple", "items": […]}                         also set, frozenset, deque
    {"$type": "dict", "items": [[key, value], …]}            keys that are not str; also OrderedDict, Counter, …
    {"$type": "float", "value": "nan"}                       inf, -inf; also Decimal, datetime, UUID, paths …
    {"$type": "bytes", "size_bytes": 3, "base64": "YWJj"}
    {"$type": "ndarray", "dtype": "<f4", "shape": [2, 3], "size_bytes": 24}    "order": "F" if not by rows
    {"$type": "Tree", "entries": 7, "size_bytes": 24}        also File
    {"$type": "myapp.Model", "version": 2, "fields": {…}}
    {"$truncated": n}                                        n more items, pairs or characters are omitted
"""

from __future__ import annotations

import base64
import codecs
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from pathlib import PurePath
from typing import Any, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

from kedge import codec
from kedge.errors import Validation

from . import PART_DEPTH, BufferSummary, TypeSummary
from .summaries import numbers_of

MAX_DIGITS = 4_300
LONG_INT_BITS = 14_000  # Python writes no more than 4,300 digits, and JSON readers far fewer


BufferFields: TypeAlias = Callable[[BufferSummary], Mapping[str, object]]


def written(value: object, form: Callable[[object], str] = repr) -> str:
    """Return repr() or str() of any value: Python itself writes no integer of more than 4,300 digits."""
    try:
        return form(value)
    except ValueError:
        return hex(value) if isinstance(value, int) else json.dumps(to_json_view(value))


def to_json_view(
    state: object,
    *,
    max_items: int | None = None,
    max_string: int | None = None,
    fields_of: BufferFields = lambda _: {},
) -> Any:
    """Return data for `json.dumps` from a state or an outline. Raises UnsupportedType for what cannot be saved.

    Shows at most `max_items` of each container and `max_string` characters (or bytes) of each text. `fields_of` returns
    further fields for an array, tree, file, or byte string that is not in the outline itself.
    """
    view = _View(max_items, max_string, fields_of)
    try:
        return view.show(state)
    except RecursionError:  # show its outline, which says where it stops
        return view.show(codec.outline(codec.encode(state).tree))


@dataclass(frozen=True, slots=True)
class _View:
    max_items: int | None
    max_string: int | None
    fields_of: BufferFields

    def show(self, value: object) -> Any:
        if type(value) in _SHOWN:
            return _SHOWN[type(value)](self, value)
        if isinstance(value, PurePath):
            return {"$type": type(value).__name__, "value": self.text(str(value))}
        if isinstance(value, BufferSummary):
            return self.buffer(value)
        # From a library, or registered: show its outline.
        return self.show(codec.outline(codec.encode(value).tree))

    def integer(self, value: int) -> object:
        return value if value.bit_length() <= LONG_INT_BITS else {"$type": "int", "hex": self.text(hex(value))}

    def number(self, value: float) -> object:
        return value if math.isfinite(value) else {"$type": "float", "value": str(value)}

    def text(self, value: str) -> object:
        if self.max_string is None or len(value) <= self.max_string:
            return value
        return {"$type": "str", "value": value[: self.max_string], "$truncated": len(value) - self.max_string}

    def of_bytes(self, value: bytes | bytearray) -> object:
        shown = value if self.max_string is None else value[: self.max_string]
        view = {"$type": type(value).__name__, "size_bytes": len(value), "base64": base64.b64encode(shown).decode()}
        return view if len(shown) == len(value) else {**view, "$truncated": len(value) - len(shown)}

    def items(self, values: Iterable[object], count: int) -> list[Any]:
        shown = [self.show(value) for value in islice(values, self.max_items)]
        return shown if len(shown) == count else [*shown, {"$truncated": count - len(shown)}]

    def of_list(self, value: list[Any]) -> object:
        return self.items(value, len(value))

    def sequence(self, value: Any) -> object:
        view = {"$type": type(value).__name__, "items": self.items(value, len(value))}
        return view if not isinstance(value, deque) else {**view, "maxlen": value.maxlen}

    def of_set(self, value: Any) -> object:
        shown = sorted((self.show(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
        if self.max_items is not None and len(shown) > self.max_items:
            shown[self.max_items :] = [{"$truncated": len(shown) - self.max_items}]
        return {"$type": type(value).__name__, "items": shown}

    def of_dict(self, value: Mapping[Any, object]) -> object:
        if not all(type(key) is str and not key.startswith("$") for key in value):
            return self.mapping(value)
        view = {key: self.show(item) for key, item in islice(value.items(), self.max_items)}
        return view if len(view) == len(value) else {**view, "$truncated": len(value) - len(view)}

    def mapping(self, value: Mapping[Any, object]) -> object:
        shown: list[object] = [[self.show(key), self.show(item)] for key, item in islice(value.items(), self.max_items)]
        if len(shown) < len(value):
            shown.append({"$truncated": len(value) - len(shown)})
        return {"$type": type(value).__name__, "items": shown}

    def of_complex(self, value: complex) -> object:
        return {"$type": "complex", "real": self.number(value.real), "imag": self.number(value.imag)}

    def written(self, value: object) -> object:
        return {"$type": type(value).__name__, "value": self.text(str(value))}

    def fraction(self, value: Fraction) -> object:
        parts = {"numerator": self.integer(value.numerator), "denominator": self.integer(value.denominator)}
        return {"$type": "Fraction", **parts}

    def moment(self, value: Any) -> object:
        view: dict[str, object] = {"$type": type(value).__name__, "value": value.isoformat()}
        if isinstance(getattr(value, "tzinfo", None), ZoneInfo):
            view["zone"] = value.tzinfo.key
        if getattr(value, "fold", 0):
            view["fold"] = 1
        return view

    def duration(self, value: timedelta) -> object:
        parts = {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}
        return {"$type": "timedelta", **parts}

    def bounds(self, value: range | slice) -> object:
        parts = {"start": value.start, "stop": value.stop, "step": value.step}
        return {"$type": type(value).__name__, **{name: self.show(part) for name, part in parts.items()}}

    def buffer(self, value: BufferSummary) -> object:
        if value.kind in ("bytes", "bytearray"):
            if not value.ordinals:
                return self.of_bytes(value.data if value.kind == "bytes" else bytearray(value.data))
            return {"$type": value.kind, "size_bytes": value.size_bytes, **self.fields_of(value)}
        if value.kind in ("Tree", "File"):
            entries = {"entries": value.shape[0], "size_bytes": value.size_bytes}
            return {"$type": value.kind, **entries, **self.fields_of(value)}
        view: dict[str, object] = {"$type": value.kind, "dtype": self.text(value.dtype), "shape": list(value.shape)}
        if value.kind == "numpy scalar" and (numbers := numbers_of(value, 1)):
            return {**view, "value": self.show(numbers[0])}
        view["size_bytes"] = value.size_bytes
        if value.order != "C":
            view["order"] = value.order
        return {**view, **self.fields_of(value)}

    def of_type(self, value: TypeSummary) -> object:
        fields = {name: self.show(item) for name, item in value.fields.items()}
        return {"$type": value.name, "version": value.version, "fields": fields}


_SHOWN: dict[type, Callable[[_View, Any], object]] = {
    type(None): lambda view, value: value,
    bool: lambda view, value: value,
    int: _View.integer,
    float: _View.number,
    str: _View.text,
    bytes: _View.of_bytes,
    bytearray: _View.of_bytes,
    list: _View.of_list,
    tuple: _View.sequence,
    deque: _View.sequence,
    set: _View.of_set,
    frozenset: _View.of_set,
    dict: _View.of_dict,
    OrderedDict: _View.mapping,
    Counter: _View.mapping,
    defaultdict: _View.mapping,
    complex: _View.of_complex,
    Decimal: _View.written,
    UUID: _View.written,
    timezone: _View.written,
    ZoneInfo: _View.written,
    Fraction: _View.fraction,
    datetime: _View.moment,
    date: _View.moment,
    time: _View.moment,
    timedelta: _View.duration,
    range: _View.bounds,
    slice: _View.bounds,
    TypeSummary: _View.of_type,
}


def from_json(text: str | bytes) -> Any:
    """Parse plain JSON as a state: integers of up to 4,300 digits, floats, no duplicate keys, bounded depth.

    Raises Validation for anything else.
    """
    try:
        if not isinstance(text, str):
            text = bytes(text).removeprefix(codecs.BOM_UTF8).decode()  # "utf-8-sig" is written in Python
        state = _parse(text)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise Validation(
            f"the JSON is not UTF-8: {error.reason} at byte {error.start:,}",
            hint="kedge save --file stores a file unchanged",
        ) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Validation(
            f"this is not JSON: {error.msg} at {where}", hint="check it with python -m json.tool"
        ) from None
    if text.count("{") + text.count("[") > PART_DEPTH and _depth_is_over(state, PART_DEPTH):
        raise _too_deep()
    return state


def _too_deep() -> Validation:
    return Validation(f"the JSON is nested more than {PART_DEPTH} levels deep", hint="save it in a flatter form")


def _depth_is_over(value: object, levels: int) -> bool:
    if type(value) is dict:
        return levels == 0 or any(_depth_is_over(item, levels - 1) for item in value.values())
    if type(value) is list:
        return levels == 0 or any(_depth_is_over(item, levels - 1) for item in value)
    return False


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Validation(f"the JSON has the key {twice!r} twice in one object", hint="keep one of them")
    return value


def _to_int(text: str) -> int:
    """Parse an integer of bounded length, because parsing takes quadratic time (Python has the same limit)."""
    digits = len(text.lstrip("-"))
    if digits > MAX_DIGITS:
        raise Validation(f"the JSON has an integer of {digits:,} digits", hint="write it as a string")
    return int(text)


def _to_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        shown = digits if len(digits) <= 40 else digits[:39] + "…"
        raise Validation(f"the JSON number {shown} is beyond a float", hint="write it as a string")
    return value


def _refuse_constant(name: str) -> object:
    raise Validation(f"{name} is not JSON", hint="use null, or a string")


# Created once: with options, `json.loads` creates a decoder for each call.
_parse = json.JSONDecoder(
    object_pairs_hook=_distinct, parse_int=_to_int, parse_float=_to_float, parse_constant=_refuse_constant
).decode
