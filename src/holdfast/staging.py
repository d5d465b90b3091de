"""save_async: copy the state now, make it durable in the background, in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from .chunks import DeviceMemory, allocate
from .codec import Encoded, Source
from .ending import save_at_end
from .workers import start

T = TypeVar("T")

IN_FLIGHT = 2  # saves staged at once; a further one waits, so that memory stays bounded


class PendingSave(Future[T]):
    """The future of a save_async. An error nobody asked for comes up at the next save and at close."""

    was_seen = False

    def result(self, timeout: float | None = None) -> T:
        self.was_seen = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.was_seen = True
        return super().exception(timeout)


class Arena:
    """Memory to copy states into. For those of an accelerator its pages are locked, once."""

    def __init__(self, size: int) -> None:
        self.view = allocate(size)
        self._locked_by: DeviceMemory | None = None

    def lock(self, device: DeviceMemory) -> None:
        if self._locked_by is None and device.lock(self.view):
            self._locked_by = device.part(0, 0)

    def free(self) -> None:
        if self._locked_by is not None:
            self._locked_by.unlock(self.view)
            self._locked_by = None


class BackgroundSaves:
    """One thread that commits staged states in the order they were given."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[PendingSave[object], Callable[[], object], Arena | None] | None] = SimpleQueue()
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []
        self._failed: list[PendingSave[object]] = []
        self._pending: list[PendingSave[Any]] = []
        self._thread: threading.Thread | None = None
        _unfinished.add(self)

    def submit(self, encoded: Encoded, commit: Callable[[Encoded], T]) -> PendingSave[T]:
        """Copy the buffers of `encoded`, then `commit` the copy later. Returns once the state may be changed again."""
        self._slots.acquire()
        try:
            self._start()
            staged, arena = self._stage(encoded)
        except BaseException:
            self._slots.release()
            raise
        future: PendingSave[T] = PendingSave()
        with self._lock:
            self._pending = [known for known in self._pending if not known.done()] + [future]
        self._jobs.put((future, lambda: commit(staged), arena))  # type: ignore[arg-type]
        return future

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-save", daemon=True)
                start(thread)
                self._thread = thread

    def _stage(self, encoded: Encoded) -> tuple[Encoded, Arena | None]:
        remote = [b for b in encoded.buffers if isinstance(b, DeviceMemory)]
        total = sum(len(b) for b in encoded.buffers if isinstance(b, memoryview)) + sum(b.size_bytes for b in remote)
        if not total:
            return encoded, None
        arena = self._take(total)
        buffers: list[Source] = []
        at = 0

        def space(size: int) -> memoryview:
            nonlocal at
            at += size
            return arena.view[at - size : at]

        try:
            if remote:
                arena.lock(remote[0])
            for buffer in encoded.buffers:
                if isinstance(buffer, memoryview):
                    buffers.append(space(len(buffer)))
                elif isinstance(buffer, DeviceMemory):
                    buffers.append(space(buffer.size_bytes))
                    buffer.copy_to(buffers[-1])  # type: ignore[arg-type]
                else:
                    buffers.append(buffer)
            for own, copy in zip(encoded.buffers, buffers, strict=True):  # while the accelerator copies by itself
                if isinstance(own, memoryview):
                    copy[:] = own  # type: ignore[index]
            for buffer in remote:
                buffer.wait()
        except BaseException:
            arena.free()
            raise
        return Encoded(encoded.tree, buffers), arena

    def _take(self, size: int) -> Arena:
        """An arena of at least `size`. Kept between saves: touching fresh memory costs more than the copy."""
        with self._lock:
            fitting = [a for a in self._arenas if len(a.view) >= size]
            if fitting:
                best = min(fitting, key=lambda arena: len(arena.view))
                self._arenas.remove(best)
                return best
            self._free_arenas()
        return Arena(size)

    def _free_arenas(self) -> None:
        for arena in self._arenas:
            arena.free()
        self._arenas.clear()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, commit, arena = job
            try:
                if future.set_running_or_notify_cancel():  # from here on cancel() is refused
                    future.set_result(commit())
            except BaseException as error:  # noqa: BLE001 - handed to the caller through the future
                with self._lock:
                    self._failed.append(future)
                future.set_exception(error)
            finally:
                if arena is not None:
                    with self._lock:
                        self._arenas.append(arena)
                self._slots.release()

    def drain(self) -> None:
        """Wait until all that was given so far is committed or has failed: what comes next comes after it."""
        if self._pending and threading.current_thread() is not self._thread:
            wait(self._pending)

    def finish(self) -> None:
        """Wait for everything staged."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody has looked at yet."""
        if not self._failed:
            return
        with self._lock:
            failed, self._failed = self._failed, []
        for future in failed:
            if not future.was_seen and (error := future.exception()) is not None:
                raise error

    def close(self) -> None:
        """Wait for everything staged, then raise what failed unseen."""
        self.finish()
        self._free_arenas()
        self.raise_unseen()


_unfinished: weakref.WeakSet[BackgroundSaves] = weakref.WeakSet()


@save_at_end
def _finish_all() -> None:
    """A program that ends without close() still gets what it staged."""
    for saves in list(_unfinished):
        saves.close()
