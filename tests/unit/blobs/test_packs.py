"""Packs on disk: what the port's suite cannot see from outside."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from kedge.blobs import pack_file
from kedge.blobs.direct import BLOCK_BYTES, DIRECT_READ_BYTES, Input, OpenFiles
from kedge.blobs.libc import is_cached, is_resident, library
from kedge.blobs.packs import PackBlobs
from kedge.errors import NoSpace, NotFound, StorageError, UnsupportedFormat, Validation
from kedge.testing.blobs_suite import never, pattern, put, read
from tests.parts import lack
from tests.waiting import wait_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packs"


@pytest.fixture
def blobs(folder: Path) -> Iterator[PackBlobs]:
    blobs = PackBlobs(str(folder))
    yield blobs
    blobs.close()


def sizes(folder: Path) -> list[int]:
    return sorted(path.stat().st_size for path in folder.iterdir())


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def fails(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# --- the file ---


def test_the_bytes_of_a_pack(blobs: PackBlobs, folder: Path) -> None:
    (pack, first), (_, second) = put(blobs, b"one", pattern(5000))
    blobs.close()
    fields = b"KDPACK1\n" + struct.pack("<I", 2) + pack.encode()
    expected = (fields + struct.pack("<I", zlib.crc32(fields))).ljust(4096, b"\0")
    expected += b"one".ljust(4096, b"\0") + pattern(5000).ljust(8192, b"\0")
    assert (first, second) == (4096, 8192)
    assert (folder / f"{pack}.pack").read_bytes() == expected


def test_one_pack_serves_many_saves(blobs: PackBlobs) -> None:
    places = [put(blobs, pattern(10_000, seed))[0] for seed in range(50)]
    assert len({pack for pack, _ in places}) == 1
    assert all(offset % BLOCK_BYTES == 0 for _, offset in places)


def test_a_full_pack_is_followed_by_the_next(folder: Path) -> None:
    blobs = PackBlobs(str(folder), roll_bytes=1 << 20)
    datas = [pattern(300_000, seed) for seed in range(12)]
    places = put(blobs, *datas)
    assert len({pack for pack, _ in places}) == 3
    assert all(size <= (1 << 20) + 303_104 for _, size in blobs.packs())
    assert [read(blobs, place, 300_000) for place in places] == datas
    blobs.close()


def test_a_tiny_store_stays_tiny(blobs: PackBlobs, folder: Path) -> None:
    put(blobs, b"little")
    assert used_bytes(folder) <= 128 << 10
    blobs.close()
    assert sizes(folder) == [8192]


def test_what_a_hint_overstated_is_given_back(blobs: PackBlobs, folder: Path) -> None:
    put(blobs, b"little", hint=1 << 30)
    assert used_bytes(folder) <= 128 << 10
    put(blobs, pattern(100_000), hint=1 << 30)
    assert used_bytes(folder) <= 1 << 20


def test_what_was_given_up_is_given_back(blobs: PackBlobs, folder: Path) -> None:
    put(blobs, b"kept")
    writer = blobs.writer(0)
    for _ in range(8):
        writer.append(bytes(1 << 20))
    writer.abort()
    assert sizes(folder) == [8192]


def test_a_pack_with_nothing_committed_is_removed(blobs: PackBlobs, folder: Path) -> None:
    writer = blobs.writer(1 << 20)
    writer.append(pattern(1 << 20))
    writer.abort()
    assert sizes(folder) == []


@pytest.mark.parametrize("how", ["del", "exit"])
def test_a_forgotten_close_costs_no_space(folder: Path, how: str) -> None:
    code = f"""
from kedge.blobs.packs import PackBlobs
blobs = PackBlobs({str(folder)!r})
writer = blobs.writer(0)
writer.append(b"x")
writer.commit()
writer.release()
{"del blobs, writer" if how == "del" else ""}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sizes(folder) == [8192]


# --- foreign and damaged things ---


