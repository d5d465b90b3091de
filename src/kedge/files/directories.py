"""Directories by descriptor: each step opens one name below an open directory, and never follows a link.

So a name that is replaced by a symlink at any moment leads to an error, not out of the tree; and no path gets too long.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Self

from .table import Table

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_OPEN = 32  # per walk: deep trees must not exhaust the process's descriptors


class Directories:
    """The directories of `table` below `root`, opened on demand. For one thread; owns `root`."""

    def __init__(self, table: Table, root: int) -> None:
        self._table = table
        self._root = root
        self._open: OrderedDict[int, int] = OrderedDict()

    def fd(self, row: int) -> int:
        """Return a descriptor of directory `row`, valid until the next call."""
        descriptor = self._root if row == 0 else self._open.get(row)
        if descriptor is not None:
            return descriptor
        way = []
        while row and row not in self._open:
            way.append(row)
            row = self._table.parent[row]
        above = self._open[row] if row else self._root
        for row in reversed(way):
            above = os.open(self._table.names[row], OPEN_DIRECTORY, dir_fd=above)
            self._open[row] = above
            if len(self._open) > _KEPT_OPEN:
                os.close(self._open.popitem(last=False)[1])
        return above

    def forget(self) -> None:
        """Close all directories but the root."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()
        os.close(self._root)
