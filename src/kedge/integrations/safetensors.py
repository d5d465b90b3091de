"""safetensors files out of checkpoints and into them, without the package of that name (docs/tensors.md).

    file    8 bytes: length of the header, little-endian · header, JSON · tensors, one behind the other
    header  {name: {"dtype": "F32", "shape": […], "data_offsets": [begin, end]}, …, "__metadata__": {name: text}}

Names are paths in the state, joined by dots. What is no tensor stands in the header's metadata under "kedge", as
the JSON that `kedge export` writes, so that nothing of a state is lost on the way.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.json_view import to_json_view
from kedge.codec.summaries import NUMPY_DTYPES, TORCH_DTYPES
from kedge.diff.outline import StoredState, children, open_state, with_content
from kedge.errors import Corrupted, UnsupportedType, Validation, storage_errors
from kedge.manager import CheckpointManager

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_OTHER_BYTES = 1 << 20  # of byte strings beside the tensors
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
_DTYPES = {text: name for name, text in _NAMES.items()}
_FROM_NUMPY = {text: name for name, text in NUMPY_DTYPES.items()} | {"<q": "int64", "<Q": "uint64"}
_AS_DIRECTORY = "export it to a directory: kedge export ID DIR"


def write_file(manager: CheckpointManager, checkpoint_id: str, file: BinaryIO) -> int:
    """Write the tensors and arrays of a checkpoint, each verified, one in memory at a time; return their number."""
    state = open_state(manager.store, checkpoint_id)
    tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    places: dict[int, str] = {}
    for name, summary in _tensors(state.outline, ""):
        dtype, shape = _form(name, summary)
        if name in tensors or name == "__metadata__":
            raise Validation(f"two tensors would be called {name}", hint=_AS_DIRECTORY)
        tensors[name] = dtype, shape, summary
        places[id(summary)] = name
    header: dict[str, object] = {"__metadata__": {"format": "pt", "kedge": _rest(state, places)}}
    end = 0
    for name, (dtype, shape, _) in tensors.items():
        begin, end = end, end + TORCH_DTYPES[dtype] * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    head = packed_header(header)
    if len(head) > _MOST_HEADER_BYTES:
        raise Validation("its names and values do not fit into the header of a safetensors file", hint=_AS_DIRECTORY)
    file.write(head)
    for name, (dtype, _, summary) in tensors.items():
        file.write(_bytes(state, summary, name, TORCH_DTYPES[dtype]))
    return len(tensors)


def dtype_name(dtype: str) -> str | None:
    """The name in safetensors files of a dtype of numpy, torch or jax; None if they lack it."""
    return _NAMES.get(_FROM_NUMPY.get(dtype, dtype))


def packed_header(header: Mapping[str, object]) -> bytes:
    """The header with its length, padded so that the tensors begin at a multiple of 8."""
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_file(path: str | os.PathLike[str]) -> dict[str, object]:
    """{name: tensor}: torch's where torch is installed, else numpy's; the file's own memory, private to the reader."""
    with storage_errors("read", path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise _damaged(path, "it has less than 8 bytes")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view = memoryview(memory)
    length = int.from_bytes(view[:8], "little")
    if length > min(_MOST_HEADER_BYTES, size - 8):
        raise _damaged(path, "its header is longer than the file")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        entries = sorted(_entries(header), key=lambda entry: entry[3])
    except UnsupportedType:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is damaged: {error}") from error
    data, at = view[8 + length :], 0
    state: dict[str, Any] = {}
    for name, dtype, shape, begin, end in entries:
        if begin != at or end > len(data) or end - begin != TORCH_DTYPES[dtype] * math.prod(shape):
            raise _damaged(path, f"the place of {name!r} is wrong")
        state[name] = _made(data[begin:end], dtype, shape, name)
        at = end
    if at != len(data):
        raise _damaged(path, "bytes follow its last tensor")
    return {name: state[name] for name in header if name in state}


def _entries(header: Any) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
            raise ValueError(f"{name!r} has no shape and place")
        if entry["dtype"] not in _DTYPES:
            raise UnsupportedType(f"{name!r} has the dtype {entry['dtype']}", hint="convert it before", path=name)
        yield name, _DTYPES[entry["dtype"]], shape, begin, end


def _made(data: memoryview, dtype: str, shape: tuple[int, ...], name: str) -> Any:
    try:
        import torch
    except ImportError:
        pass
    else:
        if not len(data):
            return torch.empty(shape, dtype=getattr(torch, dtype))
        # A tensor may begin anywhere in a file, an element only where its size allows.
        memory = data if 8 % TORCH_DTYPES[dtype] == 0 else memoryview(bytearray(data))
        return torch.frombuffer(memory, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    try:
        import numpy as np

        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    except (ImportError, TypeError) as error:
        text = f"{name} is {dtype}, for which torch is needed"
        raise UnsupportedType(text, hint="pip install torch", path=name) from error


def _tensors(value: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BufferSummary):
        if value.kind in ("tensor", "ndarray"):
            yield path or "tensor", value
        return
    if isinstance(value, TypeSummary) and isinstance(value.fields.get("memory"), BufferSummary):
        yield path or "tensor", value
        return
    for name, child in children(value):
        yield from _tensors(child, f"{path}.{name}" if path else name)


def _form(name: str, summary: BufferSummary | TypeSummary) -> tuple[str, tuple[int, ...]]:
    if isinstance(summary, TypeSummary):
        dtype, shape = str(summary.fields["dtype"]), summary.fields["shape"]
    else:
        dtype, shape = _FROM_NUMPY.get(summary.dtype, summary.dtype), summary.shape
    if dtype not in _NAMES:
        raise UnsupportedType(f"{name} has the dtype {dtype}, which safetensors lacks", hint=_AS_DIRECTORY, path=name)
    assert isinstance(shape, tuple)
    return dtype, shape


def _bytes(state: StoredState, summary: BufferSummary | TypeSummary, name: str, itemsize: int) -> bytes | memoryview:
    if isinstance(summary, BufferSummary):
        data = state.bytes_of(summary)
        if summary.order == "F":
            return _rearranged(data, summary.shape[::-1], None, 0, itemsize)
        return data
    fields: Mapping[str, Any] = summary.fields
    data = state.bytes_of(fields["memory"])
    return _rearranged(data, fields["shape"], fields["stride"], fields["offset_bytes"], itemsize)


def _rearranged(
    data: bytes | memoryview, shape: tuple[int, ...], stride: tuple[int, ...] | None, offset: int, itemsize: int
) -> bytes:
    """The elements in the order of rows: of columns (no stride), or of a view of memory that is shared."""
    try:
        import numpy as np
    except ImportError as error:
        raise Validation("tensors that share memory are written apart by numpy", hint="pip install numpy") from error
    element = np.dtype((np.void, itemsize))
    if stride is None:
        return np.ndarray(shape, element, data).T.tobytes()
    return np.ndarray(shape, element, data, offset, [step * itemsize for step in stride]).tobytes()


def _rest(state: StoredState, places: Mapping[int, str]) -> str:
    """The state as JSON, with names in place of tensors."""
    other = with_content(state, _MOST_OTHER_BYTES, hint=_AS_DIRECTORY)

    def fields_of(summary: BufferSummary) -> Mapping[str, object]:
        name = places.get(id(summary))
        return other(summary) if name is None else {"tensor": name}

    def marked(value: object) -> object:
        """Tensors that share memory as themselves, not as that memory."""
        if isinstance(value, TypeSummary) and id(value) in places:
            return TypeSummary(value.name, value.version, {"tensor": places[id(value)]})
        if isinstance(value, Mapping):
            return {key: marked(child) for key, child in value.items()}
        return [marked(child) for child in value] if isinstance(value, list) else value

    checkpoint = state.checkpoint
    about = {"checkpoint": checkpoint.id, "job": checkpoint.job, "step": checkpoint.step}
    return json.dumps({**about, "state": to_json_view(marked(state.outline), fields_of=fields_of)})


def _damaged(path: str | os.PathLike[str], why: str) -> Corrupted:
    return Corrupted(f"{Path(path).name} is no safetensors file: {why}", hint="get it again from where it came from")