def test_foreign_files_are_left_alone(blobs: PackBlobs, folder: Path) -> None:
    (place,) = put(blobs, b"data")
    (folder / "notes.txt").write_text("mine")
    (folder / "short.pack").write_text("mine")
    (folder / ("A" * 32 + ".pack")).write_text("mine")
    (folder / ("b" * 32 + ".pack")).mkdir()
    (folder / ("c" * 32 + ".pack")).symlink_to(folder / "notes.txt")
    assert [pack for pack, _ in blobs.packs()] == [place[0]]
    with pytest.raises(StorageError):
        blobs.remove("c" * 32, never)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_name_never_leads_out_of_the_directory(blobs: PackBlobs, folder: Path) -> None:
    (folder.parent / "secret.pack").write_text("secret")
    for name in ("../secret", "x/../../secret", str(folder.parent / "secret")):
        with pytest.raises(NotFound):
            blobs.read_into(name, 0, memoryview(bytearray(6)))
        with pytest.raises(NotFound):
            blobs.remove(name, never)
        with pytest.raises(NotFound):
            blobs.file_of(name)


def test_a_newer_format_is_refused(blobs: PackBlobs, folder: Path) -> None:
    (place,) = put(blobs, b"data")
    blobs.close()
    path = folder / f"{place[0]}.pack"
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 3)
    path.write_bytes(data)
    assert read(blobs, place, 4) == b"data"  # its checksum is wrong: damage, not a format
    data[44:48] = struct.pack("<I", zlib.crc32(data[:44]))
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormat, match="format 3"):
        read(blobs, place, 4)


def test_a_file_put_back_under_its_name_is_read_anew(blobs: PackBlobs, folder: Path) -> None:
    (place,) = put(blobs, b"data")
    assert read(blobs, place, 4) == b"data"
    path = folder / f"{place[0]}.pack"
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(NotFound):
        read(blobs, place, 4)
    path.write_bytes(data.replace(b"data", b"DATA"))
    assert read(blobs, place, 4) == b"DATA"


