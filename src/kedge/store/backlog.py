"""Records in packs for saves that wrote to no pack, made in the background.

A state of up to 64 KiB is one index row and one sync (I1). So that a lost index can be rebuilt whole, such rows, and
chunks in rows, are copied to packs in batches: in the background some time after the first save, when the store is
closed, and by gc. The background pace leaves the machine to savers. The index notes the progress, so anyone can
continue: a killed process leaves only work behind. Nothing here is part of a save, and nothing reads what was copied
before.

Rows of one batch share one record (docs/format.md). The index names the pack for each, so that gc keeps it (I3).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kedge.blobs.direct import round_up
from kedge.blobs.shelter import give_up_if_abandoned, sheltered
from kedge.chunks import portions
from kedge.errors import CheckpointError
from kedge.ports import Blobs, BlobWriter, Chunk, ChunksGone, Index, NewCheckpoint, RecordPlace, SavedRow

from .record import Draft, append_record

if TYPE_CHECKING:
    from kedge.crypto import DataKey

Describe = Callable[[Sequence[NewCheckpoint], Sequence[Chunk], "DataKey | None"], Draft]

AFTER_S = 5.0
_PAUSES = 15  # for each second of copying in the background: it may fall behind under load, and may catch up later
_AT_ONCE = 512  # rows per read: at most 32 MiB if all are small
_RECORD_BYTES = 4 << 20  # of manifests in one record
CLOSING_S = 2.0  # limit for a close; gc does the rest


class _Copied(NamedTuple):
    saves: int
    reached: int  # the event up to which everything is copied
    newest: int  # the last event there was to read


class Backlog:
    """The rows that one process has to copy. Thread-safe; survives fork."""

    def __init__(self, index: Index, blobs: Blobs, describe: Describe, key: Callable[[], DataKey | None]) -> None:
        self._index = index
        self._blobs = blobs
        self._describe = describe
        self._key = key
        self.after_fork()

    def after_fork(self) -> None:
        """Leave the parent's saves to the parent, in a forked child."""
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._closing = threading.Event()
        self._is_noted = False  # something was saved since the last look
        self._timer: threading.Timer | None = None  # starts the copying

    def note(self) -> None:
        """Note that the index has a save which no pack has."""
        self._is_noted = True
        if self._timer is None:
            with self._lock:
                if self._timer is None and not self._closing.is_set():
                    timer = threading.Timer(AFTER_S, self._copy_slowly)
                    timer.daemon = True
                    with suppress(RuntimeError, MemoryError):  # no threads left: the next save retries; gc copies, too
                        timer.start()
                        self._timer = timer

    def close(self) -> None:
        """Copy what this process has saved, if that takes little time. Failing is harmless to acknowledged saves."""
        self._closing.set()
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if timer is not None or self._is_noted:
            with suppress(CheckpointError):  # the next process, or gc, copies it
                self.copy(CLOSING_S)

    @sheltered
    def copy(self, limit_s: float | None = None) -> int:
        """Copy what only the index has, or as much as `limit_s` allows. Return the number of saves copied.

        Ignores what is saved meanwhile: beside continuous savers this would never end.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        count, goal = 0, None
        while until is None or time.monotonic() < until:
            give_up_if_abandoned()
            with self._copying:
                copied = self._copy_batch()
            count += copied.saves
            goal = copied.newest if goal is None else goal
            if copied.reached >= goal:
                break
        return count

    def _copy_slowly(self) -> None:
        """`copy` in a thread of its own, with pauses."""
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
        except CheckpointError:  # the next process, or gc, copies it
            pass
        finally:
            with self._lock:
                if self._timer is threading.current_thread():  # not one that a later save started
                    self._timer = None

    def _copy_batch(self) -> _Copied:
        """Copy the next rows to packs."""
        batch = self._index.unrecorded(_AT_ONCE)
        reached = batch.up_to or batch.newest
        if len(batch.chunks) == _AT_ONCE:  # there may be more that are as old
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
        except ChunksGone:  # gc condemned the pack as abandoned: repeat with another one
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
    """Append records of checkpoints as the index has them, and of chunks. Yield where each record is."""
    for group in portions(rows, lambda row: len(row[0].manifest), _RECORD_BYTES):
        draft = describe([save for save, _ in group], chunks, key)
        chunks = ()
        pack, _ = append_record(writer, draft)
        for save, digest in group:
            yield RecordPlace(save.id, digest, pack, round_up(draft.size_bytes) // len(group))
    if chunks:
        append_record(writer, describe((), chunks, key))


def _append_chunks(writer: BlobWriter, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Append chunks from rows consecutively. Return their new places."""
    if not chunks:
        return []
    pack, offset = writer.append(b"".join(chunk.data or b"" for chunk in chunks))
    placed: list[Chunk] = []
    for chunk in chunks:
        placed.append(replace(chunk, pack=pack, offset=offset))
        offset += chunk.stored_bytes
    return placed
