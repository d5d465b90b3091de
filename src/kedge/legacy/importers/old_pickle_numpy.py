"""numpy's arrays and scalars in an old pickle, rebuilt from what it says about them.

A pickle calls numpy's own functions, and hands `dtype.__setstate__` whatever it likes: sizes of no type, objects where
bytes lie. Here its words are only taken down. The dtype is one that the codec's grammar knows, the bytes are as
many as it takes, and numpy sees both after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kedge.codec.summaries import shape_of

_ALIGNED = 0x80  # numpy's flag of a structure
_UNORDERED = ("b1", "i1", "u1")


class Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, text: object = "", align: object = False, copy: object = True) -> None:
        self._text = text.decode("ascii") if isinstance(text, bytes) else text
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or not 8 <= len(state) <= 9:
            raise ValueError("a dtype of an unknown form")
        self._state = state

    def describe(self) -> Any:
        """In the codec's grammar."""
        if not isinstance(self._text, str):
            raise ValueError("a dtype without a name")
        if not self._state:
            return self._simple("|", ())
        _, order, inner, names, fields, itemsize, _, flags, *more = self._state
        if inner is not None:
            base, shape = inner
            return {"base": _dtype(base).describe(), "shape": list(shape) if isinstance(shape, tuple) else [shape]}
        if names is not None:
            return {
                "fields": [_field(name, fields[name]) for name in names],
                "itemsize": itemsize,
                "aligned": bool(flags & _ALIGNED),
            }
        return self._simple(order, more[0] if more else ())

    def _simple(self, order: str, more: Any) -> str:
        text = str(self._text)
        if text[:1] == "O":
            return "O"
        unit = ""
        if text[:1] in "mM" and more:
            name, count, *_ = more[1]
            name = name.decode("ascii") if isinstance(name, bytes) else name
            unit = "" if name == "generic" else f"[{'' if count == 1 else count}{name}]"
        if text[:1] not in "biufcSUVmM" or not text[1:].isdigit():
            raise ValueError(f"the dtype {text[:40]!r}")
        is_unordered = text in _UNORDERED or text[0] in "SV"
        return ("|" if is_unordered else order if order in ("<", ">") else "<") + text + unit

    def real(self) -> Any:
        from kedge.codec.numpy_types import restore_dtype

        return restore_dtype(self.describe())


class Array:
    """Stands for numpy.ndarray: `real` is made once the whole pickle is read."""

    def __init__(self) -> None:
        self._parts: tuple[Any, object, bool, object] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise ValueError("an array of an unknown form")
        shape, dtype, is_fortran, data = state[-4:]
        self._parts = shape, dtype, bool(is_fortran), data

    def real(self, plain: Callable[[object], object]) -> Any:
        """`plain` gives what stands for an item of an array of objects."""
        if self._parts is None:
            raise ValueError("an array without content")
        shape, dtype, is_fortran, data = self._parts
        lengths = shape_of(list(shape) if isinstance(shape, tuple) else shape)
        content = [plain(item) for item in data] if isinstance(data, list) else data
        return _filled(_dtype(dtype).real(), lengths, "F" if is_fortran else "C", content)

    @staticmethod
    def reconstruct(kind: object, shape: object, code: object) -> Array:
        """Stands for numpy.core.multiarray._reconstruct."""
        if kind is not Array:
            raise ValueError("an array of another class")
        return Array()

    @staticmethod
    def from_buffer(data: object, dtype: object, shape: object, order: object) -> Array:
        """Stands for numpy.core.numeric._frombuffer."""
        array = Array()
        array._parts = shape, dtype, order == "F", data
        return array


class MaskedArray:
    """Stands for numpy.ma.MaskedArray, which is kept as its parts."""

    def __init__(self) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 7:
            raise ValueError("a masked array of an unknown form")
        self._state = state

    def parts(self) -> dict[str, Any]:
        import numpy as np

        if not self._state:
            raise ValueError("a masked array without content")
        _, shape, dtype, is_fortran, data, mask, fill_value = self._state
        order = "F" if is_fortran else "C"
        lengths, content = shape_of(list(shape)), _dtype(dtype).real()
        of_mask = np.dtype(np.ma.make_mask_descr(content))
        return {
            "data": _filled(content, lengths, order, data),
            "mask": _filled(of_mask, lengths, order, mask),
            "fill_value": fill_value,
        }

    @staticmethod
    def reconstruct(kind: object, base: object, shape: object, dtype: object) -> MaskedArray:
        """Stands for numpy.ma.core._mareconstruct."""
        return MaskedArray()


def scalar(dtype: object, data: object = None) -> Any:
    """Stands for numpy.core.multiarray.scalar."""
    real = _dtype(dtype).real()
    if real.char == "O":
        return data
    return _filled(real, (1,), "C", data if data is not None else bytes(real.itemsize))[0]


NAMES: dict[str, Callable[..., object]] = {
    "_reconstruct": Array.reconstruct,
    "scalar": scalar,
    "_frombuffer": Array.from_buffer,
    "ndarray": Array,
    "dtype": Dtype,
}


def _filled(dtype: Any, shape: tuple[int, ...], order: Any, data: object) -> Any:
    import numpy as np

    count = math.prod(shape)
    if dtype.char == "O":
        if not isinstance(data, list) or len(data) != count:
            raise ValueError("an array of objects that are not there")
        flat = np.empty(count, object)
        for n, item in enumerate(data):
            flat[n] = item
        return flat.reshape(shape, order=order)
    if dtype.hasobject or not isinstance(data, bytes | bytearray | str):
        raise ValueError("an array whose content is no bytes")
    content = data.encode("latin-1") if isinstance(data, str) else bytes(data)  # Python 2 wrote text
    if len(content) != count * dtype.itemsize:
        raise ValueError(f"an array of {len(content):,} bytes where {count * dtype.itemsize:,} belong")
    if not content:
        return np.zeros(shape, dtype, order=order)
    return np.frombuffer(content, dtype).reshape(shape, order=order).copy(order=order)


def _dtype(value: object) -> Dtype:
    if not isinstance(value, Dtype):
        raise ValueError("an array whose dtype is none")
    return value


def _field(name: object, field: Any) -> list[object]:
    inner, offset, *title = field
    return [name, title[0] if title else None, offset, _dtype(inner).describe()]
