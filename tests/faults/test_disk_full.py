"""A full disk refuses saves with NoSpace, loses nothing, and can be freed with what the store itself offers."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.torture.disk_full import MIXED, cycle, helped
from tests.torture.disks import mounted, tmpfs

pytestmark = pytest.mark.faults


@pytest.mark.requires("tmpfs")
@pytest.mark.parametrize("kinds", [MIXED, ("small",), ("inline",)], ids=lambda kinds: "+".join(dict.fromkeys(kinds)))
def test_full_of_bytes(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    with tmpfs(tmp_path / "disk", "size=8m") as disk:
        numbers = cycle(disk / "store", kinds)
    assert numbers["deleted"] > 0


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while ballast.write(bytes(4096)):
            pass


@pytest.mark.requires("tmpfs")
def test_opening_without_a_free_block(tmp_path: Path) -> None:
    """Where not even the memory that processes share fits, it is the disk that is full, not a device that fails."""
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        with holdfast.open(disk / "store") as store:
            saved = store.save("job", "step", {"n": 1})
        fill(disk / "ballast")
        with pytest.raises(holdfast.NoSpace, match=r"index\.sqlite"):
            holdfast.open(disk / "store")
        (disk / "ballast").unlink()
        with holdfast.open(disk / "store") as store:
            assert store.load(saved) == {"n": 1}


@pytest.mark.requires("tmpfs")
def test_memory_that_cannot_be_kept_is_closed_again_when_there_is_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        memory = holdfast.open(f"memory:{disk / 'kept'}")
        saved = memory.save("job", "large", random.Random(1).randbytes(1_000_000))
        gone = memory.save("job", "gone", 1)
        memory.delete("job", gone)
        fill(disk / "ballast")
        with pytest.raises(holdfast.NoSpace, match="close the store again"):
            memory.close()
        assert memory.load(saved) == random.Random(1).randbytes(1_000_000)
        late = memory.save("job", "late", 2)
        (disk / "ballast").unlink()
        memory.close()
        memory.close()
        with pytest.raises(holdfast.CheckpointError, match="closed"):
            memory.jobs()
        with holdfast.open(disk / "kept") as store:
            assert [c.id for c in store.list("job")] == [saved, late]
            assert store.verify().is_ok


@pytest.mark.requires("tmpfs")
def test_no_more_files(tmp_path: Path) -> None:
    """Without a free inode no pack, no log and no new store can be made."""
    with tmpfs(tmp_path / "disk", "size=64m", "nr_inodes=40") as disk:
        with holdfast.open(disk / "store") as store:
            first = store.save("job", "before", {"n": 1})
            fillers = fill_with_files(disk)
            store.save("job", "small", {"n": 2})  # needs no new file
            with pytest.raises(holdfast.NoSpace):
                store.save("job", "large", random.Random(1).randbytes(200_000))
            assert store.verify().is_ok
        with pytest.raises(holdfast.NoSpace):
            holdfast.open(disk / "another")
        for filler in fillers:
            filler.unlink()
        with holdfast.open(disk / "store") as store:
            assert store.load(first) == {"n": 1}
            store.save("job", "large", random.Random(1).randbytes(200_000))
            assert [c.step for c in store.list("job")] == ["before", "small", "large"]
            assert store.verify().is_ok


def fill_with_files(disk: Path) -> list[Path]:
    made: list[Path] = []
    while True:
        filler = disk / f"filler-{len(made)}"
        try:
            filler.touch()
        except OSError:
            return made
        made.append(filler)


@pytest.mark.requires("ext4")
@pytest.mark.xdist_group("loop")
def test_full_ext4(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", size_mib=12, make=("-m", "0", "-b", "4096")) as disk:
        numbers = cycle(disk.path / "store", MIXED)
    assert numbers["deleted"] > 0


@pytest.mark.requires("ext4")
@pytest.mark.xdist_group("loop")
def test_space_freed_by_somebody_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", size_mib=8, make=("-m", "0", "-b", "4096")) as disk:
        numbers = helped(disk.path / "store", MIXED)
    assert numbers["acknowledged"] >= 2 * len(MIXED)


@pytest.mark.requires("ext4")
@pytest.mark.xdist_group("loop")
def test_opening_a_full_disk_of_small_blocks(tmp_path: Path) -> None:
    """SQLite would be killed there by touching its shared memory: a typed error comes before that."""
    with mounted(tmp_path / "disk", size_mib=4, make=("-m", "0", "-b", "1024")) as disk:
        with holdfast.open(disk.path / "store") as store:
            saved = store.save("job", "step", {"n": 1})
        with (disk.path / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(1024)):
                    pass
            except OSError:
                pass
        program = (
            "import sys, holdfast\ntry:\n    holdfast.open(sys.argv[1])\nexcept holdfast.NoSpace:\n    print('full')"
        )
        done = subprocess.run([sys.executable, "-c", program, disk.path / "store"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "full\n"), done.stderr
        (disk.path / "ballast").unlink()
        with holdfast.open(disk.path / "store") as store:
            assert store.load(saved) == {"n": 1}
