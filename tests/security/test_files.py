"""Trees from an enemy: whatever the entry table claims, nothing outside of the destination is touched."""

from __future__ import annotations

import copy
import os
import stat
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import kedge
from kedge.chunks import Entry, StoredStream
from kedge.files import directories, output, scan, table, tree
from kedge.files.restore import STAGE_PREFIX
from kedge.files.stored_files import StoredFiles

Manager = kedge.CheckpointManager
Fields = dict[str, Any]

FILE, DIRECTORY, SYMLINK, HARD_LINK = range(4)
U32, U64, I64 = "I", "Q", "q"


@pytest.fixture
def cm() -> Iterator[Manager]:
    with kedge.open("memory:") as manager:
        yield manager


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Something that must stay as it is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    before = folder.stat().st_mtime_ns
    yield folder
    assert os.listdir(folder) == ["precious"]
    assert (folder / "precious").read_text() == "precious"
    assert folder.stat().st_mtime_ns == before


def column(code: str, *values: int) -> bytes:
    return array(code, values).tobytes()


def hostile_table(*rows: tuple[int, int, bytes], **changed: object) -> bytes:
    """A table of (kind, parent, name), below a root, with columns replaced as wished."""
    kinds, parents, names = zip((DIRECTORY, 0, b""), *rows, strict=True)
    count = len(kinds)
    fields: Fields = {
        "version": 1,
        "kind": bytes(kinds),
        "names": b"\0".join(names),
        "parent": column(U32, *parents),
        "mode": column(U32, *[0o755] * count),
        "uid": column(U32, *[0] * count),
        "gid": column(U32, *[0] * count),
        "size": column(U64, *[0] * count),
        "mtime_ns": column(I64, *[0] * count),
        "ctime_ns": column(I64, *[0] * count),
        "inode": column(U64, *range(count)),
        "device": column(U64, *[0] * count),
        "targets": b"",
        "links": b"",
        "sparse": [],
        "skipped": [],
    }
    return ormsgpack.packb({**fields, **changed})


def loaded(packed: bytes, content: StoredStream | None = None) -> kedge.Tree:
    """What loading a state with this table gives."""
    found = kedge.Tree("nowhere")
    found._stored = StoredFiles(True, packed, content)
    return found


