"""Which items of a list are stored together.

The last item of a block says that it is the last. So the same items make the same blocks wherever and by whomever they
are laid, and a change leaves the blocks before it and behind it as they were. The first and the last items of a list,
which no block has on both sides, stay by themselves: a list grows at its end, and may lose items at its beginning.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from kedge.store.rope import Piece, common_length

LARGE_BYTES = 8192  # beyond, an item stays by itself: its own pieces will do
LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 4096, 24576
_END_AFTER_BYTES = 8192  # beyond the least, on average


class Encoded(Protocol):
    """An item of a list."""

    data: bytes

    @property
    def ends_block(self) -> bool: ...


T = TypeVar("T", bound=Encoded)


def ends_block(data: bytes) -> bool:
    """Whether a block ends with this item: longer ones are more likely to, so that blocks are alike in size."""
    return zlib.crc32(data) % _END_AFTER_BYTES < len(data)


class Block:
    """Items in a row, stored as one piece."""

    __slots__ = ("piece",)

    def __init__(self, items: Sequence[Encoded]) -> None:
        self.piece = Piece(b"".join([item.data for item in items]))


class Blocks(Generic[T]):
    """A list as blocks and single items: `units`. Of one like an earlier one, only what differs is looked at."""

    def __init__(self, items: Sequence[T], earlier: Blocks[T] | None = None) -> None:
        self.units: list[Block | T] = []
        self._items = items
        self._marks: list[tuple[int, int]] = []  # items and units up to where a block may begin
        start = 0
        if earlier is not None:
            same = common_length(items, earlier._items)
            settled = len(items) - common_length(items[same:][::-1], earlier._items[same:][::-1])
            # The item behind a mark may be why it is there.
            self._marks = earlier._marks[: bisect_left(earlier._marks, (same, 0))]
            if self._marks:
                start = self._marks[-1][0]
                self.units = earlier.units[: self._marks[-1][1]]
        else:
            settled = len(items) + 1
        self._continue(start, earlier, settled)

    def _continue(self, start: int, earlier: Blocks[T] | None, settled: int) -> None:
        """Make units of the items from `start` on; from `settled` on, they are those the earlier list ends with."""
        items = self._items
        may_begin, size = start > 0, 0
        for n in range(start, len(items)):
            item = items[n]
            length = len(item.data)
            is_large = length > LARGE_BYTES
            if n > start and (is_large or (may_begin and size + length > MOST_BLOCK_BYTES)):
                if self._end(start, n, earlier, settled, is_joined=may_begin):
                    return
                start, size, may_begin = n, 0, True
            size += length
            if is_large or (item.ends_block and (size >= LEAST_BLOCK_BYTES or not may_begin)):
                if self._end(start, n + 1, earlier, settled, is_joined=may_begin and not is_large):
                    return
                start, size, may_begin = n + 1, 0, True
        self.units += items[start:]

    def _end(self, start: int, end: int, earlier: Blocks[T] | None, settled: int, *, is_joined: bool) -> bool:
        """A unit, or several, and a mark; whether all behind it could be taken from the earlier list."""
        some = self._items[start:end]
        if is_joined and len(some) > 1 and sum([len(item.data) for item in some]) >= LEAST_BLOCK_BYTES:
            self.units.append(Block(some))
        else:
            self.units += some
        self._marks.append((end, len(self.units)))
        if earlier is None or end < settled:
            return False
        place = end - len(self._items) + len(earlier._items)
        at = bisect_left(earlier._marks, (place, 0))
        if at == len(earlier._marks) or earlier._marks[at][0] != place:
            return False
        units = earlier._marks[at][1]
        more = len(self.units) - units
        self._marks += [(n + end - place, count + more) for n, count in earlier._marks[at + 1 :]]
        self.units += earlier.units[units:]
        return True
