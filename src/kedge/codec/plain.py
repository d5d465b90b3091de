"""The kinds of the standard library: numbers, text, containers, times, paths."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID, SafeUUID

from .kinds import (
    BufferSummary,
    DecodeContext,
    EncodeContext,
    Leaf,
    Problem,
    Shape,
    Structure,
    Tag,
    add,
    kind_of,
    leaf_outlines,
    unsupported,
)

# --- numbers and text; the packer itself writes INT and STR, which are only for what msgpack cannot hold ---


def _unused(value: object, ctx: EncodeContext) -> bytes:
    raise AssertionError("the packer writes these itself")


def _load_complex(payload: bytes, ctx: DecodeContext) -> complex:
    return complex(*struct.unpack(">dd", payload))


# --- bytes: inline in the tree if short, otherwise a buffer ---


def _save_bytes(value: bytes | bytearray, ctx: EncodeContext) -> bytes:
    return ctx.pack([len(value), ctx.place_bytes(memoryview(value))])


@dataclass(frozen=True, slots=True)
class BytesView:
    """Bytes in somebody else's memory, such as a mapped file: saved as bytes, and never copied as a whole."""

    view: memoryview


def _save_view(value: BytesView, ctx: EncodeContext) -> bytes:
    return ctx.pack([value.view.nbytes, ctx.place_bytes(value.view)])


def _open_bytes(payload: bytes, ctx: DecodeContext) -> tuple[int, Any]:
    size_bytes, reference = ctx.unpack(payload)
    return _count(size_bytes), reference


def _load_bytes(payload: bytes, ctx: DecodeContext) -> bytes:
    size_bytes, reference = _open_bytes(payload, ctx)
    return bytes(ctx.bytes_of(reference, size_bytes))


def _load_bytearray(payload: bytes, ctx: DecodeContext) -> bytearray:
    size_bytes, reference = _open_bytes(payload, ctx)
    return bytearray(ctx.bytes_of(reference, size_bytes))


def _summarise_bytes(kind: str, payload: bytes, ctx: DecodeContext) -> BufferSummary:
    size_bytes, reference = _open_bytes(payload, ctx)
    return BufferSummary(kind, "uint8", (size_bytes,), size_bytes, **buffer_fields(reference))


def buffer_fields(reference: object) -> Any:
    """Return the fields of a BufferSummary that locate the bytes."""
    return {"data": reference} if type(reference) is bytes else {"ordinals": (_count(reference),)}


# --- times ---


def _save_timedelta(value: timedelta, ctx: EncodeContext) -> bytes:
    return ctx.pack([value.days, value.seconds, value.microseconds])


def _load_timedelta(payload: bytes, ctx: DecodeContext) -> timedelta:
    days, seconds, microseconds = ints(ctx.unpack(payload), 3)
    value = timedelta(days, seconds, microseconds)
    if (value.days, value.seconds, value.microseconds) != (days, seconds, microseconds):
        raise ValueError("not normalised")
    return value


def _save_timezone(value: timezone, ctx: EncodeContext) -> bytes:
    return ctx.pack(list(value.__getinitargs__()))  # type: ignore[attr-defined]


def _check_zone(value: datetime | time) -> tzinfo | None:
    zone = value.tzinfo
    kind = kind_of(zone)
    if zone is None or (kind is not None and kind.tag in (Tag.TIMEZONE, Tag.ZONEINFO)):
        return zone
    what = f"has a time zone of class {type(zone).__module__}.{type(zone).__qualname__}"
    raise unsupported(what, "use zoneinfo.ZoneInfo or datetime.timezone")


def _save_datetime(value: datetime, ctx: EncodeContext) -> bytes:
    fields = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return ctx.pack([*fields, value.fold, _check_zone(value)])


def _load_datetime(payload: bytes, ctx: DecodeContext) -> datetime:
    *fields, fold, zone = ctx.unpack(payload)
    return datetime(*ints(fields, 7), fold=fold, tzinfo=zone)  # type: ignore[misc,arg-type]


def _save_time(value: time, ctx: EncodeContext) -> bytes:
    return ctx.pack([value.hour, value.minute, value.second, value.microsecond, value.fold, _check_zone(value)])


def _load_time(payload: bytes, ctx: DecodeContext) -> time:
    *fields, fold, zone = ctx.unpack(payload)
    return time(*ints(fields, 4), fold=fold, tzinfo=zone)  # type: ignore[misc,arg-type]


