"""A checkpoint directory of ARCH: the process and its files, or neither."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers.archive.importer import import_images
from kedge.containers.snapshot import job_of
from kedge.legacy import arch
from tests.unit.containers.criu_writer import write_dump

pytestmark = pytest.mark.requires("root")  # removed files are devices


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    upper = tmp_path / "fs"
    (upper / "etc").mkdir(parents=True)
    (upper / "etc" / "conf").write_text("x = 1")
    os.mknod(upper / "gone", 0o600 | stat.S_IFCHR, os.makedev(0, 0))
    write_dump(tmp_path / "dump")
    assert arch.save_checkpoint_file(upper, tmp_path / "dump")
    return tmp_path / "dump"


def test_its_files_come_with_its_process(dump: Path, tmp_path: Path) -> None:
    with kedge.open("memory:") as store:
        imported = import_images(store, str(dump), key="app", spec={})
        state: Any = store.restore(job_of("container", "app"))
        assert not imported.left_out
        assert import_images(store, str(dump), key="app", spec={}).is_new is False
        with pytest.raises(kedge.NotFound):
            state["images"].read("container_files.tar")
        state["rootfs"].write_to(tmp_path / "new", exact=True)
    assert (tmp_path / "new/etc/conf").read_text() == "x = 1"
    assert stat.S_ISCHR((tmp_path / "new/gone").stat().st_mode)


def test_a_cut_tar_is_no_checkpoint(dump: Path) -> None:
    tar = dump / "container_files.tar"
    tar.write_bytes(tar.read_bytes()[:-9])
    with kedge.open("memory:") as store:
        with pytest.raises(kedge.Corrupted, match="container_files"):
            import_images(store, str(dump), key="app", spec={})
        assert store.jobs() == []
