"""Tar archives: everything comes back, GNU tar agrees in both directions, and no lie in one is believed."""

import contextlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.containers.archive.tar import (
    BLOCK_DEVICE,
    CHARACTER,
    DIRECTORY,
    FIFO,
    FILE,
    HARD_LINK,
    LIMITS,
    SYMLINK,
    Limits,
    Member,
    TarReader,
    path_parts,
)  # fmt: skip
from kedge.containers.archive.tar_writer import TarWriter
from kedge.errors import CheckpointError, Corrupted, Validation

_NAMES = st.binary(min_size=1, max_size=150).filter(
    lambda name: not {0, ord("/")} & {*name} and name not in (b".", b"..")
)
_NUMBERS = st.integers(0, (1 << 32) - 1)
_TIMES = st.integers(-(10**18), 4 * 10**18)


@st.composite
def _members(draw: st.DrawFn) -> tuple[Member, bytes]:
    kind = draw(st.sampled_from([FILE, FILE, FILE, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO]))
    data, ranges, size = b"", None, 0
    if kind == FILE:
        if draw(st.booleans()):
            data = draw(st.binary(max_size=2000))
            size = len(data)
        else:
            gaps = draw(st.lists(st.tuples(st.integers(0, 9999), st.integers(1, 3)), max_size=40))
            ranges, size = [], 0
            for gap, blocks in gaps:
                ranges.append((size + gap, 512 * blocks))
                size += gap + 512 * blocks
            size += draw(st.integers(0, 9999))
            data = b"d" * sum(length for _, length in ranges)
    attributes = draw(st.dictionaries(st.just(b"user.") | st.just(b"security.x"), st.binary(max_size=99)))
    member = Member(
        b"/".join(draw(st.lists(_NAMES, min_size=1, max_size=3))), kind, size, draw(st.integers(0, 0o7777)),
        draw(_NUMBERS), draw(_NUMBERS), draw(_TIMES), draw(_NAMES) if kind in (HARD_LINK, SYMLINK) else b"",
        (draw(st.integers(0, 4095)), draw(st.integers(0, 4095))) if kind in (CHARACTER, BLOCK_DEVICE) else (0, 0),
        attributes, ranges,
    )  # fmt: skip
    return member, data


def _written(members: list[tuple[Member, bytes]]) -> bytes:
    out = io.BytesIO()
    writer = TarWriter(out)
    for member, data in members:
        writer.add(member, [data] if data else [])
    writer.close()
    return out.getvalue()


def _read(data: bytes, limits: Limits = LIMITS) -> list[tuple[Member, bytes]]:
    reader = TarReader(io.BytesIO(data), name="x.tar", limits=limits)
    return [(member, b"".join(reader.pieces())) for member in reader]


@given(st.lists(_members(), max_size=5))
def test_what_is_written_comes_back(members: list[tuple[Member, bytes]]) -> None:
    found = _read(_written(members))
    for (member, data), (again, read) in zip(members, found, strict=True):
        if again.kind == DIRECTORY:
            again.name = again.name.removesuffix(b"/") if not member.name.endswith(b"/") else again.name
        assert again == member
        assert read == data


@given(st.lists(_members(), max_size=3), st.data())
def test_damage_is_typed(members: list[tuple[Member, bytes]], data: st.DataObject) -> None:
    whole = bytearray(_written(members))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        _read(bytes(whole[: data.draw(st.integers(0, len(whole)))]), Limits(total_bytes=1 << 20))


