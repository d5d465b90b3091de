"""A copy of files that somebody else writes to: exact, and never led elsewhere."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import kedge
from kedge.containers import safe_copy
from kedge.containers.safe_copy import copy_tree


@pytest.mark.requires("root")
def test_everything_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_bytes(os.urandom(3 << 20))
    os.link(source / "sub/file", source / "twin")
    os.symlink("/etc/passwd", source / "link")
    os.mkfifo(source / "fifo", 0o640)
    os.mknod(source / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with (source / "holes").open("wb") as file:
        file.seek(8 << 20)
        file.write(b"end")
        file.truncate(16 << 20)
    os.chown(source / "sub/file", 1234, 4321)
    os.setxattr(source / "sub", "user.note", b"\0\xff")
    os.chmod(source / "sub", 0o2750)
    os.utime(source / "fifo", ns=(1, 1_700_000_000_123_456_789))
    copy_tree(source, target)
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*"))
    assert names == sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    for name in names:
        old, new = os.lstat(source / name), os.lstat(target / name)
        for field in ("st_mode", "st_uid", "st_gid", "st_rdev", "st_size", "st_mtime_ns", "st_nlink"):
            if not (stat.S_ISDIR(old.st_mode) and field in ("st_size", "st_nlink")):
                assert getattr(old, field) == getattr(new, field), (name, field)
    assert (source / "sub/file").read_bytes() == (target / "sub/file").read_bytes()
    assert (source / "holes").read_bytes() == (target / "holes").read_bytes()
    assert (target / "holes").stat().st_blocks < 100
    assert os.path.samefile(target / "twin", target / "sub/file")
    assert os.readlink(target / "link") == "/etc/passwd"
    assert os.getxattr(target / "sub", "user.note") == b"\0\xff"


@pytest.mark.requires("root")
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_folder_that_becomes_a_link_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """At the moment between the look at a directory and its opening."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("of the machine")
    (tmp_path / "source/sub").mkdir(parents=True)
    (tmp_path / "source/sub/file").write_text("of the container")
    original: Callable[..., int] = os.open
    moments = iter(range(10))

    def exchanging(name: str, flags: int, *rest: int, **options: int) -> int:
        is_folder = name == "sub" and flags & os.O_DIRECTORY
        if is_folder and next(moments) == (0 if side == "source" else 1):
            (tmp_path / side / "sub").rename(tmp_path / "aside")
            (tmp_path / side / "sub").symlink_to(outside)
        return original(name, flags, *rest, **options)

    monkeypatch.setattr(safe_copy.os, "open", exchanging)
    with pytest.raises(kedge.StorageError):
        copy_tree(tmp_path / "source", tmp_path / "target")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert not list((tmp_path / "target").rglob("secret"))
