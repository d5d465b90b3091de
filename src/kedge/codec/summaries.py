"""The outline of arrays, tables and registered types, without their libraries and classes.

This is also the grammar of stored dtypes, checked here before numpy sees one: numpy's own parser would accept an "O",
and with it memory full of pointers, from a hostile tree.

    dtype   "<f4"  "|b1"  ">U12"  "<M8[25s]"  "<q" (C's long long)  "O" (items are in the tree)
            {"base": dtype, "shape": [length…]}
            {"fields": [[name, title or nil, offset, dtype], …], "itemsize": n, "aligned": bool}
            {"string": coerce}                                 numpy's StringDType, items are in the tree
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .kinds import BufferSummary, DecodeContext, Tag, TypeSummary, leaf_outlines, structure_outlines
from .plain import buffer_fields, distinct

_DTYPE = re.compile(
    r"[<>|](?:(b)1|([iu])([1248])|([qQ])|(f)(2|4|8|12|16)|(c)(8|16|24|32)|([SUV])(\d{1,9})"
    r"|([mM])8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|μs|ns|ps|fs|as)\])?)"
)


def dtype_size(dtype: object) -> int:
    """Return the bytes per element of a stored dtype with a memory layout. Raises ValueError for anything else."""
    if isinstance(dtype, str) and (match := _DTYPE.fullmatch(dtype)):
        kind, *size = [part for part in match.groups() if part is not None]
        if kind in "qQmM":
            return 8
        return int(size[0]) * (4 if kind == "U" else 1) if size else 1
    if isinstance(dtype, dict):
        if dtype.keys() == {"base", "shape"}:
            return dtype_size(dtype["base"]) * math.prod(shape_of(dtype["shape"]))
        if dtype.keys() == {"fields", "itemsize", "aligned"}:
            for _name, _title, _offset, inner in dtype["fields"]:
                dtype_size(inner)
            return shape_of([dtype["itemsize"]])[0]
    raise ValueError(f"{dtype!r} is not a dtype")


def dtype_text(dtype: Any) -> str:
    """Return a dtype as text for people."""
    if isinstance(dtype, str):
        return {"O": "object"}.get(dtype, dtype)
    if "base" in dtype:
        return f"{dtype_text(dtype['base'])}{dtype['shape']}"
    if "string" in dtype:
        return "string"
    return "{" + ", ".join(f"{name}: {dtype_text(inner)}" for name, _, _, inner in dtype["fields"]) + "}"


# The dtypes of torch and jax that numpy has too, by their names there.
NUMPY_DTYPES = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4",
    "int64": "<i8", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
_NUMBERS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
            "q": "q", "Q": "Q", "f2": "e", "f4": "f", "f8": "d"}  # fmt: skip


def numbers_of(summary: BufferSummary, most: int) -> list[int | float] | None:
    """Return the numbers of a small array whose bytes are in the tree; None for larger ones and other types."""
    dtype = NUMPY_DTYPES.get(summary.dtype, summary.dtype)
    code = _NUMBERS.get(dtype[1:])
    if code is None or summary.ordinals or summary.kind not in ("ndarray", "tensor", "numpy scalar", "jax array"):
        return None
    order = ">" if dtype[0] == ">" else "<"
    count, rest = divmod(len(summary.data), struct.calcsize(order + code))
    return list(struct.unpack(f"{order}{count}{code}", summary.data)) if count <= most and not rest else None


def shape_of(lengths: object) -> tuple[int, ...]:
    """Return a stored shape. Raises ValueError if it is not one."""
    if type(lengths) is not list or any(type(length) is not int or length < 0 for length in lengths):
        raise ValueError(f"{lengths!r} is not a shape")
    return tuple(lengths)


def array_parts(values: Any) -> tuple[Any, tuple[int, ...], Literal["C", "F"], Any, int]:
    """Return dtype, shape, order, reference and size of a stored array, checked against each other."""
    dtype, lengths, order, reference = values
    shape = shape_of(lengths)
    if order not in ("C", "F"):
        raise ValueError(f"{order!r} is not an order")
    return dtype, shape, order, reference, dtype_size(dtype) * math.prod(shape)


def _array(payload: bytes, ctx: DecodeContext) -> BufferSummary:
    dtype, shape, order, reference, size_bytes = array_parts(ctx.unpack(payload))
    return BufferSummary("ndarray", dtype_text(dtype), shape, size_bytes, order=order, **buffer_fields(reference))


def _object_array(head: Sequence[Any], items: list[Any]) -> TypeSummary:
    dtype, lengths, _ = head
    return TypeSummary("numpy.ndarray", 1, {"dtype": dtype_text(dtype), "shape": shape_of(lengths), "items": items})


def _scalar(payload: bytes, ctx: DecodeContext) -> BufferSummary | TypeSummary:
    dtype, data = ctx.unpack(payload)
    if dtype in ("U", "S"):
        return TypeSummary("numpy.str_" if dtype == "U" else "numpy.bytes_", 1, {"value": data})
    size_bytes = dtype_size(dtype)
    return BufferSummary("numpy scalar", dtype_text(dtype), (), size_bytes, **buffer_fields(data))


# Bytes per element of the torch dtypes that can be saved, by torch's names.
TORCH_DTYPES = {
    "bool": 1,
    **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
SPARSE_LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A stored tensor, its parts checked against each other."""

    cls: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    reference: Any
    memory_bytes: int
    stride: tuple[int, ...] | None = None  # of a tensor that shares memory with others, from offset_bytes on
    offset_bytes: int = 0


