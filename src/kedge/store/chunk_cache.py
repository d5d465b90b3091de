"""What this process remembers of chunks: each job's last save, stored chunks, and small ones it has read.

The first two are guesses that save a query: the index checks at the commit that the chunks exist (I3).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kedge.chunks import Entry
from kedge.errors import Corrupted, NotFound
from kedge.ports import Blobs, Chunk, ChunksGone, Index

_MOST_CHUNKS = 65536
_MOST_JOBS = 8
_MOST_ENTRIES = 65536
_MOST_PACKS = 4096
_MOST_RECENT_BYTES = 16 << 20
_SMALL_BYTES = 32 << 10
_ENTRY_BYTES = 128  # overhead of an entry
_TRUSTED_S = 60.0  # for a pack that is not a local file, once seen whole: each look costs a round trip


class RecentChunks:
    """Small chunks that were read and verified (I2), because neighbours in a history share most of them.

    A digest stands for the same bytes forever. No lock, because a signal handler may interrupt anywhere.
    """

    def __init__(self) -> None:
        self._chunks: dict[bytes, bytes] = {}
        self._size_bytes = 0

    def among(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return those of these chunks that are known."""
        known = self._chunks
        return {digest: data for digest in digests if (data := known.get(digest)) is not None}

    def add(self, chunks: Mapping[bytes, bytes]) -> None:
        small = {digest: data for digest, data in chunks.items() if len(data) <= _SMALL_BYTES}
        self._size_bytes += sum([_ENTRY_BYTES + len(data) for data in small.values()])
        if self._size_bytes > _MOST_RECENT_BYTES:
            self._chunks, self._size_bytes = {}, 0
        else:
            self._chunks.update(small)


class RecentStreams:
    """The streams of each job's last save, to compare its next save with."""

    def __init__(self) -> None:
        self._streams: OrderedDict[str, Sequence[Sequence[Entry]]] = OrderedDict()
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def of(self, job: str) -> Sequence[Sequence[Entry]] | None:
        with self._lock:
            return self._streams.get(job)

    def remember(self, job: str, streams: Sequence[Sequence[Entry]]) -> None:
        if sum(map(len, streams)) > _MOST_ENTRIES:
            return
        with self._lock:
            self._streams[job] = streams
            self._streams.move_to_end(job)
            while len(self._streams) > _MOST_JOBS:
                self._streams.popitem(last=False)


class KnownChunks:
    """Committed chunks of parted trees, each with its pack; "" is the index itself."""

    def __init__(self, index: Index, blobs: Blobs) -> None:
        self._index = index
        self._blobs = blobs
        self._lock = threading.Lock()
        self._packs_of: OrderedDict[bytes, str | None] = OrderedDict()
        self._seen_whole: OrderedDict[str, float] = OrderedDict()  # remote packs, and when seen (monotonic)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __contains__(self, name: bytes) -> bool:
        return name in self._packs_of

    def remember(self, names: Iterable[bytes], new: Sequence[Chunk]) -> None:
        """Note the chunks that a committed save named; it wrote the `new` ones."""
        placed = {chunk.digest: chunk.pack for chunk in new}
        self._saw({pack for pack in placed.values() if pack})
        with self._lock:
            for name in names:
                self._packs_of[name] = placed.get(name, self._packs_of.get(name))
                self._packs_of.move_to_end(name)
            while len(self._packs_of) > _MOST_CHUNKS:
                self._packs_of.popitem(last=False)

    def check_packs(self, reused: Sequence[bytes]) -> None:
        """Raise ChunksGone if a reused pack was removed or truncated, so that its chunks are written again.

        Reads only the end of each pack. A chunk damaged inside is found by reading it, for example by verify.
        """
        now_s = time.monotonic()
        doubtful = [name for name in reused if not self._is_trusted(self._packs_of.get(name), now_s)]
        by_pack: dict[str, list[Chunk]] = {}
        for chunk in self._index.locate(doubtful).values() if doubtful else ():
            pack = chunk.pack if chunk.data is None else ""
            if pack and not self._is_trusted(pack, now_s):
                by_pack.setdefault(pack, []).append(chunk)
            if chunk.digest in self._packs_of:
                self._packs_of[chunk.digest] = pack
        for pack, chunks in by_pack.items():
            last = max(chunk.offset + chunk.stored_bytes for chunk in chunks) - 1
            try:
                self._blobs.read_into(pack, last, memoryview(bytearray(1)))
            except (NotFound, Corrupted):
                self._index.mark_damaged(chunks, True)
                raise ChunksGone([chunk.digest for chunk in chunks]) from None
        self._saw(by_pack)  # only what was read: relying on a pack does not renew trust in it

    def _is_trusted(self, pack: str | None, now_s: float) -> bool:
        return pack == "" or (pack is not None and now_s - self._seen_whole.get(pack, -_TRUSTED_S) < _TRUSTED_S)

    def _saw(self, packs: Iterable[str]) -> None:
        now_s = time.monotonic()
        with self._lock:
            for pack in packs:
                if self._blobs.file_of(pack) is None:
                    self._seen_whole[pack] = now_s
                    self._seen_whole.move_to_end(pack)
            while len(self._seen_whole) > _MOST_PACKS:
                self._seen_whole.popitem(last=False)
