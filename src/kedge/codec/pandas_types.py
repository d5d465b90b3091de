"""pandas: frames, series and indexes taken apart into arrays, which the codec stores exactly.

Not through Arrow, which would lose dtypes, index classes, frequencies and the types of objects. Columns in numpy memory
become buffers without a copy. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

from .kinds import DecodeContext, EncodeContext, Leaf, Problem, Shape, Structure, Tag, add, unsupported
from .plain import distinct

_MASKED = {
    "IntegerArray": pd.arrays.IntegerArray,
    "FloatingArray": pd.arrays.FloatingArray,
    "BooleanArray": pd.arrays.BooleanArray,
}
_MAX_RANGE = 100_000_000  # a RangeIndex is small, but as a level pandas makes arrays of its length
_NA_VALUES = {"nan": np.nan, "NA": pd.NA}


def _refuse(what: str, hint: str) -> Problem:
    return unsupported(f"is a pandas value with {what}", hint)


# --- one column: a numpy array, or a dictionary that describes another kind ---


def _take_array(values: Any) -> Any:
    dtype = values.dtype
    if isinstance(dtype, np.dtype) or type(values) is pd.arrays.NumpyExtensionArray:
        return np.asarray(values)
    if type(values).__name__ in _MASKED:
        return {"masked": type(values).__name__, "data": values._data, "mask": values._mask}
    if isinstance(dtype, pd.CategoricalDtype):
        return {"codes": np.asarray(values.codes), "categories": values.categories, "ordered": values.ordered}
    if isinstance(dtype, pd.DatetimeTZDtype):
        return {"utc": np.asarray(values, dtype=f"M8[{dtype.unit}]"), "zone": dtype.tz}
    if isinstance(dtype, pd.PeriodDtype):
        return {"ordinals": values.asi8, "freq": _take_period(dtype)}
    if isinstance(dtype, pd.IntervalDtype):
        left, right = (_take_array(bound.array) for bound in (values.left, values.right))
        return {"left": left, "right": right, "closed": values.closed}
    if isinstance(dtype, pd.StringDtype):
        na_value = "NA" if dtype.na_value is pd.NA else "nan"
        if dtype.storage == "pyarrow":
            return {"text": _take_arrow(values), "na": na_value}
        return {"text": np.asarray(values, dtype=object), "na": na_value}
    if isinstance(dtype, pd.ArrowDtype):
        return {"arrow": _take_arrow(values)}
    raise _refuse(f"the dtype {dtype}", "convert it with .astype(…) to a dtype of numpy, or to a dense one")


def _take_arrow(values: Any) -> Any:
    import pyarrow as pa

    return pa.table({"values": values.__arrow_array__()})


def _build_array(stored: Any) -> Any:
    """Return the stored column as an array that pandas adopts with exactly this dtype."""
    if isinstance(stored, np.ndarray):
        if stored.ndim != 1:
            raise ValueError("a column of more than one dimension")
        return stored
    match stored:
        case {"masked": cls, "data": data, "mask": mask}:
            return _MASKED[cls](data, mask)
        case {"codes": codes, "categories": categories, "ordered": ordered}:
            return pd.Categorical.from_codes(codes, categories=categories, ordered=ordered)
        case {"utc": utc, "zone": zone}:
            return pd.DatetimeIndex(utc).tz_localize("UTC").tz_convert(zone).array
        case {"ordinals": ordinals, "freq": freq}:
            return pd.PeriodIndex.from_ordinals(ordinals, freq=freq).array
        case {"left": left, "right": right, "closed": closed}:
            bounds = (pd.Index(_build_array(bound)) for bound in (left, right))
            return pd.arrays.IntervalArray.from_arrays(*bounds, closed=closed)
        case {"text": np.ndarray() as text, "na": na}:
            return pd.array(text, dtype=pd.StringDtype("python", na_value=_NA_VALUES[na]))
        case {"text": table, "na": na}:
            dtype = pd.StringDtype("pyarrow", na_value=_NA_VALUES[na])
            return pd.arrays.ArrowStringArray(table.column("values"), dtype=dtype)
        case {"arrow": table}:
            return pd.arrays.ArrowExtensionArray(table.column("values"))
    raise ValueError("an unknown kind of column")


def _build_series(stored: Any) -> pd.Series:
    values = _build_array(stored)
    return pd.Series(values, dtype=values.dtype, copy=False)


def _take_freq(freq: Any) -> str | None:
    if freq is None:
        return None
    text: str = freq.freqstr
    try:
        is_same = to_offset(text) == freq
    except (ValueError, TypeError):
        is_same = False
    if not is_same:
        raise _refuse(f"the frequency {freq!r}, which has no name", "remove it: index.freq = None")
    return text


def _take_period(dtype: pd.PeriodDtype) -> str:
    text: str = dtype.name.removeprefix("period[").removesuffix("]")
    if pd.PeriodDtype(text) != dtype:
        raise _refuse(f"the frequency {dtype.freq!r}, which has no name", "convert it with .asfreq(…)")
    return text


# --- indexes ---


def _take_index(index: pd.Index) -> tuple[Sequence[object], Sequence[Any]]:
    if type(index) is pd.RangeIndex:
        pairs = [("start", index.start), ("stop", index.stop), ("step", index.step), ("name", index.name)]
        return ("RangeIndex",), pairs
    if isinstance(index, pd.MultiIndex):
        if any(len(level) > _MAX_RANGE for level in index.levels):
            raise _refuse("a level of more than 100 million values", "use remove_unused_levels()")
        fields = {
            "levels": [level.rename(None) for level in index.levels],
            "codes": [np.asarray(codes) for codes in index.codes],
            "names": list(index.names),
            "sortorder": index.sortorder,
        }
        return ("MultiIndex",), list(fields.items())
    freq = _take_freq(index.freq) if isinstance(index, pd.DatetimeIndex | pd.TimedeltaIndex) else None
    return ("Index",), [("data", _take_array(index.array)), ("name", index.name), ("freq", freq)]


def _build_index(cls: str, fields: dict[str, Any]) -> pd.Index:
    if cls == "RangeIndex":
        return pd.RangeIndex(**fields)
    if cls == "MultiIndex":
        if any(len(level) > _MAX_RANGE for level in fields["levels"] if isinstance(level, pd.RangeIndex)):
            raise ValueError("a level without end")
        return pd.MultiIndex(**fields)
    values = _build_array(fields["data"])
    index = pd.Index(values, dtype=values.dtype, name=fields["name"], copy=False, tupleize_cols=False)
    if fields["freq"] is not None:
        index.freq = fields["freq"]  # pandas checks that the values fit it
    return index


# --- series and frames ---


def _take(value: Any) -> tuple[Sequence[object], Sequence[Any]]:
    common = [("attrs", value.attrs), ("unique", not value.flags.allows_duplicate_labels)]
    if isinstance(value, pd.Series):
        data = _take_array(value.array)
        return ("Series",), [("data", data), ("index", value.index), ("name", value.name), *common]
    columns = [_take_array(value.iloc[:, position].array) for position in range(value.shape[1])]
    return ("DataFrame",), [("columns", value.columns), ("data", columns), ("index", value.index), *common]


def _build(head: Sequence[Any], pairs: list[Any]) -> object:
    (cls,), fields = head, distinct(pairs)
    if cls not in ("Series", "DataFrame"):
        return _build_index(cls, fields)
    index = fields["index"]
    value: Any
    if cls == "Series":
        value = _build_series(fields["data"])
        if len(value) != len(index):
            raise ValueError("index and values differ in length")
        value.index, value.name = index, fields["name"]
    elif fields["data"]:
        columns = [_build_series(column) for column in fields["data"]]
        if any(len(column) != len(index) for column in columns):
            raise ValueError("index and values differ in length")
        value = pd.DataFrame(dict(enumerate(columns)), copy=False)
        value.columns, value.index = fields["columns"], index
    elif len(fields["columns"]) == 0:
        value = pd.DataFrame(index=index, columns=fields["columns"])
    else:
        raise ValueError("columns without values")
    value.attrs = fields["attrs"]
    return value.set_flags(allows_duplicate_labels=not fields["unique"]) if fields["unique"] else value


# --- scalars ---


def _save_scalar(value: Any, ctx: EncodeContext) -> bytes:
    if value is pd.NaT or value is pd.NA:
        return ctx.pack(["NaT" if value is pd.NaT else "NA"])
    parts = [type(value).__name__, value.unit, int(value.asm8.view("i8"))]
    if isinstance(value, pd.Timestamp):
        parts += [value.tz, value.fold]
    return ctx.pack(parts)


def _load_scalar(payload: bytes, ctx: DecodeContext) -> object:
    match ctx.unpack(payload):
        case ["NaT"]:
            return pd.NaT
        case ["NA"]:
            return pd.NA
        case ["Timedelta", ("s" | "ms" | "us" | "ns") as unit, int(count)]:
            return pd.Timedelta(np.timedelta64(count, unit)).as_unit(unit)
        case ["Timestamp", ("s" | "ms" | "us" | "ns") as unit, int(count), zone, (0 | 1) as fold]:
            moment = pd.Timestamp(np.datetime64(count, unit)).as_unit(unit)
            if zone is not None:
                return moment.tz_localize("UTC").tz_convert(zone)
            return moment.replace(fold=fold) if fold else moment
    raise ValueError("an unknown kind of scalar")


_INDEXES = (
    pd.Index, pd.RangeIndex, pd.MultiIndex, pd.DatetimeIndex, pd.TimedeltaIndex, pd.PeriodIndex, pd.IntervalIndex,
    pd.CategoricalIndex,
)  # fmt: skip
add(Structure(Tag.PANDAS, "pandas value", Shape.FIELDS, 1, _take, _build), pd.DataFrame, pd.Series)
add(Structure(Tag.PANDAS, "pandas value", Shape.FIELDS, 1, _take_index, _build), *_INDEXES)
add(
    Leaf(Tag.PANDAS_SCALAR, "pandas scalar", _save_scalar, _load_scalar),
    *(pd.Timestamp, pd.Timedelta, type(pd.NaT), type(pd.NA)),
)
