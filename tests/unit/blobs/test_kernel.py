"""What Linux says of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kedge.blobs import kernel
from kedge.cli.commands.doctor import disk
from kedge.errors import NotAStore
from kedge.store import directory

LINES = """\
21 1 0:20 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a,upperdir=/b\\040c
22 21 0:21 / /mnt/with\\040space rw,noatime - fuse.s3fs bucket rw,user_id=0
23 21 8:1 / /mnt/disk rw - ext4 /dev/sda1 rw,nobarrier
24 21 0:22 / /mnt/disk ro master:2 propagate_from:1 - tmpfs tmpfs ro
"""


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(LINES)
    opened = open

    def instead(path: Any, *args: Any, **options: Any) -> Any:
        return opened(tmp_path / "mountinfo" if path == "/proc/self/mountinfo" else path, *args, **options)

    monkeypatch.setattr(kernel, "open", instead, raising=False)


@pytest.mark.usefixtures("mounts")
def test_mounts() -> None:
    root, bucket, _, newest = kernel.mounts()
    assert root == (os.makedev(0, 20), "/", "overlay", "rw,relatime,rw,lowerdir=/a,upperdir=/b c")
    assert (bucket.point, bucket.kind) == ("/mnt/with space", "fuse.s3fs")
    assert newest == (os.makedev(0, 22), "/mnt/disk", "tmpfs", "ro,ro")
    assert list(kernel.mounts(1 << 30)) == []  # no such process


@pytest.mark.usefixtures("mounts")
def test_a_path_is_on_the_mount_made_last_above_it() -> None:
    assert disk.mount_of(Path("/mnt/disk/store")).kind == "tmpfs"
    assert disk.mount_of(Path("/mnt/disks")).kind == "overlay"
    assert disk.mount_of(Path("/mnt/with space/store")).kind == "fuse.s3fs"


@pytest.mark.parametrize(("kind", "is_refused"), [("fuse.s3fs", True), ("nfs4", True), ("ext4", False), ("", False)])
def test_the_doctor_and_the_store_refuse_the_same_file_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, is_refused: bool
) -> None:
    mount = kernel.Mount(tmp_path.stat().st_dev, "/", kind, "rw")
    monkeypatch.setattr(disk, "mounts", lambda: iter([mount]))
    monkeypatch.setattr(directory, "mounts", lambda: iter([mount]))
    first = next(iter(disk.disk_findings(tmp_path)))
    assert (first.status == "bad" and "network" in first.fix) == is_refused
    if is_refused:
        with pytest.raises(NotAStore):
            directory.refuse_network(tmp_path)
    else:
        directory.refuse_network(tmp_path)
