"""Saves that wrote to no pack get records there too, behind the backs of those who saved.

A state of up to 64 KiB is one row of the index and one sync (I1). So that a lost index can be rebuilt whole, such rows,
and chunks that are rows, are copied to packs in batches: from some time after the first on, at a pace that leaves the
machine to those who save; when the store is closed; and by gc. The index notes how far this has come, and what it lacks
anybody who does it next copies: a killed process leaves nothing behind but work. Nothing here is on the path of a save,
and nothing looks at what was copied before.

Rows of one batch lie in one record (docs/format.md). The index names the pack for each, so that gc keeps it (I3).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kedge.blobs.direct import round_up
from kedge.chunks import portions
from kedge.errors import CheckpointError
from kedge.ports import Blobs, BlobWriter, Chunk, ChunksGone, Index, NewCheckpoint, RecordPlace, SavedRow

from .record import Draft, append_record

if TYPE_CHECKING:
    from kedge.crypto import DataKey

Describe = Callable[[Sequence[NewCheckpoint], Sequence[Chunk], "DataKey | None"], Draft]

AFTER_S = 5.0
_PAUSES = 15  # for each second of copying behind the backs of savers: under load it may not keep up, and need not
_AT_ONCE = 512  # rows read at once: 32 MiB at most, if all are small
_RECORD_BYTES = 4 << 20  # of manifests in one record
CLOSING_S = 2.0  # what a close may spend; gc does the rest


class _Copied(NamedTuple):
    saves: int
    reached: int  # the event up to which nothing is left
    newest: int  # the one up to which there was something to look at


class Backlog:
    """What one process has to copy. Thread-safe; survives fork."""

    def __init__(self, index: Index, blobs: Blobs, describe: Describe, key: Callable[[], DataKey | None]) -> None:
        self._index = index
        self._blobs = blobs
        self._describe = describe
        self._key = key
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: what the parent saved is the parent's to copy."""
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._closing = threading.Event()
        self._is_noted = False  # something was saved since the last look
        self._timer: threading.Timer | None = None  # and the copying that it begins

    def note(self) -> None:
        """A save is in the index alone now."""
        self._is_noted = True
        if self._timer is None:
            with self._lock:
                if self._timer is None and not self._closing.is_set():
                    timer = threading.Timer(AFTER_S, self._copy_slowly)
                    timer.daemon = True
                    with suppress(RuntimeError, MemoryError):  # no more threads: the next save tries, close and gc copy
                        timer.start()
                        self._timer = timer

    def close(self) -> None:
        """Copy what this process has saved, if that is soon done: a failure costs nothing that was acknowledged."""
        self._closing.set()
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if timer is not None or self._is_noted:
            with suppress(CheckpointError):  # whoever comes next, or gc, copies it
                self.copy(CLOSING_S)

    def copy(self, limit_s: float | None = None) -> int:
        """Copy all that is in the index alone, or as much as `limit_s` allows; answers how many saves that were.

        What is saved meanwhile is not waited for: beside those who save all the time nobody would ever come to an end.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        count, goal = 0, None
        while until is None or time.monotonic() < until:
            with self._copying:
                copied = self._copy_batch()
            count += copied.saves
            goal = copied.newest if goal is None else goal
            if copied.reached >= goal:
                break
        return count

    def _copy_slowly(self) -> None:
        """The same, in a thread of its own."""
        try:
            while not self._closing.is_set():
                self._is_noted = False
                start = time.monotonic()
                with self._copying:
                    copied = self._copy_batch()
                pause_s = _PAUSES * (time.monotonic() - start)
                if copied.reached >= copied.newest:
                    with self._lock:
                        if not self._is_noted:
                            self._timer = None
                            return
                    pause_s = AFTER_S
                self._closing.wait(pause_s)
        except CheckpointError:  # whoever comes next, or gc, copies it
            pass
        finally:
            with self._lock:
                if self._timer is threading.current_thread():  # not the one that a later save began
                    self._timer = None

    def _copy_batch(self) -> _Copied:
        """Copy the next rows."""
        batch = self._index.unrecorded(_AT_ONCE)
        reached = batch.up_to or batch.newest
        if len(batch.chunks) == _AT_ONCE:  # there may be more of them, as old as these
            reached = -1
        if not batch.rows and not batch.chunks:
            if batch.up_to:
                self._index.set_recorded((), (), up_to=batch.up_to)
            return _Copied(0, reached, batch.newest)
        writer = self._blobs.writer(0)
        try:
            chunks = _append_chunks(writer, batch.chunks)
            places = list(write_saves(writer, batch.rows, chunks, self._describe, self._key()))
            writer.commit()
            self._index.set_recorded(places, chunks, up_to=batch.up_to)
        except ChunksGone:  # gc took the pack for abandoned: once more, into another one
            writer.abort()
            return _Copied(0, -1, batch.newest)
        except BaseException:
            writer.abort()
            raise
        writer.release()
        return _Copied(len(places), reached, batch.newest)


def write_saves(
    writer: BlobWriter, rows: Iterable[SavedRow], chunks: Sequence[Chunk], describe: Describe, key: DataKey | None
) -> Iterator[RecordPlace]:
    """Append records of checkpoints as the index has them, and of chunks; where each lies."""
    for some in portions(rows, lambda row: len(row[0].manifest), _RECORD_BYTES):
        draft = describe([save for save, _ in some], chunks, key)
        chunks = ()
        pack, _ = append_record(writer, draft)
        for save, digest in some:
            yield RecordPlace(save.id, digest, pack, round_up(draft.size_bytes) // len(some))
    if chunks:
        append_record(writer, describe((), chunks, key))


def _append_chunks(writer: BlobWriter, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks that are rows, one behind the other; where they lie now."""
    if not chunks:
        return []
    pack, offset = writer.append(b"".join(chunk.data or b"" for chunk in chunks))
    placed: list[Chunk] = []
    for chunk in chunks:
        placed.append(replace(chunk, pack=pack, offset=offset))
        offset += chunk.stored_bytes
    return placed
