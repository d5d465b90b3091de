"""Safeguards taken out, one at a time, so that tests can prove they would notice.

Applied in a child by name (`Child(…, mutant="pack not synced")`) or around a test in the same process.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import kedge.blobs.pack_file
import kedge.blobs.packs
import kedge.care.copy
import kedge.care.follow
import kedge.care.gc
import kedge.index.sqlite.file
import kedge.index.sqlite.process_queue
import kedge.index.sqlite.sweep
import kedge.index.sqlite.writes
import kedge.store.backlog
import kedge.store.chunk_reader
import kedge.store.directory
import kedge.store.local
from kedge.index.rows import late_manifests
from kedge.ports import digest_of

Patch = Callable[[], Any]


def _nothing(*_: object, **__: object) -> None:
    return None


def _unsynced_index() -> Any:
    """PRAGMA synchronous=OFF instead of FULL."""
    real = kedge.index.sqlite.file.connect

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = real(*args, **kwargs)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    return mock.patch("kedge.index.sqlite.file.connect", connect)


class _OsWithoutFileSync:
    """The os module, but fsync does something for directories only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.fsync(fd)


def _unchecked_references() -> Any:
    real = kedge.index.sqlite.writes.Writes._check_references

    def check(self: Any, new: Any) -> None:
        real(self, replace(new, reused_chunks=()))

    return mock.patch.object(kedge.index.sqlite.writes.Writes, "_check_references", check)


