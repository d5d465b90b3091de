"""Trees that repeat most of an earlier one, stored in parts, so that only new content is stored.

Otherwise a growing list (a conversation) would be written whole at every save. A parted tree consists of bytes and runs
of pieces. Each piece becomes a chunk. Digests of neighbours are grouped into chunks above them, and those digests into
chunks above again. Where a group ends depends only on its digests, not on what precedes it. Unfinished groups stay in
the manifest. So one more piece adds that piece, sometimes a group, and the manifest names a few digests per level.

    form 5     MessagePack [part…]; a part is bytes of the tree, or [height, digest]
    height 0   the chunk is bytes of the tree
    height n   the chunk is digests, 32 bytes each, of chunks of height n - 1

If a chunk of digests exists, so does everything below it: a commit adds what is missing and checks what it reuses, and
gc deletes everything unreferenced in one transaction. So a save checks only the topmost chunks it reuses (I3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import ormsgpack

from kedge.chunks import Writer
from kedge.errors import Corrupted
from kedge.ports import digest_of

DIGEST_BYTES = 32
MAX_HEIGHT = 16
_LEAST, _MOST = 3, 8  # digests in a group
_FEW = 64  # pieces: searching them is faster than building a table
_ENDS = 0x01  # one digest in two ends its group if that is long enough: measured to store least

T = TypeVar("T")

Read = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]  # verified plain bytes by digest


class Piece:
    """Bytes that several trees share, named by their digest."""

    __slots__ = ("data", "digest")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = digest_of(data)


@dataclass(frozen=True, slots=True)
class _Level:
    """The digests of one height, where their groups end, and the digest of each group."""

    digests: list[bytes]
    ends: list[int]
    nodes: list[bytes]
    new: slice  # the digests that differ from those of an earlier level


class Pieces:
    """A run of pieces. Saved again, it is not regrouped; for a run like an earlier one, only the difference is."""

    def __init__(self, pieces: Sequence[Piece], earlier: Pieces | None = None) -> None:
        self.pieces = pieces
        self._levels: list[_Level] = []
        self._nodes: dict[bytes, bytes] = {}  # the chunks above the pieces
        known: list[_Level] = []
        if earlier is not None and len(earlier._nodes) < len(pieces):  # otherwise most of them belong to earlier runs
            known = earlier._levels
            self._nodes.update(earlier._nodes)
        digests = [piece.digest for piece in pieces]
        while digests:
            level = _group(digests, known[len(self._levels)] if len(self._levels) < len(known) else None, self._nodes)
            self._levels.append(level)
            digests = level.nodes
        self._new = pieces[self._levels[0].new] if self._levels else pieces
        self.size_bytes = sum([len(piece.data) for piece in self._new])
        if known and earlier is not None:
            first, last = self._levels[0].new.start, self._levels[0].new.stop - len(pieces) + len(earlier.pieces)
            gone = sum([len(piece.data) for piece in earlier.pieces[first:last]])
            self.size_bytes += earlier.size_bytes - gone

    @property
    def tops(self) -> list[tuple[int, bytes]]:
        """Height and digest of what the manifest names, in the order of the pieces."""
        tops: list[tuple[int, bytes]] = []
        for height, level in enumerate(self._levels):
            tops[:0] = [(height, digest) for digest in level.digests[level.ends[-1] if level.ends else 0 :]]
        return tops

    def data_of(self, digest: bytes, height: int) -> bytes:
        if height:
            return self._nodes[digest]
        if len(self._new) <= _FEW:
            for piece in self._new:
                if piece.digest == digest:
                    return piece.data
        return self._data[digest]

    @cached_property
    def _data(self) -> dict[bytes, bytes]:
        return {piece.digest: piece.data for piece in self.pieces}


@dataclass(frozen=True)
class PartedTree:
    """A tree to save: bytes, and runs of pieces."""

    parts: Sequence[bytes | Pieces]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.size_bytes for part in self.parts)


def write_parts(tree: PartedTree, writer: Writer, known: Callable[[bytes], bool]) -> tuple[bytes, list[bytes]]:
    """Write the new chunks of a tree to `writer`. Return the manifest, and digests a later save may treat as known.

    `known` tells which digests an earlier save of this process committed. That is a guess: the commit checks it.
    """
    packed: list[object] = []
    fresh: dict[bytes, bytes] = {}
    named: list[bytes] = []
    for part in tree.parts:
        if isinstance(part, bytes):
            packed.append(part)
            continue
        waiting = part.tops
        packed += waiting
        while waiting:
            height, digest = waiting.pop()
            if digest in fresh:
                continue
            named.append(digest)
            if known(digest) and writer.reuse(digest):
                continue
            data = fresh[digest] = part.data_of(digest, height)
            if height:
                waiting += [(height - 1, below) for below in digests_of(data)]
    writer.add_named(fresh)
    return b"\x05" + ormsgpack.packb(packed), named


def _group(digests: list[bytes], earlier: _Level | None, chunks: dict[bytes, bytes]) -> _Level:
    """Group digests and add the groups' chunks; groups before and after the difference are reused."""
    ends: list[int] = []
    nodes: list[bytes] = []
    start, same, settled, shift = 0, 0, len(digests), 0
    known: dict[int, int] = {}
    if earlier is not None:
        shift = len(digests) - len(earlier.digests)
        same = common_length(digests, earlier.digests)
        same_groups = bisect_right(earlier.ends, same)
        ends, nodes = earlier.ends[:same_groups], earlier.nodes[:same_groups]
        start = ends[-1] if ends else 0
        behind = common_length(digests[same:][::-1], earlier.digests[same:][::-1])
        settled = len(digests) - behind
        known = {end + shift: number for number, end in enumerate(earlier.ends[same_groups:], same_groups)}
    first = start
    for position in range(start, len(digests)):
        length = position + 1 - first
        if length >= _LEAST and (digests[position][0] & _ENDS or length == _MOST):
            joined = b"".join(digests[first : position + 1])
            node = digest_of(joined)
            chunks[node] = joined
            first = position + 1
            ends.append(first)
            nodes.append(node)
            if first >= settled and (number := known.get(first)) is not None and earlier is not None:
                ends += [end + shift for end in earlier.ends[number + 1 :]]
                nodes += earlier.nodes[number + 1 :]
                break
    return _Level(digests, ends, nodes, slice(same, settled))


