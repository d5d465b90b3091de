"""What is written survives a power cut: bytes before their name, and every name above; each sync is needed."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
import kedge.care.repair
import kedge.store.directory
from kedge.blobs import libc
from kedge.blobs.direct import sync_data, sync_directory
from kedge.care.repair import repair
from kedge.care.repair_files import refile
from kedge.cli import cli
from kedge.containers.archive.export import replace_file
from kedge.files import restore as restoring
from kedge.index.files.journal import Journal
from kedge.store.directory import Marker, open_packs
from tests.parts import require
from tests.torture.durable import Durable, watched

pytestmark = pytest.mark.faults

KEY = b"k" * 32


@pytest.fixture
def store(tmp_path: Path) -> str:
    place = tmp_path / "store"
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("content")
    os.link(tmp_path / "tree" / "sub" / "file", tmp_path / "tree" / "other name")
    (tmp_path / "tree").chmod(0o751)
    with kedge.open(place) as opened:
        opened.save("job", "step", {"files": kedge.Tree(tmp_path / "tree")})
        opened.save("file", "step", kedge.File(tmp_path / "tree" / "sub" / "file"))
        opened.save("plain", "step", {"n": 1})
    return str(place)


def run(*words: str) -> None:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, done.output


def refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "no hard links here")


def expect(durable: Durable, *paths: Path, home: Path) -> None:
    assert all(path.exists() for path in paths)
    assert durable.lacking(*paths, home=home) == []


# --- stores ---


def test_a_new_store_and_its_large_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "new" / "deep" / "store"
    write = kedge.store.directory.write_marker
    were_named: list[bool] = []

    def write_marker(path: Path, marker: Marker) -> None:
        were_named.append(durable.has_names(path, "index.sqlite", "packs"))
        write(path, marker)

    monkeypatch.setattr("kedge.store.directory.write_marker", write_marker)
    with watched() as durable, kedge.open(place) as opened:
        assert were_named == [True]
        expect(durable, place, home=tmp_path)
        for n in range(2):
            opened.save("job", "large", os.urandom(100_000 + n))
            expect(durable, place, home=tmp_path)
        opened.gc()
        expect(durable, place, home=tmp_path)
    expect(durable, place, home=tmp_path)


def test_packs_whose_folder_another_process_made(tmp_path: Path) -> None:
    """And was killed before it had synced the name of it."""
    place = tmp_path / "store"
    kedge.open(place).close()
    with watched() as durable, kedge.open(place) as opened:
        opened.save("job", "large", os.urandom(100_000))
        assert durable.lacking(place / "packs", home=place) == []


def test_packs_beside_a_database(tmp_path: Path) -> None:
    place = tmp_path / "new" / "packs"
    with watched() as durable:
        open_packs(place).close()
    expect(durable, place, home=tmp_path)


def test_a_folder_of_packs_that_is_made_when_it_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "store"
    kedge.open(place).close()
    (place / "packs").rmdir()
    with watched() as durable, kedge.open(place):
        assert durable.lacking(place / "packs", home=place) == []


def test_an_encrypted_store(tmp_path: Path) -> None:
    require("module:cryptography")
    place = tmp_path / "store"
    kedge.open(place).close()
    with watched() as durable, kedge.open(place, key=KEY) as opened:
        opened.save("job", "small", 1)
        assert durable.lacking(place / "keyrings", place / "kedge-store", home=place) == []


def test_whether_an_index_was_closed(tmp_path: Path) -> None:
    place = tmp_path / "store"
    kedge.open(place).close()
    (place / "index.sqlite-state").unlink()  # a store of before there was one
    with watched() as durable, kedge.open(place) as opened:
        assert durable.lacking(place / "index.sqlite-state", home=place) == []
        opened.save("job", "small", 1)
        assert b"state: open" in (place / "index.sqlite-state").read_bytes()
        assert durable.lacking(place / "index.sqlite-state", home=place) == []


def test_a_repaired_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = kedge.care.repair.write_marker
    were_named: list[bool] = []

    def write_marker(path: Path, marker: Marker) -> None:
        were_named.append(durable.has_names(path, marker.index))
        write(path, marker)

    monkeypatch.setattr("kedge.care.repair.write_marker", write_marker)
    with watched(Path(store)) as durable:
        repair(Path(store), actor="test")
        assert durable.lacking(Path(store, "kedge-store"), home=Path(store)) == []
    aside = [*Path(store).glob("index.damaged-*")]
    assert aside
    assert were_named == [True]
    assert durable.has_names(Path(store), "index-2.sqlite", *(path.name for path in aside))


def test_a_store_of_readable_files(tmp_path: Path) -> None:
    place = tmp_path / "new" / "files"
    with watched() as durable, kedge.open(f"files:{place}") as opened:
        expect(durable, place, home=tmp_path)
        first = opened.save("job", "small", 1)
        assert [*place.rglob(f"{first}.json")]
        expect(durable, place, home=tmp_path)
        opened.save("job", "large", os.urandom(100_000))
        expect(durable, place, home=tmp_path)
        opened.delete("job", first)
        opened.gc()
        expect(durable, place, home=tmp_path)
    before = (place / ".kedge" / "journal").stat().st_ino
    with watched(place) as durable:
        refile(place, actor="test")
    assert (place / ".kedge" / "journal").stat().st_ino != before
    expect(durable, place / ".kedge" / "journal", home=place / ".kedge")
    aside = [path.name for path in (place / ".kedge").glob("journal.damaged-*")]
    assert len(aside) == 1
    assert durable.has_names(place / ".kedge", *aside)


def test_a_journal_in_the_place_of_another(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for payload in ("first", "second"):
        with watched() as durable, closing(journal):
            journal.replace(payload)
        expect(durable, tmp_path / "journal", home=tmp_path)


# --- what users are given ---


def test_a_key_in_a_file(tmp_path: Path) -> None:
    """Whoever encrypts a store with it and loses the file has lost the store."""
    require("module:cryptography")
    with watched() as durable:
        run("key", "new", "--out", str(tmp_path / "key"))
    expect(durable, tmp_path / "key", home=tmp_path)


@pytest.mark.parametrize("syncs", ["each", "all at once"])
def test_a_restored_directory(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, syncs: str) -> None:
    asked: list[Path] = []
    if syncs != "each":
        monkeypatch.setattr(restoring, "_SYNC_EACH_UP_TO", 0)
    monkeypatch.setattr(libc, "sync_file_system", lambda fd: asked.append(Path(f"/proc/self/fd/{fd}").resolve()))
    target = tmp_path / "new" / "and" / "deep"
    with kedge.open(store) as opened, watched() as durable:
        _, state = opened.load_latest("job") or (None, None)
        state["files"].write_to(target)  # type: ignore[index]
        if syncs == "each":
            expect(durable, target, home=tmp_path)
            assert durable.has_mode(target)
        else:
            assert len(asked) == 1
            assert durable.has_names(target.parent, "deep")
        assert (target / "sub" / "file").read_text() == "content"


def test_a_directory_restored_into_one_that_exists(tmp_path: Path, store: str) -> None:
    target = tmp_path / "target"
    left = target / f"{os.fsdecode(restoring.STAGE_PREFIX)}left" / "by" / "a killed one"
    left.mkdir(parents=True)
    with kedge.open(store) as opened, watched(target) as durable:
        _, state = opened.load_latest("job") or (None, None)
        state["files"].write_to(target, overwrite=True)  # type: ignore[index]
        assert durable.lacking(target / "sub", home=target) == []
        assert sorted(path.name for path in target.iterdir()) == ["other name", "sub"]
        assert (target / "sub" / "file").read_text() == (target / "other name").read_text() == "content"


@pytest.mark.parametrize("links", ["links", "no links"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_restored_file(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, overwrite: bool, links: str
) -> None:
    target = tmp_path / "new" / "file"
    if links == "no links":
        monkeypatch.setattr(os, "link", refused)
    if overwrite:
        target.parent.mkdir()
        target.write_text("old")
    with kedge.open(store) as opened, watched() as durable:
        _, state = opened.load_latest("file") or (None, None)
        state.write_to(target, overwrite=overwrite)  # type: ignore[union-attr]
        assert durable.lacking(target, home=target.parent) == []
        assert target.read_text() == "content"
        if not overwrite:
            assert durable.has_names(tmp_path, "new")


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("form", ["dir", "jobs", "json", "zip"])
def test_an_export(tmp_path: Path, store: str, form: str, replaces: bool) -> None:
    target = tmp_path / "new" / "export" if form in ("dir", "jobs") else tmp_path / f"export.{form}"
    words = ["export", "plain", str(target), "--format", form, "--store", store]
    if replaces:
        run(*words)
        words.append("--force")
    with watched(*[target.parent] * replaces) as durable:
        run(*words)
    expect(durable, target, home=target.parent if replaces else tmp_path)
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".")]


def test_an_archive(tmp_path: Path) -> None:
    with watched() as durable:
        replace_file(tmp_path / "archive", lambda out: out.write(b"content") and None)
    expect(durable, tmp_path / "archive", home=tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / "archive"]


# --- systems that lack something ---


@pytest.mark.parametrize("fails", [False, True])
def test_an_export_where_names_cannot_be_exchanged(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It takes two steps; if the second one fails, what was there before is there again."""
    target = tmp_path / "export"
    words = ["export", "plain", str(target), "--format", "dir", "--store", store]
    run(*words)
    (target / "was-there").touch()
    sync_directory(target)
    monkeypatch.setattr(libc, "exchange", cannot_exchange)
    rename = os.rename

    def refuse(source: Path, name: Path) -> None:
        if fails and name == target and source.name != "old":
            raise PermissionError(errno.EACCES, "not today")
        rename(source, name)

    monkeypatch.setattr(os, "rename", refuse)
    with watched(tmp_path) as durable:
        done = CliRunner().invoke(cli, [*words, "--force"])
    assert (done.exit_code == 0) is not fails, done.output
    assert (target / "was-there").exists() is fails
    if not fails:
        expect(durable, target, home=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def cannot_exchange(*_: object) -> None:
    raise OSError(errno.EINVAL, "cannot exchange names")


def test_an_export_where_there_are_no_hard_links(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refused)
    with watched() as durable:
        run("export", "plain", str(tmp_path / "export.json"), "--format", "json", "--store", store)
    expect(durable, tmp_path / "export.json", home=tmp_path)


def test_a_system_without_fdatasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched() as durable, (tmp_path / "file").open("wb", buffering=0) as file:
        monkeypatch.delattr(os, "fdatasync")
        file.write(b"content")
        sync_data(file.fileno())
        sync_directory(tmp_path)
    expect(durable, tmp_path / "file", home=tmp_path)


@pytest.mark.parametrize("has_syncfs", [True, False])
def test_all_files_of_a_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_syncfs: bool) -> None:
    asked: list[str] = []

    class Library:
        if has_syncfs:

            def syncfs(self, _: int) -> int:
                asked.append("syncfs")
                return 0

    monkeypatch.setattr(libc, "library", Library)
    monkeypatch.setattr(os, "sync", lambda: asked.append("sync"))
    libc.sync_file_system(0)
    assert asked == ["syncfs" if has_syncfs else "sync"]
