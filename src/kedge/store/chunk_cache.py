"""What this process remembers of chunks: each job's last save, stored chunks, and small ones it has read.

The first two are guesses that save a query: the index checks at the commit that the chunks exist (I3).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


class Place(NamedTuple):
    """A pack, and where in it a chunk ends; "": the index itself."""

    pack: str
    end: int


class KnownChunks:
    """Committed chunks of parted trees, each with its place."""

    def __init__(self, index: Index, blobs: Blobs) -> None:
        self._index = index
        self._blobs = blobs
        self._lock = threading.Lock()
        self._places: OrderedDict[bytes, Place | None] = OrderedDict()
        self._seen_whole: OrderedDict[str, float] = OrderedDict()  # remote packs, and when seen (monotonic)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def remember(self, names: Iterable[bytes], new: Sequence[Chunk]) -> None:
        """Note the chunks that a committed save named; it wrote the `new` ones."""
        placed = {chunk.digest: _place_of(chunk) for chunk in new}
        self._saw({place.pack for place in placed.values() if place.pack})
        with self._lock:
            for name in names:
                self._places[name] = placed.get(name, self._places.get(name))
                self._places.move_to_end(name)
            while len(self._places) > _MOST_CHUNKS:
                self._places.popitem(last=False)

    def check_packs(self, reused: Sequence[bytes]) -> None:
        """Raise ChunksGone if a reused pack was removed or truncated, so that its chunks are written again.

        Reads only the end of each pack, where its chunks were last. If the pack is not whole there, the index says
        where gc has moved them. A chunk damaged inside is found by reading it, for example by verify.
        """
        now_s = time.monotonic()
        doubtful = {name: place for name in reused if not self._is_trusted(place := self._places.get(name), now_s)}
        whole = self._whole(place for place in doubtful.values() if place)
        moved = [name for name, place in doubtful.items() if place is None or place.pack not in whole]
        stored = self._index.locate(moved) if moved else {}
        places = {name: _place_of(chunk) for name, chunk in stored.items()}
        whole |= self._whole(place for place in places.values() if not self._is_trusted(place, now_s))
        for name, place in places.items():
            if name in self._places:
                self._places[name] = place
        cut = [name for name, place in places.items() if not (place.pack in whole or self._is_trusted(place, now_s))]
        if cut:
            self._index.mark_damaged([stored[name] for name in cut], True)
            raise ChunksGone(cut)
        self._saw(whole)  # only what was read: relying on a pack does not renew trust in it

    def _whole(self, places: Iterable[Place]) -> set[str]:
        """Return the packs that reach to the ends of these places."""
        ends: dict[str, int] = {}
        for pack, end in places:
            ends[pack] = max(end, ends.get(pack, 0))
        whole: set[str] = set()
        for pack, end in ends.items():
            try:
                self._blobs.read_into(pack, end - 1, memoryview(bytearray(1)))
            except (NotFound, Corrupted):
                continue
            whole.add(pack)
        return whole

    def _is_trusted(self, place: Place | None, now_s: float) -> bool:
        if place is None:
            return False
        return not place.pack or now_s - self._seen_whole.get(place.pack, -_TRUSTED_S) < _TRUSTED_S

    def _saw(self, packs: Iterable[str]) -> None:
        now_s = time.monotonic()
        with self._lock:
            for pack in packs:
                if self._blobs.file_of(pack) is None:
                    self._seen_whole[pack] = now_s
                    self._seen_whole.move_to_end(pack)
            while len(self._seen_whole) > _MOST_PACKS:
                self._seen_whole.popitem(last=False)


def _place_of(chunk: Chunk) -> Place:
    return Place(chunk.pack, chunk.offset + chunk.stored_bytes) if chunk.data is None else Place("", 0)