class _WithoutLateSaves:
    """A connection on which nothing was committed since gc began to mark."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *parameters: Any) -> Any:
        if sql == late_manifests():
            return self._connection.execute("SELECT NULL WHERE 0")
        return self._connection.execute(sql, *parameters)


def _sweep_without_late_saves() -> Any:
    real = kedge.index.sqlite.sweep.sweep
    return mock.patch("kedge.index.sqlite.index.sweep", lambda db, *rest: real(_WithoutLateSaves(db), *rest))


def _unverified_chunks() -> Any:
    def read(self: Any, entry: Any, target: memoryview, place: Any, of: str) -> None:
        if entry.is_zero:
            target[:] = bytes(len(target))
        else:
            self._fill(entry, target, place, of)

    return mock.patch.object(kedge.store.chunk_reader.ChunkReader, "_read_one", read)


def _unverified_manifest() -> Any:
    return mock.patch.object(kedge.store.local.LocalStore, "_verify", _nothing)


def _reader_asks_once() -> Any:
    def read(self: Any, entry: Any, target: memoryview, place: Any, of: str) -> None:
        self._fill(entry, target, place, of)
        assert digest_of(target) == entry.digest

    return mock.patch.object(kedge.store.chunk_reader.ChunkReader, "_read_one", read)


def _unsynced_compaction() -> Any:
    real = kedge.care.gc._rewrite

    def rewrite(*args: Any) -> Any:
        with mock.patch.object(kedge.blobs.packs.PackWriter, "commit", _nothing):
            return real(*args)

    return mock.patch("kedge.care.gc._rewrite", rewrite)


def _removes_untold() -> Any:
    """A pack of chunks alone goes, though a namespace that is locked may need it."""
    real = kedge.care.gc._namespaces_in
    return mock.patch("kedge.care.gc._namespaces_in", lambda *args: real(*args) or {""})


def _recorded_early() -> Any:
    """The index says that rows are in a pack before they are."""
    real = kedge.store.backlog.Backlog._copy_batch

    def copy_batch(self: Any) -> Any:
        waiting: list[Callable[[], None]] = []
        writer = kedge.blobs.packs.PackWriter
        write, commit = kedge.blobs.pack_file.OpenPack.write, writer.commit

        def late_write(pack: Any, view: memoryview, offset: int) -> None:
            data = bytes(view)
            waiting.append(lambda: write(pack, memoryview(data), offset))

        def late_commit(one: Any) -> None:
            waiting.append(lambda: commit(one))

        def set_recorded(*args: Any, **kwargs: Any) -> None:
            recorded(*args, **kwargs)
            for action in waiting:
                action()

        recorded = self._index.set_recorded
        with (
            mock.patch.object(kedge.blobs.pack_file.OpenPack, "write", late_write),
            mock.patch.object(writer, "commit", late_commit),
            mock.patch.object(self._index, "set_recorded", set_recorded),
        ):
            return real(self)

    return mock.patch.object(kedge.store.backlog.Backlog, "_copy_batch", copy_batch)


def _copies_backwards() -> Any:
    real = kedge.care.copy.Copying._copy_all
    return mock.patch.object(kedge.care.copy.Copying, "_copy_all", lambda self, wanted: real(self, wanted[::-1]))


def _place_noted_first() -> Any:
    """A follower that notes how far it has come before it is there."""
    real = kedge.care.follow.Following._round

    def round_(self: Any, events: Any) -> Any:
        self._last, self._is_worth_noting = events[-1], True
        self._note(is_due=True)
        return real(self, events)

    return mock.patch.object(kedge.care.follow.Following, "_round", round_)


def _old_key_forgotten() -> Any:
    """Although rows are still under it."""
    from kedge.crypto import Keyring

    real = Keyring.with_new_key
    return mock.patch.object(Keyring, "with_new_key", lambda self: real(self).with_current_only())


def _answered_at_once() -> Any:
    """A process is told that its save was committed by another one that has only begun to."""
    real = kedge.index.sqlite.process_queue.ProcessQueue.asked

    def asked(self: Any) -> Any:
        found = real(self)
        self.answer(found, [1] * len(found))
        return found

    return mock.patch.object(kedge.index.sqlite.process_queue.ProcessQueue, "asked", asked)


def _packs(name: str, value: Any) -> Patch:
    return lambda: mock.patch(f"kedge.blobs.{name}", value)


MUTANTS: dict[str, tuple[Patch, ...]] = {
    "pack not synced": (_packs("pack_file.sync_data", _nothing),),
    "pack directory not synced": (_packs("pack_file.sync_directory", _nothing),),
    "index not synced": (_unsynced_index,),
    "nothing synced": (
        _unsynced_index,
        _packs("pack_file.sync_data", _nothing),
        _packs("pack_file.sync_directory", _nothing),
    ),
    "marker not synced": (lambda: mock.patch("kedge.store.directory.os", _OsWithoutFileSync()),),
    "store directory not synced": (lambda: mock.patch("kedge.store.directory.sync_directory", _nothing),),
    "names above the store not synced": (lambda: mock.patch("kedge.store.directory._sync_names", _nothing),),
    "compaction not synced": (_unsynced_compaction,),
    "reused chunks not checked": (_unchecked_references,),
    "late saves not marked": (_sweep_without_late_saves,),
    "packs not locked": (
        _packs("pack_file.try_lock", lambda fd, path: True),
        _packs("packs.try_lock", lambda fd, path: True),
    ),
    "packs unlocked before the commit": (
        lambda: mock.patch.object(
            kedge.blobs.packs.PackWriter, "commit", _released(kedge.blobs.packs.PackWriter.commit)
        ),
    ),
    "pack removed unasked": (lambda: mock.patch("kedge.care.gc.partial", return_value=lambda: True),),
    "packs without records removed": (_removes_untold,),
    "copies not in order": (_copies_backwards,),
    "recorded before it is durable": (_recorded_early,),
    "place noted before the copies": (_place_noted_first,),
    "reader does not ask again": (_reader_asks_once,),
    "chunk digest not checked": (_unverified_chunks,),
    "manifest digest not checked": (_unverified_manifest,),
    "lease token not checked": (
        lambda: mock.patch.object(kedge.index.sqlite.writes.Writes, "_check_lease", return_value=False),
    ),
    "answered before it is committed": (_answered_at_once,),
    "saves of ended processes committed": (
        lambda: mock.patch("kedge.index.sqlite.process_queue.ProcessQueue._is_taken", return_value=True),
    ),
    "unanswered saves not looked for": (
        lambda: mock.patch("kedge.index.sqlite.writes.Writes.landed", return_value=None),
    ),
    "old data key forgotten at once": (_old_key_forgotten,),
    "lease of keys not checked": (
        *(
            lambda place=place: mock.patch(f"kedge.index.{place}.check_holder", _nothing)
            for place in ("files.index", "sqlite.index", "transactions.SqlTransaction")
        ),
    ),
    "lease token not checked by PostgreSQL": (
        lambda: mock.patch("kedge.index.postgres.writes.PostgresWrites._check_lease", return_value=False),
    ),
}


def _released(commit: Callable[[Any], None]) -> Callable[[Any], None]:
    def and_release(self: Any) -> None:
        commit(self)
        self.release()

    return and_release


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Run with this mutant in place; "" is the real thing."""
    with ExitStack() as stack:
        for patch in MUTANTS[name] if name else ():
            stack.enter_context(patch())
        yield
