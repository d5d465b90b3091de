"""What containers may name in directories of the machine, and what is taken of it."""

import os
from pathlib import Path

import pytest

import kedge
from kedge.containers.archive.directory import copy_files
from kedge.containers.archive.tar import Limits
from kedge.containers.runtime import dumps


@pytest.fixture(name="root")
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    (root / "team/one").mkdir(parents=True)
    (root / "team/one/inventory.img").write_bytes(b"x")
    (tmp_path / "secret").mkdir()
    (root / "team/link").symlink_to(tmp_path / "secret")
    monkeypatch.setenv("KEDGE_RESTORE_ROOTS", f"relative:{root}/")
    return root


def test_only_below_the_roots(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in ("", "team"):
        with dumps.opened(f"{root}/team/one", namespace) as found:
            assert os.listdir(found) == ["inventory.img"]
    for path, namespace in (
        (f"{tmp_path}/secret", ""), (f"{root}/../secret", ""), (f"{root}/team/../team/one", ""), (f"{root}", ""),
        (f"{root}/", ""), (f"{root}//team", ""), (f"{root}/team/one", "other"), (f"{root}/team", "team"),
        (f"{root}/gone", ""), ("relative/x", ""),
    ):  # fmt: skip
        with pytest.raises(kedge.NotFound), dumps.opened(path, namespace):
            pass
    for path in (f"{root}/team/link", f"{root}/team/link/x"):
        with pytest.raises(kedge.Validation, match="link"), dumps.opened(path):
            pass
    monkeypatch.delenv("KEDGE_RESTORE_ROOTS")
    with pytest.raises(kedge.NotFound, match="KEDGE_RESTORE_ROOTS"), dumps.opened(f"{root}/team/one"):
        pass


def test_a_directory_that_is_open_to_one_namespace(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kybernate's sample has it: a path that does not name the namespace of its pod."""
    monkeypatch.setenv("KEDGE_RESTORE_ROOTS", f"kybernate-system={root}/team:=/:other=relative")
    with dumps.opened(f"{root}/team/one", "kybernate-system") as found:
        assert os.listdir(found) == ["inventory.img"]
    for path, namespace in (
        (f"{root}/team/one", "other"), (f"{root}/team/one", ""), (f"{root}/team/one", "team"),
        (f"{tmp_path}/secret", "kybernate-system"), (f"{root}/team/../../secret", "kybernate-system"),
        (f"{root}/team", "kybernate-system"),
    ):  # fmt: skip
        with pytest.raises(kedge.NotFound), dumps.opened(path, namespace):
            pass


def test_plain_files_are_copied_and_nothing_else(root: Path, tmp_path: Path) -> None:
    copy_files(str(root / "team/one"), tmp_path / "copy", Limits())
    assert (tmp_path / "copy/inventory.img").read_bytes() == b"x"
    with pytest.raises(kedge.Validation, match="limit"):
        copy_files(str(root / "team/one"), tmp_path / "large", Limits(total_bytes=0))
    with pytest.raises(kedge.CheckpointError):
        copy_files(str(root / "team"), tmp_path / "linked", Limits())
    (root / "team/link").unlink()
    os.mkfifo(root / "team/fifo")
    with pytest.raises(kedge.Validation, match="neither"):
        copy_files(str(root / "team"), tmp_path / "special", Limits())
    deep = root / "a/b/c/d/e/f"
    deep.mkdir(parents=True)
    with pytest.raises(kedge.Validation, match="too many"):
        copy_files(str(root / "a"), tmp_path / "deep", Limits())
