"""A store that can only be read is read; every write is refused with ReadOnly, and nothing in it changes."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kedge
from tests.torture.disks import unmount
from tests.users import public_folder, run_as

pytestmark = pytest.mark.faults

LARGE = random.Random(1).randbytes(200_000)
NOBODY = 65534
KILLED = (
    "import os, sys, kedge\nstore = kedge.open(sys.argv[1])\nprint(store.save('job', 'killed', 3), flush=True)\n"
    "os.kill(os.getpid(), 9)"
)


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """The folder once more, by a read-only mount."""
    there = path.with_name(path.name + "-read-only")
    there.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", path, there], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", there], check=True)
        yield there
    finally:
        unmount(there)


def files_of(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*") if p.is_file()}


def made(path: Path, scheme: str = "file") -> list[str]:
    with kedge.open(f"{scheme}:{path}") as store:
        return [store.save("job", "small", {"n": 1}), store.save("job", "large", LARGE)]


WRITES: list[Callable[[kedge.CheckpointManager, str], object]] = [
    lambda store, _: store.save("job", "more", 1),
    lambda store, _: store.save("job", "more", LARGE[::-1]),
    lambda store, _: store.save_async("job", "more", 1).result(),
    lambda store, checkpoint: store.delete("job", checkpoint),
    lambda store, _: store.cleanup("job", keep_last=1),
    lambda store, checkpoint: store.tag(checkpoint, good="yes"),
    lambda store, checkpoint: store.pin(checkpoint),
    lambda store, _: store.gc(),
    lambda store, _: store.take_lease("job", "me", 10),
    lambda store, _: store.copy("job", "copy"),
]


@pytest.mark.requires("tmpfs")
@pytest.mark.parametrize("scheme", ["file", "files"])
def test_a_read_only_mount(tmp_path: Path, scheme: str) -> None:
    small, large = made(tmp_path / "store", scheme)
    before = files_of(tmp_path / "store")
    with read_only(tmp_path / "store") as there, kedge.open(f"{scheme}:{there}") as store:
        assert [c.id for c in store.list("job")] == [small, large]
        assert store.load(small) == {"n": 1}
        assert store.load(large) == LARGE
        assert store.diff(small, large) is not None
        assert store.verify().is_ok
        assert [job.name for job in store.jobs()] == ["job"]
        for write in WRITES:
            with pytest.raises(kedge.ReadOnly):
                write(store, small)
        assert [c.id for c in store.list("job")] == [small, large]
        with kedge.open(f"{scheme}:{there}", namespace="unknown") as other:
            assert other.jobs() == []
    assert files_of(tmp_path / "store") == before


@pytest.mark.requires("tmpfs")
@pytest.mark.parametrize("lost", [(), ("-shm",)], ids=["as it was left", "without shared memory"])
def test_a_killed_store_on_a_read_only_mount(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """The newest checkpoints are in the log, which is read where it is, or in a copy."""
    saved = made(tmp_path / "store")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "store"], capture_output=True, text=True)
    saved += done.stdout.split()
    for suffix in lost:
        (tmp_path / f"store/index.sqlite{suffix}").unlink()
    with read_only(tmp_path / "store") as there, kedge.open(there) as store:
        assert [c.id for c in store.list("job")] == saved
        assert store.restore("job") == 3
    shutil.move(tmp_path / "store/index.sqlite-wal", tmp_path / "log")
    with read_only(tmp_path / "store") as there, pytest.raises(kedge.Corrupted, match="was not closed"):
        kedge.open(there)


@pytest.mark.requires("tmpfs")
def test_beside_a_writer(tmp_path: Path) -> None:
    """Who can only read sees what others save, also when they begin and end meanwhile."""
    saved = made(tmp_path / "store")
    with read_only(tmp_path / "store") as there, kedge.open(there) as reader:
        assert [c.id for c in reader.list("job")] == saved
        for n in range(3):
            with kedge.open(tmp_path / "store") as writer:
                saved.append(writer.save("job", "more", n))
                assert [c.id for c in reader.list("job")] == saved
            assert [c.id for c in reader.list("job")] == saved
            assert reader.restore("job") == n


def test_what_changed_while_it_was_read_is_not_given_out(tmp_path: Path) -> None:
    from kedge.index.sqlite.read_only import ReadOnlyFile

    made(tmp_path / "store")
    file = ReadOnlyFile(str(tmp_path / "store/index.sqlite"))
    with pytest.raises(kedge.Unavailable, match="read it again"), file.reading() as db:
        assert db.execute("SELECT count(*) FROM checkpoint").fetchone() == (2,)
        with kedge.open(tmp_path / "store") as writer:
            writer.save("job", "more", 1)


@pytest.mark.requires("root")
@pytest.mark.parametrize("scheme", ["file", "files"])
def test_the_folder_of_somebody_else(scheme: str) -> None:
    with public_folder() as folder:
        saved = made(folder / "store", scheme)
        for path in (folder / "store", *(folder / "store").rglob("*")):  # whose owner lets everybody read it
            path.chmod(0o755 if path.is_dir() else 0o644)
        before = files_of(folder / "store")
        program = (
            "store = kedge.open(arguments[0])\nprint(*(c.id for c in store.list('job')))\n"
            "assert store.verify().is_ok\n"
            "try:\n    store.save('job', 'more', 1)\nexcept kedge.ReadOnly as error:\n    print(error.hint)\n"
        )
        printed = run_as(NOBODY, program, f"{scheme}:{folder / 'store'}", group=NOBODY, also_in=NOBODY)
        assert printed.splitlines()[0].split() == saved
        assert "read-only" in printed.splitlines()[1]
        assert files_of(folder / "store") == before
