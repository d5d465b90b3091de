"""What is written outside of stores survives a power cut: its bytes before its name, and every name above it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli import cli
from tests.parts import require

pytestmark = pytest.mark.faults


class Watched:
    """What was synced, in order: directories by their path, files by inode; and the moments of renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directories: dict[str, int] = {}  # the last sync of each
        self.files: dict[int, int] = {}
        self.names: list[int] = []
        self._count = 0
        real = os.fsync

        def fsync(fd: int) -> None:
            real(fd)
            self._count += 1
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                self.directories[os.readlink(f"/proc/self/fd/{fd}")] = self._count
            else:
                self.files[status.st_ino] = self._count

        monkeypatch.setattr(os, "fsync", fsync)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._noted(getattr(os, name)))

    def _noted(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            self._count += 1
            self.names.append(self._count)
            real(*args, **options)

        return call

    def expect(self, path: Path, home: Path) -> None:
        """All below `path` was synced before it was named, and then the names from `home` down to it."""
        last = self.names[-1] if self.names else self._count + 1
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                assert self.files.get(file.stat().st_ino, last) < last, f"{file} is named before it is durable"
        for folder in path.relative_to(home).parents:
            assert str(home / folder) in self.directories, f"the names in {home / folder} are not durable"
        if self.names:
            assert self.directories[str(path.parent)] > last


@pytest.fixture
def store(tmp_path: Path) -> str:
    place = tmp_path / "store"
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("content")
    with kedge.open(place) as opened:
        opened.save("job", "step", {"files": kedge.Tree(tmp_path / "tree")})
        opened.save("plain", "step", {"n": 1})
    return str(place)


def test_a_key_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever encrypts a store with it and loses the file has lost the store."""
    require("module:cryptography")
    watched = Watched(monkeypatch)
    made = CliRunner().invoke(cli, ["key", "new", "--out", str(tmp_path / "key")])
    assert made.exit_code == 0, made.output
    watched.expect(tmp_path / "key", tmp_path)


def test_a_restored_directory(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(store) as opened:
        _, state = opened.load_latest("job") or (None, None)
        watched = Watched(monkeypatch)
        state["files"].write_to(tmp_path / "new" / "and" / "deep")  # type: ignore[index]
    watched.expect(tmp_path / "new" / "and" / "deep", tmp_path)


@pytest.mark.parametrize("form", ["dir", "jobs", "json", "zip"])
def test_an_export(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    target = tmp_path / "new" / "export" if form in ("dir", "jobs") else tmp_path / f"export.{form}"
    watched = Watched(monkeypatch)
    done = CliRunner().invoke(cli, ["export", "plain", str(target), "--format", form, "--store", store])
    assert done.exit_code == 0, done.output
    watched.expect(target, tmp_path)
