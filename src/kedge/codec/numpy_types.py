"""numpy: arrays of every dtype with a memory layout, arrays of objects item by item, scalars and dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kedge.errors import Validation

from .kinds import (
    Choice,
    DecodeContext,
    EncodeContext,
    Leaf,
    Problem,
    Shape,
    Structure,
    Tag,
    add,
    by_class,
    unsupported,
)
from .summaries import array_parts, dtype_size, shape_of

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]

_STRING = getattr(np.dtypes, "StringDType", None)  # numpy 2
_described: dict[DType, Any] = {}


# --- dtypes (the grammar is in summaries) ---


def describe(dtype: DType) -> Any:
    """Return the stored form of `dtype`, which restores exactly this dtype. Raises Problem if there is none."""
    cached = _described.get(dtype)
    # Equal dtypes may differ in class, alignment or metadata.
    if cached is not None and cached[0] is dtype:
        return cached[1]
    stored = _describe(dtype)
    if not _is_same(restore_dtype(stored), dtype):
        raise _no_dtype(dtype)
    if len(_described) < 1000:
        _described[dtype] = dtype, stored
    return stored


def _describe(dtype: DType) -> Any:
    if dtype.metadata is not None:
        raise _no_dtype(dtype)
    if _STRING is not None and isinstance(dtype, _STRING):
        if hasattr(dtype, "na_object"):
            raise _no_dtype(dtype)
        return {"string": bool(dtype.coerce)}
    if dtype.subdtype is not None:
        base, lengths = dtype.subdtype
        return {"base": _describe(base), "shape": [int(length) for length in lengths]}
    if dtype.names is not None:
        return {
            "fields": [_describe_field(name, dtype) for name in dtype.names],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
    if dtype.char in "qQ":  # as wide as an int64, but a different class
        return (">" if dtype.str[0] == ">" else "<") + dtype.char
    return "O" if dtype.char == "O" else dtype.str


def _describe_field(name: str, dtype: DType) -> list[Any]:
    inner, offset, *title = dtype.fields[name]  # type: ignore[index]
    if title and type(title[0]) is not str:
        raise _no_dtype(dtype)
    return [name, title[0] if title else None, offset, _describe(inner)]


def restore_dtype(stored: Any) -> DType:
    if stored == "O":
        return np.dtype(object)
    if isinstance(stored, dict) and stored.keys() == {"string"} and _STRING is not None:
        dtype: DType = _STRING(coerce=bool(stored["string"]))
        return dtype
    if isinstance(stored, dict) and "base" in stored:
        return np.dtype((restore_dtype(stored["base"]), shape_of(stored["shape"])))
    if isinstance(stored, dict) and "fields" in stored:
        names, titles, offsets, inner = zip(*stored["fields"], strict=True) if stored["fields"] else ((),) * 4
        fields: dict[str, Any] = {
            "names": list(names),
            "formats": [restore_dtype(field) for field in inner],
            "offsets": list(offsets),
            "itemsize": stored["itemsize"],
        }
        if any(title is not None for title in titles):
            fields["titles"] = list(titles)
        structured: DType = np.dtype(fields, align=bool(stored["aligned"]))  # type: ignore[call-overload]
        return structured
    dtype_size(stored)
    simple: DType = np.dtype(stored)
    return simple


def _is_same(a: DType, b: DType) -> bool:
    """Return whether dtypes and all their classes are equal (numpy's == ignores class and alignment)."""
    if a != b or type(a) is not type(b) or a.type is not b.type or a.isalignedstruct != b.isalignedstruct:
        return False
    if a.names is None or a.fields is None or b.fields is None:
        return True
    return all(_is_same(a.fields[name][0], b.fields[name][0]) for name in a.names)


def _no_dtype(dtype: DType) -> Problem:
    why = "metadata" if dtype.metadata is not None else f"the class {type(dtype).__name__}"
    what = f"has the dtype {dtype!r} with {why}, which could not be restored exactly"
    return unsupported(what, "convert it with .astype(…) to a dtype of numpy's own")


# --- arrays ---


def memory_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, not copied."""
    if not array.nbytes:
        return memoryview(bytearray())
    flat = array if array.flags.c_contiguous else array.T
    return memoryview(flat.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _save_array(array: Array, ctx: EncodeContext) -> bytes:
    stored = describe(array.dtype)
    if array.dtype.hasobject:
        what = f"has the dtype {array.dtype!r}: objects inside a structure"
        raise unsupported(what, "save each field as an array of its own")
    order = _order_of(array)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = np.array(array, order="C")
    return ctx.pack([stored, list(array.shape), order, ctx.place_bytes(memory_of(array))])


def _order_of(array: Array) -> str:
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _load_array(payload: bytes, ctx: DecodeContext) -> Array:
    stored, shape, order, reference, size_bytes = array_parts(ctx.unpack(payload))
    dtype = restore_dtype(stored)
    if dtype.hasobject or dtype.itemsize * math.prod(shape) != size_bytes:
        raise ValueError(f"{stored!r} has another size")
    return np.ndarray(shape, dtype, ctx.bytes_of(reference, size_bytes), order=order)


def _array_target(payload: bytes, ctx: DecodeContext, own: Array) -> tuple[int | bytes, memoryview]:
    stored, shape, order, reference, _ = array_parts(ctx.unpack(payload))
    dtype = restore_dtype(stored)
    if own.shape != shape or not _is_same(own.dtype, dtype):
        raise Problem(
            f"the target is {own.dtype} {list(own.shape)}, what was saved is {dtype} {list(shape)}",
            "give a target of that form, or load without into=",
            Validation,
        )
    fits = own.flags.c_contiguous if order == "C" else own.flags.f_contiguous
    if not fits or not own.flags.writeable:
        need = f"writable and contiguous in {order} order"
        raise Problem(f"the target array is not {need}", f"allocate it with order={order!r}", Validation)
    return reference, memory_of(own)


def _take_objects(array: Array) -> tuple[Sequence[object], Sequence[Any]]:
    order = _order_of(array)
    items = array.ravel(order=order)  # type: ignore[arg-type]
    head = (describe(array.dtype), list(array.shape), order)
    return head, [items[index] for index in range(items.size)]


def _build_objects(head: Sequence[Any], items: list[Any]) -> Array:
    stored, lengths, order = head
    shape, dtype = shape_of(lengths), restore_dtype(stored)
    if math.prod(shape) != len(items) or order not in ("C", "F") or not _is_item_wise(dtype):
        raise ValueError(f"{len(items)} items of {stored!r} do not make an array of {lengths}")
    flat: Array = np.empty(len(items), dtype)
    for index, item in enumerate(items):  # a slice assignment would unpack nested sequences
        flat[index] = item
    return flat.reshape(shape, order=order)


def _is_item_wise(dtype: DType) -> bool:
    return dtype.char == "O" or (_STRING is not None and isinstance(dtype, _STRING))


# --- scalars and dtypes as values ---


def _save_scalar(value: np.generic, ctx: EncodeContext) -> bytes:
    return ctx.pack([describe(value.dtype), ctx.place_bytes(memoryview(value.tobytes()))])


def _save_text(value: np.str_ | np.bytes_, ctx: EncodeContext) -> bytes:
    # An array would cut off trailing NULs.
    if isinstance(value, np.str_):
        return ctx.pack(["U", str.__str__(value)])
    return ctx.pack(["S", bytes(value)])


def _load_scalar(payload: bytes, ctx: DecodeContext) -> object:
    stored, data = ctx.unpack(payload)
    if stored == "U" and type(data) is str:
        return np.str_(data)
    if stored == "S" and type(data) is bytes:
        return np.bytes_(data)
    dtype = restore_dtype(stored)
    if dtype.hasobject or dtype.itemsize != dtype_size(stored):
        raise ValueError(f"{stored!r} has another size")
    return np.ndarray((), dtype, ctx.bytes_of(data, dtype.itemsize))[()]


def _load_dtype(payload: bytes, ctx: DecodeContext) -> DType:
    (stored,) = ctx.unpack(payload)
    return restore_dtype(stored)


_ARRAY = Leaf(Tag.NDARRAY, "ndarray", _save_array, _load_array, _array_target)
_OBJECTS = Structure(Tag.OBJECT_ARRAY, "ndarray of objects", Shape.ITEMS, 3, _take_objects, _build_objects)


add(_ARRAY)
add(_OBJECTS)
by_class[np.ndarray] = Choice(lambda array: _OBJECTS if _is_item_wise(array.dtype) else _ARRAY)
_SCALAR = Leaf(Tag.NUMPY_SCALAR, "numpy scalar", _save_scalar, _load_scalar)
_SCALAR_CLASSES = {np.dtype(char).type for char in np.typecodes["All"]} | {np.longlong, np.ulonglong}
add(_SCALAR, *(_SCALAR_CLASSES - {np.object_, np.str_, np.bytes_}))
add(Leaf(Tag.NUMPY_SCALAR, "numpy scalar", _save_text, _load_scalar), np.str_, np.bytes_)
_DTYPE_CLASSES = {getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")}
add(Leaf(Tag.NUMPY_DTYPE, "dtype", lambda dtype, ctx: ctx.pack([describe(dtype)]), _load_dtype), *_DTYPE_CLASSES)