def test_scanning_passes_over_unreadable_blocks(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    magic = b"\x89RECORD\n"
    places = put(blobs, *[magic + pattern(2 << 20, seed) for seed in range(4)])
    bad = places[1][1]
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    offsets = [offset for _, offset in places]
    assert list(blobs.scan(places[0][0], magic)) == [offsets[0], *offsets[2:]]


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/packs"):
        with pytest.raises(StorageError, match="directory"):
            PackBlobs(str(tmp_path / place))


def test_a_closed_store_takes_nothing(blobs: PackBlobs) -> None:
    blobs.close()
    with pytest.raises(Validation, match="closed"):
        blobs.writer(0).append(b"x")


# --- the way to the disk ---


def is_direct(blobs: PackBlobs) -> bool:
    pack = blobs._pool._current
    assert pack is not None
    return bool(fcntl.fcntl(pack._output.fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_writes_are_direct_unless_told_otherwise(blobs: PackBlobs, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        lack("direct writes", "this file system has none")
    put(blobs, b"data")
    assert is_direct(blobs)
    buffered = PackBlobs(str(tmp_path / "buffered"), direct=False)
    put(buffered, b"data")
    assert not is_direct(buffered)
    buffered.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_may_refuse_direct_writes_late(
    blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    (place,) = put(blobs, pattern(3_000_000))
    assert not is_direct(blobs)
    assert read(blobs, place, 3_000_000) == pattern(3_000_000)


def test_direct_reads_may_be_refused_late(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = put(blobs, pattern(3_000_000))
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read(blobs, place, 3_000_000) == pattern(3_000_000)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_may_not_preallocate(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fails(number))
    (place,) = put(blobs, pattern(3_000_000))
    assert read(blobs, place, 3_000_000) == pattern(3_000_000)


@pytest.mark.parametrize("is_direct", [True, False])
def test_short_writes_and_reads_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool) -> None:
    draw = random.Random(1)
    real_pwrite, real_preadv = os.pwrite, os.preadv

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if draw.random() < 0.5:
            return real_pwrite(fd, data, offset)
        whole = draw.randrange(len(data) // BLOCK_BYTES + 1) * BLOCK_BYTES
        real_pwrite(fd, data[:whole], offset)
        return whole + draw.randrange(min(BLOCK_BYTES, max(1, len(data) - whole)))  # and a part that is garbage

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        blocks = max(1, len(buffers[0]) // BLOCK_BYTES // draw.randrange(1, 5))
        return real_preadv(fd, [buffers[0][: blocks * BLOCK_BYTES]], offset)

    blobs = PackBlobs(str(folder), direct=is_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "preadv", preadv)
    datas = [pattern(draw.randrange(1, 400_000), seed) for seed in range(10)]
    places = put(blobs, *datas)
    assert [read(blobs, place, len(data)) for place, data in zip(places, datas, strict=True)] == datas
    blobs.close()


def test_a_device_that_takes_nothing_is_an_error(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    put(blobs, b"data")
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StorageError, match="Input/output error"):
        blobs.writer(0).append(b"more")


def test_large_reads_go_around_the_page_cache(blobs: PackBlobs) -> None:
    size = 4 * DIRECT_READ_BYTES
    (place,) = put(blobs, pattern(size))
    path = blobs.file_of(place[0])
    assert path is not None
    fd = os.open(path, os.O_RDONLY)
    try:
        if not blobs._files.get(path)._direct_fd:
            lack("direct reads", "this file system has none")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not is_cached(fd, place[1], size)
        assert not is_resident(fd, place[1], size)
        assert read(blobs, place, size) == pattern(size)
        assert not is_cached(fd, place[1], size)
        os.pread(fd, size, place[1])
        assert is_cached(fd, place[1], size)
        assert is_resident(fd, place[1], size)
        assert read(blobs, place, size) == pattern(size)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("start", "size"), [(0, 3 << 20), (BLOCK_BYTES, BLOCK_BYTES), (0, 5000), (7, BLOCK_BYTES)])
def test_writes_from_memory_that_is_used_again(blobs: PackBlobs, start: int, size: int) -> None:
    """On a page or not, what was appended is what it was then."""
    memory = memoryview(mmap.mmap(-1, 1 << 22))
    memory[start : start + size] = pattern(size)
    writer = blobs.writer(size)
    place = writer.append(memory[start : start + size])
    memory[start : start + size] = bytes(size)
    writer.commit()
    writer.release()
    assert read(blobs, place, size) == pattern(size)


@pytest.mark.parametrize("size", [DIRECT_READ_BYTES, DIRECT_READ_BYTES + 1, 2_500_000])
def test_reads_into_aligned_memory(blobs: PackBlobs, size: int) -> None:
    (place, _) = put(blobs, pattern(size), b"next")
    memory = mmap.mmap(-1, 1 << 22)
    view = memoryview(memory)
    view[size : size + 4] = b"MARK"
    blobs.read_into(*place, view[:size])
    assert view[:size] == pattern(size)
    assert view[size : size + 4] == b"MARK"


def test_the_page_cache_is_emptied_on_the_way(folder: Path) -> None:
    blobs = PackBlobs(str(folder), direct=False)
    writer = blobs.writer(0)
    places = [writer.append(pattern(4 << 20, seed)) for seed in range(13)]
    path = blobs.file_of(places[0][0])
    assert path is not None
    fd = os.open(path, os.O_RDONLY)
    try:
        assert not is_cached(fd, places[0][1], 4 << 20)
    finally:
        os.close(fd)
    writer.commit()
    for seed, place in enumerate(places):
        assert read(blobs, place, 4 << 20) == pattern(4 << 20, seed)
    blobs.close()


def descriptors(folder: Path) -> int:
    """How many of this process are files of the folder; what other threads have open does not count."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link).startswith(f"{folder}/") for link in links)


def test_descriptors_are_bounded_and_let_go(tmp_path: Path) -> None:
    opened: list[Input] = []
    files = OpenFiles(4, opened.append)
    paths = [tmp_path / str(n) for n in range(10)]
    for path in paths:
        path.write_bytes(b"x")
        files.get(str(path))
    opened.clear()
    assert descriptors(tmp_path) == 8  # two for each file
    kept = [files.get(str(path)) for path in paths[-4:]]
    assert opened == []  # the last four are still open
    for path in paths[-3:]:
        path.unlink()
    del kept
    files.get(str(paths[0]))  # a new one: the deleted ones go
    assert len(files._files) == 2
    files.clear()
    opened.clear()
    gc.collect()
    assert descriptors(tmp_path) == 0


# --- syncs ---


class Syncs:
    """Syncs that are recorded, (descriptor, begin, end), and end only when every saver waits for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[int, float, float]] = []
        self.savers = self.waiting = 0
        self.changed = threading.Condition()
        self.real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def fdatasync(self, fd: int) -> None:
        begin = time.monotonic()
        with self.changed:
            assert self.changed.wait_for(lambda: self.waiting == self.savers, 60)
        self.real(fd)
        self.done.append((fd, begin, time.monotonic()))

    def count(self, savers: int = 0, waiting: int = 0) -> None:
        with self.changed:
            self.savers += savers
            self.waiting += waiting
            self.changed.notify_all()


def test_concurrent_commits_share_syncs(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = Syncs(monkeypatch)

    def save(seed: int) -> tuple[float, float]:
        writer = blobs.writer(5000)
        writer.append(pattern(5000, seed))
        appended = time.monotonic()
        syncs.count(waiting=1)
        writer.commit()
        committed = time.monotonic()
        syncs.count(waiting=-1)
        writer.release()
        return appended, committed

    def work(first: int) -> list[tuple[float, float]]:
        try:
            return [save(seed) for seed in range(first, first + 4)]
        finally:
            syncs.count(savers=-1)

    syncs.count(savers=16)
    with ThreadPoolExecutor(16) as pool:
        saves = [times for done in pool.map(work, range(0, 64, 4)) for times in done]
    assert len(syncs.done) < 32
    for appended, committed in saves:  # I1: a whole sync lies between the append and the acknowledgement
        assert any(appended <= begin and end <= committed for _, begin, end in syncs.done)


@pytest.mark.parametrize("what", ["fdatasync", "fsync"])
def test_a_failed_sync_ends_a_pack(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """I9, for the pack (fdatasync) and for its name (fsync of the directory)."""
    kept = put(blobs, b"kept") if what == "fdatasync" else []
    one, two = blobs.writer(0), blobs.writer(0)
    place, same = one.append(b"one"), two.append(b"two")
    assert place[0] == same[0]
    pack = blobs._pool._current
    assert pack is not None
    fd = pack._output.fd
    with monkeypatch.context() as patch:
        patch.setattr(os, what, fails(errno.EIO))
        with pytest.raises(StorageError, match=place[0]):
            one.commit()
    touched: list[int] = []
    real_pwrite, real_fdatasync = os.pwrite, os.fdatasync
    monkeypatch.setattr(os, "pwrite", lambda f, *rest: touched.append(f) or real_pwrite(f, *rest))
    monkeypatch.setattr(os, "fdatasync", lambda f: touched.append(f) or real_fdatasync(f))
    with pytest.raises(StorageError, match="sync"):
        two.commit()  # no second try, and no false success
    assert fd not in touched
    two.abort()
    (again,) = put(blobs, b"one")
    assert again[0] != place[0]
    assert read(blobs, again, 3) == b"one"
    for earlier in kept:
        assert read(blobs, earlier, 4) == b"kept"


def test_everyone_waiting_for_a_sync_that_fails_is_told(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    committing = threading.Semaphore(0)
    everybody = threading.Event()

    def fdatasync(_: int) -> None:
        if not everybody.is_set():
            for _ in range(8):
                assert committing.acquire(timeout=60)
            everybody.set()
        raise OSError(errno.EIO, "broken")

    writers = [blobs.writer(0) for _ in range(8)]
    for writer in writers:
        writer.append(b"data")
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    failed = []

    def commit(n: int) -> None:
        committing.release()
        try:
            writers[n].commit()
        except StorageError:
            failed.append(n)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(commit, range(8)))
    assert len(failed) == 8


def test_a_failed_write_back_is_a_failed_sync(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache reports it once, to whoever asks first: here sync_file_range, then nobody (I9)."""
    blobs = PackBlobs(str(folder), direct=False)
    writer, other = blobs.writer(0), blobs.writer(0)
    other.append(b"other")

    def sync_file_range(*_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(library(), "sync_file_range", sync_file_range)
        with pytest.raises(StorageError, match="Input/output error"):
            for _ in range(10):
                writer.append(bytes(4 << 20))
    for victim in (writer, other):
        with pytest.raises(StorageError):
            victim.commit()
        victim.abort()
    blobs.close()


def test_a_writer_with_a_failed_append_does_not_commit(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, other = blobs.writer(0), blobs.writer(0)
    writer.append(b"one")
    place = other.append(b"other")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails(errno.EIO))
        with pytest.raises(StorageError):
            writer.append(b"two")
    with pytest.raises(StorageError, match="earlier write"):
        writer.commit()
    assert other.append(b"next")[0] != place[0]  # nothing more goes where writing failed
    other.commit()  # but its bytes that are there are well
    writer.abort()
    assert read(blobs, place, 5) == b"other"


def test_a_full_disk(blobs: PackBlobs, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept,) = put(blobs, pattern(10_000))
    writer = blobs.writer(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        with pytest.raises(NoSpace, match="No space left"):
            for seed in range(100):
                writer.append(pattern(100_000, seed))
    writer.abort()
    assert sizes(folder) == [4096 + 12_288]
    assert read(blobs, kept, 10_000) == pattern(10_000)
    put(blobs, pattern(100_000))


def test_what_fits_is_written_though_the_hint_does_not_fit(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def fallocate(fd: int, offset: int, size: int) -> None:
        if size > 500_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    (place,) = put(blobs, pattern(300_000), hint=1 << 30)
    assert read(blobs, place, 300_000) == pattern(300_000)


def test_no_space_for_a_new_pack_leaves_none(blobs: PackBlobs, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", fails(errno.ENOSPC))
    with pytest.raises(NoSpace):
        blobs.writer(0).append(b"data")
    assert sizes(folder) == []


def test_abort_waits_for_appends_under_way(blobs: PackBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed under a write may be another file's by the time the write happens."""
    put(blobs, b"data")
    real = os.pwrite
    started, aborted = threading.Event(), threading.Event()
    too_early = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        started.set()
        too_early.append(aborted.wait(0.1))  # limit: an abort that waits comes later
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = blobs.writer(0)
    thread = threading.Thread(target=writer.append, args=(b"slow",))
    thread.start()
    assert started.wait(60)
    writer.abort()
    aborted.set()
    assert too_early == [False]
    thread.join()


# --- locks, processes ---


def test_gc_may_see_a_pack_before_its_maker_has_the_lock(
    blobs: PackBlobs, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remover = PackBlobs(str(folder))
    real = pack_file.try_lock
    removed = []

    def try_lock(fd: int, path: str) -> bool:
        if not removed:
            removed.append(Path(path).stem)
            monkeypatch.setattr(pack_file, "try_lock", real)
            assert remover.remove(removed[0], lambda: True)
        return real(fd, path)

    monkeypatch.setattr(pack_file, "try_lock", try_lock)
    (place,) = put(blobs, b"data")
    assert place[0] not in removed
    assert read(remover, place, 4) == b"data"
    remover.close()


def in_child(work: Callable[[], None]) -> int:
    """Fork, do `work` in the child, answer its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: the very thing tested here
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_parent_and_child_both_go_on(blobs: PackBlobs, folder: Path) -> None:
    (before,) = put(blobs, pattern(10_000, 1))
    open_writer = blobs.writer(0)
    pending = open_writer.append(pattern(10_000, 2))

    def child() -> None:
        assert read(blobs, before, 10_000) == pattern(10_000, 1)
        (place,) = put(blobs, pattern(10_000, 3))
        assert place[0] != before[0]
        for call in (open_writer.commit, lambda: open_writer.append(b"x")):
            with pytest.raises(Validation, match="parent"):
                call()
        open_writer.abort()
        assert not blobs.remove(before[0], never)  # the parent's writer is alive
        blobs.close()

    assert in_child(child) == 0
    open_writer.commit()
    open_writer.release()
    (after,) = put(blobs, pattern(10_000, 4))
    assert after[0] == before[0]
    assert read(blobs, before, 10_000) == pattern(10_000, 1)
    assert read(blobs, pending, 10_000) == pattern(10_000, 2)
    assert len(list(blobs.packs())) == 2


def test_a_child_does_not_keep_the_lock(blobs: PackBlobs) -> None:
    writer = blobs.writer(0)
    pack, _ = writer.append(b"data")
    writer.commit()
    ready, go = os.pipe(), os.pipe()

    def child() -> None:
        os.write(ready[1], b".")
        os.read(go[0], 1)

    thread = threading.Thread(target=in_child, args=(child,))
    thread.start()
    os.read(ready[0], 1)
    writer.release()
    assert blobs.remove(pack, lambda: True)
    os.write(go[1], b".")
    thread.join()
    for fd in (*ready, *go):
        os.close(fd)


def test_a_closed_pack_is_free_though_a_copy_of_its_descriptor_is_open(blobs: PackBlobs, folder: Path) -> None:
    """As in a child that was forked without Python's knowledge."""
    (place,) = put(blobs, b"data")
    writer = blobs.writer(0)
    writer.append(b"more")
    pack = blobs._pool._current
    assert pack is not None
    copy = os.dup(pack._output.fd)
    writer.commit()
    blobs.close()
    assert not blobs.remove(place[0], never)
    writer.release()
    assert blobs.remove(place[0], lambda: True)
    os.close(copy)


@pytest.mark.parametrize("what", ["reading", "writing"])
def test_fork_while_a_lock_is_held(blobs: PackBlobs, what: str) -> None:
    (place,) = put(blobs, b"data")

    def child() -> None:
        signal.alarm(60)
        assert read(blobs, place, 4) == b"data"
        put(blobs, b"more")

    with blobs._files._lock if what == "reading" else blobs._pool._lock:
        assert in_child(child) == 0


def test_fork_while_threads_save(blobs: PackBlobs) -> None:
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            put(blobs, pattern(20_000))

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for seed in range(10):

            def child(seed: int = seed) -> None:
                (place,) = put(blobs, pattern(9_000, seed))
                assert read(blobs, place, 9_000) == pattern(9_000, seed)

            assert in_child(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_killed_writer_leaves_removable_garbage(blobs: PackBlobs, folder: Path) -> None:
    code = f"""
import sys, time
from kedge.blobs.packs import PackBlobs
writer = PackBlobs({str(folder)!r}).writer(1 << 20)
print(writer.append(b"x" * 100_000)[0], flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        pack = process.stdout.readline().strip()
        assert not blobs.remove(pack, never)
        process.kill()
    assert pack in dict(blobs.packs())
    assert blobs.remove(pack, lambda: True)


def test_writers_removers_and_readers_at_once(folder: Path) -> None:
    """gc never removes what is being written or is named, though it tries all the time (I3)."""
    stores = [PackBlobs(str(folder), roll_bytes=200_000) for _ in range(2)]
    named: dict[str, int] = {}
    lock = threading.Lock()
    stop = threading.Event()
    lost: list[str] = []
    saves = [0] * 4
    removed: list[str] = []

    def save(n: int) -> None:
        draw = random.Random(n)
        blobs = stores[n % 2]
        while not stop.is_set():
            writer = blobs.writer(0)
            seed = draw.randrange(100)
            place = writer.append(pattern(10_000, seed))
            if draw.random() < 0.2:
                writer.abort()
                continue
            writer.commit()
            time.sleep(0.0005)  # sleep: what the index takes
            with lock:
                named[place[0]] = named.get(place[0], 0) + 1
            writer.release()
            try:
                if read(blobs, place, 10_000) != pattern(10_000, seed):
                    lost.append("changed")
            except NotFound as error:
                lost.append(str(error))
            with lock:
                named[place[0]] -= 1  # deleted again
            saves[n] += 1

    def is_garbage(pack: str) -> bool:
        with lock:
            return not named.get(pack)

    def collect() -> None:
        while not stop.is_set():
            for pack, _ in stores[0].packs():
                if stores[1].remove(pack, lambda pack=pack: is_garbage(pack)):
                    removed.append(pack)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)] + [threading.Thread(target=collect)]
    for thread in threads:
        thread.start()

    def is_over() -> bool:
        is_enough = min(saves) >= 50 and len(removed) >= 5
        return is_enough or bool(lost) or not all(thread.is_alive() for thread in threads)

    wait_for(is_over, "too little happens", timeout_s=240)  # with every sync that takes
    stop.set()
    for thread in threads:
        thread.join()
    assert lost == []
    assert min(saves) >= 50
    for blobs in stores:
        blobs.close()


def test_a_disk_that_goes_away_while_a_pack_is_locked(tmp_path: Path) -> None:
    """XFS locks a file, and then cannot say whether it still has a name."""
    path = tmp_path / "pack"
    path.touch()
    away = mock.patch("os.fstat", side_effect=OSError(errno.EIO, "Input/output error"))
    with path.open() as file, away, pytest.raises(StorageError, match="lock"):
        pack_file.try_lock(file.fileno(), str(path))
