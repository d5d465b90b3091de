"""kedge.File and kedge.Tree: what is saved comes back, what did not change is not read, memory stays bounded."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kedge
from kedge.blobs import libc
from kedge.files import FilesSummary, diff_trees, restore, scan, summaries_in, writers
from kedge.files import output as filling
from kedge.files.scan import STORE_MARKER
from kedge.files.table import Table, pack_table, parse_table

Manager = kedge.CheckpointManager


@pytest.fixture
def cm() -> Iterator[Manager]:
    with kedge.open("memory:") as manager:
        yield manager


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def snapshot(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Everything a tree keeps of what is on disk."""
    found: dict[bytes, tuple[object, ...]] = {}
    first_names: dict[tuple[int, int], bytes] = {}
    top = os.fsencode(root)
    for folder, folders, files in os.walk(top):
        for path in [os.path.join(folder, name) for name in folders + files] + ([folder] if folder == top else []):
            status = os.lstat(path)
            name = os.path.relpath(path, top)
            seen: tuple[object, ...] = (status.st_mode, status.st_mtime_ns, status.st_uid, status.st_gid)
            if stat.S_ISLNK(status.st_mode):
                seen += (os.readlink(path),)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    seen += (file.read(),)
                if status.st_nlink > 1:
                    seen += ("linked", first_names.setdefault((status.st_dev, status.st_ino), name) == name)
            found[name] = seen
    return found


def settle(root: Path) -> None:
    """Let enough time pass for the times of files to be trusted."""
    time.sleep(0.12)  # sleep: at least the age of a file that is trusted


