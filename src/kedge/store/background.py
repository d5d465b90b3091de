"""save_async: copy the state now, make it durable in the background, in order."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kedge.blobs import shelter
from kedge.blobs.workers import Workers, start
from kedge.chunks import DeviceMemory, allocate, cut
from kedge.codec import Encoded, Source
from kedge.exit import save_at_end

T = TypeVar("T")

IN_FLIGHT = 2  # staged saves; a further one waits, so that memory stays bounded
COPIERS = min(8, os.cpu_count() or 1)  # a single thread cannot fill the memory bus of a machine with many cores
PIECE_BYTES = 16 << 20  # the task of one copier


class PendingSave(Future[T]):
    """The future of a save_async. The next save, or close, raises an error that nobody has asked for.

    Its lock, like that of any future, is also needed by the thread that fulfils it. So the main thread never holds it:
    a signal handler that saves may interrupt it.
    """

    was_seen = False

    def result(self, timeout: float | None = None) -> T:
        self.was_seen = True
        return shelter.wait_for(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.was_seen = True
        return shelter.wait_for(super().exception, timeout)

    def cancel(self) -> bool:
        return shelter.run(super().cancel)

    def cancelled(self) -> bool:
        return shelter.run(super().cancelled)

    def running(self) -> bool:
        return shelter.run(super().running)

    def done(self) -> bool:
        return shelter.run(super().done)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        shelter.run(super().add_done_callback, fn)


class Arena:
    """Memory to copy states into. Its pages are locked once if an accelerator's state is copied."""

    _locked_by: DeviceMemory | None = None

    def __init__(self, size: int) -> None:
        self.view = allocate(size)

    def lock(self, device: DeviceMemory) -> None:
        if self._locked_by is None:
            shelter.run(touch, self.view)  # locking missing pages would create them one at a time
            if device.lock(self.view):
                self._locked_by = device.part(0, 0)

    def free(self) -> None:
        if self._locked_by is not None:
            self._locked_by.unlock(self.view)
            self._locked_by = None

    def __del__(self) -> None:
        self.free()  # an interrupt may have dropped the arena anywhere


def touch(memory: memoryview) -> None:
    """Write to all of new memory in several threads: the kernel creates each page at the first write."""
    _at_once([partial(_clear, piece) for piece in cut(memory, PIECE_BYTES)])


def copy(source: memoryview, target: memoryview) -> list[Callable[[], None]]:
    """Copy to a target of the same size. For large sources, return the copies still to be done, for several threads."""
    if source.readonly or len(source) <= PIECE_BYTES:  # ctypes takes only the address of writable memory
        target[:] = source
        return []
    return [partial(_move, *pair) for pair in zip(cut(source, PIECE_BYTES), cut(target, PIECE_BYTES), strict=True)]


def _clear(memory: memoryview) -> None:
    ctypes.memset(_address(memory), 0, len(memory))


def _move(source: memoryview, target: memoryview) -> None:
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(memory: memoryview) -> Any:
    """Return an address for a C function that releases the GIL; it keeps the memory alive."""
    return ctypes.byref(ctypes.c_char.from_buffer(memory))


def _at_once(tasks: Sequence[Callable[[], None]]) -> None:
    with Workers(COPIERS, "kedge-copy", keep=COPIERS) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()


@dataclass(frozen=True, slots=True)
class Staged:
    """A copied state; the caller's may change."""

    encoded: Encoded
    arena: Arena | None
    is_counted: bool  # counted as being staged, until it is handed over to be committed


