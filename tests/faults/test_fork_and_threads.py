"""Fork while saving, and asyncio: both go on, neither waits for the other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge
from tests.torture.states import make, same
from tests.waiting import wait_for_async

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]

# Forks happen in a program of their own: pytest's threads are none of a user's.
FORKING = """
import os, random, sys, threading, traceback
import kedge
from tests.torture.ledger import about
from tests.torture.states import make, same

place, rounds = sys.argv[1], int(sys.argv[2])
store = kedge.open(place)
stop = threading.Event()
lock = threading.Lock()
saved = []

def save(job, number, kind):
    checkpoint = store.save(job, "step", make(kind, number), metadata=about(kind, number))
    line = f"{checkpoint} {job} {kind} {number}\\n"
    os.write(1, line.encode())
    return checkpoint

def keep_saving(thread):
    draw = random.Random(thread)
    while not stop.is_set():
        save(f"parent-{thread}", draw.randrange(10**9), draw.choice(["small", "inline", "packed", "arrays"]))

threads = [threading.Thread(target=keep_saving, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
pids = []
for n in range(rounds):
    pid = os.fork()
    if pid == 0:
        try:
            for number, kind in enumerate(["small", "arrays", "packed"]):
                checkpoint = save(f"child-{n}", number, kind)
                assert same(store.load(checkpoint), make(kind, number))
            later = store.save_async(f"child-{n}", "later", make("packed", 9), metadata=about("packed", 9))
            os.write(1, f"{later.result()} child-{n} packed 9\\n".encode())
            store.gc()
            if n % 2:
                grandchild = os.fork()
                if grandchild == 0:
                    save(f"grandchild-{n}", 1, "packed")
                    os._exit(0)
                assert os.waitpid(grandchild, 0)[1] == 0
                store.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    pids.append(pid)
    save("parent-main", n, "arrays")
codes = [os.waitpid(pid, 0)[1] for pid in pids]
stop.set()
for thread in threads:
    thread.join()
store.close()
sys.exit(any(codes))
"""


def test_a_child_does_not_write_into_the_buffers_of_its_parent() -> None:
    """Both go on saving through the buffer of the thread that forked: one must not put its bytes into the other's."""
    program = """
        import os
        from kedge.blobs import direct
        view = direct._buffers.view
        view[:4] = b"ours"
        pid = os.fork()
        if pid == 0:
            view[:4] = b"mine"
            os._exit(0)
        os.waitpid(pid, 0)
        assert bytes(view[:4]) == b"ours", bytes(view[:4])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


READING = """
import os, sys, threading
import kedge

store = kedge.open(sys.argv[1])
saved = store.save("job", "step", 1)
forks = []

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(store.get(saved).id != saved)
    forks.append(os.waitpid(pid, 0)[1])

def fork_often():
    for _ in range(5):
        fork()

thread = threading.Thread(target=fork_often)
thread.start()
while thread.is_alive():
    assert store.get(saved).id == saved
thread.join()

def trace(frame, event, _):  # what a signal handler could do, too
    global left
    left -= event == "line"
    if left == 0:
        sys.settrace(None)
        fork()
    return trace

for at in range(1, 1000, 3):
    left = at
    sys.settrace(trace)
    found = store.get(saved)
    sys.settrace(None)
    assert found.id == saved
    if left > 0:
        break
store.close()
sys.exit(at < 10 or len(forks) < 8 or any(forks))
"""


def test_fork_while_the_main_thread_reads(tmp_path: Path) -> None:
    """By another thread, and by the main thread itself, at any line of a read."""
    done = subprocess.run([sys.executable, "-c", READING, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_fork_while_saving(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-c", FORKING, place, "5"], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    with kedge.open(place) as store:
        acknowledged = [line.split() for line in done.stdout.splitlines()]
        assert len({words[1] for words in acknowledged if words[1].startswith("child")}) == 5
        for checkpoint, job, kind, number in acknowledged:
            assert store.get(checkpoint).job == job
            assert same(store.load(checkpoint), make(kind, int(number)))
        assert store.verify(deep=True).problems == ()
        store.gc()
        assert store.verify(deep=True).problems == ()


def test_a_child_that_ends_does_not_end_the_parents_leases_or_saves(tmp_path: Path) -> None:
    program = """
        import os, sys
        import kedge
        store = kedge.open(sys.argv[1])
        with store.lease("job", ttl_s=30) as lease:
            store.save("job", "before", 1, lease=lease)
            pid = os.fork()
            if pid == 0:
                os._exit(0 if store.restore("job") == 1 else 1)
            assert os.waitpid(pid, 0)[1] == 0
            store.save("job", "after", 2, lease=lease)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # an ordinary end, with everything that Python cleans up
        assert os.waitpid(pid, 0)[1] == 0
        store.save("job", "last", bytes(300_000))
        store.close()
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with kedge.open(tmp_path / "store") as store:
        assert [c.step for c in store.list("job")] == ["before", "after", "last"]
        assert store.verify().is_ok


def test_a_save_async_in_flight_belongs_to_the_parent(tmp_path: Path) -> None:
    program = """
        import os, sys
        import kedge
        store = kedge.open(sys.argv[1])
        pending = [store.save_async("job", str(n), bytes([n]) * 3_000_000) for n in range(2)]
        pid = os.fork()
        if pid == 0:
            store.save("child", "own", 1)
            store.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        for save in pending:
            save.result()
        store.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with kedge.open(tmp_path / "store") as store:
        assert [store.load(c.id) for c in store.list("job")] == [bytes([n]) * 3_000_000 for n in range(2)]
        assert store.restore("child") == 1
        assert store.verify().is_ok


class _Held:
    """A system call that ends only when an event loop has come round since it began, or never does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, patience_s: float) -> None:
        self.calls, self.is_blocked, self._patience_s = 0, False, patience_s
        self._real, self._begun, self._came_round = getattr(os, name), threading.Event(), threading.Event()
        monkeypatch.setattr(os, name, self._hold)

    def _hold(self, *arguments: object) -> object:
        self.calls += 1
        self._begun.set()
        self.is_blocked = self.is_blocked or not self._came_round.wait(self._patience_s)
        return self._real(*arguments)

    async def let_go(self, work: asyncio.Future[Any]) -> Any:
        await wait_for_async(lambda: self._begun.is_set() or work.done(), "it does not begin")
        self._came_round.set()
        return await work


PATIENCE_S = {"save": 30.0, "load": 30.0}  # only a blocked loop makes anybody wait for it


async def check_loop_is_free(place: Path, save: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Saves and loads stand still inside a system call until the loop, which must be free, has come round."""
    state = {"weights": np.random.default_rng(1).random(1 << 20)}
    with pytest.MonkeyPatch.context() as patch, kedge.open(place) as store:
        synced = _Held(patch, "fdatasync", PATIENCE_S["save"])
        saved = await synced.let_go(asyncio.ensure_future(save(store, "job", "large", state)))
        read = _Held(patch, "preadv", PATIENCE_S["load"])
        loaded = await read.let_go(asyncio.ensure_future(load(store, saved)))
        assert loaded["weights"].tobytes() == state["weights"].tobytes()
    assert synced.calls > 0
    assert read.calls > 0
    assert not synced.is_blocked, "a save blocks the event loop"
    assert not read.is_blocked, "a load blocks the event loop"


def test_a_large_save_does_not_block_the_event_loop(tmp_path: Path) -> None:
    save, load = (lambda store, *a: store.aio.save(*a)), (lambda store, *a: store.aio.load(*a))
    asyncio.run(check_loop_is_free(tmp_path / "store", save, load))


@pytest.mark.mutant
@pytest.mark.parametrize("what", ["save", "load"])
def test_one_that_did_would_be_seen(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATIENCE_S, what, 0.05)  # the other one does not block

    async def save(store: kedge.CheckpointManager, *arguments: Any) -> Any:
        return store.save(*arguments) if what == "save" else await store.aio.save(*arguments)

    async def load(store: kedge.CheckpointManager, *arguments: Any) -> Any:
        return store.load(*arguments) if what == "load" else await store.aio.load(*arguments)

    with pytest.raises(AssertionError, match=f"a {what} blocks the event loop"):
        asyncio.run(check_loop_is_free(tmp_path / "store", save, load))


def test_many_tasks_save_at_once(tmp_path: Path) -> None:
    async def main() -> list[str]:
        with kedge.open(tmp_path / "store") as store:
            ids = await asyncio.gather(*(store.aio.save("job", "step", {"n": n}) for n in range(200)))
            states = await asyncio.gather(*(store.aio.load(i) for i in ids))
            assert states == [{"n": n} for n in range(200)]
            assert [c.seq for c in await store.aio.list("job")] == list(range(1, 201))
            return ids

    assert len(set(asyncio.run(main()))) == 200
    assert os.path.isdir(tmp_path / "store")


def test_what_a_child_saves_after_its_parent_has_closed_is_kept(tmp_path: Path) -> None:
    """SQLite's locks are per process: a child that took over its parent's would write to a deleted log."""
    program = """
        import os, sys
        import kedge
        store = kedge.open(sys.argv[1])
        store.save("job", "first", 1)
        told, tell = os.pipe()
        ready, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            store.load_latest("job")
            os.write(say, b"1")
            os.read(told, 1)
            store.save("child", "small", 2)
            store.save("child", "large", bytes(200_000))
            os._exit(0)
        os.read(ready, 1)
        store.save("job", "second", 1)
        store.close()
        os.write(tell, b"1")
        assert os.waitpid(pid, 0)[1] == 0
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with kedge.open(tmp_path / "store") as store:
        assert [store.load(c.id) for c in store.list("child")] == [2, bytes(200_000)]
        assert store.verify().is_ok


def test_fork_while_another_thread_meets_its_first_array(tmp_path: Path) -> None:
    """That brings in a module; the child must not wait for an import of a thread it does not have."""
    program = """
        import os, sys, threading, time
        import numpy
        import kedge

        def slow(event, args):
            if event == "exec" and args[0].co_filename.endswith("numpy_types.py"):
                begun.set()
                time.sleep(0.5)  # sleep: at least until the fork, or it is harmless

        begun = threading.Event()
        sys.addaudithook(slow)
        store = kedge.open(sys.argv[1])
        thread = threading.Thread(target=store.save, args=("job", "parent", numpy.zeros(3)))
        thread.start()
        begun.wait()
        pid = os.fork()
        if pid == 0:
            store.save("job", "child", numpy.zeros(3))
            os._exit(0)
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        store.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with kedge.open(tmp_path / "store") as store:
        assert sorted(c.step for c in store.list("job")) == ["child", "parent"]
