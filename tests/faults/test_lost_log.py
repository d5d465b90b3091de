"""I1, I3: an index that was not closed and has lost its log is refused, and gc leaves alone what only packs know."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kedge
from kedge.index.sqlite import connections
from kedge.index.sqlite.closed_mark import IndexState
from tests.parts import require

pytestmark = pytest.mark.faults

KEY = bytes(range(32))
LARGE = random.Random(1).randbytes(200_000)
SAVING = """
import os, random, sys, kedge
store = kedge.open(sys.argv[1])
print(store.save("job", "small", {"n": 1}), flush=True)
print(store.save("job", "large", random.Random(1).randbytes(200_000)), flush=True)
sys.stdin.readline()
{end}
"""


def saving(store: Path, end: str = "os.kill(os.getpid(), 9)") -> list[str]:
    """Two checkpoints, by a program that ends as it is told to; answers their IDs."""
    program = SAVING.replace("{end}", end)
    done = subprocess.run([sys.executable, "-c", program, store], input="\n", capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.split()


FIRST: dict[str, Callable[[kedge.CheckpointManager], object]] = {
    "save": lambda store: store.save("job", "step", 2),
    "tag": lambda store: store.tag(store.list("job")[0].id, n="1"),
    "gc of nothing": lambda store: store.gc(),
    "gc after a deletion": lambda store: (store.delete("job", store.list("job")[-1].id), store.gc()),
    "change of keys": lambda store: store.rekey(rewrite=True),
    "namespace": lambda store: kedge.open(store.url, key=KEY, namespace="new").close(),
}


@pytest.mark.parametrize("first", FIRST)
def test_no_log_is_asked_for_that_may_never_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A power cut before the first commit is durable leaves no log: an index that says "open" then would be refused."""
    require("module:cryptography")
    place, log = tmp_path / "store", tmp_path / "store" / "index.sqlite-wal"
    with kedge.open(place, key=KEY) as store:
        store.save("job", "step", 1)
        store.save("job", "step", LARGE)
    real, marks = IndexState.mark_open, []

    def mark_open(state: IndexState) -> None:
        if not state.is_marked:
            marks.append(log.exists() and log.stat().st_size > 0)
        real(state)

    monkeypatch.setattr(IndexState, "mark_open", mark_open)
    with kedge.open(place, key=KEY) as store:
        FIRST[first](store)
    assert all(marks)
    assert bool(marks) == (first != "gc of nothing")


def test_a_lost_log_is_not_an_empty_store(tmp_path: Path) -> None:
    small, large = saving(tmp_path / "store")
    (tmp_path / "store/index.sqlite-wal").rename(tmp_path / "log")
    for _ in range(2):
        with pytest.raises(kedge.Corrupted, match=r"index\.sqlite-wal.*check --repair"):
            kedge.open(tmp_path / "store")
    shutil.copy(tmp_path / "log", tmp_path / "store/index.sqlite-wal")
    with kedge.open(tmp_path / "store") as store:
        assert [c.id for c in store.list("job")] == [small, large]
    with kedge.open(tmp_path / "store") as store:
        assert store.verify().is_ok


def test_a_lost_log_is_repaired_from_packs(tmp_path: Path) -> None:
    from kedge.care.repair import repair

    _, large = saving(tmp_path / "store")
    (tmp_path / "store/index.sqlite-wal").unlink()
    (tmp_path / "store/index.sqlite-shm").unlink()
    report = repair(tmp_path / "store", actor="test")
    assert not report.is_index_complete  # the small one was in the log alone
    with kedge.open(tmp_path / "store") as store:
        assert store.load(large) == LARGE
        assert store.gc().packs_removed == 0


def test_a_long_log_that_was_moved_on_in_part(tmp_path: Path) -> None:
    """A large part of the index may be in the database proper, and only its end in the log."""
    more = "import random\nfor n in range(120): store.save('job', 'more', random.Random(n).randbytes(40_000))\n"
    saving(tmp_path / "store", more + "os.kill(os.getpid(), 9)")
    assert (tmp_path / "store/index.sqlite").stat().st_size > 1 << 20
    (tmp_path / "store/index.sqlite-wal").unlink()
    with pytest.raises(kedge.Corrupted, match="was not closed"):
        kedge.open(tmp_path / "store")


@pytest.mark.parametrize(
    "end",
    ["", "store.close()", "del store", "sys.exit(0)", "os._exit(0)", "os.fork(); store.save('job', 'child', 1)"],
    ids=["end", "close", "forgotten", "exit", "_exit", "fork"],
)
def test_whoever_ends_without_being_killed_is_not_refused(tmp_path: Path, end: str) -> None:
    saved = saving(tmp_path / "store", end)
    assert end == "os._exit(0)" or not (tmp_path / "store/index.sqlite-wal").exists()
    with kedge.open(tmp_path / "store") as store:
        assert [c.id for c in store.list("job")][:2] == saved[:2]


def test_killed_beside_others(tmp_path: Path) -> None:
    """Whoever stays moves the log of a killed one on; whoever only reads does too."""
    for is_writer in (False, True):
        with kedge.open(tmp_path / "store") as other:
            if is_writer:
                other.save("job", "other", 1)
            saved = saving(tmp_path / "store")
        assert not (tmp_path / "store/index.sqlite-wal").exists()
        with kedge.open(tmp_path / "store") as store:
            assert [c.id for c in store.list("job")][-2:] == saved