def save(cm: Manager, tree: object, job: str = "job") -> kedge.Tree:
    """Save and load again."""
    loaded = cm.load(cm.save(job, "step", tree))
    assert isinstance(loaded, kedge.Tree)
    return loaded


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files whose content is read from now on."""
    names: list[str] = []
    really_read = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name not in names:
            names.append(name)
        return really_read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    return names


# --- there and back ---

NAMES = (
    st.binary(min_size=1, max_size=12)
    .map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"-"))
    .filter(lambda name: name not in (b".", b"..", STORE_MARKER))  # a store inside of a tree is left out
)
LEAVES = st.one_of(
    st.binary(max_size=300),
    st.sampled_from([5000, 70_000, 300_000]),  # so many random bytes
    st.tuples(st.just("link"), st.binary(min_size=1, max_size=20).map(lambda target: target.replace(b"\0", b"/"))),
    st.just("hard link"),
)
FOLDERS = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=5), lambda inner: st.dictionaries(NAMES, LEAVES | inner, max_size=5)
)


def build(folder: bytes, content: dict[bytes, object], draw: random.Random, files: list[bytes]) -> None:
    for name, what in content.items():
        path = os.path.join(folder, name)
        if isinstance(what, dict):
            os.mkdir(path)
            build(path, what, draw, files)
        elif isinstance(what, tuple):
            os.symlink(what[1], path)
        elif isinstance(what, bytes | int):
            Path(os.fsdecode(path)).write_bytes(what if isinstance(what, bytes) else draw.randbytes(what))
            files.append(path)
        elif files:
            os.link(draw.choice(files), path)
        if not isinstance(what, tuple) and os.path.lexists(path):
            os.chmod(path, draw.choice([0o755, 0o700, 0o777, 0o1750]))
        if os.path.lexists(path):
            times = (0, draw.randrange(2**60))
            os.utime(path, ns=times, follow_symlinks=False)


@given(folders=FOLDERS, seed=st.integers(0, 2**32))
def test_any_tree_comes_back_as_it_was(folders: dict[bytes, object], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, kedge.open("memory:") as cm:
        root, out = Path(folder, "in"), Path(folder, "out")
        root.mkdir()
        build(os.fsencode(root), folders, random.Random(seed), [])
        loaded = save(cm, kedge.Tree(root))
        loaded.write_to(out)
        assert snapshot(out) == snapshot(root)
        for entry in loaded.entries:
            if entry.kind in ("file", "hard link"):
                assert loaded.read(entry.path) == (root / entry.path).read_bytes()
        again = save(cm, kedge.Tree(out), "other")
        assert [entry.path for entry in again.entries] == [entry.path for entry in loaded.entries]


@pytest.mark.parametrize("shape", ["random", "text", "zeros"])
def test_sizes_around_every_border(cm: Manager, source: Path, tmp_path: Path, shape: str) -> None:
    draw = random.Random(3)
    mib = 1 << 20
    for size in (0, 1, 4095, mib - 1, mib, mib + 1, 4 * mib - 1, 4 * mib, 4 * mib + 1, 9 * mib + 17):
        data = {
            "random": draw.randbytes(size),
            "text": (b"some words " * (size // 11 + 1))[:size],
            "zeros": bytes(size),
        }
        (source / f"{size}.bin").write_bytes(data[shape])
    loaded = save(cm, {"tree": kedge.Tree(source)}["tree"])
    loaded.write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)
    assert loaded.read(f"{mib}.bin") == (source / f"{mib}.bin").read_bytes()
    assert loaded.size_bytes == sum(path.stat().st_size for path in source.iterdir())


def test_many_small_files_share_chunks(cm: Manager, source: Path, tmp_path: Path) -> None:
    for n in range(2000):
        folder = source / f"d{n // 50}"
        folder.mkdir(exist_ok=True)
        (folder / f"{n}.txt").write_text(f"{n} " * 200)
    loaded = save(cm, kedge.Tree(source))
    assert loaded._stored is not None
    assert loaded._stored.content is not None
    sizes = [entry.size_bytes for entry in loaded._stored.content.entries]
    assert max(sizes) <= 1 << 20
    assert len(sizes) < 12
    loaded.write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)


def test_empty_tree_and_empty_files(cm: Manager, source: Path, tmp_path: Path) -> None:
    loaded = save(cm, kedge.Tree(source))
    assert loaded.entries == []
    assert loaded.size_bytes == 0
    loaded.write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)
    (source / "empty").touch()
    (source / "folder").mkdir()
    save(cm, kedge.Tree(source)).write_to(tmp_path / "out2")
    assert snapshot(tmp_path / "out2") == snapshot(source)


def test_holes_stay_holes(cm: Manager, source: Path, tmp_path: Path) -> None:
    with (source / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(40 << 20)
        file.write(b"middle")
        file.truncate(100 << 20)
    with (source / "only a hole").open("wb") as file:
        file.truncate(1 << 40)
    checkpoint = cm.get(cm.save("job", "step", kedge.Tree(source)))
    assert checkpoint.size_bytes < 1 << 20
    loaded = cm.load(checkpoint.id)
    assert isinstance(loaded, kedge.Tree)
    loaded.write_to(tmp_path / "out")
    for name in ("sparse", "only a hole"):
        before, after = (source / name).stat(), (tmp_path / "out" / name).stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert after.st_blocks <= before.st_blocks
    assert loaded.read("sparse") == (source / "sparse").read_bytes()


def test_deep_trees_and_long_names(cm: Manager, tmp_path: Path) -> None:
    draw = os.fsencode(tmp_path)
    levels = 1000
    fd = os.open(draw, os.O_RDONLY)
    os.mkdir("source", dir_fd=fd)
    name = "source"
    for level in range(levels):
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd, name = below, ("n" * 250 if level < 900 else "d") + str(level)
        os.mkdir(name, dir_fd=fd)
    inside = os.open(name, os.O_RDONLY, dir_fd=fd)
    file = os.open("leaf", os.O_WRONLY | os.O_CREAT, dir_fd=inside)
    os.write(file, b"down here")
    for descriptor in (file, inside, fd):
        os.close(descriptor)
    try:
        loaded = save(cm, kedge.Tree(tmp_path / "source"))
        assert len(loaded.entries) == levels + 1
        assert loaded.read(loaded.entries[-1].path) == b"down here"
        loaded.write_to(tmp_path / "out")
        again = save(cm, kedge.Tree(tmp_path / "out"), "other")
        assert again.entries == loaded.entries
        loaded.write_to(tmp_path / "out", overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["out", "source"]
    finally:
        subprocess.run(["rm", "-rf", "source", "out"], cwd=tmp_path, check=True)


def test_a_single_file(cm: Manager, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(random.Random(5).randbytes(3 << 20))
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    state = cm.load(cm.save("job", "step", {"log": kedge.File(path), "through": kedge.File(tmp_path / "link")}))
    assert isinstance(state, dict)
    loaded = state["log"]
    assert loaded.entry.path == "x.log"
    assert loaded.entry.mode == 0o640
    assert state["through"].entry.path == "link"
    assert loaded.read() == state["through"].read() == path.read_bytes()
    loaded.write_to(tmp_path / "deep" / "er" / "y.log")
    assert (tmp_path / "deep" / "er" / "y.log").read_bytes() == path.read_bytes()
    assert (tmp_path / "deep" / "er" / "y.log").stat().st_mtime_ns == path.stat().st_mtime_ns
    with pytest.raises(kedge.Conflict, match="exists already"):
        loaded.write_to(path)
    with pytest.raises(kedge.Conflict, match="directory"):
        loaded.write_to(tmp_path / "deep", overwrite=True)
    path.write_bytes(b"other")
    leftover = restore.STAGE_PREFIX + hashlib.sha256(b"x.log").hexdigest()[:16].encode()
    os.makedirs(os.path.join(os.fsencode(tmp_path), leftover, b"of a killed restore"))
    loaded.write_to(path, overwrite=True)
    assert path.stat().st_size == 3 << 20
    assert sorted(os.listdir(tmp_path)) == ["deep", "link", "x.log"]


def test_reading_one_file_of_a_tree(cm: Manager, source: Path) -> None:
    (source / "sub").mkdir()
    (source / "sub" / "a").write_text("a")
    os.link(source / "sub" / "a", source / "sub" / "b")
    (source / "link").symlink_to("sub/a")
    loaded = save(cm, kedge.Tree(source))
    assert loaded.read("sub/a") == loaded.read("sub/b") == b"a"
    assert b"".join(loaded.stream("sub/a")) == b"a"
    by_path = {entry.path: entry for entry in loaded.entries}
    assert by_path["link"].target == "sub/a"
    assert (by_path["sub/b"].kind, by_path["sub/b"].target, by_path["sub/b"].size_bytes) == ("hard link", "sub/a", 1)
    with pytest.raises(kedge.NotFound, match="no 'sub/c'"):
        loaded.read("sub/c")
    for name in ("sub", "link"):
        with pytest.raises(kedge.Validation, match="not a file"):
            loaded.read(name)
    with pytest.raises(kedge.Validation, match="not in a store"):
        kedge.Tree(source).read("sub/a")
    with pytest.raises(kedge.Validation, match="not in a store"):
        kedge.File(source / "sub" / "a").write_to(source / "x")
    assert [entry.path for entry in kedge.Tree(source).entries] == [entry.path for entry in loaded.entries]


def test_what_is_left_out(cm: Manager, source: Path) -> None:
    for name in ("keep.py", "drop.pyc", "build", "sub/build", "sub/deep/drop.pyc", "sub/deep/keep.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)

    def paths(exclude: str | list[str]) -> set[str]:
        return {entry.path for entry in kedge.Tree(source, exclude=exclude).entries}

    everything = paths([])
    assert paths("*.pyc") == everything - {"drop.pyc", "sub/deep/drop.pyc"}
    assert paths(["/build"]) == everything - {"build"}
    assert paths(["build/"]) == everything - {"build", "sub/build"}
    assert paths(["sub/deep", "drop.*"]) == {"keep.py", "build", "sub", "sub/build"}
    with kedge.open(source / ".kedge") as inner:
        inner.save("a", "b", 1)
        inner.save("job", "step", kedge.Tree(source))  # a store inside the tree that goes into it
        assert kedge.Tree(source).skipped == [(".kedge", "a Kedge store")]
    assert paths([]) == everything


def test_special_files_are_refused_by_name_or_skipped(
    cm: Manager, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(kedge.Validation, match="pipe is a fifo"):
        cm.save("job", "step", {"tree": kedge.Tree(source)})
    assert cm.list("job") == []
    monkeypatch.chdir(source)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        loaded = save(cm, kedge.Tree(source, skip_special=True))
    assert loaded.entries == []
    assert sorted(loaded.skipped) == [("pipe", "a fifo"), ("sock", "a socket")]


def test_wrong_paths(cm: Manager, source: Path) -> None:
    (source / "file").touch()
    for value, error in (
        (kedge.Tree(source / "nothing"), kedge.NotFound),
        (kedge.File(source / "nothing"), kedge.NotFound),
        (kedge.Tree(source / "file"), kedge.Validation),
        (kedge.File(source), kedge.Validation),
        (kedge.File(""), kedge.Validation),
        (kedge.Tree("nul\0"), kedge.Validation),
        (kedge.Tree(source / ("x" * 5000)), kedge.Validation),
    ):
        with pytest.raises(error):
            cm.save("job", "step", [value])
    assert cm.list("job") == []


@pytest.mark.requires("root")
def test_a_file_nobody_may_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Path(folder, "open").write_text("x")
        Path(folder, "secret").write_text("x")
        Path(folder, "secret").chmod(0o600)
        Path(folder, "locked").mkdir(mode=0o700)
        script = """
            import os, sys, kedge
            with kedge.open("memory:") as cm:
                cm.save("warm", "up", kedge.Tree(sys.argv[1]))  # imports what the other user may not
                os.seteuid(65534)
                for exclude in ([], ["locked"], ["locked", "secret"]):
                    try:
                        cm.save("job", "step", kedge.Tree(sys.argv[1], exclude=exclude))
                    except kedge.Validation as error:
                        print(str(error))
                    print(len(cm.list("job")))
        """
        command = [sys.executable, "-c", textwrap.dedent(script), folder]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.splitlines()
    assert "locked: Permission denied" in said[0]
    assert "secret: Permission denied" in said[2]
    assert said[1::2] == ["0", "0"]
    assert said[4] == "1"


# --- unchanged files are not read ---


def test_what_did_not_change_is_not_read(cm: Manager, source: Path, tmp_path: Path, read_files: list[str]) -> None:
    draw = random.Random(2)
    (source / "sub").mkdir()
    (source / "large").write_bytes(draw.randbytes(5 << 20))
    for n in range(300):
        (source / "sub" / f"{n:03}").write_bytes(draw.randbytes(5000))
    settle(source)
    first = cm.get(cm.save("job", "step", {"tree": kedge.Tree(source), "n": 1}))
    assert len(read_files) == 301
    assert first.stored_bytes > 6 << 20

    read_files.clear()
    cm.save("job", "other step", {"n": 2})  # without the tree: older checkpoints are asked too
    second = cm.get(cm.save("job", "step", {"tree": kedge.Tree(source), "n": 2}))
    assert read_files == []
    assert second.stored_bytes < 20_000

    (source / "sub" / "150").write_bytes(b"changed")
    (source / "sub" / "150x").write_bytes(b"new")
    settle(source)
    state = cm.load(cm.save("job", "step", {"tree": kedge.Tree(source), "n": 3}))
    assert {"150", "150x"} <= set(read_files)
    assert len(read_files) < 280  # their bundle, not the others
    assert "large" not in read_files
    assert isinstance(state, dict)
    state["tree"].write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)

    read_files.clear()
    cm.save("job", "step", {"tree": kedge.Tree(source, always_read=True)})
    assert len(read_files) == 302


def test_a_fresh_file_is_not_trusted(
    cm: Manager, source: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in the same tick of the clock in which it was saved, it could have changed without a trace."""
    file = source / "file"
    file.write_text("one")
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: file.stat().st_ctime_ns)
        save(cm, kedge.Tree(source))
    read_files.clear()
    settle(source)
    save(cm, kedge.Tree(source))
    assert read_files == ["file"]
    read_files.clear()
    assert save(cm, kedge.Tree(source)).read("file") == b"one"
    assert read_files == []


