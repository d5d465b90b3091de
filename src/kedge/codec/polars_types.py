"""polars: data frames and series, as one buffer of Arrow IPC (stream format) each."""

from __future__ import annotations

import io
from typing import Any

import polars as pl

from .kinds import DecodeContext, EncodeContext, Leaf, Problem, Tag, add, unsupported
from .summaries import shape_of, table_parts


def _save(value: pl.DataFrame | pl.Series, ctx: EncodeContext) -> bytes:
    frame = value.to_frame() if isinstance(value, pl.Series) else value
    if frame.height and not frame.width:
        raise _refuse("rows and no columns", "save the number of rows")
    for name, dtype in frame.schema.items():
        if _has_objects(dtype):
            raise _refuse(f"Python objects in the column {name!r}", "save that column as a list")
    data = io.BytesIO()
    frame.write_ipc_stream(data, compat_level=pl.CompatLevel.newest())
    if _read(memoryview(_head(frame))).schema != frame.schema:
        raise _refuse("a schema that Arrow IPC does not keep", "cast the column that is special")
    about = {"shape": list(frame.shape), "columns": [f"{name}: {dtype}" for name, dtype in frame.schema.items()]}
    view = data.getbuffer()
    return ctx.pack([type(value).__name__, about, view.nbytes, ctx.place_bytes(view)])


def _head(frame: pl.DataFrame) -> bytes:
    data = io.BytesIO()
    frame.clear().write_ipc_stream(data, compat_level=pl.CompatLevel.newest())
    return data.getvalue()


def _has_objects(dtype: Any) -> bool:
    if isinstance(dtype, pl.Struct):
        return any(_has_objects(field.dtype) for field in dtype.fields)
    if isinstance(dtype, pl.List | pl.Array):
        return _has_objects(dtype.inner)
    return bool(dtype == pl.Object)


def _refuse(what: str, hint: str) -> Problem:
    return unsupported(f"is a polars value with {what}", hint)


def _read(data: memoryview) -> pl.DataFrame:
    try:
        return pl.read_ipc_stream(io.BytesIO(data))
    except BaseException as error:  # a Rust panic is not an Exception
        if type(error).__name__ == "PanicException":
            raise ValueError(f"polars cannot read it: {error}") from None
        raise


def _load(payload: bytes, ctx: DecodeContext) -> pl.DataFrame | pl.Series:
    cls, about, size_bytes, reference = table_parts(ctx.unpack(payload))
    frame = _read(ctx.bytes_of(reference, size_bytes))
    if frame.shape != shape_of(about["shape"]):
        raise ValueError("it has another shape")
    if cls == "DataFrame":
        return frame
    if cls == "Series" and frame.width == 1:
        return frame.to_series()
    raise ValueError(f"{cls!r} is not a class of polars")


add(Leaf(Tag.POLARS, "polars value", _save, _load), pl.DataFrame, pl.Series)
