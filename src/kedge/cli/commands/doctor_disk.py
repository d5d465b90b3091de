"""Measuring the disk under a store: how long a sync takes, what a large write reaches, which file system it is."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kedge.blobs.direct import aligned_memory

_SYNCS = 25
_RENAMES = 9
_PIECE_BYTES = 4 << 20
_PIECES = 8


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    kind: str
    options: tuple[str, ...]


def mount_of(path: Path) -> Mount:
    """The mount `path` is on, by the longest mount point above it; empty fields where the system does not tell."""
    real = os.path.realpath(path)
    best = Mount("/", "", ())
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, _, *more) = before.split(), after.split()
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(point, kind, (*fields[5].split(","), *",".join(more).split(",")))
    return best


def measure_sync(directory: Path) -> tuple[list[float], float]:
    """Sorted times of small synced writes, and how far the file system's clock is from ours, in seconds."""
    times = []
    with _scratch(directory, os.O_RDWR) as handle:
        os.posix_fallocate(handle, 0, _SYNCS * 4096)
        os.fsync(handle)
        for n in range(_SYNCS):
            started = time.perf_counter()
            os.pwrite(handle, os.urandom(4096), n * 4096)
            os.fdatasync(handle)
            times.append(time.perf_counter() - started)
        skew_s = os.fstat(handle).st_mtime - time.time()
    return sorted(times), skew_s


def measure_rename(directory: Path) -> list[float]:
    """Sorted times of replacing a file: written, synced, renamed over the old one, its directory synced.

    OSError when the name does not have the new content afterwards.
    """
    times = []
    with tempfile.TemporaryDirectory(prefix=".kedge-doctor-", dir=directory) as folder:
        name, draft = os.path.join(folder, "file"), os.path.join(folder, "file.new")
        for n in range(_RENAMES):
            started = time.perf_counter()
            _write_synced(draft, b"%d" % n)
            os.replace(draft, name)
            _sync(folder)
            times.append(time.perf_counter() - started)
            with open(name, "rb") as file:
                if file.read() != b"%d" % n or os.path.exists(draft):
                    raise OSError(f"{folder} renames files without replacing them")
    return sorted(times)


def has_locks(directory: Path) -> bool:
    """Whether a lock that one process holds keeps another one out."""
    with tempfile.NamedTemporaryFile(prefix=".kedge-doctor-", dir=directory) as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        command = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", command, file.name], check=False, capture_output=True)
        return other.returncode != 0 and b"BlockingIOError" in other.stderr


def _write_synced(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def measure_direct(directory: Path) -> tuple[float, bool]:
    """Bytes per second of a durable write of 32 MiB, and whether it went around the page cache."""
    with aligned_memory(_PIECE_BYTES) as piece:  # page-aligned, as O_DIRECT wants it
        piece.write(os.urandom(_PIECE_BYTES))
        for flag, is_direct in ((getattr(os, "O_DIRECT", 0), True), (0, False)):
            if is_direct and not flag:
                continue
            try:
                with _scratch(directory, os.O_WRONLY | flag) as handle:
                    os.posix_fallocate(handle, 0, _PIECES * _PIECE_BYTES)
                    started = time.perf_counter()
                    for n in range(_PIECES):
                        os.pwrite(handle, piece, n * _PIECE_BYTES)
                    os.fdatasync(handle)
                    return _PIECES * _PIECE_BYTES / (time.perf_counter() - started), is_direct
            except OSError:
                if not is_direct:
                    raise
    raise AssertionError("unreachable")


@contextmanager
def _scratch(directory: Path, flags: int) -> Iterator[int]:
    """A file without a name for long: opened, unlinked, used."""
    made, name = tempfile.mkstemp(prefix=".kedge-doctor-", dir=directory)
    os.close(made)
    try:
        handle = os.open(name, flags)
    finally:
        os.unlink(name)
    try:
        yield handle
    finally:
        os.close(handle)