@pytest.mark.parametrize("files", [1, 200], ids=["a few files", "many"])  # whose table is stored otherwise
def test_a_mapped_file_is_not_trusted(cm: Manager, source: Path, read_files: list[str], files: int) -> None:
    """A write through a mapping need not change the times, also when its descriptor is closed."""
    for number in range(files):
        (source / f"still {number}").write_text("still")
    with (source / "mapped").open("w+b") as file:
        file.write(bytes(1 << 20))
        file.flush()
        memory = mmap.mmap(file.fileno(), 1 << 20)
    memory[:1] = b"1"
    settle(source)
    save(cm, kedge.Tree(source))
    read_files.clear()
    save(cm, kedge.Tree(source))
    assert "mapped" in read_files
    memory[:1] = b"2"
    assert save(cm, kedge.Tree(source)).read("mapped")[:1] == b"2"
    memory[:1] = b"3"
    memory.close()
    assert save(cm, kedge.Tree(source)).read("mapped")[:1] == b"3"
    settle(source)
    save(cm, kedge.Tree(source))  # now nobody writes it
    read_files.clear()
    assert save(cm, kedge.Tree(source)).read("mapped")[:1] == b"3"
    assert read_files == []


def test_a_single_file_that_is_mapped_is_not_trusted(cm: Manager, tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        for value in (b"1", b"2", b"3"):
            memory[:1] = value
            settle(tmp_path)
            loaded = cm.load(cm.save("job", "step", kedge.File(path)))
            assert isinstance(loaded, kedge.File)
            assert loaded.read()[:1] == value


def test_who_opens_a_file_for_writing_while_it_is_looked_at_is_not_hurt(cm: Manager, source: Path) -> None:
    """The look takes a lease for a moment: a program that opens the file then waits, and nobody is killed."""
    file = source / "file"
    file.write_text("x")
    settle(source)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            with file.open("r+"):
                pass

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            save(cm, kedge.Tree(source, always_read=True))
    finally:
        is_over.set()
        writer.join()


def test_file_systems_that_stamp_late_are_always_read(
    cm: Manager, source: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nfs = 0x6969
    monkeypatch.setattr(libc, "file_system_of", lambda fd: nfs)
    (source / "file").write_text("x")
    settle(source)
    save(cm, kedge.Tree(source))
    read_files.clear()
    save(cm, kedge.Tree(source))
    assert read_files == ["file"]


@pytest.mark.mutant
def test_trusting_mapped_files_would_be_noticed(
    cm: Manager, source: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers.Writers, "may_change_unseen", lambda *_: False)
    with pytest.raises(AssertionError):
        test_a_mapped_file_is_not_trusted(cm, source, read_files, 1)


@pytest.mark.mutant
def test_trusting_fresh_files_would_be_noticed(
    cm: Manager, source: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_unsettled", lambda table, started_ns: set())
    (source / "file").write_text("one")
    save(cm, kedge.Tree(source))
    read_files.clear()
    save(cm, kedge.Tree(source))
    assert read_files == []


def test_times_in_whole_seconds_or_in_the_future_are_trusted_later_or_never() -> None:
    table = Table()
    table.add(b"file", 0, 0)
    second = 1_000_000_000
    for mtime_ns, ctime_ns, started_ns, is_settled in (
        (5 * second + 1, 5 * second + 1, 6 * second, True),
        (5 * second + 1, 5 * second + 1, 5 * second + 1, False),
        (5 * second + 1, 5 * second + 1, 5 * second + 2, False),
        (5 * second, 5 * second, 6 * second, False),
        (5 * second, 5 * second, 8 * second, True),
        (1, 9 * second, 8 * second, False),
        (9 * second + 1, 1, 8 * second, False),
    ):
        table.mtime_ns[:] = type(table.mtime_ns)("q", [mtime_ns])
        table.ctime_ns[:] = type(table.ctime_ns)("q", [ctime_ns])
        assert scan._unsettled(table, started_ns) == (set() if is_settled else {0})


def _replace(file: Path) -> None:
    (file.parent / "new").write_bytes(b"y" * file.stat().st_size)
    os.replace(file.parent / "new", file)


def _rewrite(file: Path) -> None:
    with file.open("r+b") as open_file:
        open_file.write(b"y")


@pytest.mark.parametrize("change", [_replace, _rewrite, lambda file: None], ids=["replaced", "rewritten", "touched"])
@pytest.mark.parametrize("size", [1000, 3 << 20])
def test_same_size_and_time_do_not_deceive(
    cm: Manager, source: Path, read_files: list[str], change: Callable[[Path], None], size: int
) -> None:
    file = source / "file"
    file.write_bytes(b"x" * size)
    (source / "other").write_bytes(b"z" * size)
    settle(source)
    before = file.stat()
    save(cm, kedge.Tree(source))
    read_files.clear()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    loaded = save(cm, kedge.Tree(source))
    assert loaded.read("file") == file.read_bytes()
    assert "file" in read_files
    assert ("other" in read_files) == (size == 1000)  # only small files have to be read with their neighbours


def test_the_same_tree_gives_the_same_checkpoint(cm: Manager, source: Path) -> None:
    """Nothing of the clock gets into it, so a repeated save with one idempotency key is the same save."""
    (source / "file").write_text("x")
    settle(source)
    first, second = (cm.save("job", "step", kedge.Tree(source), idempotency_key="once") for _ in range(2))
    assert first == second


def test_moved_files_are_read_again_and_stored_once(cm: Manager, source: Path, tmp_path: Path) -> None:
    draw = random.Random(8)
    (source / "a").mkdir()
    for n in range(40):
        (source / "a" / f"{n}").write_bytes(draw.randbytes(50_000))
    (source / "a" / "large").write_bytes(draw.randbytes(3 << 20))
    settle(source)
    save(cm, kedge.Tree(source))
    (source / "a").rename(source / "b")
    (source / "b" / "5").unlink()
    settle(source)
    checkpoint = cm.get(cm.save("job", "step", kedge.Tree(source)))
    assert checkpoint.stored_bytes < 1_300_000  # the bundle with the missing file
    loaded = cm.load(checkpoint.id)
    assert isinstance(loaded, kedge.Tree)
    loaded.write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)


def test_an_insertion_into_a_large_file_stores_little(cm: Manager, source: Path) -> None:
    data = random.Random(4).randbytes(24 << 20)
    (source / "log").write_bytes(data)
    cm.save("job", "step", kedge.Tree(source))
    (source / "log").write_bytes(data[:1000] + b"inserted" + data[1000:] + b"appended")
    checkpoint = cm.get(cm.save("job", "step", kedge.Tree(source)))
    assert checkpoint.stored_bytes < 5 << 20


def test_chunks_that_gc_took_are_read_again(
    cm: Manager, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(6)
    (source / "small").write_bytes(draw.randbytes(100_000))
    (source / "large").write_bytes(draw.randbytes(5 << 20))
    settle(source)
    first = cm.save("job", "step", kedge.Tree(source))
    index = cm.store.index
    commit = index.commit

    def commit_after_gc(*args: object, **named: object) -> object:
        monkeypatch.setattr(index, "commit", commit)
        cm.delete("job", first)
        cm.gc()
        return commit(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(index, "commit", commit_after_gc)
    save(cm, kedge.Tree(source)).write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)


def test_a_loaded_tree_can_be_saved_again_here_and_elsewhere(cm: Manager, source: Path, tmp_path: Path) -> None:
    (source / "large").write_bytes(random.Random(9).randbytes(5 << 20))
    for n in range(200):
        (source / f"{n}").write_text(str(n))
    loaded = save(cm, kedge.Tree(source))
    checkpoint = cm.get(cm.save("job", "again", {"tree": loaded}))
    assert checkpoint.stored_bytes < 10_000
    with kedge.open(tmp_path / "other") as other:
        other.save("job", "step", {"tree": loaded, "x": 1})
        state = other.restore("job")
        assert isinstance(state, dict)
        state["tree"].write_to(tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(source)


# --- files that change meanwhile ---


@pytest.mark.parametrize("size", [1000, 5 << 20])
@pytest.mark.parametrize("how", ["grown", "shrunk", "rewritten", "replaced", "gone"])
def test_a_file_that_changes_while_it_is_read(
    cm: Manager, source: Path, monkeypatch: pytest.MonkeyPatch, size: int, how: str
) -> None:
    file = source / "busy"
    data = random.Random(1).randbytes(size)
    file.write_bytes(data)
    settle(source)
    really_open = os.open
    changes = {
        "grown": lambda: file.write_bytes(data + b"more"),
        "shrunk": lambda: os.truncate(file, 10),
        "rewritten": lambda: _rewrite(file),
        "replaced": lambda: _replace(file),
        "gone": file.unlink,
    }

    def open_and_change(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags == scan.READ_FILE and how in ("replaced", "gone"):
            monkeypatch.setattr(os, "open", really_open)
            changes[how]()
        fd = really_open(path, flags, mode, dir_fd=dir_fd)  # type: ignore[arg-type]
        if flags == scan.READ_FILE:
            changes[how]()
            monkeypatch.setattr(os, "open", really_open)
        return fd

    for allow_changing in (False, True):
        file.write_bytes(data)
        settle(source)
        monkeypatch.setattr(os, "open", open_and_change)
        tree = kedge.Tree(source, allow_changing=allow_changing)
        if allow_changing and how != "gone":
            loaded = save(cm, {"x": tree}["x"])
            assert len(loaded.read("busy")) == size
        else:
            with pytest.raises(kedge.Conflict, match="busy changed while"):
                cm.save("job", "step", {"x": tree})
            assert cm.list("job") == []


def test_save_async_reads_in_the_background(cm: Manager, source: Path) -> None:
    (source / "file").write_bytes(bytes(range(256)) * 10_000)
    pending = cm.save_async("job", "step", {"tree": kedge.Tree(source), "bytes": bytes(10_000)})
    state = cm.load(pending.result())
    assert isinstance(state, dict)
    assert state["tree"].read("file") == (source / "file").read_bytes()


# --- restoring ---


def test_destinations(cm: Manager, source: Path, tmp_path: Path) -> None:
    (source / "sub").mkdir()
    (source / "sub" / "file").write_text("new")
    (source / "link").symlink_to("sub/file")
    loaded = save(cm, kedge.Tree(source))
    for name in ("new", "deeper/new"):
        loaded.write_to(tmp_path / name)
        assert snapshot(tmp_path / name) == snapshot(source)
    (tmp_path / "empty").mkdir()
    loaded.write_to(tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(source)

    full = tmp_path / "full"
    (full / "sub").mkdir(parents=True)
    (full / "sub" / "file").write_text("old")
    (full / "sub" / "mine").write_text("mine")
    with pytest.raises(kedge.Conflict, match="not empty"):
        loaded.write_to(full)
    assert (full / "sub" / "file").read_text() == "old"
    loaded.write_to(full, overwrite=True)
    assert (full / "sub" / "file").read_text() == "new"
    assert (full / "sub" / "mine").read_text() == "mine"
    assert os.readlink(full / "link") == "sub/file"
    loaded.write_to(full, overwrite=True)

    (tmp_path / "a file").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(kedge.Conflict, match="not a directory"):
            loaded.write_to(tmp_path / "a file", overwrite=overwrite)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("other", ["file where a directory belongs", "directory where a file belongs"])
def test_what_cannot_be_replaced_stops_before_anything_changed(
    cm: Manager, source: Path, tmp_path: Path, other: str
) -> None:
    (source / "a").write_text("new")
    (source / "z" / "z").mkdir(parents=True)
    (source / "z" / "y").write_text("new")
    loaded = save(cm, kedge.Tree(source))
    out = tmp_path / "out"
    (out / "z").mkdir(parents=True)
    (out / "a").write_text("old")
    if other.startswith("file"):
        (out / "z" / "z").write_text("old")
    else:
        (out / "z" / "y").mkdir()
    before = snapshot(out)
    with pytest.raises(kedge.Conflict, match=r"z/[zy] is .* cannot be replaced"):
        loaded.write_to(out, overwrite=True)
    after = snapshot(out)
    assert {name: seen[4:] for name, seen in after.items()} == {name: seen[4:] for name, seen in before.items()}


@pytest.mark.requires("root")
def test_owners_and_set_id_bits(cm: Manager, source: Path, tmp_path: Path) -> None:
    (source / "tool").write_text("x")
    os.chown(source / "tool", 1234, 5678)
    (source / "tool").chmod(0o6755)
    (source / "folder").mkdir()
    (source / "folder").chmod(0o2775)
    loaded = save(cm, kedge.Tree(source))
    loaded.write_to(tmp_path / "plain")
    status = (tmp_path / "plain" / "tool").stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o755, 1234, 5678)
    assert (tmp_path / "plain" / "folder").stat().st_mode & 0o7777 == 0o775
    loaded.write_to(tmp_path / "all", setuid=True, owners=False)
    status = (tmp_path / "all" / "tool").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o6755, 0)
    assert (tmp_path / "all" / "folder").stat().st_mode & 0o7777 == 0o2775


def steps_of_restoring(tree: kedge.Tree, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What restoring does that matters after a power cut, in order, repetitions left out."""
    log: list[str] = []

    def logged(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            log.append(name)
            return real(*args, **named)

        return call

    monkeypatch.setattr(os, "rename", logged("rename", os.rename))
    monkeypatch.setattr(os, "fsync", logged("sync", os.fsync))
    monkeypatch.setattr(os, "pwrite", logged("write", os.pwrite))
    monkeypatch.setattr(libc, "sync_file_system", logged("sync", libc.sync_file_system))
    tree.write_to(out)
    return [name for n, name in enumerate(log) if log[n - 1 : n] != [name]]


@pytest.mark.parametrize("few", [100, 0])
@pytest.mark.parametrize("is_new", [True, False])
def test_bytes_are_durable_before_they_have_a_name(
    cm: Manager, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool, few: int
) -> None:
    (source / "file").write_text("x")
    loaded = save(cm, kedge.Tree(source))
    monkeypatch.setattr(restore, "_SYNC_EACH_UP_TO", few)
    if not is_new:
        (tmp_path / "out").mkdir()
    assert steps_of_restoring(loaded, tmp_path / "out", monkeypatch) == ["write", "sync", "rename", "sync"]


@pytest.mark.mutant
def test_a_missing_sync_would_be_noticed(
    cm: Manager, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "file").write_text("x")
    loaded = save(cm, kedge.Tree(source))
    monkeypatch.setattr(restore, "_SYNC_EACH_UP_TO", 0)
    monkeypatch.setattr(restore, "_sync", lambda table, root, wishes: None)
    assert steps_of_restoring(loaded, tmp_path / "out", monkeypatch)[:2] == ["write", "rename"]


def test_a_failed_sync_is_reported_and_nothing_appears(
    cm: Manager, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "file").write_text("x")
    loaded = save(cm, kedge.Tree(source))

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kedge.StorageError, match="Input/output error"):
        loaded.write_to(tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.requires("tmpfs")
@pytest.mark.faults
def test_a_full_disk_leaves_nothing(cm: Manager, source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(os.urandom(3 << 20))
    loaded = save(cm, kedge.Tree(source))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        with pytest.raises(kedge.NoSpace):
            loaded.write_to(disk / "out")
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.faults
@pytest.mark.parametrize("exists", [False, True], ids=["new", "overwrite"])
def test_a_kill_leaves_no_half_file(source: Path, tmp_path: Path, exists: bool) -> None:
    draw = random.Random(11)
    for n in range(400):
        folder = source / f"d{n % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{n}").write_bytes(draw.randbytes(20_000))
    (source / "large").write_bytes(draw.randbytes(20 << 20))
    with kedge.open(tmp_path / "store") as cm:
        save(cm, kedge.Tree(source))
    whole = snapshot(source)
    out = tmp_path / "out"
    script = """
        import os, signal, sys, kedge
        left = int(sys.argv[3])
        def end(event, _):
            global left
            if event == "open":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        with kedge.open(sys.argv[1]) as cm:
            tree = cm.restore("job")
            os.write(1, b"go")
            sys.addaudithook(end)
            tree.write_to(sys.argv[2], overwrite=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "store"), str(out)]
    was_killed = 0
    for opens in (30, 300, 0, 0, 0, 0):  # killed at that one; or, without a number, at any moment
        if exists:
            for name in whole:
                target = os.path.join(os.fsencode(out), name)
                if stat.S_ISREG(os.lstat(os.path.join(os.fsencode(source), name)).st_mode):
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    Path(os.fsdecode(target)).write_bytes(b"old")
        else:
            subprocess.run(["rm", "-rf", out], check=True)
        with subprocess.Popen([*command, str(opens)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.read(2) == b"go"
            if not opens:
                time.sleep(draw.uniform(0, 0.3))  # sleep: to be killed at any moment
                child.kill()
            was_killed += child.wait() < 0
        if not exists and out.exists():
            assert snapshot(out).keys() == whole.keys()
        for name, seen in (snapshot(out) if out.exists() else {}).items():
            if name in whole and stat.S_ISREG(int(str(seen[0]))):
                assert seen[4] in (whole[name][4], b"old")
    assert was_killed >= 2
    with kedge.open(tmp_path / "store") as cm:
        tree = cm.restore("job")
        assert isinstance(tree, kedge.Tree)
        tree.write_to(out, overwrite=True)
    assert snapshot(out) == whole
    assert not [name for folder in (tmp_path, out) for name in os.listdir(folder) if name.startswith(".kedge")]


def test_progress_counts_bytes(cm: Manager, source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(bytes(range(256)) * 20_000)
    seen: list[tuple[int, int]] = []
    save(cm, kedge.Tree(source)).write_to(tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5_120_000, 5_120_000)
    assert seen == sorted(seen)


# --- looking at trees, comparing them ---


def test_differences_are_found_without_reading(cm: Manager, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(12)
    for name in ("same", "changed", "touched", "mode", "gone"):
        (source / name).write_bytes(draw.randbytes(1000))
    for name in ("large same", "large touched", "large changed"):
        (source / name).write_bytes(draw.randbytes(3 << 20))
    (source / "link").symlink_to("a")
    for file in source.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000), follow_symlinks=False)  # so that what is changed has another
    old = save(cm, kedge.Tree(source))
    assert diff_trees(old, old) == []
    (source / "changed").write_bytes(draw.randbytes(1000))
    with (source / "large changed").open("r+b") as large:
        large.seek(2 << 20)
        large.write(b"changed")
    for name in ("touched", "large touched"):
        os.utime(source / name)
    (source / "mode").chmod(0o600)
    (source / "gone").unlink()
    (source / "new").mkdir()
    (source / "link").unlink()
    (source / "link").symlink_to("b")
    new = save(cm, kedge.Tree(source))

    found = {change.path: (change.what, change.fields) for change in diff_trees(old, new)}
    assert found == {
        "changed": ("changed", ("content", "mtime")),
        "gone": ("removed", ()),
        "large changed": ("changed", ("content", "mtime")),
        "large touched": ("changed", ("mtime",)),
        "link": ("changed", ("mtime", "target")),
        "mode": ("changed", ("mode",)),
        "new": ("added", ()),
        "touched": ("changed", ("mtime",)),
    }
    _ = old.entries, new.entries
    sizes: list[int] = []
    read = cm.store.reader.read

    def counting(wanted: Any, *, of: str) -> None:
        sizes.extend(entry.size_bytes for entry, _ in wanted)
        read(wanted, of=of)

    monkeypatch.setattr(cm.store.reader, "read", counting)
    assert len(diff_trees(old, new)) == len(found)
    assert sum(sizes) < 1 << 20  # the bundles of small files
    with pytest.raises(kedge.Validation):
        diff_trees(old, kedge.Tree(source))


def test_outline_says_what_is_there(cm: Manager, source: Path) -> None:
    (source / "file").write_bytes(bytes(5000))
    outline = cm.outline(cm.save("job", "step", {"a": [kedge.Tree(source)], "b": kedge.File(source / "file")}))
    found = sorted(summaries_in(outline), key=lambda summary: summary.kind)
    assert [(type(s), s.kind, s.shape, s.size_bytes) for s in found] == [
        (FilesSummary, "File", (1,), 5000),
        (FilesSummary, "Tree", (1,), 5000),
    ]


def test_loading_reads_no_content(cm: Manager, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "file").write_bytes(os.urandom(3 << 20))
    saved = cm.save("job", "step", {"tree": kedge.Tree(source), "x": 1})

    def read(wanted: list[object], *, of: str) -> None:
        assert not wanted

    monkeypatch.setattr(cm.store.reader, "read", read)
    assert isinstance(cm.load(saved), dict)
    assert cm.load(saved, only="x") == {"x": 1}


# --- the table ---


def test_a_table_of_tomorrow() -> None:
    table = Table()
    table.add(b"", 0, 1)
    table.fill([os.stat("/")])
    fields = ormsgpack.unpackb(pack_table(table))
    assert parse_table(ormsgpack.packb({**fields, "xattrs": [1, 2]}), content_bytes=0, is_tree=True).names == [b""]
    with pytest.raises(kedge.UnsupportedFormat):
        parse_table(ormsgpack.packb({**fields, "version": 3}), content_bytes=0, is_tree=True)


# --- memory ---

MEMORY = """
    import os, sys
    os.cpu_count = lambda: 16  # many workers
    import kedge

    def peak_kib():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

    def reset():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    with kedge.open(sys.argv[1]) as cm:
        cm.save("warm", "up", {"tree": kedge.Tree(sys.argv[2] + "/warm"), "x": bytes(5 << 20)})
        reset(); before = peak_kib()
        cm.save("job", "step", {"tree": kedge.Tree(sys.argv[2])})
        print((peak_kib() - before) // 1024)
        tree = cm.restore("job")["tree"]
        reset(); before = peak_kib()
        tree.write_to(sys.argv[3])
        print((peak_kib() - before) // 1024)
"""


@pytest.mark.parametrize("kind", ["random", "text"])
def test_memory_stays_bounded(source: Path, tmp_path: Path, kind: str) -> None:
    """Saving and restoring take at most 32 MiB, however large the files are."""
    draw = random.Random(13)
    block = draw.randbytes(1 << 20) if kind == "random" else draw.randbytes(1 << 19).hex().encode()
    (source / "warm").mkdir()
    (source / "warm" / "file").write_bytes(os.urandom(3 << 20))
    with (source / "large").open("wb") as file:
        for n in range(192):
            file.write(n.to_bytes(4, "big") + block[4:])
    for n in range(60):
        (source / f"{n}").write_bytes(n.to_bytes(4, "big") + block[:900_000])
    paths = [str(tmp_path / name) for name in ("store", "source", "out")]
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), *paths], capture_output=True, text=True, check=True
    )
    saving, restoring = map(int, child.stdout.split())
    print(saving, restoring)
    assert saving <= 32
    assert restoring <= 32
    assert filling._WORKERS <= 4


def test_chunks_that_follow_each_other_are_read_at_once_and_each_is_verified(tmp_path: Path) -> None:
    source, content = tmp_path / "source", os.urandom(40 * 65536 + 5000)
    source.mkdir()
    (source / "pages").write_bytes(content)
    cuts = {"pages": [*range(65536, len(content), 65536), len(content)]}
    with kedge.open(tmp_path / "store") as store:
        kept = store.save("job", "step", {"tree": kedge.Tree(source, cuts=cuts)})
    [pack] = (tmp_path / "store/packs").iterdir()
    stored = pack.read_bytes()
    places = [stored.index(content[start : start + 64]) for start in range(0, 40 * 65536, 65536)]
    beside = [after - before == 65536 for before, after in itertools.pairwise(places)]
    assert sum(beside) > len(beside) / 2
    damaged = bytearray(stored)
    damaged[places[21] + 70] ^= 1
    for image in (bytes(damaged), stored[: places[-1]]):
        pack.write_bytes(image)
        with kedge.open(tmp_path / "store") as store, pytest.raises(kedge.Corrupted):
            store.load(kept)["tree"].write_to(tmp_path / "out")  # type: ignore[index]
        assert not (tmp_path / "out").exists()
    pack.write_bytes(stored)
    with kedge.open(tmp_path / "store") as store:
        store.load(kept)["tree"].write_to(tmp_path / "out")  # type: ignore[index]
    assert (tmp_path / "out/pages").read_bytes() == content


def test_what_shrinks_is_found_among_what_does_not(tmp_path: Path) -> None:
    """Chunks of memory: a few that do not shrink are no reason to store the others as they are."""
    noise, words = [os.urandom(65536) for _ in range(24)], [f"{n:08}".encode() * 8192 for n in range(24)]
    content = b"".join(noise[:12] + words[:12] + [one for pair in zip(noise[12:], words[12:]) for one in pair])  # noqa: B905
    (tmp_path / "source").mkdir()
    (tmp_path / "source/pages").write_bytes(content)
    cuts = {"pages": list(range(65536, len(content) + 1, 65536))}
    with kedge.open(tmp_path / "store") as store:
        kept = store.save("job", "step", {"tree": kedge.Tree(tmp_path / "source", cuts=cuts)})
        assert store.get(kept).stored_bytes < 0.52 * len(content)
        store.load(kept)["tree"].write_to(tmp_path / "back")
    assert (tmp_path / "back/pages").read_bytes() == content