def _load_date(payload: bytes, ctx: DecodeContext) -> date:
    if len(payload) != 10:
        raise ValueError("not YYYY-MM-DD")
    return date.fromisoformat(payload.decode("ascii"))


# --- identifiers and paths ---


_SAFETY = (SafeUUID.unknown, SafeUUID.safe, SafeUUID.unsafe)


def _load_uuid(payload: bytes, ctx: DecodeContext) -> UUID:
    (safety,) = payload[16:]
    return UUID(bytes=payload[:16], is_safe=_SAFETY[safety])


_PATHS: dict[str, type[PurePath]] = {
    cls.__name__: cls for cls in (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
}


def _save_path(value: PurePath, ctx: EncodeContext) -> bytes:
    return ctx.pack([type(value).__name__, str(value)])


def _load_path(payload: bytes, ctx: DecodeContext) -> PurePath:
    name, text = ctx.unpack(payload)
    try:
        return _PATHS[name](text)
    except NotImplementedError as error:
        hint = f"save it as a Pure{name} to load it anywhere"
        raise unsupported(f"is a {name}, which does not exist on this system", hint) from error


# --- containers ---

_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    **{f.__name__: f for f in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)},
}


def _items(value: Any) -> tuple[Sequence[object], Sequence[object]]:
    return (), value if isinstance(value, tuple) else list(value)


def _pairs(value: dict[Any, Any]) -> tuple[Sequence[object], Sequence[object]]:
    return (), list(value.items())


def _build_set(head: Sequence[Any], items: list[object]) -> set[object]:
    return set(_build_frozenset(head, items))


def _build_frozenset(head: Sequence[Any], items: list[object]) -> frozenset[object]:
    _refuse_collisions(items)
    value = frozenset(items)
    if len(value) != len(items):
        raise ValueError("an element occurs twice")
    return value


_MANY_KEYS = 1000
_MAX_ALIKE = 100


def _refuse_collisions(keys: Sequence[Hashable]) -> None:
    """Refuse keys chosen for their hash, which take quadratic time.

    Python hides the hashes of text; those of numbers, and of what contains them, anybody can compute.
    """
    if len(keys) <= _MANY_KEYS or {str, bytes}.issuperset(kinds := set(map(type, keys))):
        return
    if kinds == {int} and min(keys) >= -(1 << 63) and max(keys) < 1 << 63:  # type: ignore[type-var,operator]
        return
    if max(Counter(map(hash, keys)).values()) > _MAX_ALIKE:
        raise ValueError(f"more than {_MAX_ALIKE} keys share one hash")


def distinct(pairs: list[tuple[Hashable, Any]]) -> dict[Any, Any]:
    """Return a dictionary of these pairs. Raises Problem if a key occurs twice."""
    try:
        _refuse_collisions([key for key, _ in pairs] if len(pairs) > _MANY_KEYS else ())
        value = dict(pairs)
    except TypeError as error:
        raise Problem(f"a key cannot be one: {error}") from error
    if len(value) != len(pairs):
        raise Problem("a key occurs twice")
    return value


def _take_ordered(value: OrderedDict[Any, object]) -> tuple[Sequence[object], Sequence[object]]:
    # torch stores the versions of a state dict's modules in an attribute of the OrderedDict.
    attributes = vars(value)
    if any(hasattr(OrderedDict, name) for name in attributes):
        raise unsupported("is an OrderedDict that hides its own methods", "save dict(…) of it")
    return (attributes or None,), list(value.items())


def _build_ordered(head: Sequence[Any], pairs: list[Any]) -> OrderedDict[object, object]:
    value = OrderedDict(distinct(pairs))
    if head[0] is not None:
        if any(hasattr(OrderedDict, name) for name in head[0]):
            raise ValueError("an attribute hides a method")
        vars(value).update(**head[0])
    return value


def _take_counter(value: Counter[Any]) -> tuple[Sequence[object], Sequence[object]]:
    if vars(value):
        raise unsupported("is a Counter with attributes of its own", "save them apart")
    return _pairs(value)


def _build_counter(head: Sequence[Any], pairs: list[Any]) -> Counter[object]:
    return Counter(distinct(pairs))


def _take_default(value: defaultdict[Any, object]) -> tuple[Sequence[object], Sequence[object]]:
    factory = value.default_factory
    name = getattr(factory, "__name__", "None" if factory is None else "")
    if not isinstance(name, str) or name not in _FACTORIES or _FACTORIES[name] is not factory:
        raise unsupported(
            f"is a defaultdict whose factory {factory!r} is code, not data",
            f"save dict(…) of it; factories that can be saved are {', '.join(_FACTORIES)}",
        )
    return (name,), list(value.items())


