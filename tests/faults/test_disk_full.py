"""A full disk refuses saves with NoSpace, loses nothing, and can be freed with what the store itself offers."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
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
    with path.open("wb", buffering=0) as ballast:
        for size in (4096, 512):
            with pytest.raises(OSError, match="No space"):
                while ballast.write(bytes(size)):
                    pass


def large(seed: int) -> bytes:
    return random.Random(seed).randbytes(300_000)


def fill_completely(disk: Path, what: str) -> list[Path]:
    """No free byte, or no free inode; answers what to remove to have them back."""
    if what == "inodes":
        return fill_with_files(disk)
    fill(disk / "ballast")
    return [disk / "ballast"]


@pytest.mark.requires("tmpfs")
@pytest.mark.parametrize("scheme", ["file", "files"])
@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_disk_without_room_is_no_dead_end(tmp_path: Path, what: str, scheme: str) -> None:
    """A store on it opens, is read, deleted from and collected; then saves work again."""
    with tmpfs(tmp_path / "disk", "size=16m", "nr_inodes=80") as disk:
        url = f"{scheme}:{disk / 'store'}"
        with kedge.open(url) as store:
            saved = [store.save("job", f"step {n}", large(n)) for n in range(8)]
            small = store.save("job", "small", {"n": 1})
        fillers = fill_completely(disk, what)
        with kedge.open(url) as store:
            assert [c.id for c in store.list("job")] == [*saved, small]
            assert store.load(saved[3]) == large(3)
            with pytest.raises(kedge.NoSpace, match="gc"):
                store.save("job", "refused", large(9))
        with kedge.open(url) as store:
            assert [c.id for c in store.list("job")] == [*saved, small]
            for checkpoint in saved[:6]:
                assert store.delete("job", checkpoint)
            assert store.gc().chunks_removed
        with kedge.open(url) as store:
            for filler in fillers[:6] if what == "inodes" else ():  # gc gives back bytes, and hardly an inode
                filler.unlink()
            assert store.load(store.save("job", "again", large(10))) == large(10)
            assert [c.step for c in store.list("job")] == ["step 6", "step 7", "small", "again"]
            assert store.verify().is_ok
        for filler in fillers:
            filler.unlink(missing_ok=True)
        with kedge.open(url) as store:
            store.save("job", "at last", large(11))
            assert store.verify().is_ok


@pytest.mark.requires("tmpfs")
def test_saves_do_not_live_on_the_reserve(tmp_path: Path) -> None:
    """Else nothing would be left of it for deleting."""
    with tmpfs(tmp_path / "disk", "size=8m") as disk:
        with kedge.open(disk / "store") as store:
            first = store.save("job", "first", large(1))
        fill(disk / "ballast")
        for _ in range(3):
            with kedge.open(disk / "store") as store:
                for n in range(20):
                    with pytest.raises(kedge.NoSpace):
                        store.save("job", "refused", {"n": n})
                    with pytest.raises(kedge.NoSpace):
                        store.save("job", "refused", large(n))
        with kedge.open(disk / "store") as store:
            assert store.delete("job", first)
            store.gc()
        with kedge.open(disk / "store") as store:
            store.save("job", "second", {"n": 2})
            assert len(list((disk / "store/reserve").iterdir())) == 4


@pytest.mark.requires("tmpfs")
def test_a_long_log_on_a_full_disk(tmp_path: Path) -> None:
    """Small states lie in the log of the index, which needs its size once more to be moved on."""
    with tmpfs(tmp_path / "disk", "size=100m") as disk:
        with kedge.open(disk / "store") as store:
            with (disk / "ballast").open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, 88 << 20)
            saved = []
            with pytest.raises(kedge.NoSpace):
                while True:
                    saved.append(store.save("job", "step", random.Random(len(saved)).randbytes(40_000)))
            fill(disk / "more")
        with kedge.open(disk / "store") as store:
            assert [c.id for c in store.list("job")] == saved
            assert store.cleanup("job", keep_last=5) == len(saved) - 5
            assert store.gc().chunks_removed
        with kedge.open(disk / "store") as store:
            store.save("job", "again", random.Random(0).randbytes(40_000))
            assert store.verify().is_ok


@pytest.mark.requires("tmpfs")
@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_refused_save_in_files_does_not_exist(tmp_path: Path, what: str) -> None:
    """I1 the other way round: what was refused is not there when the store is opened again."""
    with tmpfs(tmp_path / "disk", "size=4m", "nr_inodes=60") as disk:
        with kedge.open(f"files:{disk / 'store'}") as store:
            saved = [store.save("job", "before", {"n": 1})]
            fillers = fill_completely(disk, what)
            for n in range(30):
                try:
                    saved.append(store.save(f"job-{n}", "step", {"n": n, "text": "x" * 3000}))
                except kedge.NoSpace:
                    continue
            listed = [c.id for job in store.jobs() for c in store.list(job.name)]
            assert sorted(listed) == sorted(saved)
            assert len(saved) < 31
        with kedge.open(f"files:{disk / 'store'}") as store:
            assert sorted(c.id for job in store.jobs() for c in store.list(job.name)) == sorted(saved)
        for filler in fillers:
            filler.unlink()
        with kedge.open(f"files:{disk / 'store'}") as store:
            saved.append(store.save("job", "after", {"n": 2}))
            assert sorted(c.id for job in store.jobs() for c in store.list(job.name)) == sorted(saved)
        assert sorted(path.stem for path in (disk / "store").glob("*/*/*.json")) == sorted(saved)


@pytest.mark.requires("tmpfs")
def test_memory_that_cannot_be_kept_is_closed_again_when_there_is_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        memory = kedge.open(f"memory:{disk / 'kept'}")
        saved = memory.save("job", "large", random.Random(1).randbytes(1_000_000))
        gone = memory.save("job", "gone", 1)
        memory.delete("job", gone)
        fill(disk / "ballast")
        with pytest.raises(kedge.NoSpace, match="close the store again"):
            memory.close()
        assert memory.load(saved) == random.Random(1).randbytes(1_000_000)
        late = memory.save("job", "late", 2)
        (disk / "ballast").unlink()
        memory.close()
        memory.close()
        with pytest.raises(kedge.CheckpointError, match="closed"):
            memory.jobs()
        with kedge.open(disk / "kept") as store:
            assert [c.id for c in store.list("job")] == [saved, late]
            assert store.verify().is_ok


@pytest.mark.requires("tmpfs")
def test_no_more_files(tmp_path: Path) -> None:
    """Without a free inode no pack, no log and no new store can be made."""
    with tmpfs(tmp_path / "disk", "size=64m", "nr_inodes=40") as disk:
        with kedge.open(disk / "store") as store:
            first = store.save("job", "before", {"n": 1})
            fillers = fill_with_files(disk)
            store.save("job", "small", {"n": 2})  # needs no new file
            with pytest.raises(kedge.NoSpace):
                store.save("job", "large", random.Random(1).randbytes(200_000))
            assert store.verify().is_ok
        with pytest.raises(kedge.NoSpace):
            kedge.open(disk / "another")
        for filler in fillers:
            filler.unlink()
        with kedge.open(disk / "store") as store:
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
        with kedge.open(disk.path / "store") as store:
            saved = store.save("job", "step", {"n": 1})
        with (disk.path / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(1024)):
                    pass
            except OSError:
                pass
        program = (
            "import sys, kedge\ntry:\n    print(kedge.open(sys.argv[1]).restore('job'))\n"
            "except kedge.NoSpace:\n    print('full')"
        )
        for said in ("{'n': 1}\n", "full\n"):  # with the reserve, and without
            done = subprocess.run([sys.executable, "-c", program, disk.path / "store"], capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, said), done.stderr
            shutil.rmtree(disk.path / "store/reserve", ignore_errors=True)
            fill(disk.path / "more")
        (disk.path / "ballast").unlink()
        with kedge.open(disk.path / "store") as store:
            assert store.load(saved) == {"n": 1}
