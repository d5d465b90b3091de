"""Signals while a store is used: handlers that save, and handlers that raise, at every line the main thread passes.

The long form, at random instants and with other threads beside: `./dev torture interrupts --count 100000`.
"""

from __future__ import annotations

import _thread
import itertools
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kedge
from kedge.blobs import shelter
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.writes import Writes
from tests.torture import interrupts

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore"),  # what raises inside the `__del__` of something is told so, and ignored
]

Store = kedge.CheckpointManager


class Interrupted(BaseException):
    """What a handler raises."""


def _save_async(store: Store) -> None:
    store.save_async("job", "step", {"array": np.arange(100_000)}).result()


def _lease(store: Store) -> None:
    with store.lease("leased", ttl_s=0.3) as lease:  # lease: nobody else wants it before it ends
        store.save("leased", "step", 1, lease=lease)


def _delete(store: Store) -> None:
    store.delete("job", store.list("job")[0].id)


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "small save": lambda store: store.save("job", "step", {"n": 1}),
    "large save": lambda store: store.save("job", "step", {"array": np.random.default_rng().bytes(300_000)}),
    "save_async": _save_async,
    "load": lambda store: store.load(store.list("loaded")[0].id),
    "delete": _delete,
    "lease": _lease,
}


class _At:
    """Does something at the n-th line of Python that this thread runs, wherever that is."""

    def __init__(self, n: int, act: Callable[[], None]) -> None:
        self.left = n
        self._act = act

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self._act()
        return self

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def _raise() -> None:
    raise Interrupted