ROWS: dict[str, bytes] = {
    "..": hostile_table((FILE, 0, b"..")),
    ".": hostile_table((FILE, 0, b".")),
    "no name": hostile_table((FILE, 0, b"")),
    "absolute": hostile_table((FILE, 0, b"/etc/passwd")),
    "a path": hostile_table((FILE, 0, b"../outside/precious")),
    "a path down": hostile_table((DIRECTORY, 0, b"a"), (FILE, 0, b"a/b")),
    "NUL": hostile_table((FILE, 0, b"a\0b")),
    "directory ..": hostile_table((DIRECTORY, 0, b".."), (FILE, 1, b"precious")),
    "twice": hostile_table((FILE, 0, b"a"), (FILE, 0, b"a")),
    "link and directory": hostile_table(
        (SYMLINK, 0, b"a"), (DIRECTORY, 0, b"a"), (FILE, 2, b"precious"), targets=b"../outside"
    ),
    "inside a link": hostile_table((SYMLINK, 0, b"a"), (FILE, 1, b"precious"), targets=b"../outside"),
    "inside a file": hostile_table((FILE, 0, b"a"), (FILE, 1, b"b")),
    "inside itself": hostile_table((DIRECTORY, 1, b"a")),
    "a circle": hostile_table((DIRECTORY, 2, b"a"), (DIRECTORY, 1, b"b")),
    "far away": hostile_table((FILE, 4_000_000_000, b"a")),
    "root is a file": hostile_table(kind=bytes([FILE])),
    "root is a link": hostile_table(kind=bytes([SYMLINK]), targets=b"/etc"),
    "root has a name": hostile_table(names=b"x"),
    "root elsewhere": hostile_table((DIRECTORY, 0, b"a"), parent=column(U32, 1, 0)),
    "unknown kind": hostile_table((9, 0, b"a")),
    "a device": hostile_table((4, 0, b"a")),
    "apart directory": hostile_table((DIRECTORY | 0x80, 0, b"a")),
    "symlink without target": hostile_table((SYMLINK, 0, b"a")),
    "hard link to a directory": hostile_table((HARD_LINK, 0, b"a"), links=column(U32, 0)),
    "hard link to itself": hostile_table((HARD_LINK, 0, b"a"), links=column(U32, 1)),
    "hard link to a later file": hostile_table((HARD_LINK, 0, b"a"), (FILE, 0, b"b"), links=column(U32, 2)),
    "hard link to a symlink": hostile_table(
        (SYMLINK, 0, b"a"), (HARD_LINK, 0, b"b"), targets=b"/etc/passwd", links=column(U32, 1)
    ),
    "hard link to nothing": hostile_table((HARD_LINK, 0, b"a"), links=column(U32, 77)),
    "too few links": hostile_table((HARD_LINK, 0, b"a")),
    "mode": hostile_table((FILE, 0, b"a"), mode=column(U32, 0o755, 0o170777)),
    "size without content": hostile_table((FILE, 0, b"a"), size=column(U64, 0, 5)),
    "endless size": hostile_table((FILE, 0, b"a"), size=column(U64, 0, 2**64 - 1)),
    "endless hole": hostile_table((FILE | 0x80, 0, b"a"), size=column(U64, 0, 2**64 - 1), sparse=[[1]]),
    "data outside": hostile_table((FILE | 0x80, 0, b"a"), sparse=[[1, 0, 5]]),
    "negative range": hostile_table((FILE | 0x80, 0, b"a"), size=column(U64, 0, 9), sparse=[[1, -5, 5]]),
    "crossed ranges": hostile_table((FILE | 0x80, 0, b"a"), size=column(U64, 0, 9), sparse=[[1, 4, 2, 0, 2]]),
    "odd ranges": hostile_table((FILE | 0x80, 0, b"a"), size=column(U64, 0, 9), sparse=[[1, 4]]),
    "ranges of nothing": hostile_table(sparse=[[77, 0, 1]]),
    "ranges of a directory": hostile_table(sparse=[[0]]),
    "short column": hostile_table((FILE, 0, b"a"), uid=column(U32, 0)),
    "odd column": hostile_table((FILE, 0, b"a"), uid=b"123456789"),
    "columns are numbers": hostile_table((FILE, 0, b"a"), names=7),
    "kinds are text": hostile_table((FILE, 0, b"a"), kind="ab"),
    "skipped is a number": hostile_table(skipped=7),
    "no rows": hostile_table(kind=b"", names=b""),
    "a list": ormsgpack.packb([1, 2, 3]),
    "nothing": b"",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("name", ROWS)
def test_no_save_could_have_written_this(tmp_path: Path, outside: Path, name: str) -> None:
    hostile = loaded(ROWS[name])
    with pytest.raises(kedge.Corrupted, match="entry table"):
        hostile.write_to(tmp_path / "out")
    with pytest.raises(kedge.Corrupted):
        _ = hostile.entries
    assert sorted(os.listdir(tmp_path)) == ["outside"]


def test_the_table_for_these_tests_is_a_good_one(tmp_path: Path) -> None:
    """Else the others would prove nothing."""
    good = hostile_table(
        (DIRECTORY, 0, b"a"),
        (FILE, 1, b"b"),
        (SYMLINK, 0, b"c"),
        (HARD_LINK, 0, b"d"),
        targets=b"x",
        links=column(U32, 2),
    )
    loaded(good).write_to(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "c", "d"]


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_ROWS", 10)
    with pytest.raises(kedge.Corrupted):
        _ = loaded(hostile_table(*[(FILE, 0, b"%d" % n) for n in range(10)])).entries
    monkeypatch.undo()
    deep = [(DIRECTORY, n, b"d") for n in range(table.MAX_DEPTH + 1)]
    with pytest.raises(kedge.Corrupted, match="levels deep"):
        _ = loaded(hostile_table(*deep)).entries


def test_a_chunk_that_claims_gigabytes_takes_no_memory(cm: Manager, tmp_path: Path) -> None:
    huge = Entry(2**32 - 1, b"\1" * 32)
    stream = StoredStream([huge], 2**32 - 1, cm.store.reader, "a checkpoint")
    hostile = loaded(hostile_table((FILE, 0, b"a"), size=column(U64, 0, 2**32 - 1)), stream)
    with pytest.raises(kedge.Corrupted, match="claims"):
        hostile.read("a")
    with pytest.raises(kedge.Corrupted, match="claims"):
        hostile.write_to(tmp_path / "out")
    with pytest.raises(kedge.Corrupted, match="claims"):
        _ = StoredFiles(True, replace(stream, size_bytes=1 << 40), None).table
    assert os.listdir(tmp_path) == []


def test_a_damaged_chunk_is_told_and_nothing_appears(cm: Manager, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(os.urandom(100_000))
    found = cm.load(cm.save("job", "step", kedge.Tree(tmp_path / "in")))
    assert isinstance(found, kedge.Tree)
    stored = found._stored
    assert stored is not None
    assert stored.content is not None
    (entry,) = stored.content.entries
    stored.content = replace(stored.content, entries=[replace(entry, digest=bytes(31) + b"x")])
    with pytest.raises(kedge.Corrupted, match="damaged"):
        found.read("file")
    with pytest.raises(kedge.Corrupted, match="damaged"):
        found.write_to(tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


# --- the destination is hostile too ---


def simple_tree(cm: Manager, tmp_path: Path) -> kedge.Tree:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "precious").write_text("hostile")
    (tmp_path / "in" / "precious").write_text("hostile")
    found = cm.load(cm.save("job", "step", kedge.Tree(tmp_path / "in")))
    assert isinstance(found, kedge.Tree)
    return found


def test_links_in_the_destination_are_not_followed(cm: Manager, tmp_path: Path, outside: Path) -> None:
    found = simple_tree(cm, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to(outside)
    with pytest.raises(kedge.Conflict, match="sub is no directory"):
        found.write_to(out, overwrite=True)
    (out / "sub").unlink()
    (out / "precious").symlink_to(outside / "precious")
    found.write_to(out, overwrite=True)  # replaces the link, not what it points to
    assert (out / "precious").read_text() == "hostile"
    assert not (out / "precious").is_symlink()
    file = cm.load(cm.save("job", "file", kedge.File(tmp_path / "in" / "precious")))
    assert isinstance(file, kedge.File)
    (tmp_path / "link").symlink_to(outside / "precious")
    with pytest.raises(kedge.Conflict):
        file.write_to(tmp_path / "link")
    file.write_to(tmp_path / "link", overwrite=True)


@pytest.mark.parametrize("when", ["directories", "files"])
def test_a_directory_that_becomes_a_link_meanwhile(
    cm: Manager, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    found = simple_tree(cm, tmp_path)
    step = {"directories": "_make_directories", "files": "_write_files"}[when]
    really = getattr(output.Filling, step)

    def swap(self: output.Filling) -> None:
        really(self)
        (stage,) = [name for name in tmp_path.iterdir() if name.name.startswith(STAGE_PREFIX.decode())]
        (stage / "sub").rename(tmp_path / "aside")
        (stage / "sub").symlink_to(outside)

    monkeypatch.setattr(output.Filling, step, swap)
    if when == "directories":
        with pytest.raises(kedge.StorageError):
            found.write_to(tmp_path / "out")
    else:  # all is written; only its owner, mode and time are missing
        with pytest.raises(kedge.StorageError):
            found.write_to(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.mutant
def test_following_links_would_be_noticed(cm: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = simple_tree(cm, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    really = output.Filling._make_directories

    def swap(self: output.Filling) -> None:
        really(self)
        (stage,) = [name for name in tmp_path.iterdir() if name.name.startswith(STAGE_PREFIX.decode())]
        (stage / "sub").rmdir()
        (stage / "sub").symlink_to(elsewhere)

    monkeypatch.setattr(output.Filling, "_make_directories", swap)
    monkeypatch.setattr(directories, "OPEN_DIRECTORY", directories.OPEN_DIRECTORY & ~os.O_NOFOLLOW)
    found.write_to(tmp_path / "out")
    assert os.listdir(elsewhere) == ["precious"]


def test_leftovers_that_lead_outside_are_not_followed(cm: Manager, tmp_path: Path, outside: Path) -> None:
    found = simple_tree(cm, tmp_path)
    prefix = STAGE_PREFIX.decode()
    (tmp_path / f"{prefix}link").symlink_to(outside)
    (tmp_path / f"{prefix}folder").mkdir()
    (tmp_path / f"{prefix}folder" / "link").symlink_to(outside)
    (tmp_path / f"{prefix}folder" / "deep" / "er").mkdir(parents=True)
    (tmp_path / f"{prefix}folder" / "deep" / "er" / "file").write_text("x")
    found.write_to(tmp_path / "out")
    left = [name for name in os.listdir(tmp_path) if name.startswith(prefix)]
    assert left == [f"{prefix}link"]


def test_set_id_bits_and_owners_need_asking(tmp_path: Path) -> None:
    packed = hostile_table((FILE, 0, b"tool"), (DIRECTORY, 0, b"d"), mode=column(U32, 0o755, 0o6777, 0o3777))
    loaded(packed).write_to(tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out" / "tool").stat().st_mode) == 0o777
    assert stat.S_IMODE((tmp_path / "out" / "d").stat().st_mode) == 0o1777


def test_owner_minus_one_means_leave_it(tmp_path: Path) -> None:
    none = column(U32, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    packed = hostile_table((FILE, 0, b"a"), (SYMLINK, 0, b"l"), targets=b"x", uid=none, gid=none)
    loaded(packed).write_to(tmp_path / "out")
    assert (tmp_path / "out" / "a").stat().st_uid == os.geteuid()


# --- the source is hostile too ---


@pytest.mark.parametrize("what", ["directory", "file"])
def test_a_name_that_becomes_a_link_is_not_read(
    cm: Manager, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "precious").write_text("harmless")
    really = scan.scan_tree

    def scan_and_swap(*args: Any) -> scan.Scan:
        found = really(*args)
        if what == "directory":
            (root / "sub").rename(tmp_path / "aside")
            (root / "sub").symlink_to(outside)
        else:
            (root / "sub" / "precious").unlink()
            (root / "sub" / "precious").symlink_to(outside / "precious")
        return found

    monkeypatch.setattr(tree, "scan_tree", scan_and_swap)
    for allow_changing in (False, True):
        with pytest.raises(kedge.Conflict, match="changed while"):
            cm.save("job", "step", kedge.Tree(root, allow_changing=allow_changing))
        if what == "directory":
            (root / "sub").unlink()
            (tmp_path / "aside").rename(root / "sub")
        else:
            (root / "sub" / "precious").unlink()
            (root / "sub" / "precious").write_text("harmless")
    assert cm.list("job") == []


def test_a_fifo_put_there_meanwhile_does_not_block(
    cm: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "file").write_text("x" * 100)
    really = scan.scan_tree

    def scan_and_swap(*args: Any) -> scan.Scan:
        found = really(*args)
        (root / "file").unlink()
        os.mkfifo(root / "file")
        return found

    monkeypatch.setattr(tree, "scan_tree", scan_and_swap)
    with pytest.raises(kedge.CheckpointError):
        cm.save("job", "step", kedge.Tree(root))


def test_names_that_terminals_obey_are_harmless_in_messages(cm: Manager, tmp_path: Path) -> None:
    os.mkfifo(os.fsencode(tmp_path) + b"/\xff\xfe pipe")
    with pytest.raises(kedge.Validation) as caught:
        cm.save("job", "step", kedge.Tree(tmp_path))
    assert str(caught.value).encode()  # can be printed


# --- noise ---


def mutated(draw: st.DataObject, packed: bytes) -> bytes:
    data = bytearray(packed)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, 65535)) % len(data)  # which may depend on times and inode numbers
        data[at] = draw.draw(st.integers(0, 255))
    return bytes(data)


def below(root: Path) -> set[bytes]:
    found = set()
    for folder, folders, files in os.walk(os.fsencode(root)):
        found |= {os.path.join(folder, name) for name in folders + files}
    return found


NOISY = hostile_table(
    (DIRECTORY, 0, b"aa"),
    (FILE, 1, b"bb"),
    (SYMLINK, 0, b"cc"),
    (HARD_LINK, 1, b"dd"),
    (FILE | 0x80, 0, b"ee"),
    targets=b"../x",
    links=column(U32, 2),
    size=column(U64, 0, 0, 0, 0, 0, 900),
    sparse=[[5]],
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_noise_in_a_table_never_gets_out(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = tmp_path_factory.mktemp("noise")
    out = place / "out"
    try:
        loaded(mutated(data, NOISY)).write_to(out, owners=False)
    except kedge.CheckpointError:
        assert os.listdir(place) == []
    else:
        assert os.listdir(place) == ["out"]
        os.chmod(out, 0o755)
        assert all(path.startswith(os.fsencode(out) + b"/") for path in below(out))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@example(data=None)
def test_noise_in_the_state_is_a_typed_error(cm: Manager, tmp_path: Path, data: st.DataObject | None) -> None:
    from kedge import codec

    root = tmp_path / "in"
    root.mkdir(exist_ok=True)
    (root / "file").write_text("x")
    encoded = codec.encode(kedge.Tree(root))
    packed = encoded.tree if data is None else mutated(data, encoded.tree)
    manifest_streams: dict[int, StoredStream] = {
        n: StoredStream([], 0, cm.store.reader, "x") for n in range(len(encoded.buffers))
    }
    for look in (lambda: codec.decode(packed, manifest_streams.__getitem__), lambda: codec.outline(packed)):
        try:
            value = copy.copy(look())
            if isinstance(value, kedge.Tree):
                _ = value.entries
        except kedge.CheckpointError:
            pass


def test_loading_brings_in_nothing_new(cm: Manager, tmp_path: Path) -> None:
    """I7: loading runs no code of anybody's; it does not even import any."""
    (tmp_path / "evil.py").write_text("raise SystemExit")
    saved = cm.save("job", "step", kedge.Tree(tmp_path))
    before = set(sys.modules)
    found = cm.load(saved)
    assert isinstance(found, kedge.Tree)
    assert found.read("evil.py") == b"raise SystemExit"
    assert set(sys.modules) <= before