class BackgroundSaves:
    """One thread that commits staged states in the order they were staged."""

    is_used = False  # before the first, there is nothing to wait for, and nothing has failed

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[PendingSave[Any], Callable[[Encoded], object], Staged] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._arenas: list[Arena] = []
        self._failed: list[PendingSave[object]] = []
        self._pending: list[PendingSave[Any]] = []
        self._staging = 0  # by threads other than the main one
        self._thread: threading.Thread | None = None  # also None while it ends
        self._committer = 0  # its ident: a save by this thread must not wait for itself
        _unfinished.add(self)

    def stage(self, encoded: Encoded) -> Staged:
        """Copy the buffers of `encoded`; the originals may be changed when this returns.

        Runs without locks in the caller's thread, whose device and accelerator stream are current.
        """
        self.is_used = True
        is_counted = not shelter.is_exposed()  # an exposed save could be interrupted before it is uncounted
        if is_counted or not self._is_roomy():
            shelter.wait_for(self._wait_for_room, is_counted)
        try:
            return self._stage(encoded, is_counted)
        except BaseException:
            if is_counted:
                self._stop_counting()
            raise

    def _is_roomy(self) -> bool:
        return len(self._pending) + self._staging < IN_FLIGHT

    def _wait_for_room(self, is_counted: bool) -> None:
        with self._lock:
            self._has_room.wait_for(self._is_roomy)
            self._staging += is_counted

    def _stop_counting(self) -> None:
        with self._lock:
            self._staging -= 1
            self._has_room.notify_all()

    def commit_later(self, staged: Staged, commit: Callable[[Encoded], T]) -> PendingSave[T]:
        """Let the thread `commit` a staged state, after all earlier ones."""
        future: PendingSave[T] = PendingSave()
        with self._lock:
            self._staging -= staged.is_counted
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kedge-save", daemon=True)
                start(thread)
                self._thread = thread
                _finish_in_child()
            self._pending = [*self._pending, future]
        self._jobs.put((future, commit, staged))
        if _exit.has_begun:  # nobody will wait for it any more, or ask for its error
            self.finish()
            self.raise_unseen()
        return future

    def _stage(self, encoded: Encoded, is_counted: bool) -> Staged:
        remote = [b for b in encoded.buffers if isinstance(b, DeviceMemory)]
        total = sum(len(b) for b in encoded.buffers if isinstance(b, memoryview)) + sum(b.size_bytes for b in remote)
        if not total:
            return Staged(encoded, None, is_counted)
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
            rest: list[Callable[[], None]] = []
            for own, place in zip(encoded.buffers, buffers, strict=True):  # meanwhile the accelerator copies
                if isinstance(own, memoryview):
                    rest += copy(own, place)  # type: ignore[arg-type]
            if rest:
                shelter.run(_at_once, rest)
            for buffer in remote:
                buffer.wait()
        except BaseException:
            arena.free()
            raise
        return Staged(Encoded(encoded.tree, buffers, is_private=True), arena, is_counted)

    def _take(self, size: int) -> Arena:
        """Return an arena of at least `size`. Reused between saves: touching new memory costs more than the copy."""
        for arena in sorted(self._arenas, key=lambda arena: len(arena.view)):
            if len(arena.view) >= size:
                try:
                    self._arenas.remove(arena)
                except ValueError:
                    continue  # another thread took it
                return arena
        self._free_arenas()
        return Arena(size)

    def _free_arenas(self) -> None:
        while self._arenas:
            try:
                self._arenas.pop().free()
            except IndexError:
                return  # another thread took it

    def _run(self) -> None:
        self._committer = threading.get_ident()
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job
            with self._lock:
                self._pending = [future for future in self._pending if not future.done()]
                self._has_room.notify_all()

    def _do(self, future: PendingSave[object], commit: Callable[[Encoded], object], staged: Staged) -> None:
        try:
            if future.set_running_or_notify_cancel():  # from now on cancel() is refused
                future.set_result(commit(staged.encoded))
        except BaseException as error:  # noqa: BLE001 - handed to the caller through the future
            with self._lock:
                self._failed.append(future)
            future.set_exception(error)
        finally:
            if staged.arena is not None:
                self._arenas.append(staged.arena)

    def drain(self) -> None:
        """Wait until all earlier saves are committed or have failed, so that the next save comes after them."""
        if self._pending and threading.get_ident() != self._committer:
            shelter.wait_for(wait, self._pending)

    def finish(self) -> None:
        """Wait for everything staged."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody has seen; the next call raises the next one."""
        while self._failed:
            future = self._failed.pop(0)
            if not future.was_seen and (error := future.exception()) is not None:
                raise error

    def close(self) -> None:
        """Wait for everything staged, then raise the first unseen failure."""
        self.finish()
        self._free_arenas()
        self.raise_unseen()

    def report(self) -> bool:
        """At the end of the program, wait for everything staged and print failures. Return whether there were any."""
        has_failed = False
        while True:
            try:
                shelter.wait_for(self.close)
            except BaseException as error:  # noqa: BLE001 - nobody is left to catch it
                has_failed = True
                sys.stderr.write("kedge: a save_async failed as the program ended:\n")
                traceback.print_exception(error)
                if not isinstance(error, Exception):  # Ctrl-C: stop waiting
                    return True
            else:
                return has_failed


class _Exit:
    """How the program ends."""

    has_begun = False
    failure: _Failure | None = None


class _Failure:
    """Makes the exit code 1. No exit handler can change it in Python, so this runs after everything else is gone."""

    def __del__(self, exit_now: Callable[[int], None] = os._exit) -> None:
        exit_now(1)


_exit = _Exit()
_unfinished: weakref.WeakSet[BackgroundSaves] = weakref.WeakSet()


@save_at_end
def _finish_all() -> None:
    """Finish what a program staged that ends without close(). If that fails, the exit code tells."""
    _exit.has_begun = True
    failed = [saves for saves in list(_unfinished) if saves.report()]
    if failed:
        _exit.failure = _Failure()


def _finish_in_child() -> None:
    """Register a finalizer, because children of multiprocessing end without exit handlers."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, _finish_all, exitpriority=100)
