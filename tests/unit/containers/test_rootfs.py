"""Files that are in use elsewhere while they are to be exchanged."""

import errno
import os
from pathlib import Path

import pytest

import kedge
from kedge.blobs import libc
from kedge.containers import rootfs
from kedge.containers.attempts import NotUndone, attempt, put_right
from kedge.containers.rootfs import Rootfs
from kedge.errors import CheckpointError, Conflict
from kedge.files import Tree


@pytest.mark.parametrize(("tool", "error"), [("umount", Conflict), ("mount", NotUndone)])
def test_a_mount_that_fails_says_how_to_let_others_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, error: type[CheckpointError]
) -> None:
    """Where / is private, other mount namespaces keep what is unmounted here. The files stay what they were; a root
    that is not mounted again is left to the next attempt."""
    for name in ("umount", "mount"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n[ {name} = {tool} ] || exit 0\necho 'target is busy.' >&2\nexit 32\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    for folder in ("upper", "saved"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(folder)
    overlay = Rootfs("overlay", tmp_path, tmp_path / "upper", f"workdir={tmp_path}/work")
    with kedge.open(tmp_path / "store") as store:
        saved = store.load(store.save("files", "step", Tree(tmp_path / "saved")))
        with (
            pytest.raises(error, match=f"{tool} of .* failed: target is busy") as caught,
            rootfs.replaced(overlay, saved, lambda _: None) as put_in_place,
        ):
            put_in_place()
    assert "mount --make-rshared /, restart the engine" in caught.value.hint
    assert (tmp_path / "upper/file").read_text() == "upper"
    assert bool(list(tmp_path.glob(".kedge-*"))) == (error is NotUndone)


def test_files_that_could_not_be_put_back_are_put_back_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    for folder in ("root", "saved"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text(folder)
    place = Rootfs("directory", tmp_path / "root", tmp_path / "root", "")
    with kedge.open(tmp_path / "store") as store:
        saved = store.load(store.save("files", "step", Tree(tmp_path / "saved")))
        with (
            pytest.raises(NotUndone, match="Input/output error"),
            attempt("restore", "1") as work,
            rootfs.replaced(place, saved, lambda facts: work.describe(replaces=facts)) as put_in_place,
        ):
            put_in_place()
            monkeypatch.setattr(libc, "exchange", broken)
            raise ZeroDivisionError
    assert (tmp_path / "root/file").read_text() == "saved"
    monkeypatch.undo()
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    put_right()
    assert (tmp_path / "root/file").read_text() == "root"
    assert not list(tmp_path.glob(".kedge-*"))


def broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