def tensor_parts(values: Any) -> TensorParts:
    cls, dtype, lengths, requires_grad, reference, *view = values
    if cls not in ("Tensor", "Parameter") or dtype not in TORCH_DTYPES or type(requires_grad) is not bool:
        raise ValueError(f"{cls!r} of {dtype!r} is not a tensor")
    shape, itemsize = shape_of(lengths), TORCH_DTYPES[dtype]
    if not view:
        return TensorParts(cls, dtype, shape, requires_grad, reference, itemsize * math.prod(shape))
    strides, offset_bytes, memory_bytes = view
    stride = shape_of(strides)
    shape_of([offset_bytes, memory_bytes])
    reach = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) + 1
    if 0 in shape or offset_bytes % itemsize or offset_bytes + reach * itemsize > memory_bytes:
        raise ValueError("the tensor is not inside its memory")
    return TensorParts(cls, dtype, shape, requires_grad, reference, memory_bytes, stride, offset_bytes)


def _tensor(payload: bytes, ctx: DecodeContext) -> BufferSummary | TypeSummary:
    parts = tensor_parts(ctx.unpack(payload))
    where = buffer_fields(parts.reference)
    if parts.stride is None:
        return BufferSummary("tensor", parts.dtype, parts.shape, parts.memory_bytes, **where)
    memory = BufferSummary("bytes", "uint8", (parts.memory_bytes,), parts.memory_bytes, **where)
    about = {"dtype": parts.dtype, "shape": parts.shape, "stride": parts.stride, "offset_bytes": parts.offset_bytes}
    return TypeSummary(f"torch.{parts.cls}", 1, {**about, "memory": memory})


def _sparse_tensor(payload: bytes, ctx: DecodeContext) -> TypeSummary:
    layout, lengths, _, *parts = ctx.unpack(payload)
    names = ("indices", "values", "is_coalesced") if layout == "sparse_coo" else ("compressed", "plain", "values")
    return TypeSummary(f"torch.{layout}", 1, {"shape": shape_of(lengths), **dict(zip(names, parts, strict=True))})


def _torch_value(payload: bytes, ctx: DecodeContext) -> TypeSummary:
    cls, value = ctx.unpack(payload)
    return TypeSummary(f"torch.{cls}", 1, {"value": value})


# Bytes per element of jax's dtypes, by jax's names.
JAX_DTYPES = {
    **{name: size for name, size in TORCH_DTYPES.items() if not name.startswith(("float8", "float4", "complex32"))},
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"), 1),
}


def jax_parts(values: Any) -> tuple[str, tuple[int, ...], str, Any, int]:
    """Return dtype, shape, kind of random key or "", reference and size of a jax array."""
    dtype, lengths, kind, reference = values
    if dtype not in JAX_DTYPES or type(kind) is not str:
        raise ValueError(f"{dtype!r} is not a dtype of jax")
    shape = shape_of(lengths)
    return dtype, shape, kind, reference, JAX_DTYPES[dtype] * math.prod(shape)


def _jax(payload: bytes, ctx: DecodeContext) -> BufferSummary:
    dtype, shape, kind, reference, size_bytes = jax_parts(ctx.unpack(payload))
    return BufferSummary("jax key" if kind else "jax array", dtype, shape, size_bytes, **buffer_fields(reference))


def table_parts(values: Any) -> tuple[str, dict[str, Any], int, Any]:
    """Return class, further facts, size and reference of a table stored as Arrow IPC."""
    cls, about, size_bytes, reference = values
    if type(cls) is not str or type(about) is not dict:
        raise ValueError("not a table")
    return cls, about, shape_of([size_bytes])[0], reference


def _table(package: str) -> Any:
    def outline(payload: bytes, ctx: DecodeContext) -> BufferSummary:
        cls, about, size_bytes, reference = table_parts(ctx.unpack(payload))
        columns, shape = about.get("columns"), shape_of(about.get("shape"))
        return BufferSummary(f"{package}.{cls}", str(columns), shape, size_bytes, **buffer_fields(reference))

    return outline


def _pandas_scalar(payload: bytes, ctx: DecodeContext) -> TypeSummary:
    cls, *values = ctx.unpack(payload)
    return TypeSummary(f"pandas.{cls}", 1, {"value": values})


def _fields(head: Sequence[Any], pairs: list[Any]) -> TypeSummary:
    name, version, _more = head
    return _summary(name, version, distinct(pairs))


def _value(head: Sequence[Any], items: list[Any]) -> TypeSummary:
    name, version, value = head
    return _summary(name, version, {"value": value})


def _summary(name: object, version: object, fields: dict[str, Any]) -> TypeSummary:
    if type(name) is not str or type(version) is not int:
        raise ValueError("no name and version")
    return TypeSummary(name, version, fields)


leaf_outlines |= {
    Tag.NDARRAY: _array,
    Tag.NUMPY_SCALAR: _scalar,
    Tag.NUMPY_DTYPE: lambda payload, ctx: TypeSummary("numpy.dtype", 1, {"value": dtype_text(ctx.unpack(payload)[0])}),
    Tag.TENSOR: _tensor,
    Tag.JAX: _jax,
    Tag.SPARSE_TENSOR: _sparse_tensor,
    Tag.TORCH_VALUE: _torch_value,
    Tag.PANDAS_SCALAR: _pandas_scalar,
    Tag.POLARS: _table("polars"),
    Tag.ARROW: _table("pyarrow"),
}
structure_outlines |= {
    Tag.OBJECT_ARRAY: _object_array,
    Tag.PANDAS: lambda head, pairs: TypeSummary(f"pandas.{head[0]}", 1, distinct(pairs)),
    Tag.FIELDS: _fields,
    Tag.VALUE: _value,
}