@given(st.binary(max_size=1600))
def test_any_bytes_at_all(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        _read(data)


def test_gnu_tar_reads_what_we_write(tmp_path: Path) -> None:
    long = b"d\xc3\xa4/" + b"n" * 200
    (tmp_path / "x.tar").write_bytes(
        _written(
            [
                (Member(b"a", size=5, mtime_ns=1_234_567_890_123_456_789, attributes={b"user.x": b"\0\n="}), b"hello"),
                (Member(long, size=3), b"abc"),
                (Member(b"holes", size=1 << 20, ranges=[(4096, 512), (1 << 19, 3)]), b"A" * 512 + b"BBB"),
                (Member(b"dir", DIRECTORY, mode=0o751), b""),
                (Member(b"dir/link", SYMLINK, link=b"../a" * 40), b""),
                (Member(b"same", HARD_LINK, link=b"a"), b""),
            ]
        )
    )
    subprocess.run(["tar", "--no-same-owner", "-xf", "x.tar"], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "a").read_bytes() == b"hello"
    assert (tmp_path / "a").stat().st_mtime_ns == 1_234_567_890_123_456_789
    assert (tmp_path / "same").stat().st_ino == (tmp_path / "a").stat().st_ino
    assert (tmp_path / os.fsdecode(long)).read_bytes() == b"abc"
    holes = (tmp_path / "holes").read_bytes()
    assert (len(holes), holes[4096:4608], holes[1 << 19 : (1 << 19) + 3]) == (1 << 20, b"A" * 512, b"BBB")
    assert (tmp_path / "dir/link").readlink() == Path("../a" * 40)


@pytest.mark.parametrize("form", ["gnu", "posix", "ustar"])
def test_we_read_what_gnu_tar_writes(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    (source / "dir").mkdir(parents=True)
    (source / "dir/file").write_bytes(b"x" * 1000)
    os.link(source / "dir/file", source / "hard")
    (source / "link").symlink_to("dir/file")
    os.mkfifo(source / "fifo")
    if form != "ustar":
        (source / ("n" * 150)).write_text("long")
        with open(source / "sparse", "wb") as file:
            for n in range(40):
                file.seek(n * 65536)
                file.write(b"data")
            file.truncate(4 << 20)
    subprocess.run(
        ["tar", f"--format={form}", *(["--sparse"] if form != "ustar" else []), "-cf", tmp_path / "x.tar", "."],
        cwd=source, check=True, timeout=60,
    )  # fmt: skip
    found = {
        member.name.removeprefix(b"./"): (member, data) for member, data in _read((tmp_path / "x.tar").read_bytes())
    }
    kinds = {member.kind for member, _ in found.values()}
    assert {FILE, HARD_LINK, SYMLINK, FIFO, DIRECTORY} <= kinds
    assert found[b"link"][0].link == b"dir/file"
    if form != "ustar":
        assert found[b"n" * 150][1] == b"long"
        member, data = found[b"sparse"]
        assert member.size == 4 << 20
        assert member.ranges is not None
        assert sum(length for _, length in member.ranges) == len(data) < 1 << 20
        whole = bytearray(member.size)
        position = 0
        for offset, length in member.ranges:
            whole[offset : offset + length] = data[position : position + length]
            position += length
        assert whole == (source / "sparse").read_bytes()


def test_numbers_in_binary_are_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.uid = 3_000_000
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(info)
    assert _read(out.getvalue())[0][0].uid == 3_000_000


@pytest.mark.parametrize("name", [b"../x", b"a/../../x", b"a\0b", b"n" * 300, b"/".join([b"d"] * 300), b"n" * 5000])
def test_names_that_lead_out_or_are_too_long(name: bytes) -> None:
    with pytest.raises(Validation):
        path_parts(name, Limits())


def test_absolute_names_and_dots_stay_inside() -> None:
    assert path_parts(b"//etc/./x/", Limits()) == (b"etc", b"x")


def test_limits() -> None:
    many = _written([(Member(b"%d" % n), b"") for n in range(20)])
    with pytest.raises(Validation, match="members"):
        _read(many, Limits(members=10))
    huge = _written([(Member(b"holes", size=1 << 50, ranges=[(0, 1)]), b"x")])
    with pytest.raises(Validation, match="bytes"):
        _read(huge)
    attributes = {b"user.%d" % n: b"x" * 60_000 for n in range(30)}
    with pytest.raises(Validation, match="header"):
        _read(_written([(Member(b"a", attributes=attributes), b"")]))


def test_cut_off_anywhere() -> None:
    whole = _written([(Member(b"a", size=700), b"x" * 700)])
    for end in range(1, len(whole) - 1024, 97):
        with pytest.raises(Corrupted):
            _read(whole[:end])
