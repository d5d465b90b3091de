"""Trees that repeat most of an earlier one, kept in parts, so that only what is new is stored.

A growing list (a conversation) would otherwise be written whole at every save. A parted tree is bytes, and runs of
pieces between them. Each piece becomes a chunk. Digests of neighbours are gathered into chunks above them, digests of
those into chunks above again; such a group ends where a digest says so, whatever stands before it. Groups that have
not ended yet stay in the manifest. A run with one more piece thus adds that piece, sometimes a group, and the
manifest names a few digests for each level.

    form 5     MessagePack [part…]; a part is bytes of the tree, or [height, digest]
    height 0   the chunk is bytes of the tree
    height n   the chunk is digests, 32 bytes each, of chunks of height n - 1

Whoever has a chunk of digests has all below it: a commit brings what is missing and checks what it reuses, and gc
deletes whatever is not named in one transaction. So a save checks only the topmost chunks it reuses (I3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import ormsgpack

from .chunks import ChunkWriter
from .errors import Corrupted

DIGEST_BYTES = 32
MAX_HEIGHT = 16
_LEAST, _MOST = 3, 8  # digests in a group
_ENDS = 0x01  # one digest in two ends its group, once that is long enough: measured to store least

# (height and digest of what the manifest names, digests below each, bytes of each) of a run
Stack = tuple[list[tuple[int, bytes]], dict[bytes, list[bytes]], dict[bytes, bytes]]
Read = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]  # verified plain bytes by digest


class Piece:
    """Bytes that several trees have in common, named by their SHA-256."""

    __slots__ = ("data", "digest")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = hashlib.sha256(data).digest()


@dataclass(frozen=True)
class Run:
    """Pieces in a row. Saved again, it is not grouped again."""

    pieces: Sequence[Piece]

    @cached_property
    def size_bytes(self) -> int:
        return sum(len(piece.data) for piece in self.pieces)

    @cached_property
    def stack(self) -> Stack:
        return _stack(self.pieces)


@dataclass(frozen=True)
class PartedTree:
    """A tree as it is saved: bytes, and runs of pieces."""

    parts: Sequence[bytes | Run]

    @property
    def size_bytes(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.size_bytes for part in self.parts)


def write_parts(tree: PartedTree, writer: ChunkWriter, known: Callable[[bytes], bool]) -> tuple[bytes, list[bytes]]:
    """The manifest of a tree, whose new chunks go to `writer`, and the digests a later save may take as known.

    `known` says which digests an earlier save of this process has committed. That is a guess: the commit checks it.
    """
    packed: list[object] = []
    fresh: dict[bytes, bytes] = {}
    named: list[bytes] = []
    for part in tree.parts:
        if isinstance(part, bytes):
            packed.append(part)
            continue
        tops, below, data = part.stack
        packed += tops
        waiting = [digest for _, digest in tops]
        while waiting:
            digest = waiting.pop()
            if digest in fresh:
                continue
            named.append(digest)
            if known(digest) and writer.reuse(digest):
                continue
            fresh[digest] = data[digest]
            waiting += below.get(digest, ())
    writer.add_named(fresh)
    return b"\x05" + ormsgpack.packb(packed), named


def _stack(run: Sequence[Piece]) -> Stack:
    data = {piece.digest: piece.data for piece in run}
    below: dict[bytes, list[bytes]] = {}
    tops: list[tuple[int, bytes]] = []
    level, height = [piece.digest for piece in run], 0
    while level:
        above: list[bytes] = []
        group: list[bytes] = []
        for digest in level:
            group.append(digest)
            if len(group) >= _LEAST and (digest[0] & _ENDS or len(group) == _MOST):
                above.append(_node(group, below, data))
                group = []
        tops = [(height, digest) for digest in group] + tops
        level, height = above, height + 1
    return tops, below, data


def _node(group: list[bytes], below: dict[bytes, list[bytes]], data: dict[bytes, bytes]) -> bytes:
    joined = b"".join(group)
    digest = hashlib.sha256(joined).digest()
    below[digest], data[digest] = group, joined
    return digest


def parts_of(packed: bytes) -> list[bytes | tuple[int, bytes]] | None:
    """The parts of a form 5 manifest; None for the others. Nonsense is Corrupted."""
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
        raise Corrupted(f"the manifest's parts are damaged: {error}", hint="run holdfast check") from error
    return parts


def read_parts(parts: Sequence[bytes | tuple[int, bytes]], read: Read) -> bytes:
    """The tree, each level of each run read at once."""
    found: list[bytes] = []
    for part in parts:
        if isinstance(part, bytes):
            found.append(part)
            continue
        height, digest = part
        level = [digest]
        for _ in range(height):
            nodes = read(list(dict.fromkeys(level)))
            level = [below for digest in level for below in _digests(nodes[digest])]
        pieces = read(list(dict.fromkeys(level)))
        found += [pieces[digest] for digest in level]
    return b"".join(found)


def references(parts: Iterable[bytes | tuple[int, bytes]], read: Read) -> Iterator[bytes]:
    """Every chunk these parts need, each once."""
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
            level = [below for digest in level for below in _digests(nodes[digest])]
            height -= 1


def _digests(node: bytes) -> Iterator[bytes]:
    if not node or len(node) % DIGEST_BYTES:
        raise Corrupted("a chunk of digests has an impossible length", hint="run holdfast check")
    for start in range(0, len(node), DIGEST_BYTES):
        yield node[start : start + DIGEST_BYTES]
