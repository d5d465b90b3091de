"""The memory of tensors as bytes: main memory directly, an accelerator's through page-locked buffers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kedge.chunks import CHUNK_BYTES, TASK_BYTES, Deferred
from kedge.errors import Validation

# Each piece must be a task of its own, because the next one a thread reads reuses the buffer.
assert 4 * CHUNK_BYTES >= TASK_BYTES
REACHABLE = frozenset({"cpu", "cuda", "xpu", "mps"})  # a "meta" tensor has no bytes


def bytes_of(tensor: Any) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, not copied. Works without numpy, for every dtype."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(bytearray())
    memory = (ctypes.c_uint8 * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # keeps it alive as long as the view
    return memoryview(memory).cast("B")


def flat(storage: Any, start: int, stop: int) -> object:
    """Return a range of a storage as a tensor of bytes over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (stop - start,), (1,))


def is_remote(tensor: Any) -> bool:
    """Return whether the processor cannot reach the tensor's memory."""
    return bool(tensor.device.type != "cpu")


def allocate(size_bytes: int, device: Any) -> object:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{device} has no {size_bytes:,} bytes left for a tensor: {error}") from error


def parse_device(device: object) -> str:
    """Return the name of a device that tensors can be loaded onto. Raises Validation for any other."""
    try:
        name = str(torch.device(device))
        torch.empty(0, device=name)
    except (RuntimeError, TypeError, AssertionError) as error:
        text = str(error).partition("\n")[0]
        raise Validation(f"device={device!r} cannot be used: {text}", hint='use "cpu", "cuda" or "cuda:1"') from error
    if name.partition(":")[0] not in REACHABLE:
        raise Validation(f"device={device!r} holds no bytes", hint='use "cpu", "cuda" or "cuda:1"')
    return name


def _stream_of(tensor: Any) -> torch.cuda.Stream | None:
    """Return the stream on which this thread's work with the tensor is queued; None where there are no streams."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class _Staging(threading.local):
    """One buffer per thread that the accelerator can copy from and to directly, created once."""

    def __init__(self) -> None:
        self.tensor = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.view = bytes_of(self.tensor)


_staging = _Staging()


class TensorMemory:
    """`chunks.DeviceMemory`: the bytes of a contiguous tensor on an accelerator.

    Other threads copy them, on streams of their own. Each copy waits for what was queued on the stream of the thread
    that made this object: the tensor may still be computed there, or its memory still be read.
    """

    def __init__(self, tensor: Any, queued: torch.cuda.Event | None = None) -> None:
        """`queued`: an event that is waited for instead of what the current stream has queued."""
        self.tensor = tensor.detach().reshape(-1).view(torch.uint8)
        self.size_bytes: int = self.tensor.numel()
        stream = _stream_of(self.tensor)
        self._queued = queued if queued is not None or stream is None else stream.record_event()

    def part(self, start: int, stop: int) -> TensorMemory:
        return TensorMemory(self.tensor[start:stop], self._queued)

    def pieces(self) -> Iterator[Deferred]:
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, self.size_bytes)
            yield Deferred(stop - start, partial(self._read, start, stop))

    def _read(self, start: int, stop: int) -> memoryview:
        self._wait_for_queued()
        _staging.tensor[: stop - start].copy_(self.tensor[start:stop])
        return _staging.view[: stop - start]

    def staging(self) -> memoryview:
        if self.size_bytes > CHUNK_BYTES:
            return memoryview(bytearray(self.size_bytes))
        return _staging.view[: self.size_bytes]

    def take(self, data: memoryview) -> None:
        if self.size_bytes:
            self._wait_for_queued()
            self.tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def copy_to(self, target: memoryview) -> None:
        self._wait_for_queued()
        torch.frombuffer(target, dtype=torch.uint8).copy_(self.tensor, non_blocking=True)

    def wait(self) -> None:
        if (stream := _stream_of(self.tensor)) is not None:
            stream.synchronize()

    def _wait_for_queued(self) -> None:
        if self._queued is not None and (stream := _stream_of(self.tensor)) is not None:
            stream.wait_event(self._queued)

    def lock(self, memory: memoryview) -> bool:
        """Pin pages, so that copies run at the full speed of the bus: 8 GiB in 0.16 s."""
        if not self.tensor.is_cuda:
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) == 0

    def unlock(self, memory: memoryview) -> None:
        torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
