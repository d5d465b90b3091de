"""Where CRIU's images are read from: a directory, or a tree in a store."""

from __future__ import annotations

import os
import stat
from typing import Protocol

from kedge.errors import NotFound, StorageError, storage_error
from kedge.files import Tree

MAX_NAMES = 1_000_000


class ImageFiles(Protocol):
    """Files by name, without directories between."""

    @property
    def place(self) -> str:
        """For messages."""

    def names(self) -> frozenset[str]: ...

    def read(self, name: str, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset` on; NotFound if there is no such file."""


class Directory:
    """A directory of images. Links are not followed; what is no plain file is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._names: frozenset[str] | None = None

    @property
    def place(self) -> str:
        return self._path

    def names(self) -> frozenset[str]:
        if self._names is None:
            try:
                with os.scandir(self._path) as entries:
                    plain = (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
                    self._names = frozenset(name for _, name in zip(range(MAX_NAMES), plain, strict=False))
            except FileNotFoundError:
                raise NotFound(f"there is no directory {self._path}", hint="give the directory of a dump") from None
            except OSError as error:
                raise storage_error("list", self._path, error) from error
        return self._names

    def read(self, name: str, offset: int, size: int) -> bytes:
        path = os.path.join(self._path, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{self._path} has no {name}", hint="a complete dump has it") from None
        except OSError as error:
            raise storage_error("read", path, error) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotFound(f"{path} is not a plain file", hint="a complete dump has one")
            size = min(size, max(0, status.st_size - offset))
            parts = []
            while size > 0 and (part := os.pread(descriptor, min(size, 1 << 24), offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
            return b"".join(parts)
        except OSError as error:
            if isinstance(error, NotFound | StorageError):
                raise
            raise storage_error("read", path, error) from error
        finally:
            os.close(descriptor)


class StoredImages:
    """The images of a checkpoint in a store; what is read is verified (I2)."""

    def __init__(self, tree: Tree, place: str) -> None:
        self._tree = tree
        self._place = place
        self._names = frozenset(entry.path for entry in tree.entries if entry.kind in ("file", "hard link"))

    @property
    def place(self) -> str:
        return self._place

    def names(self) -> frozenset[str]:
        return self._names

    def read(self, name: str, offset: int, size: int) -> bytes:
        if name not in self._names:
            raise NotFound(f"{self._place} has no {name}", hint="a complete dump has it")
        return self._tree.read_part(name, offset, size)
