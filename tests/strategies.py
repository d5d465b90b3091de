"""Hypothesis strategies for states and names, and the equality that a round trip must keep."""

from __future__ import annotations

import datetime
import math
import pathlib
import sys
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

_ZONES = ("UTC", "Europe/Oslo", "America/New_York", "Asia/Kathmandu")
_FACTORIES = (None, int, list, dict, set, str)


def names() -> st.SearchStrategy[str]:
    """Names in the grammar of jobs, tags and types."""
    return st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}", fullmatch=True)


def texts() -> st.SearchStrategy[str]:
    """Any str, lone surrogates included."""
    return st.text() | st.text(st.characters(categories=["Cs", "L"]), max_size=4)


def zones() -> st.SearchStrategy[datetime.tzinfo]:
    offsets = st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23))
    return (
        st.sampled_from(_ZONES).map(zoneinfo.ZoneInfo)
        | offsets.map(datetime.timezone)
        | st.builds(datetime.timezone, offsets, st.text(max_size=5))
        | st.just(datetime.UTC)
    )


def _moments() -> st.SearchStrategy[object]:
    zone = st.none() | zones()
    folds = st.sampled_from((0, 1))
    moments = st.builds(lambda t, z, f: t.replace(tzinfo=z, fold=f), st.datetimes(), zone, folds)
    times = st.builds(lambda t, z, f: t.replace(tzinfo=z, fold=f), st.times(), zone, folds)
    return st.one_of(moments, times, st.dates(), st.timedeltas(), zones())


def _paths() -> st.SearchStrategy[object]:
    parts = st.lists(st.text(st.characters(exclude_characters="/\\\0:", codec="utf-8"), min_size=1, max_size=5))
    classes = st.sampled_from((pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path))
    return st.builds(lambda cls, names: cls(*names), classes, parts)


def _numbers() -> st.SearchStrategy[object]:
    big = st.integers(-(1 << 300), 1 << 300)
    return st.one_of(
        st.integers(-(1 << 65), 1 << 65), big, st.floats(), st.complex_numbers(), st.decimals(), st.fractions()
    )


def scalars() -> st.SearchStrategy[object]:
    """Values without parts, of every builtin type the codec knows."""
    ranges = st.builds(range, st.integers(), st.integers(), st.integers(1) | st.integers(max_value=-1))
    bounds = st.none() | st.integers()
    return st.one_of(
        st.none(),
        st.booleans(),
        _numbers(),
        texts(),
        st.binary(),
        st.binary().map(bytearray),
        _moments(),
        st.uuids(),
        _paths(),
        ranges,
        st.builds(slice, bounds, bounds, bounds),
    )


def keys() -> st.SearchStrategy[Any]:
    """Dictionary keys and set elements: hashable, and equal to themselves."""
    finite = st.floats(allow_nan=False) | st.decimals(allow_nan=False)
    simple = st.one_of(st.none(), st.booleans(), st.integers(), finite, texts(), st.binary(), st.uuids(), _moments())
    return simple | st.tuples(simple, simple) | st.frozensets(simple, max_size=3)


def arrays() -> st.SearchStrategy[Any]:
    """numpy arrays of every kind of dtype, order and stride; needs numpy."""
    import numpy as np
    from hypothesis.extra import numpy as hnp

    plain = hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes()
    dtypes = plain | hnp.nested_dtypes(plain, max_leaves=4) | hnp.array_dtypes(plain, max_size=3)
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    base = st.builds(_filled, dtypes, shapes, st.binary(min_size=1, max_size=64))
    views: tuple[Callable[[Any], Any], ...] = (
        lambda a: a,
        np.asfortranarray,
        lambda a: a[::-1] if a.ndim else a,
        lambda a: a[..., ::2] if a.ndim else a,
    )
    return st.builds(lambda view, a: view(a), st.sampled_from(views), base)


def _filled(dtype: Any, shape: tuple[int, ...], pattern: bytes) -> Any:
    import numpy as np

    array = np.zeros(shape, dtype)
    if array.nbytes and array.dtype.kind not in "US" and array.dtype.names is None:
        array.reshape(-1).view(np.uint8)[...] = np.resize(np.frombuffer(pattern, np.uint8), array.nbytes)
        if array.dtype.kind == "b":
            array = array.view(np.uint8) % 2 == 1
    return array


def states(*, with_arrays: bool = False) -> st.SearchStrategy[Any]:
    """Any state of builtin types, nested; with numpy arrays too when asked."""
    leaves = scalars() | arrays() if with_arrays else scalars()
    return st.recursive(leaves, _containers, max_leaves=20)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=5)
    dicts = st.dictionaries(keys(), children, max_size=5)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.builds(
            lambda items, room: deque(items, room and len(items) + room - 1), lists, st.none() | st.integers(1, 3)
        ),
        st.sets(keys(), max_size=5),
        st.frozensets(keys(), max_size=5),
        st.dictionaries(texts(), children, max_size=5),
        dicts,
        dicts.map(OrderedDict),
        st.dictionaries(keys(), st.integers(), max_size=5).map(Counter),
        st.builds(defaultdict, st.sampled_from(_FACTORIES), dicts),
    )


def equal(a: Any, b: Any) -> bool:
    """Whether `b` is what a round trip of `a` must answer: the same types all the way down, and equal values.

    NaN equals NaN, -0.0 does not equal 0.0, dictionaries have the same order, arrays the same dtype and order.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    if isinstance(a, Decimal):
        return bool(a.as_tuple() == b.as_tuple())
    if isinstance(a, Mapping):
        return _equal_mappings(a, b)
    if isinstance(a, list | tuple | deque):
        same = len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return same and all(map(equal, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(equal(x, y) for y in b) for x in a)
    if isinstance(a, datetime.datetime | datetime.time):
        return equal((_bare(a), a.fold, a.tzinfo), (_bare(b), b.fold, b.tzinfo))
    if isinstance(a, datetime.timezone):
        return bool(a == b and a.tzname(None) == b.tzname(None))
    if isinstance(a, slice):
        return equal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, Fraction | range):
        return repr(a) == repr(b)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, numpy.ndarray | numpy.generic):
        return _equal_arrays(a, b)
    return bool(a == b)


def _bare(moment: datetime.datetime | datetime.time) -> str:
    return moment.replace(tzinfo=None).isoformat()


def _equal_mappings(a: Any, b: Any) -> bool:
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        return False
    if isinstance(a, OrderedDict) and not equal(vars(a), vars(b)):
        return False
    if len(a) != len(b):
        return False
    for (key, item), (other_key, other_item) in zip(a.items(), b.items(), strict=True):
        if not (equal(key, other_key) and equal(item, other_item)):
            return False
    return True


def _equal_arrays(a: Any, b: Any) -> bool:
    if (a.dtype, a.dtype.type, a.shape) != (b.dtype, b.dtype.type, b.shape):
        return False
    if a.dtype.hasobject or a.dtype.char == "T":
        return equal(a.ravel().tolist(), b.ravel().tolist())
    f_order = a.flags.f_contiguous and not a.flags.c_contiguous
    if getattr(a, "ndim", 0) and f_order != (b.flags.f_contiguous and not b.flags.c_contiguous):
        return False
    return bool(a.tobytes() == b.tobytes())