def common_length(a: Sequence[T], b: Sequence[T]) -> int:
    """Return the length of the common beginning of two sequences, by bisection because they may be long."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def parts_of(packed: bytes) -> list[bytes | tuple[int, bytes]] | None:
    """Return the parts of a form 5 manifest; None for other forms. Raises Corrupted for invalid data."""
    if packed[:1] != b"\x05":
        return None
    try:
        parts: list[bytes | tuple[int, bytes]] = []
        for part in ormsgpack.unpackb(packed[1:]):
            if not isinstance(part, bytes):
                height, digest = part
                if not 0 <= height <= MAX_HEIGHT or len(digest) != DIGEST_BYTES:
                    raise ValueError("no height and digest")
                part = (height, digest)
            parts.append(part)
    except (ValueError, TypeError) as error:
        raise Corrupted(f"the manifest's parts are damaged: {error}", hint="run kedge check") from error
    return parts


def read_parts(parts: Sequence[bytes | tuple[int, bytes]], read: Read) -> bytes:
    """Return the tree. Chunks of one height, of all runs, are read at once."""
    for height in range(max((part[0] for part in parts if isinstance(part, tuple)), default=-1), -1, -1):
        level = dict.fromkeys(part[1] for part in parts if isinstance(part, tuple) and part[0] == height)
        chunks = read(list(level)) if level else {}
        below: list[bytes | tuple[int, bytes]] = []
        for part in parts:
            if isinstance(part, bytes) or part[0] != height:
                below.append(part)
            elif height:
                below += [(height - 1, digest) for digest in digests_of(chunks[part[1]])]
            else:
                below.append(chunks[part[1]])
        parts = below
    return b"".join([part for part in parts if isinstance(part, bytes)])


def references(parts: Iterable[bytes | tuple[int, bytes]], read: Read) -> Iterator[bytes]:
    """Yield every chunk these parts need, once."""
    seen: set[bytes] = set()
    for part in parts:
        if isinstance(part, bytes):
            continue
        height, digest = part
        level = [digest]
        while True:
            level = [digest for digest in dict.fromkeys(level) if digest not in seen]
            seen.update(level)
            yield from level
            if height == 0 or not level:
                break
            nodes = read(level)
            level = [below for digest in level for below in digests_of(nodes[digest])]
            height -= 1


def may_be_node(data: bytes) -> bool:
    """Return whether a chunk's length is one that chunks of digests have."""
    return DIGEST_BYTES <= len(data) <= _MOST * DIGEST_BYTES and len(data) % DIGEST_BYTES == 0


def digests_of(node: bytes) -> Iterator[bytes]:
    """Yield the digests in a chunk of digests."""
    if not node or len(node) % DIGEST_BYTES:
        raise Corrupted("a chunk of digests has an impossible length", hint="run kedge check")
    for start in range(0, len(node), DIGEST_BYTES):
        yield node[start : start + DIGEST_BYTES]
