"""Writing arrays as .npy files without numpy (format: numpy.lib.format)."""

from __future__ import annotations

import struct
from typing import Any

from kedge.codec import BufferSummary
from kedge.codec.summaries import dtype_size

from .outline import ArraySummary

_TENSOR_DTYPES = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4",
    "int64": "<i8", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip


def npy_header(summary: BufferSummary) -> bytes | None:
    """What stands before the bytes of an array in a .npy file; None where that format has no words for it."""
    if isinstance(summary, ArraySummary):
        try:
            descr = _descr(summary.stored_dtype)
        except ValueError:
            return None
    elif summary.kind == "tensor" and summary.dtype in _TENSOR_DTYPES:
        descr = _TENSOR_DTYPES[summary.dtype]
    else:
        return None
    text = f"{{'descr': {descr!r}, 'fortran_order': {summary.order == 'F'}, 'shape': {summary.shape!r}, }}"
    encoded = text.encode()
    version, prefix = (1, "<H") if text.isascii() and len(encoded) < 60_000 else (3, "<I")
    head = 8 + struct.calcsize(prefix)
    fill = -(head + len(encoded) + 1) % 64
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack(prefix, len(encoded) + fill + 1)
        + encoded
        + b" " * fill
        + b"\n"
    )


def _descr(dtype: Any) -> object:
    """A stored dtype in the words of .npy headers."""
    if isinstance(dtype, str):
        return dtype.replace("q", "i8").replace("Q", "u8")
    if "fields" not in dtype:
        raise ValueError("no plain array")
    described: list[object] = []
    position = 0
    for name, title, offset, inner in sorted(dtype["fields"], key=lambda field: field[2]):
        if offset < position:
            raise ValueError("fields overlap")
        if offset > position:
            described.append(("", f"|V{offset - position}"))
        label = name if title is None else (title, name)
        if isinstance(inner, dict) and "base" in inner:
            described.append((label, _descr(inner["base"]), tuple(inner["shape"])))
        else:
            described.append((label, _descr(inner)))
        position = offset + dtype_size(inner)
    if dtype["itemsize"] > position:
        described.append(("", f"|V{dtype['itemsize'] - position}"))
    return described


_FORMATS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
            "q": "q", "Q": "Q", "f2": "e", "f4": "f", "f8": "d"}  # fmt: skip


def values_of(summary: BufferSummary, most: int) -> list[object] | None:
    """The numbers of a small array that lies in the tree itself; None for larger ones and for other types."""
    dtype = _TENSOR_DTYPES.get(summary.dtype, summary.dtype)
    letter = _FORMATS.get(dtype[1:])
    if letter is None or summary.ordinals or summary.kind not in ("ndarray", "tensor", "numpy scalar"):
        return None
    order = ">" if dtype[0] == ">" else "<"
    count = len(summary.data) // struct.calcsize(order + letter)
    return list(struct.unpack(f"{order}{count}{letter}", summary.data)) if count <= most else None
