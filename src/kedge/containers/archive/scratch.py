"""A private directory for what is unpacked: gone afterwards; what a killed process left goes at the next use."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.errors import storage_errors

PREFIX = "kedge-unpacked-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def private_directory(work: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new directory in `work` ($TMPDIR if not given) that only this user can enter."""
    above = os.fspath(work) if work is not None else tempfile.gettempdir()
    with storage_errors("make a directory in", above):
        _remove_leftovers(above)
        place, lock = _new_locked(above)
    try:
        yield Path(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _new_locked(above: str) -> tuple[str, int]:
    """A new directory and its lock. Between the two, somebody may have taken it for a leftover: then another."""
    while True:
        place = tempfile.mkdtemp(prefix=PREFIX, dir=above)
        try:
            lock = os.open(place, _OPEN)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink and os.path.isdir(place):
            return place, lock
        os.close(lock)


def _remove_leftovers(above: str) -> None:
    """Directories of ours that nobody holds locked: their process is dead."""
    for name in os.listdir(above):
        if not name.startswith(PREFIX):
            continue
        try:
            lock = os.open(os.path.join(above, name), _OPEN)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.join(above, name), ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
