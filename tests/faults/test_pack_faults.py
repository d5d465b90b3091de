"""What committed packs survive: every system call failing or being the last one, and every power cut (I1, I9).

One history of saves, aborts and removals is played under three kinds of misfortune. Whatever happens, all that
was acknowledged reads back, and all else can be removed.
"""

import errno
import fcntl
import inspect
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kedge.blobs import pack_file
from kedge.blobs.packs import PackBlobs, PackWriter
from kedge.errors import CheckpointError, StorageError
from kedge.testing.blobs_suite import read

pytestmark = pytest.mark.faults

Report = Callable[..., None]  # ("kept", pack, offset, size, seed) | ("dropping" | "removed", pack)


def history(folder: str, report: Report) -> None:
    """Saves that share packs, roll over, are given up and removed; what fails is done once more, as a store does."""
    blobs = PackBlobs(folder, roll_bytes=48 << 10)

    def save(*seeds: int) -> str:
        for attempt in itertools.count():
            writer = blobs.writer(0)
            try:
                places = [(writer.append(content(size_of(seed), seed)), seed) for seed in seeds]
                writer.commit()
            except StorageError:
                writer.abort()
                if attempt == 2:
                    raise
                continue
            for (pack, offset), seed in places:
                report("kept", pack, offset, size_of(seed), seed)
            writer.release()
            return places[0][0][0]
        raise AssertionError

    save(1, 2)
    early, late = blobs.writer(0), blobs.writer(0)
    try:
        early.append(content(size_of(3), 3))
        late.append(content(size_of(4), 4))
        early.append(content(size_of(5), 5))
    except StorageError:
        pass
    finally:
        late.abort()
        early.abort()
    save(6)  # where the others were
    doomed = save(7, 8, 9, 10)
    save(11)
    for pack, _ in list(blobs.packs()):
        if pack == doomed:
            report("dropping", pack)  # the index no longer names it
            try:
                if blobs.remove(pack, lambda: True):
                    report("removed", pack)
            except StorageError:
                pass
    save(12)
    blobs.close()


def size_of(seed: int) -> int:
    return 3_000 + seed * 1_999


