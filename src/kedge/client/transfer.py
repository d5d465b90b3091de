"""States over HTTP in the store's form: as chunks, sending only those that the other side lacks.

The bytes sent are those that were digested; received bytes are verified before they are returned (I2).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kedge.chunks import WORKERS, ZERO, Deferred, Entry, Staged, is_zero, portions
from kedge.errors import Corrupted, NotFound, Unavailable
from kedge.ports import Buffer, digest_of
from kedge.store import not_over_http
from kedge.store.adoption import MOVE_BYTES, Exported
from kedge.store.streams import place
from kedge.store.wire import FAILED, LENGTH_BYTES, MAX_DIGESTS, framed, length, parse_length, split_digests

from .connection import Client, Download, error_of

_BATCH_BYTES = 16 << 20  # in memory while the service reports which are missing
_PORTION_CHUNKS = 1024  # per request
_ATTEMPTS = 4

_Target = memoryview | Staged


class Outbox:
    """The chunks of one save (`kedge.chunks.Writer`), read while the request's body is written."""

    def __init__(self, client: Client, distrusted: Collection[bytes] = ()) -> None:
        self._client = client
        self._distrusted = frozenset(distrusted)
        self._streams: list[tuple[list[Entry], Iterable[Buffer | Deferred], bool]] = []
        self._named: dict[bytes, bytes] = {}
        self._elsewhere: list[Exported] = []
        self._settled: set[bytes] = set()  # the service has these, or they were sent

    def add(
        self, pieces: Iterable[Buffer | Deferred], *, size_bytes: int, at_once: int = WORKERS, is_shared: bool = False
    ) -> list[Entry]:
        entries: list[Entry] = []
        self._streams.append((entries, pieces, is_shared))
        return entries

    def add_named(self, pieces: Mapping[bytes, bytes]) -> None:
        self._named.update(pieces)

    def reuse(self, digest: bytes) -> bool:
        return digest not in self._distrusted

    def add_from(self, exported: Exported) -> None:
        """Add chunks of another store, which are read only if the service lacks them."""
        self._elsewhere.append(exported)

    def chunks(self) -> Iterator[bytes]:
        """Yield the missing chunks, each after its length. Afterwards the entries of the streams are complete."""
        batch: dict[bytes, Buffer] = {}
        size = 0
        for digest, piece in self._pieces():
            if digest in self._settled or digest in batch:
                continue
            batch[digest] = piece
            size += len(piece)
            if size >= _BATCH_BYTES or len(batch) >= MAX_DIGESTS:
                yield from self._missing(batch)
                batch, size = {}, 0
        if batch:
            yield from self._missing(batch)
        for exported in self._elsewhere:
            missing = [digest for digest in self._ask(exported.references) if digest not in self._settled]
            for some in portions(missing, exported.size_of, MOVE_BYTES):
                for piece in exported.read(some).values():
                    yield framed(piece)
            self._settled.update(exported.references)

    def _pieces(self) -> Iterator[tuple[bytes, Buffer]]:
        for entries, pieces, is_shared in self._streams:
            for piece in pieces:
                if isinstance(piece, Deferred):
                    if piece.known is not None and (piece.known.is_zero or self.reuse(piece.known.digest)):
                        entries.append(piece.known)  # the commit checks that it exists
                        continue
                    data: Buffer = bytes(piece.read())
                else:
                    data = bytes(piece) if is_shared else piece
                view = memoryview(data)
                digest = digest_of(view)
                if is_zero(view, digest):
                    entries.append(Entry(len(view), ZERO))
                    continue
                entries.append(Entry(len(view), digest))
                yield digest, view
        yield from self._named.items()

    def _missing(self, batch: Mapping[bytes, Buffer]) -> Iterator[bytes]:
        for digest in self._ask(list(batch)):
            yield length(len(batch[digest]))
            yield bytes(batch[digest])
        self._settled |= batch.keys()

    def _ask(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the digests to send."""
        missing: set[bytes] = set()
        for start in range(0, len(digests), MAX_DIGESTS):
            some = b"".join(digests[start : start + MAX_DIGESTS])
            missing.update(split_digests(self._client.exchange("/api/v1/chunks/missing", some)))
        return [digest for digest in digests if digest in missing or digest in self._distrusted]


def body_of(
    head: Mapping[str, object], outbox: Outbox, pack: Callable[[], bytes], spilled: bytes = b""
) -> Iterator[bytes]:
    """Yield the body of a save; `pack` returns the manifest once the chunks are known, `spilled` is its content."""
    yield framed(json.dumps(head, allow_nan=False).encode())
    yield from outbox.chunks()
    packed = pack()
    yield length(0) + framed(packed) + framed(spilled) + digest_of(packed + spilled)


class HttpReader:
    """`kedge.store.load.NamedReader` behind a service."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def read(self, wanted: Sequence[tuple[Entry, _Target]], *, of: str) -> None:
        targets: dict[Entry, list[_Target]] = {}
        for entry, target in wanted:
            if entry.is_zero:
                _fill_zeros(target)
            else:
                targets.setdefault(entry, []).append(target)
        waiting = list(targets)
        for start in range(0, len(waiting), _PORTION_CHUNKS):
            self._read_some(waiting[start : start + _PORTION_CHUNKS], targets, of)

    def read_row(self, entries: Sequence[Entry], memory: memoryview, *, of: str) -> None:
        self.read([(entry, part) for entry, part in place(entries, memory) if not entry.is_zero], of=of)

    def read_named(self, digests: Sequence[bytes], *, of: str) -> dict[bytes, bytes]:
        chunks: dict[bytes, bytes] = {}
        unique = list(dict.fromkeys(digests))
        for start in range(0, len(unique), _PORTION_CHUNKS):
            some = unique[start : start + _PORTION_CHUNKS]
            with self._ask(b"".join(some), of) as download:
                for digest in some:
                    chunks[digest] = download.take(_length(download))
                    _check(digest, chunks[digest], of)
        return chunks

    def map(self, entries: Sequence[Entry], *, of: str) -> memoryview:
        raise not_over_http("mapping a state", "load it as usual")

    def _read_some(self, entries: Sequence[Entry], targets: Mapping[Entry, Sequence[_Target]], of: str) -> None:
        """Read from one response; if it is cut off, request the rest again."""
        done = 0
        for attempt in range(_ATTEMPTS):
            before = done
            try:
                wanted = b"".join(entry.digest for entry in entries[done:])
                with self._ask(wanted, of) as download:
                    for entry in entries[done:]:
                        self._take(download, entry, targets[entry], of)
                        done += 1
                return
            except Unavailable:
                if attempt + 1 == _ATTEMPTS or done == before:
                    raise

    @contextmanager
    def _ask(self, digests: bytes, of: str) -> Iterator[Download]:
        """Request chunks. A missing one is damage, unless the checkpoint was deleted, which the caller checks."""
        try:
            with self._client.download("/api/v1/chunks/read", digests) as download:
                yield download
        except NotFound as error:
            raise Corrupted(f"a chunk of {of} is missing: {error.message}", hint="run kedge check") from None

    def _take(self, download: Download, entry: Entry, targets: Sequence[_Target], of: str) -> None:
        if _length(download) != entry.size_bytes:
            raise Corrupted(f"a chunk of {of} has another length than its manifest says", hint="run kedge check")
        first = targets[0]
        memory = first if isinstance(first, memoryview) else first.staging()
        download.take_into(memory)
        _check(entry.digest, memory, of)
        for target in targets:
            if not isinstance(target, memoryview):
                target.take(memory)
            elif target is not memory:
                target[:] = memory


def _length(download: Download) -> int:
    size = parse_length(download.take(LENGTH_BYTES))
    if size == FAILED:
        raise error_of(json.loads(download.take(parse_length(download.take(LENGTH_BYTES)))))
    return size


def _check(digest: bytes, data: Buffer, of: str) -> None:
    if digest_of(data) != digest:
        raise Corrupted(f"chunk {digest.hex()[:16]}… of {of} was damaged on its way", hint="load it again")


def _fill_zeros(target: _Target) -> None:
    if isinstance(target, memoryview):
        target[:] = bytes(len(target))
    else:
        memory = target.staging()
        memory[:] = bytes(len(memory))
        target.take(memory)
