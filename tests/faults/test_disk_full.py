"""A full disk refuses saves with NoSpace, loses nothing, and can be freed with what the store itself offers."""

from pathlib import Path

import pytest

from tests.torture.disk_full import MIXED, cycle, helped
from tests.torture.disks import mounted, tmpfs

pytestmark = pytest.mark.faults


@pytest.mark.requires("tmpfs")
@pytest.mark.parametrize("kinds", [MIXED, ("small",), ("inline",)], ids=lambda kinds: "+".join(dict.fromkeys(kinds)))
def test_full_of_bytes(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        numbers = cycle(disk / "store", kinds)
    assert numbers["deleted when full"] > 0


@pytest.mark.requires("tmpfs")
def test_full_of_files(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64m", "nr_inodes=10") as disk:
        for n in range(12):
            try:
                (disk / f"ballast-{n}").touch()
            except OSError:
                break
        for n in (0, 1, 2, 3, 4, 5):
            (disk / f"ballast-{n}").unlink()
        numbers = helped(disk / "store", MIXED)
    assert numbers["acknowledged"] > 0


@pytest.mark.requires("ext4")
@pytest.mark.xdist_group("loop")
def test_full_ext4(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", size_mib=8, make=("-m", "0")) as disk:
        numbers = cycle(disk.path / "store", MIXED)
    assert numbers["deleted when full"] > 0


@pytest.mark.requires("ext4")
@pytest.mark.xdist_group("loop")
def test_space_freed_by_somebody_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", size_mib=8, make=("-m", "0")) as disk:
        numbers = helped(disk.path / "store", MIXED)
    assert numbers["acknowledged"] >= 2 * len(MIXED)