def test_closed_while_another_user_is_dying(tmp_path: Path) -> None:
    """Who is killed loses its locks one by one. SQLite finds that we are the last user, and removes the log, while the
    other one still counts in the state."""
    place = tmp_path / "store"
    store = kedge.open(place)
    store.save("job", "step", 1)
    with open(place / "index.sqlite-state", "rb") as dying:
        fcntl.flock(dying, fcntl.LOCK_SH)
        store.close()
    assert not (place / "index.sqlite-wal").exists()
    with kedge.open(place) as store:
        assert store.restore("job") == 1


def test_a_copy_of_a_store_in_use_without_its_log(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", {"n": 1})
        shutil.copytree(tmp_path / "store", tmp_path / "whole")
        shutil.copytree(tmp_path / "store", tmp_path / "part", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    with kedge.open(tmp_path / "whole") as copy:
        assert copy.restore("job") == {"n": 1}
    with pytest.raises(kedge.Corrupted, match="was not closed"):
        kedge.open(tmp_path / "part")


def test_killed_while_closing(tmp_path: Path) -> None:
    """At each step of closing: what it says is true before SQLite removes the log."""
    program = (
        "import os, sys, kedge\nfrom kedge.index.sqlite import closed_mark as state\n"
        "store = kedge.open(sys.argv[1])\nstore.save('job', 'step', 1)\n"
        "def kill(*_):\n    os.kill(os.getpid(), 9)\n"
    )
    for number, step in enumerate(("state.IndexState.is_last", "state.IndexState.close", "state.IndexState.leave")):
        end = f"{step} = kill\nstore.close()\n"
        done = subprocess.run([sys.executable, "-c", program + end, tmp_path / "store"], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        with kedge.open(tmp_path / "store") as store:
            assert len(store.list("job")) == number + 1


def test_saving_again_costs_no_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: only the first save of a process says that the index is open."""
    said: list[object] = []
    write = IndexState._write
    monkeypatch.setattr(IndexState, "_write", lambda self, what: (said.append(what), write(self, what)))
    with kedge.open(tmp_path / "store") as store:
        said.clear()
        for n in range(10):
            store.save("job", "step", n)
        assert len(said) == 1


def test_gc_refuses_an_older_index(tmp_path: Path) -> None:
    """An index from a backup does not name what was saved since; gc must not take that for garbage."""
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "before", LARGE)
    shutil.copy(tmp_path / "store/index.sqlite", tmp_path / "backup")
    with kedge.open(tmp_path / "store") as store:
        late = store.save("job", "after", LARGE[::-1])
    os.replace(tmp_path / "backup", tmp_path / "store/index.sqlite")
    for _ in range(2):
        with kedge.open(tmp_path / "store") as store:
            store.save("job", "meanwhile", 1)
            with pytest.raises(kedge.Corrupted, match="kedge rebuild"):
                store.gc()
    with kedge.open(tmp_path / "store") as store:
        assert store.rebuild().added == 1
        store.gc()
        assert store.load(late) == LARGE[::-1]
    with kedge.open(tmp_path / "store") as store:
        store.gc()
        assert store.verify().is_ok


def test_a_store_of_an_older_kedge(tmp_path: Path) -> None:
    """One that does not say whether it was closed opens as ever."""
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", 1)
    (tmp_path / "store/index.sqlite-state").unlink()
    with kedge.open(tmp_path / "store") as store:
        assert store.restore("job") == 1
    assert (tmp_path / "store/index.sqlite-state").exists()


@pytest.mark.parametrize("torn", [b"", b"Kedge index\nsta"])
def test_a_state_that_was_cut_off_asks_for_no_log(tmp_path: Path, torn: bytes) -> None:
    """It is cut off while it is made, or while the log is there or has been moved on: nothing is missing (I1)."""
    with kedge.open(tmp_path / "store") as store:
        saved = store.save("job", "step", 1)
    (tmp_path / "store" / "index.sqlite-state").write_bytes(torn)
    with kedge.open(tmp_path / "store") as store:
        assert store.load(saved) == 1


def test_an_index_that_cannot_go_on_after_a_fork_stops_no_other() -> None:
    class Paused:
        def __init__(self, failure: Exception | None) -> None:
            self.failure, self.goes_on = failure, False

        def before_fork(self) -> None: ...

        def after_fork(self, *, is_child: bool) -> None:
            if self.failure is not None:
                raise self.failure
            self.goes_on = True

    first, last = Paused(None), Paused(None)
    connections._before()
    connections._paused += [first, Paused(OSError("no")), last]
    with pytest.raises(OSError, match="no"):
        connections._after(False)
    assert first.goes_on
    assert last.goes_on
    with kedge.open("memory:") as store:  # and the main thread may use stores again
        store.save("job", "step", 1)


def test_opening_a_damaged_store_again_and_again_keeps_its_log_and_no_files(tmp_path: Path) -> None:
    """Each attempt must leave the log where it is, and cannot leave a connection open for that each time."""
    place = tmp_path / "store"
    saving(place, "[store.save(str(n), 'step', n) for n in range(300)]; os.kill(os.getpid(), 9)")
    index, log = place / "index.sqlite", place / "index.sqlite-wal"
    for file, first in (index, 4096), (log, log.stat().st_size // 2):
        content = file.read_bytes()
        file.write_bytes(content[:first] + b"\xff" * (len(content) - first))

    def attempt() -> int:
        with pytest.raises(kedge.CheckpointError):
            kedge.open(place)
        return len(os.listdir("/proc/self/fd"))

    open_files = [attempt() for _ in range(6)]
    assert set(open_files[2:]) == {open_files[1]}
    assert log.exists()