def content(size: int, seed: int) -> bytes:
    return (bytes(range(seed, 256)) * (size // (256 - seed) + 1))[:size]


@dataclass
class Kept:
    """What must be there, by the reports so far."""

    places: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)

    def report(self, what: str, pack: str, *place: int) -> None:
        if what == "kept":
            offset, size, seed = place
            self.places.setdefault(pack, []).append((offset, size, seed))
        elif what == "dropping":
            self.places.pop(pack, None)
        else:
            self.removed.add(pack)

    def check(self, folder: Path) -> None:
        """Everything kept is readable, removed packs are gone, and the rest can be removed and written beside."""
        blobs = PackBlobs(str(folder))
        present = dict(blobs.packs())
        for pack, places in self.places.items():
            for offset, size, seed in places:
                is_same = read(blobs, (pack, offset), size) == content(size, seed)
                assert is_same, f"{pack} at {offset} changed"  # apart: pytest would compare them line by line
        assert not self.removed & present.keys(), "a removed pack is back"
        for pack in present.keys() - self.places.keys():
            list(blobs.scan(pack, b"magic"))
            assert blobs.remove(pack, lambda: True), f"garbage {pack} cannot be removed"
        writer = blobs.writer(0)
        place = writer.append(b"and on it goes")
        writer.commit()
        assert read(blobs, place, 14) == b"and on it goes"
        assert {pack for pack, _ in blobs.packs()} == self.places.keys() | {place[0]}
        writer.release()
        blobs.close()


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Nothing here needs a real disk: what it may lose is imagined. Memory makes thousands of them cheap."""
    shm = Path("/dev/shm")
    folder = shm / f"kedge-{os.getpid()}-{tmp_path.name}" if shm.is_dir() else tmp_path / "disks"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


# --- each call fails, or is the last ---

CALLS = [
    (os, "open"), (os, "mkdir"), (os, "pwrite"), (os, "posix_fallocate"), (os, "ftruncate"), (os, "unlink"),
    (os, "fdatasync"), (os, "fsync"), (fcntl, "flock"), (fcntl, "fcntl"),
]  # fmt: skip


class Misfortune:
    """Counts the calls above, and strikes at the `number`th."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, strike: str) -> None:
        self.count = 0
        self._number = number
        self._strike = strike
        for module, name in CALLS:
            patch.setattr(module, name, self._wrap(getattr(module, name)))

    def _wrap(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.count += 1
            is_now = self.count == self._number
            if is_now and self._strike == "die before":
                os.kill(os.getpid(), signal.SIGKILL)
            if is_now and self._strike in ("EIO", "ENOSPC"):
                number = getattr(errno, self._strike)
                raise OSError(number, os.strerror(number))
            result = real(*args)
            if is_now and self._strike == "die after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def play(folder: Path, number: int, strike: str) -> tuple[Kept, int, int]:
    """The history in a child process, with a misfortune: (what it reported, exit status, calls it made)."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 2
        patch = pytest.MonkeyPatch()
        try:
            misfortune = Misfortune(patch, number, strike)

            def report(*words: object) -> None:
                os.write(writing, (" ".join(map(str, words)) + "\n").encode())

            try:
                history(str(folder), report)
                status = 0
            except CheckpointError:
                status = 1  # a typed error is an honest end
            patch.undo()
            report("calls", misfortune.count)
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading) as lines:
        words = [line.split() for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kept = Kept()
    for what, first, *rest in words:
        if what != "calls":
            kept.report(what, first, *map(int, rest))
    return kept, status, next((int(first) for what, first, *_ in words if what == "calls"), 0)


@pytest.mark.parametrize("strike", ["EIO", "ENOSPC", "die before", "die after"])
def test_each_call_fails_or_is_the_last(in_memory: Path, strike: str) -> None:
    kept, status, calls = play(in_memory / "whole", 0, strike)
    assert (status, len(kept.places)) == (0, 3)
    assert calls > 60
    statuses = set()
    first = 1 + (strike in ("ENOSPC", "die after"))  # of two calls in a row, one fails so and the other so
    for number in range(first, calls + 1, 2):
        folder = in_memory / str(number)
        kept, status, _ = play(folder / "packs", number, strike)
        statuses.add(status)
        kept.check(folder / "packs")
        shutil.rmtree(folder)
    assert statuses <= ({-signal.SIGKILL} if "die" in strike else {0, 1})


# --- the same from outside: the kernel says no ---

SYSCALLS = "pwrite64,fdatasync,fsync,fallocate,ftruncate,unlink"


def traced(folder: Path, *options: str) -> tuple[Kept, int, str]:
    code = f"""
from __future__ import annotations
import itertools, sys
from kedge.blobs.packs import PackBlobs
from kedge.errors import CheckpointError, StorageError

{inspect.getsource(size_of)}

{inspect.getsource(content)}

{inspect.getsource(history)}

try:
    history({str(folder / "packs")!r}, lambda *words: print(*words, flush=True))
except CheckpointError:
    sys.exit(1)
"""
    log = folder / "log"
    command = ["strace", "-f", "-o", str(log), *options, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    kept = Kept()
    for line in done.stdout.splitlines():
        what, pack, *rest = line.split()
        kept.report(what, pack, *map(int, rest))
    assert done.returncode in (0, 1, -signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    return kept, done.returncode, log.read_text()


@pytest.mark.requires("strace")
@pytest.mark.parametrize("strike", ["error=EIO", "error=ENOSPC", "signal=KILL"])
def test_the_kernel_says_no(tmp_path: Path, strike: str) -> None:
    (tmp_path / "whole").mkdir()
    kept, status, log = traced(tmp_path / "whole", "-e", f"trace={SYSCALLS}")
    assert (status, len(kept.places)) == (0, 3)
    counts = {name: len(re.findall(rf"\b{name}\(", log)) for name in SYSCALLS.split(",")}
    assert all(counts.values()), counts
    draw = random.Random(strike)
    for name, count in counts.items():
        number = draw.randrange(1, count + 1)
        folder = tmp_path / f"{name}-{number}"
        folder.mkdir()
        kept, _, log = traced(folder, "-e", f"trace={SYSCALLS}", "-e", f"inject={name}:{strike}:when={number}")
        assert "INJECTED" in log or "KILL" in log
        kept.check(folder / "packs")


# --- every disk that a power cut may leave ---


@dataclass(frozen=True)
class Op:
    """One change of the disk, or a promise. `file` is a number that stands for an inode; 0 for directories."""

    kind: str  # write, extend, cut, sync; link, unlink, mkdir, sync names; report
    file: int = 0
    path: str = ""
    at: int = 0
    data: bytes = b""
    words: tuple[object, ...] = ()


class Recorder:
    """Passes the calls of `history` on and keeps what they mean for the disk."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.ops: list[Op] = []
        self._root = str(root)
        self._files: dict[int, int] = {}  # by descriptor
        self._folders: dict[int, str] = {}
        self._numbers = itertools.count(1)
        for name in (
            "open",
            "close",
            "mkdir",
            "unlink",
            "pwrite",
            "posix_fallocate",
            "ftruncate",
            "fdatasync",
            "fsync",
        ):
            patch.setattr(os, name, self._wrap(getattr(os, name), getattr(self, f"_{name}")))

    def report(self, *words: object) -> None:
        self.ops.append(Op("report", words=words))

    def _wrap(self, real: Callable[..., object], note: Callable[..., None]) -> Callable[..., object]:
        def call(*args: object) -> object:
            result = real(*args)
            note(result, *args)
            return result

        return call

    def _open(self, fd: int, path: object, flags: int, *_: object) -> None:
        if not str(path).startswith(self._root):
            return
        if flags & os.O_CREAT:
            self._files[fd] = next(self._numbers)
            self.ops.append(Op("link", self._files[fd], str(path)))
        elif flags & os.O_DIRECTORY:
            self._folders[fd] = str(path)

    def _close(self, _: None, fd: int) -> None:
        self._files.pop(fd, None)
        self._folders.pop(fd, None)

    def _mkdir(self, _: None, path: str, *__: object) -> None:
        self.ops.append(Op("mkdir", path=path))

    def _unlink(self, _: None, path: str) -> None:
        self.ops.append(Op("unlink", path=path))

    def _pwrite(self, count: int, fd: int, data: memoryview, offset: int) -> None:
        assert count == len(data)
        for start in range(0, count, 4096):  # each block on its own may or may not arrive
            block = bytes(data[start : start + 4096])
            self.ops.append(Op("write", self._files[fd], at=offset + start, data=block))

    def _posix_fallocate(self, _: None, fd: int, offset: int, size: int) -> None:
        self.ops.append(Op("extend", self._files[fd], at=offset + size))

    def _ftruncate(self, _: None, fd: int, size: int) -> None:
        self.ops.append(Op("cut", self._files[fd], at=size))

    def _fdatasync(self, _: None, fd: int) -> None:
        self.ops.append(Op("sync", self._files[fd]))

    def _fsync(self, _: None, fd: int) -> None:
        self.ops.append(
            Op("sync names", path=self._folders[fd]) if fd in self._folders else Op("sync", self._files[fd])
        )


NAMES = ("link", "unlink", "mkdir")


def is_durable(op: Op, later: list[Op]) -> bool:
    """Whether a sync after `op` covers it: of its file, or, for names, of the directory they are in."""
    if op.kind in NAMES:
        return any(o.kind == "sync names" and o.path == os.path.dirname(op.path) for o in later)
    return any(o.kind == "sync" and o.file == op.file for o in later)


def crash_states(ops: list[Op], draw: random.Random) -> Iterator[list[Op]]:
    """What of `ops` may be on the disk after a power cut: all that is synced, and any choice of the rest.

    All choices are too many: none, all, each alone, all but each, and some by chance.
    """
    changes = [op for op in ops if op.kind in NAMES or op.kind in ("write", "extend", "cut")]
    position = {id(op): n for n, op in enumerate(ops)}
    open_ops = [op for op in changes if not is_durable(op, ops[position[id(op)] + 1 :])]
    ids = [id(op) for op in open_ops]
    choices: list[set[int]] = [set(), set(ids)]
    choices += [{one} for one in ids] + [set(ids) - {one} for one in ids]
    choices += [{one for one in ids if draw.random() < 0.5} for _ in range(4)]
    for chosen in {frozenset(choice) for choice in choices}:
        yield [op for op in changes if id(op) in chosen or id(op) not in ids]


def build(ops: list[Op], root: Path, target: Path) -> None:
    """The disk that these operations leave. A name whose directory was lost is lost with it."""
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    folders = {str(root)}
    for op in ops:
        data = contents.setdefault(op.file, bytearray())
        if op.kind == "write":
            data.extend(bytes(max(0, op.at + len(op.data) - len(data))))
            data[op.at : op.at + len(op.data)] = op.data
        elif op.kind == "extend":
            data.extend(bytes(max(0, op.at - len(data))))
        elif op.kind == "cut":
            del data[op.at :]
            data.extend(bytes(op.at - len(data)))
        elif op.kind == "mkdir":
            folders |= {op.path} if os.path.dirname(op.path) in folders else set()
        elif op.kind == "link":
            names[op.path] = op.file
        else:
            names.pop(op.path, None)
    for folder in sorted(folders):
        (target / os.path.relpath(folder, root)).mkdir(parents=True, exist_ok=True)
    for path, file in names.items():
        if os.path.dirname(path) in folders:
            (target / os.path.relpath(path, root)).write_bytes(contents.get(file, b""))


def explore(tmp_path: Path, *, every: int = 1) -> int:
    """Cut the power after every operation of the history; answers how many disks were looked at."""
    root = tmp_path / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, root)
        history(str(root / "deep" / "packs"), recorder.report)
    draw = random.Random(1)
    seen: set[tuple[int, ...]] = set()
    number = 0
    for end in range(1, len(recorder.ops) + 1, every):
        kept = Kept()
        for op in recorder.ops[:end]:
            if op.kind == "report":
                kept.report(*op.words)
        promises = sum(op.kind == "report" for op in recorder.ops[:end])
        for state in crash_states(recorder.ops[:end], draw):
            key = (promises, *map(id, state))
            if key in seen:
                continue
            seen.add(key)
            number += 1
            target = tmp_path / str(number)
            build(state, root, target)
            kept.check(target / "deep" / "packs")
            shutil.rmtree(target)
    return number


def test_every_power_cut_leaves_what_was_committed(in_memory: Path) -> None:
    assert explore(in_memory) > 500


def skip(*_: object) -> None:
    pass


def sync_without_parent(folder: pack_file.Folder) -> None:
    pack_file.sync_directory(folder.path)


def commit_without_sync_of_later_packs(writer: PackWriter) -> None:
    for pack, end in itertools.islice(writer._ends.items(), 1):
        pack.sync(end)


def reuse_committed_space(pack: pack_file.OpenPack) -> None:
    pack._committed = max(pack._committed - 8192, 4096)
    real_settle(pack)


real_settle = pack_file.OpenPack.settle

MUTANTS: dict[str, list[tuple[object, str, Callable[..., object]]]] = {
    "no fdatasync of packs": [(pack_file, "sync_data", skip)],
    "no fsync of the directory": [(pack_file.Folder, "sync", skip)],
    "no fsync of the parent": [
        (pack_file.Folder, "sync", sync_without_parent),
        (pack_file, "make_directories", lambda path, *_: os.makedirs(path, exist_ok=True)),
    ],
    "only the first pack is synced": [(PackWriter, "commit", commit_without_sync_of_later_packs)],
    "committed space is given back": [(pack_file.OpenPack, "settle", reuse_committed_space)],
}


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_safeguard_is_noticed(in_memory: Path, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    for target, name, replacement in MUTANTS[mutant]:
        monkeypatch.setattr(target, name, replacement)
    with pytest.raises((AssertionError, CheckpointError)):
        explore(in_memory)
