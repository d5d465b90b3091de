"""What `kedge doctor` finds out about the disk under a store: file system, space, syncs, locks, throughput."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from kedge.blobs.direct import aligned_memory, sync_directory
from kedge.blobs.kernel import Mount, is_network, mounts
from kedge.cli.findings import Finding, judge
from kedge.terminal.text import size

_SYNCS = 25
_RENAMES = 9
_PIECE_BYTES = 4 << 20
_PIECES = 8


_SLOW_SYNC_S = 0.02
_SKEW_S = 2.0


def disk_findings(directory: Path) -> Iterator[Finding]:
    """Findings about the disk on which `directory` is, or will be."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    yield _file_system(mount_of(place))
    yield from _space(place)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fix = "check its owner and mode, and how it is mounted"
        yield Finding("writing", "bad", f"{place} is not writable", fix)
        return
    try:
        yield from _measured(place)
    except OSError as error:
        fix = "check free space, quota, and the disk"
        yield Finding("writing", "bad", f"a test file could not be written: {error}", fix)


def _measured(place: Path) -> Iterator[Finding]:
    latencies, skew_s = measure_sync(place)
    usual = median(latencies)
    yield judge(
        "sync",
        usual < _SLOW_SYNC_S,
        f"4 KiB written and synced in {usual * 1000:.2f} ms (slowest of {_SYNCS}: {latencies[-1] * 1000:.1f} ms)",
        "every save waits this long: a local SSD is 10 to 100 times faster",
    )
    replaced_ms = median(measure_rename(place)) * 1000
    yield Finding("rename", "ok", f"a file is replaced, whole and durably, in {replaced_ms:.2f} ms")
    if has_locks(place):
        yield Finding("locks", "ok", "a lock of one process keeps another one out")
    else:
        yield Finding("locks", "bad", "two processes get the same lock", "use a local disk of this machine")
    rate, is_direct = measure_direct(place)
    yield judge(
        "throughput",
        is_direct,
        f"{size(round(rate))}/s durably, O_DIRECT {'works' if is_direct else 'is not supported here'}",
        "large states are written through the page cache, which takes more CPU time",
        "note",
    )
    if abs(skew_s) > _SKEW_S:
        what = f"the file system's clock is {skew_s:+.1f} s from this machine's"
        yield Finding("clocks", "warn", what, "set both by NTP; order in the store does not depend on it")


def _space(place: Path) -> Iterator[Finding]:
    room = os.statvfs(place)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    is_enough = free >= 1 << 30 and free >= total * 0.03
    yield judge("free space", is_enough, f"{size(free)} of {size(total)}", "free some with kedge cleanup and kedge gc")
    if room.f_files and room.f_favail < 1000:
        yield Finding("free space", "warn", f"only {room.f_favail} more files can be created", "delete unneeded files")


def mount_of(path: Path) -> Mount:
    """The mount that `path` is on, by the longest mount point above it; without a type if the system does not tell."""
    real = os.path.realpath(path)
    above = [mount for mount in mounts() if real == mount.point or real.startswith(mount.point.rstrip("/") + "/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=Mount(0, "/", "", ""))


def _file_system(mount: Mount) -> Finding:
    what = f"{mount.kind or 'unknown'} at {mount.point}"
    status, note, fix = "ok", "", ""
    options = set(mount.options.split(","))
    if mount.kind in ("tmpfs", "ramfs"):
        status, fix = "warn", "it is memory: the store is gone after a reboot"
    elif is_network(mount.kind):
        status, fix = "bad", "locks cannot be trusted over a network: use a local disk"
    elif {"nobarrier", "barrier=0"} & options:
        status, note, fix = "warn", ", mounted without barriers", "a power cut can lose saves: mount it with barriers"
    elif "ro" in options:
        status, note, fix = "bad", ", mounted read-only", "mount it read-write"
    elif mount.kind == "overlay":
        status, fix = "note", "the layer of a container: use a volume to keep the store beyond it"
    return Finding("file system", status, what + note, fix)


def timed(count: int, action: Callable[[int], object]) -> list[float]:
    """Sorted times, in seconds, of doing `action` that often; it gets the number of the round."""
    times = []
    for n in range(count):
        started = time.perf_counter()
        action(n)
        times.append(time.perf_counter() - started)
    return sorted(times)


def measure_sync(directory: Path) -> tuple[list[float], float]:
    """Sorted times of small synced writes, and how far the file system's clock is from ours, in seconds."""
    with _scratch(directory, os.O_RDWR) as handle:
        os.posix_fallocate(handle, 0, _SYNCS * 4096)
        os.fsync(handle)

        def write(n: int) -> None:
            os.pwrite(handle, os.urandom(4096), n * 4096)
            os.fdatasync(handle)

        return timed(_SYNCS, write), os.fstat(handle).st_mtime - time.time()


def measure_rename(directory: Path) -> list[float]:
    """Sorted times of replacing a file: written, synced, renamed over the old one, its directory synced.

    OSError when the name does not have the new content afterwards.
    """
    with tempfile.TemporaryDirectory(prefix=".kedge-doctor-", dir=directory) as folder:
        name, draft = Path(folder, "file"), Path(folder, "file.new")

        def replace(n: int) -> None:
            with open(draft, "wb") as file:
                file.write(b"%d" % n)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, name)
            sync_directory(folder)
            if name.read_bytes() != b"%d" % n or draft.exists():
                raise OSError(f"{folder} renames files without replacing them")

        return timed(_RENAMES, replace)


def has_locks(directory: Path) -> bool:
    """Whether a lock that one process holds keeps another one out."""
    with tempfile.NamedTemporaryFile(prefix=".kedge-doctor-", dir=directory) as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        command = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", command, file.name], check=False, capture_output=True)
        return other.returncode != 0 and b"BlockingIOError" in other.stderr


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
    draft, name = tempfile.mkstemp(prefix=".kedge-doctor-", dir=directory)
    os.close(draft)
    try:
        handle = os.open(name, flags)
    finally:
        os.unlink(name)
    try:
        yield handle
    finally:
        os.close(handle)
