"""Packs as rows of PostgreSQL, for installations that are too small for an object store.

A writer's appends are rows of one transaction: none of them exists before its commit, and an abort leaves nothing.
From the commit until the index names the pack, a row of `writer` speaks for it; a crashed writer's counts for
`grace_s`, by the server's clock. As with objects, `Index.condemn` stops a writer that slept longer (I3).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import LiteralString

from kedge.errors import Corrupted, NotFound, StorageError
from kedge.index.postgres.server import Connection, Server
from kedge.ports import Buffer

from .pack_file import check_name, check_writer

GRACE_S = 3600.0

_ALIGN = 64
_ROW_BYTES = 4 << 20  # longer appends become several rows


class PostgresBlobs:
    """`ports.Blobs` in the tables `blob` and `writer`."""

    def __init__(self, server: Server, *, grace_s: float = GRACE_S) -> None:
        self._server = server
        self._grace_s = grace_s
        self._held: set[str] = set()
        self._dropped: deque[str] = deque()  # released by destructors, where nothing may be asked of the server

    def writer(self, size_hint: int) -> PostgresWriter:
        return PostgresWriter(self, self._server)

    def seal(self) -> None:
        """Every writer has a pack of its own. gc calls this first: forget writers that died long ago."""
        self._server.all(
            "DELETE FROM kedge.writer WHERE since < clock_timestamp() - make_interval(secs => %s) RETURNING 1",
            2 * self._grace_s,
        )

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        if target.nbytes == 0:
            return
        target = target.cast("B")
        end, done = offset + len(target), 0
        rows = self._server.all(
            'SELECT "offset", substring(data FROM greatest(0, %s - "offset")::integer + 1 FOR %s) FROM kedge.blob '
            'WHERE pack = %s AND "offset" < %s AND "offset" + size_bytes > %s ORDER BY "offset"',
            offset, len(target), check_name(pack), end, offset,
        )  # fmt: skip
        for start, data in rows:
            at = max(0, start - offset)
            piece = data[: len(target) - at]
            target[at : at + len(piece)] = piece
            done = at + len(piece) if at <= done else done
        if done < len(target):
            if not rows and self._size(pack) is None:
                raise NotFound(f"pack {pack} is missing", hint="run kedge check")
            raise Corrupted(
                f"pack {pack} ends inside the {len(target)} bytes at {offset}",
                hint="it was damaged after it was written: run kedge check",
            )

    def packs(self) -> Iterator[tuple[str, int]]:
        yield from self._server.all('SELECT pack, max("offset" + size_bytes)::bigint FROM kedge.blob GROUP BY pack')

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        while self._dropped:
            self.release(self._dropped.popleft())
        is_writing = self._server.one(
            "SELECT 1 FROM kedge.writer WHERE pack = %s AND since > clock_timestamp() - make_interval(secs => %s)",
            check_name(pack), self._grace_s,
        )  # fmt: skip
        if is_writing or pack in self._held or self._size(pack) is None or not is_garbage():
            return False
        deleted = self._server.one(
            "WITH gone AS (DELETE FROM kedge.blob WHERE pack = %s RETURNING 1) SELECT count(*) FROM gone", pack
        )
        return deleted is not None and deleted[0] > 0

    def file_of(self, pack: str) -> str | None:
        return None

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        if self._size(pack) is None:
            raise NotFound(f"pack {pack} is missing")
        rows = self._server.all(
            'SELECT "offset" FROM kedge.blob WHERE pack = %s AND substring(data FROM 1 FOR %s) = %s '
            'ORDER BY "offset"',
            pack, len(magic), magic,
        )  # fmt: skip
        yield from (offset for (offset,) in rows)

    def close(self) -> None:
        """Take back what writers forgot to. The server is closed by the index."""
        try:
            for pack in [*self._held, *self._dropped]:
                self.release(pack)
        except StorageError:
            return  # closed before us, or gone: the grace period ends by itself

    def hold(self, pack: str) -> None:
        self._held.add(pack)

    def release(self, pack: str) -> None:
        self._server.run(lambda db: self._forget(db, pack))
        self._held.discard(pack)

    def _forget(self, db: Connection, pack: str) -> None:
        """Nobody waits for the disk: if this is lost in a crash, the grace period ends by itself."""
        with db.pipeline():
            db.execute("BEGIN")
            db.execute("SET LOCAL synchronous_commit = off")
            db.execute("DELETE FROM kedge.writer WHERE pack = %s", (pack,))
            db.execute("COMMIT")

    def drop(self, pack: str) -> None:
        self._held.discard(pack)
        self._dropped.append(pack)

    def _size(self, pack: str) -> int | None:
        row = self._server.one('SELECT max("offset" + size_bytes) FROM kedge.blob WHERE pack = %s', check_name(pack))
        return None if row is None else row[0]


class PostgresWriter:
    """`ports.BlobWriter`: one transaction on a connection of its own."""

    def __init__(self, blobs: PostgresBlobs, server: Server) -> None:
        self._pid = os.getpid()
        self._blobs = blobs
        self._server = server
        self._lock = threading.Lock()
        self._lent = ExitStack()
        self._db: Connection | None = None
        self._pack = os.urandom(16).hex()
        self._end = 0
        self._waiting: list[tuple[LiteralString, tuple[object, ...]]] = []  # statements that were not sent yet
        self._waiting_bytes = 0
        self._is_finished = False
        self._is_committed = False

    def append(self, data: Buffer) -> tuple[str, int]:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        with self._lock, self._server.translated():
            self._check_open()
            if self._db is None:
                self._db = self._lent.enter_context(self._server.lend(is_counted=False))
                self._waiting = [("BEGIN", ())]
            place = self._end
            for start in range(0, max(len(view), 1), _ROW_BYTES):
                piece = bytes(view[start : start + _ROW_BYTES])
                row = (self._pack, place + start, len(piece), piece)
                self._waiting.append(("INSERT INTO kedge.blob VALUES (%s, %s, %s, %b)", row))
                self._waiting_bytes += len(piece)
                if self._waiting_bytes >= _ROW_BYTES:
                    self._send(self._db)
            self._end += len(view) + -len(view) % _ALIGN or _ALIGN
            return self._pack, place

    def commit(self) -> None:
        with self._lock, self._server.translated():
            self._check_open()
            if self._db is not None:
                self._blobs.hold(self._pack)
                self._waiting += [("INSERT INTO kedge.writer VALUES (%s)", (self._pack,)), ("COMMIT", ())]
                self._send(self._db)
                self._is_committed = True
            self._finish()

    def abort(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
            self._finish()
        self.release()

    def withdraw(self, pack: str, offset: int) -> None:
        self._server.all('DELETE FROM kedge.blob WHERE pack = %s AND "offset" = %s RETURNING 1', pack, offset)
        self.release()

    def release(self) -> None:
        if self._pid == os.getpid():
            self._is_finished = True
            if self._is_committed:
                self._is_committed = False
                self._blobs.release(self._pack)

    def __del__(self) -> None:
        if self._db is not None and self._pid == os.getpid():
            self._db.close()
            self._lent.close()

    def _send(self, db: Connection) -> None:
        """What has been gathered, in one round trip."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        with db.pipeline():
            for sql, parameters in waiting:
                db.execute(sql, parameters)

    def _finish(self) -> None:
        self._is_finished = True
        self._db = None
        self._lent.close()

    def _check_open(self) -> None:
        check_writer(self._pid, is_finished=self._is_finished)
