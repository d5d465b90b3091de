"""Filling packs in memory and putting them into an object store, several at a time (see `objects`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kedge.errors import Unavailable
from kedge.ports import Buffer

from .pack_file import check_writer, header

if TYPE_CHECKING:
    from .objects import ObjectBlobs

PACK_BYTES = 16 << 20
PUTS_AT_ONCE = 4  # per writer: with the pack being filled, this limits its memory to 80 MiB
WRITER_ID_LENGTH = 16  # characters of a pack's name that are its writer's ID
ALIGN_BYTES = 64  # appends begin at multiples of this, so that `scan` finds records


class _UnderWay:
    """A request that runs in the background. Nothing keeps its memory alive afterwards."""

    def __init__(self, blobs: ObjectBlobs, action: Callable[[], None], memory: bytearray | None = None) -> None:
        self.memory = memory  # the data it sends
        self._blobs = blobs
        self._action = action
        self._future = blobs.submit(action)

    def wait(self) -> None:
        """Wait until it is done. After Unavailable the next call waits for another attempt."""
        try:
            self._future.result()
        except Unavailable:
            self._future = self._blobs.submit(self._action)
            raise

    def is_done(self) -> bool:
        return self._future.done()

    def finish(self) -> None:
        """Wait until it has ended, in success or failure."""
        self._future.exception()


class ObjectWriter:
    """`ports.BlobWriter`. After Unavailable the same call may be repeated: nothing appended is lost."""

    def __init__(self, blobs: ObjectBlobs) -> None:
        self._pid = os.getpid()
        self._blobs = blobs
        self._id = os.urandom(WRITER_ID_LENGTH // 2).hex()
        self._lock = threading.Lock()
        self._pack = ""
        self._memory = bytearray()
        self._end = 0
        self._spare: list[bytearray] = []  # of packs that were sent: new memory costs more than copying into it
        self._registering: _UnderWay | None = None
        self._under_way: list[_UnderWay] = []
        self._sent: list[str] = []
        self._is_finished = False
        self._is_committed = False

    def append(self, data: Buffer) -> tuple[str, int]:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        with self._lock:
            self._check_open()
            self._register()
            while len(self._under_way) >= PUTS_AT_ONCE:
                self._wait()
            if self._pack and self._end + len(view) > PACK_BYTES:
                self._send()
            if not self._pack:
                self._begin(len(view))
            offset = self._write(view)
            self._write(bytes(-self._end % ALIGN_BYTES))
            return self._pack, offset

    def commit(self) -> None:
        with self._lock:
            self._check_open()
            if self._pack:
                self._send()
            while self._under_way:
                self._wait()
            if self._registering is not None:
                self._registering.wait()
            self._spare.clear()
            self._is_finished = self._is_committed = True

    def abort(self) -> None:
        with self._lock:
            is_first = not self._is_finished
            self._is_finished = True
            for request in self._under_way:
                request.finish()
            self._under_way.clear()
        if is_first:
            self._blobs.discard(self._sent)
        self.release()

    def withdraw(self, pack: str, offset: int) -> None:
        """Delete the pack, which only this writer uses."""
        self._blobs.discard([pack])
        self.release()

    def release(self) -> None:
        if self._pid == os.getpid():
            self._is_finished = True
            if self._registering is not None:
                self._registering.finish()
                self._blobs.unregister(self._id)

    def __del__(self) -> None:
        if self._registering is not None and not self._is_committed and self._pid == os.getpid():
            self._blobs.drop(self._id)

    def _register(self) -> None:
        """Register in the background: until a pack is condemned, late registration costs at most repeated work."""
        if self._registering is None or (self._registering.is_done() and self._blobs.is_due(self._id)):
            self._registering = _UnderWay(self._blobs, partial(self._blobs.register, self._id))

    def _begin(self, size_bytes: int) -> None:
        """Begin a pack with room for an append of this size; memory is used only as far as it is written."""
        self._pack = self._id + os.urandom(WRITER_ID_LENGTH // 2).hex()
        first = header(self._pack)
        room = max(PACK_BYTES, len(first) + size_bytes + ALIGN_BYTES)
        self._memory = self._spare.pop() if self._spare and room == PACK_BYTES else bytearray(room)
        self._end = 0
        self._write(first)

    def _write(self, data: Buffer) -> int:
        start, self._end = self._end, self._end + len(data)
        memoryview(self._memory)[start : self._end] = data
        return start

    def _wait(self) -> None:
        """Wait for the first put in progress."""
        self._under_way[0].wait()
        done = self._under_way.pop(0)
        if done.memory is not None and len(done.memory) == PACK_BYTES:
            self._spare.append(done.memory)

    def _send(self) -> None:
        data = memoryview(self._memory)[: self._end]
        put_it = partial(self._blobs.create, self._pack, data)
        self._under_way.append(_UnderWay(self._blobs, put_it, self._memory))
        self._sent.append(self._pack)
        self._pack, self._memory = "", bytearray()

    def _check_open(self) -> None:
        check_writer(self._pid, is_finished=self._is_finished)
