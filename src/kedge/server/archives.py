"""The arrays of a state as one file that others read: .npz (numpy) and .safetensors. Made as it is sent."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence

from kedge.codec import BufferSummary
from kedge.diff.npy import npy_header
from kedge.diff.outline import StoredState, children, inside
from kedge.errors import NotFound, Validation
from kedge.integrations.safetensors import dtype_name, packed_header
from kedge.ports import Buffer

_ARRAYS = ("ndarray", "tensor", "jax array")


def arrays_in(state: StoredState, path: str) -> list[tuple[str, BufferSummary]]:
    """Every array at a path and below it, by the path to it; NotFound where there is none."""
    arrays: list[tuple[str, BufferSummary]] = []
    waiting = [(path.strip("/") or "state", inside(state.outline, path))]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, BufferSummary) and value.kind in _ARRAYS:
            arrays.append((name.removeprefix("state/"), value))
        else:
            waiting += [(f"{name}/{key}", child) for key, child in reversed(list(children(value)))]
    if not arrays:
        raise NotFound("there is no array", hint="download it as JSON")
    return arrays


class _Sink:
    """A file that keeps only what was not taken yet."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def npz(state: StoredState, arrays: Sequence[tuple[str, BufferSummary]]) -> Iterator[Buffer]:
    """numpy.load reads it; keys are the paths. Validation, before anything, for an array that .npy has no words for."""
    headers = [npy_header(summary) for _, summary in arrays]
    for (name, summary), header in zip(arrays, headers, strict=True):
        if header is None:
            raise Validation(f"{name} is a {summary.dtype} {summary.kind}, which .npz cannot hold")

    def pieces() -> Iterator[Buffer]:
        sink = _Sink()
        try:
            with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for (name, summary), header in zip(arrays, headers, strict=True):
                    info = zipfile.ZipInfo(f"{name}.npy")
                    with archive.open(info, "w", force_zip64=True) as file:
                        file.write(header or b"")
                        for piece in state.pieces_of(summary):
                            file.write(piece)
                            yield sink.take()
            yield sink.take()
        finally:
            sink.take()  # a file that nobody reads to its end: ZipFile is in a cycle, and would keep what is left

    return pieces()


def safetensors(state: StoredState, arrays: Sequence[tuple[str, BufferSummary]]) -> tuple[Iterator[Buffer], int]:
    """The file, and how long it is."""
    head: dict[str, object] = {}
    offset = 0
    for name, summary in arrays:
        dtype = dtype_name(summary.dtype)
        if dtype is None or (summary.order == "F" and len(summary.shape) > 1 and math.prod(summary.shape) > 1):
            raise Validation(
                f"{name} is a {summary.dtype} {summary.kind}, which .safetensors cannot hold",
                hint="download it as .npz",
            )
        end = offset + summary.size_bytes
        head[name] = {"dtype": dtype, "shape": list(summary.shape), "data_offsets": [offset, end]}
        offset = end
    first = packed_header(head)

    def pieces() -> Iterator[Buffer]:
        yield first
        for _, summary in arrays:
            yield from state.pieces_of(summary)

    return pieces(), len(first) + offset
