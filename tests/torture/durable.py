"""What a process made durable, as its own calls say: the bytes of each file and the names in each directory, as they
were at their last sync. SQLite syncs by itself and is not seen here: crash_states.py judges that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from kedge.blobs import libc

# SQLite's files; the locks; what is never read; the queue, which decides nothing.
_LEFT_OUT = re.compile(r"index(-\d+)?\.sqlite(-wal|-shm|-journal|-queue)?|lock|reserve|index.*\.damaged-.*")


class Durable:
    def __init__(self) -> None:
        self._bytes: dict[tuple[int, int], bytes] = {}
        self._names: dict[tuple[int, int], dict[str, int]] = {}
        self._modes: dict[tuple[int, int], int] = {}
        self.early: list[str] = []  # files that were named before their bytes were durable

    def add(self, path: Path) -> None:
        """What it contains now is durable."""
        self._modes[_key(path)] = path.lstat().st_mode
        if path.is_dir():
            self._names[_key(path)] = {part.name: part.lstat().st_ino for part in path.iterdir()}
        else:
            self._bytes[_key(path)] = path.read_bytes()

    def named(self, path: Path) -> None:
        """Whether a file, or all there is in a directory, was durable when it got a name."""
        if not path.is_symlink():
            self.early += [f"{path} has a name before it is durable: {why}" for why in self._lacking(path)]

    def lacking(self, *paths: Path, home: Path) -> list[str]:
        """What a power cut would take: of all that is there, and of the names from `home` down to it."""
        lacking = list(self.early)
        for path in paths:
            above = path.parent
            while above != home.parent:
                lacking += self._lacking_names(above, {above / part for part in path.relative_to(above).parts[:1]})
                above = above.parent
            lacking += self._lacking(path)
        return lacking

    def has_names(self, folder: Path, *names: str) -> bool:
        """Whether these names, as they are now, are durable."""
        return not self._lacking_names(folder, {folder / name for name in names}, every=True)

    def has_mode(self, path: Path) -> bool:
        """Whether it was synced since its permissions changed."""
        return self._modes.get(_key(path)) == path.lstat().st_mode

    def _lacking(self, path: Path) -> list[str]:
        if _LEFT_OUT.fullmatch(path.name) or path.is_symlink() or not (path.is_dir() or path.is_file()):
            return []
        if path.is_dir():
            inside = [*path.iterdir()]
            return self._lacking_names(path, set(inside)) + [why for part in inside for why in self._lacking(part)]
        # A pack ends with space that is not used yet, or is cut back to its bytes: neither is in need of a sync.
        is_same = self._bytes.get(_key(path), b"").rstrip(b"\0") == path.read_bytes().rstrip(b"\0")
        return [] if is_same else [f"the bytes of {path}"]

    def _lacking_names(self, folder: Path, parts: set[Path], *, every: bool = False) -> list[str]:
        durable = self._names.get(_key(folder), {})
        return [
            f"the name {part}"
            for part in sorted(parts)
            if (every or not _LEFT_OUT.fullmatch(part.name)) and durable.get(part.name) != part.lstat().st_ino
        ]


def _key(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


@contextmanager
def watched(*already: Path) -> Iterator[Durable]:
    """Note what is synced meanwhile; all there is in `already` is durable already."""
    durable = Durable()
    for top in already:
        for path in (top, *top.rglob("*")):
            if path.is_dir() or path.is_file():
                durable.add(path)

    def after(name: str) -> Callable[[int], None]:
        real = getattr(os, name)

        def call(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").resolve()
            if path.is_dir() or path.is_file():
                durable.add(path)  # before, because others may write meanwhile
            real(fd)

        return call

    def before(module: ModuleType, name: str) -> Callable[..., None]:
        real = getattr(module, name)

        def call(source: Any, target: Any, **options: Any) -> None:
            folder = options.get("src_dir_fd")
            base = Path(f"/proc/self/fd/{folder}").resolve() if folder is not None else Path.cwd()
            durable.named(base / os.fsdecode(source))
            real(source, target, **options)

        return call

    with ExitStack() as stack:
        for name in ("fsync", "fdatasync"):
            stack.enter_context(mock.patch.object(os, name, after(name)))
        for name in ("rename", "replace", "link"):
            stack.enter_context(mock.patch.object(os, name, before(os, name)))
        stack.enter_context(mock.patch.object(libc, "exchange", before(libc, "exchange")))
        yield durable
