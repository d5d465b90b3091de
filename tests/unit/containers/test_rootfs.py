"""Files that are in use elsewhere while they are to be exchanged."""

import os
from pathlib import Path

import pytest

import kedge
from kedge.containers import rootfs
from kedge.containers.rootfs import Rootfs
from kedge.errors import Conflict
from kedge.files import Tree


@pytest.mark.parametrize("tool", ["umount", "mount"])
def test_a_mount_that_fails_says_how_to_let_others_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    """Where / is private, other mount namespaces keep what is unmounted here. The files stay what they were."""
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
            pytest.raises(Conflict, match=f"{tool} of .* failed: target is busy") as caught,
            rootfs.replaced(overlay, saved, lambda _: None) as put_in_place,
        ):
            put_in_place()
    assert "mount --make-rshared /, restart the engine" in caught.value.hint
    assert (tmp_path / "upper/file").read_text() == "upper"
    assert not list(tmp_path.glob(".kedge-*"))