@pytest.mark.parametrize("kind", ["file:", "memory:", "files:"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_handler_raises_anywhere(tmp_path: Path, kind: str, operation: str) -> None:
    """Whatever was interrupted, the store goes on, and what it had is there."""
    _at_every_line(tmp_path, kind, operation, lambda _: _raise()).close()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_handler_saves_anywhere(tmp_path: Path, operation: str) -> None:
    saved: list[str] = []

    def save(store: Store) -> None:
        saved.append(store.save("handler", "step", {"array": bytes(80_000), "n": len(saved)}))

    with _at_every_line(tmp_path, "file:", operation, save) as store:
        assert [c.id for c in store.list("handler")] == saved


def _at_every_line(tmp_path: Path, kind: str, operation: str, handler: Callable[[Store], None]) -> Store:
    assert threading.current_thread() is threading.main_thread()
    step = 2 if kind == "file:" else 8  # of lines: their stores do not differ in what the main thread does
    store = kedge.open("memory:" if kind == "memory:" else f"{kind}{tmp_path / 'store'}")
    kept = store.save("loaded", "step", {"array": np.arange(200_000)})
    for _ in range(3):
        store.save("job", "step", 0)
    OPERATIONS[operation](store)
    n = 1
    while True:
        at = _At(n, lambda: handler(store))
        try:
            with at.tracing():
                OPERATIONS[operation](store)
        except (Interrupted, KeyboardInterrupt):  # the latter where a library has forgotten which it was
            pass
        except kedge.LeaseHeld:
            pass  # the one that was interrupted before ends by itself
        if at.left > 0:
            break
        n += step
        last = store.save("job", "after", {"n": n})
    assert n > 10
    assert store.load(last) == {"n": n}
    assert store.load(kept)["array"][-1] == 199_999  # type: ignore[index]
    for checkpoint in store.list("job"):
        store.load(checkpoint.id)
    return store


@pytest.mark.parametrize("kind", ["file:", "memory:", "files:"])
def test_a_handler_saves_in_the_middle_of_a_commit(tmp_path: Path, kind: str) -> None:
    """A preemption: SIGTERM comes inside a save, its handler saves. It comes behind the one it met."""
    store = kedge.open("memory:" if kind == "memory:" else f"{kind}{tmp_path / 'store'}")
    main = threading.get_ident()
    entered = threading.Event()
    saved: list[str] = []
    real = Writes.commit

    def commit(self: Writes, *args: Any) -> Any:
        if not entered.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            assert entered.wait(60), "the handler does not run while the main thread waits"
        return real(self, *args)

    def handler(*_: object) -> None:
        entered.set()
        saved.append(store.save("job", "from the handler", 2))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with mock.patch.object(Writes, "commit", commit):
            first = store.save("job", "met by it", 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [c.id for c in store.list("job")] == [first, *saved]
    store.close()


def test_an_interrupted_save_is_not_finished_behind_the_callers_back(tmp_path: Path) -> None:
    """Its state may be changing: once the caller has gone, nothing of it is committed."""
    store = kedge.open(tmp_path / "store")
    main = threading.get_ident()
    left, gone = threading.Event(), threading.Event()
    state = np.arange(4_000_000)
    real, real_leave = SqliteIndex.locate, shelter._Call._leave

    def locate(self: Any, digests: Any) -> Any:
        if not left.is_set():
            left.set()
            signal.pthread_kill(main, signal.SIGUSR1)
            assert gone.wait(60), "the caller does not go"
        return real(self, digests)

    def leave(call: Any, *arguments: Any) -> None:
        call.is_abandoned = True
        gone.set()
        real_leave(call, *arguments)

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with (
            mock.patch.object(SqliteIndex, "locate", locate),
            mock.patch.object(shelter._Call, "_leave", leave),
            pytest.raises(Interrupted),
        ):
            store.save("job", "step", state)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert store.list("job") == []
    store.save("job", "step", state)
    assert len(store.list("job")) == 1
    store.close()


def test_a_load_into_memory_ends_before_the_interrupt_is_seen(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        saved = store.save("job", "step", {"array": np.random.default_rng(1).bytes(1)} | {"a": np.arange(4_000_000)})
        target = {"array": b"", "a": np.zeros(4_000_000, np.int64)}

        for n in (20, 60, 100):
            target["a"][:] = 0  # type: ignore[index]
            try:
                with _At(n, _raise).tracing():
                    store.load(saved, into=target)
            except (Interrupted, KeyboardInterrupt):
                pass
            copy = target["a"].copy()  # type: ignore[attr-defined]
            store.load(saved)
            assert (copy == target["a"]).all()


class _Watched:
    """A lock of a store that notes where the main thread asks for it."""

    def __init__(self, places: list[str]) -> None:
        self._lock = _thread.allocate_lock()
        self._places = places

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and shelter.is_exposed():
            asks = (f for f in reversed(traceback.extract_stack()) if f.filename != __file__)
            self._places.append(" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in itertools.islice(asks, 4)))
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_WITH_LOCKS = ("kedge.store.", "kedge.index.", "kedge.blobs.", "kedge.client.", "httpcore.")  # the last for HTTP


@contextmanager
def _watched_locks() -> Iterator[list[str]]:
    """Where the main thread takes a lock that a store makes for itself; what it only waits with is not one."""
    places: list[str] = []
    real = threading.Lock

    def lock() -> Any:
        module = sys._getframe(1).f_globals["__name__"]
        is_ours = module.startswith(_WITH_LOCKS) and module != shelter.__name__
        return _Watched(places) if is_ours else real()

    with mock.patch("threading.Lock", lock):
        yield places


def _copy(store: Store) -> None:
    with kedge.open("memory:") as target:
        store.copy_to(target)


CARE: dict[str, Callable[[Store], object]] = {
    "gc": lambda store: store.gc(),
    "check": lambda store: store.verify(deep=True),
    "condemn": lambda store: store.condemn(store.list("loaded")[0].id),
    "copy": _copy,
    "copy of a job": lambda store: store.copy("loaded", f"copy-{len(store.jobs())}"),
    "cleanup": lambda store: store.cleanup("job", keep_last=2),
    "policy": lambda store: store.set_retention("job", kedge.RetentionPolicy(keep_last=2)),
    "tag": lambda store: store.tag(store.list("job")[-1].id, good="yes"),
    "events": lambda store: list(store.events()),
    "change of keys": lambda store: store.rekey(rewrite=True),
}


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["file:", "files:"])
def test_the_main_thread_takes_no_lock_of_a_store(tmp_path: Path, kind: str, is_sealed: bool) -> None:
    """A handler that needs a lock of its own thread waits for ever, whatever operation it met."""
    with _watched_locks() as places:
        store = kedge.open(f"{kind}{tmp_path / 'store'}", key=bytes(range(32)) if is_sealed else None)
        store.save("loaded", "step", {"array": np.arange(200_000), "bytes": bytes(100_000)})
        for n in range(5):
            store.save("job", "step", {"n": n, "text": f"{n}" * 90_000})
        for name, operation in (OPERATIONS | CARE).items():
            if is_sealed or name != "change of keys":
                operation(store)
                assert not places, f"{name}: {sorted(set(places))}"
        store.close()
    assert not places


@pytest.mark.requires("module:fastapi", "module:uvicorn")
def test_nor_one_of_a_connection_to_a_service(tmp_path: Path) -> None:
    from kedge.server import create_app
    from tests.server.conftest import listening

    with kedge.open(tmp_path / "store") as behind, listening(create_app(behind)) as url, _watched_locks() as places:
        store = kedge.open(url)
        store.save("loaded", "step", {"array": np.arange(200_000), "bytes": bytes(100_000)})
        for n in range(5):
            store.save("job", "step", {"n": n, "text": f"{n}" * 90_000})
        for name, operation in (OPERATIONS | CARE).items():
            if name != "change of keys":
                operation(store)
                assert not places, f"{name}: {sorted(set(places))}"
        store.close()
    assert not places


def test_a_handler_that_saves_and_closes_in_the_middle_of_gc(tmp_path: Path) -> None:
    """As a preemption does: what gc was at comes to its end, and the program to its own."""
    program = """
import signal, sys, threading
import kedge
from kedge.store.backlog import Backlog
store = kedge.open(sys.argv[1])
store.save("job", "step", 1)
real = Backlog._copy_batch
def copy_batch(self):
    if not met.is_set():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        met.wait(60)
    return real(self)
met = threading.Event()
def handler(*_):
    met.set()
    store.save("job", "last", 2)
    store.close()
    sys.exit(7)
Backlog._copy_batch = copy_batch
signal.signal(signal.SIGTERM, handler)
store.gc()
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], timeout=60, check=False)
    assert ended.returncode == 7
    with kedge.open(tmp_path / "store") as store:
        assert store.restore("job") == 2


@pytest.mark.requires("module:cryptography")
def test_a_handler_that_saves_while_a_change_of_keys_opens_them(tmp_path: Path) -> None:
    """Properties that functools keeps have a lock for all objects of their class, before Python 3.12."""
    program = """
import hmac, signal, sys, threading
import kedge
store = kedge.open(sys.argv[1], key=bytes(32))
store.save("job", "step", 1)
real, saved = hmac.digest, []
def digest(key, data, algorithm):
    if b"data key id" in data and threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR1)
    return real(key, data, algorithm)
signal.signal(signal.SIGUSR1, lambda *_: saved.append(store.save("job", "from the handler", 2)))
hmac.digest = digest
store.rekey(rewrite=True)
sys.exit(0 if saved and [c.id for c in store.list("job")][1:] == saved else 1)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], timeout=60, check=False)
    assert ended.returncode == 0


@pytest.mark.requires("module:pandas")
def test_a_handler_that_saves_while_the_codec_learns_a_type(tmp_path: Path) -> None:
    """What brings in the types of a library, when the first value of one is saved, is met half imported by nobody."""
    program = """
import signal, sys, threading
import pandas
import kedge
frame = pandas.DataFrame({"a": [1, 2]})
store = kedge.open(sys.argv[1])
def handler(*_):
    met.set()
    store.save("job", "last", frame)
def hook(event, args):
    if event == "exec" and not met.is_set() and args[0].co_filename.endswith("codec/pandas_types.py"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            met.wait(60)
met = threading.Event()
signal.signal(signal.SIGTERM, handler)
sys.addaudithook(hook)
store.save("job", "first", frame)
assert met.is_set()
assert {checkpoint.step for checkpoint in store.list("job")} == {"first", "last"}
assert store.restore("job").equals(frame)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], timeout=60, check=False)
    assert ended.returncode == 0


def test_locks_in_the_main_thread_would_be_noticed(tmp_path: Path) -> None:
    """The mutant: calls of the main thread run where they are."""
    program = """
import faulthandler, pathlib, sys
from unittest import mock
from tests.faults import test_interrupts as tests
faulthandler.dump_traceback_later(2, exit=True)  # a hang
with mock.patch("kedge.blobs.shelter.is_exposed", return_value=False):
    tests.test_a_handler_saves_anywhere(pathlib.Path(sys.argv[1]), "small save")
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=interrupts.ROOT, timeout=60, check=False)
    assert ended.returncode


def test_signals_at_random_instants(tmp_path: Path) -> None:
    done = interrupts.torture(4, tmp_path, count=900)
    assert done["interrupts"] >= 900
    assert done["interrupted"] >= 90
    assert done["handlers that saved"] >= 90


def test_a_handler_in_the_middle_of_a_fork_is_told(tmp_path: Path) -> None:
    """Everybody else is stopped then: waiting for one of them would be for ever."""
    program = """
import os, signal, sys, threading
import kedge
from kedge.index.sqlite.connections import Pool
store = kedge.open(sys.argv[1])
store.save("job", "step", 1)
real = Pool.pause
def pause(self, wait_s):
    signal.raise_signal(signal.SIGUSR1)
    return real(self, wait_s)
Pool.pause = pause
told = []
def handler(*_):
    try:
        store.save("job", "step", 2)
    except kedge.StorageError as error:
        told.append(str(error))
signal.signal(signal.SIGUSR1, handler)
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
assert "while its process forks" in told[0], told
store.save("job", "step", 3)
assert len(store.list("job")) == 2
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True, timeout=60)