def _build_default(head: Sequence[Any], pairs: list[Any]) -> defaultdict[object, object]:
    return defaultdict(_FACTORIES[head[0]], distinct(pairs))


def _take_deque(value: deque[Any]) -> tuple[Sequence[object], Sequence[object]]:
    return (value.maxlen,), list(value)


def _build_deque(head: Sequence[Any], items: list[object]) -> deque[object]:
    value = deque(items, head[0])
    if len(value) != len(items):
        raise ValueError("more items than its maxlen")
    return value


def _take_range(value: range | slice) -> tuple[Sequence[object], Sequence[Any]]:
    return (), [value.start, value.stop, value.step]


def _build_slice(head: Sequence[Any], items: list[object]) -> slice:
    start, stop, step = items
    return slice(start, stop, step)


def ints(values: Any, count: int) -> list[int]:
    if type(values) is not list or len(values) != count or any(type(value) is not int for value in values):
        raise ValueError(f"not {count} integers")
    return values


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


add(Leaf(Tag.INT, "int", _unused, lambda payload, ctx: int.from_bytes(payload, "big", signed=True)))
add(Leaf(Tag.STR, "str", _unused, lambda payload, ctx: payload.decode("utf-8", "surrogatepass")))
add(Leaf(Tag.COMPLEX, "complex", lambda value, ctx: struct.pack(">dd", value.real, value.imag), _load_complex), complex)
add(Leaf(Tag.BYTES, "bytes", _save_view, _load_bytes), BytesView)
add(Leaf(Tag.BYTES, "bytes", _save_bytes, _load_bytes), bytes)
add(Leaf(Tag.BYTEARRAY, "bytearray", _save_bytes, _load_bytearray), bytearray)
add(Leaf(Tag.DATETIME, "datetime", _save_datetime, _load_datetime), datetime)
add(Leaf(Tag.DATE, "date", lambda value, ctx: value.isoformat().encode(), _load_date), date)
add(Leaf(Tag.TIME, "time", _save_time, _load_time), time)
add(Leaf(Tag.TIMEDELTA, "timedelta", _save_timedelta, _load_timedelta), timedelta)
add(Leaf(Tag.TIMEZONE, "timezone", _save_timezone, lambda payload, ctx: timezone(*ctx.unpack(payload))), timezone)
add(Leaf(Tag.UUID, "UUID", lambda value, ctx: value.bytes + bytes([_SAFETY.index(value.is_safe)]), _load_uuid), UUID)
add(Leaf(Tag.PATH, "path", _save_path, _load_path), *_PATHS.values())
leaf_outlines[Tag.BYTES] = lambda payload, ctx: _summarise_bytes("bytes", payload, ctx)
leaf_outlines[Tag.BYTEARRAY] = lambda payload, ctx: _summarise_bytes("bytearray", payload, ctx)

add(Structure(Tag.TUPLE, "tuple", Shape.ITEMS, 0, _items, lambda head, items: tuple(items)), tuple)
add(Structure(Tag.SET, "set", Shape.ITEMS, 0, _items, _build_set, is_unordered=True), set)
add(Structure(Tag.FROZENSET, "frozenset", Shape.ITEMS, 0, _items, _build_frozenset, is_unordered=True), frozenset)
add(Structure(Tag.RANGE, "range", Shape.ITEMS, 0, _take_range, lambda head, items: range(*ints(items, 3))), range)
add(Structure(Tag.SLICE, "slice", Shape.ITEMS, 0, _take_range, _build_slice), slice)
add(Structure(Tag.DEQUE, "deque", Shape.ITEMS, 1, _take_deque, _build_deque), deque)
add(Structure(Tag.DICT, "dict", Shape.PAIRS, 0, _pairs, lambda head, pairs: distinct(pairs)), dict)
add(Structure(Tag.ORDERED_DICT, "OrderedDict", Shape.PAIRS, 1, _take_ordered, _build_ordered), OrderedDict)
add(Structure(Tag.COUNTER, "Counter", Shape.PAIRS, 0, _take_counter, _build_counter), Counter)
add(Structure(Tag.DEFAULT_DICT, "defaultdict", Shape.PAIRS, 1, _take_default, _build_default), defaultdict)
