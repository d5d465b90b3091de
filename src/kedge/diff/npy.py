"""Writing arrays as .npy files without numpy (format: numpy.lib.format)."""

from __future__ import annotations

import struct
from typing import Any

from kedge.codec import BufferSummary
from kedge.codec.summaries import NUMPY_DTYPES, dtype_size

from .outline import ArraySummary


def npy_header(summary: BufferSummary) -> bytes | None:
    """Return the header of an array in a .npy file; None if that format cannot describe it."""
    if isinstance(summary, ArraySummary):
        try:
            descr = _descr(summary.stored_dtype)
        except ValueError:
            return None
    elif summary.kind == "tensor" and summary.dtype in NUMPY_DTYPES:
        descr = NUMPY_DTYPES[summary.dtype]
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
    """Return a stored dtype as described in .npy headers."""
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
