"""A state on its way between a service and its client: the codec's tree and buffers, as they are.

    8 bytes   "KDSTATE1"
    4 bytes   length of the head, big-endian
    head      msgpack {"tree": size, "buffers": [[number, size], …]}
    tree, buffers one behind the other
    32 bytes  SHA-256 of all before

Both sides know all sizes before they read anything, and nothing is taken for whole that does not end in its digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ormsgpack

from kedge.chunks import allocate
from kedge.errors import Validation
from kedge.ports import Buffer

MEDIA_TYPE = "application/vnd.kedge.state"
_MAGIC = b"KDSTATE1"
_START = struct.Struct(">8sI")
_MAX_HEAD_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    tree: bytes
    buffers: Mapping[int, memoryview]


def size_of_frame(tree_bytes: int, buffers: Mapping[int, int]) -> int:
    """How many bytes `write_frame` will give."""
    return _START.size + len(_head(tree_bytes, buffers)) + tree_bytes + sum(buffers.values()) + 32


def write_frame(
    tree: bytes, sizes: Mapping[int, int], read: Callable[[int], Iterable[Buffer]]
) -> Iterator[bytes | memoryview]:
    """The frame in pieces; `read(n)` gives the bytes of buffer n when it is their turn."""
    digest = hashlib.sha256()

    def told(piece: bytes | memoryview) -> bytes | memoryview:
        digest.update(piece)
        return piece

    head = _head(len(tree), sizes)
    yield told(_START.pack(_MAGIC, len(head)) + head)
    yield from map(told, _pieces(tree))
    for number in sizes:
        for buffer in read(number):
            yield from map(told, _pieces(buffer))
    yield digest.digest()


def read_frame(read_into: Callable[[memoryview], None], *, most_bytes: int) -> Frame:
    """The frame that `read_into` (which fills all it is given, or raises) brings; Validation when it is none."""
    digest = hashlib.sha256()

    def take(size: int) -> memoryview:
        target = allocate(size)
        for start in range(0, size, _PIECE_BYTES):
            read_into(target[start : start + _PIECE_BYTES])
        digest.update(target)
        return target

    magic, head_bytes = _START.unpack(take(_START.size))
    if magic != _MAGIC or head_bytes > _MAX_HEAD_BYTES:
        raise Validation("this is not a state", hint="send what kedge.client sends")
    try:
        head: Any = ormsgpack.unpackb(take(head_bytes))
        tree_bytes, sizes = head["tree"], dict(head["buffers"])
        total = tree_bytes + sum(sizes.values())
        is_sound = all(type(n) is int and n >= 0 for n in (tree_bytes, *sizes, *sizes.values()))
    except (ValueError, TypeError, KeyError) as error:
        raise Validation("the head of the state is damaged", hint="send it again") from error
    if not is_sound or len(sizes) != len(head["buffers"]) or total > most_bytes:
        raise Validation(f"the state claims {total:,} bytes", hint=f"at most {most_bytes:,} are taken")
    tree = bytes(take(tree_bytes))
    buffers = {number: take(size) for number, size in sizes.items()}
    digest_read = digest.digest()
    last = allocate(32)
    read_into(last)
    if bytes(last) != digest_read:
        raise Validation("the state was damaged on its way", hint="send it again")
    return Frame(tree, buffers)


def _head(tree_bytes: int, sizes: Mapping[int, int]) -> bytes:
    return ormsgpack.packb({"tree": tree_bytes, "buffers": [[number, size] for number, size in sizes.items()]})


def _pieces(data: Buffer) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]
