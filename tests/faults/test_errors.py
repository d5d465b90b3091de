"""Whatever the operating system refuses leaves every public call as one of our errors."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kedge

pytestmark = pytest.mark.faults

LARGE = random.Random(1).randbytes(200_000)
NUMBERS = (errno.EACCES, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOSPC, errno.ESTALE)
CALLS = (
    "open", "stat", "lstat", "access", "fstat", "statvfs", "mkdir", "listdir", "scandir", "replace", "rename",
    "unlink", "link",     "fsync", "fdatasync", "ftruncate", "posix_fallocate", "write", "pwrite",
    "pread", "preadv", "read", "chmod", "chown",
)  # fmt: skip
LOCKS = ("flock", "fcntl")

Work = Callable[[str], object]


def _in(work: Callable[[kedge.CheckpointManager], object]) -> Work:
    def opened(url: str) -> object:
        with kedge.open(url) as store:
            return work(store)

    return opened


WORKS: dict[str, Work] = {
    "create": lambda url: kedge.open(url + "-new").close(),
    "open": lambda url: kedge.open(url).close(),
    "save": _in(lambda store: store.save("job", "more", {"n": 2})),
    "save large": _in(lambda store: store.save("job", "more", random.Random(os.urandom(8)).randbytes(200_000))),
    "load": _in(lambda store: store.restore("job")),
    "list": _in(lambda store: store.list("job")),
    "delete": _in(lambda store: [store.delete("job", c.id) for c in store.list("job")[:1]]),
    "gc": _in(lambda store: store.gc()),
    "verify": _in(lambda store: store.verify()),
    "tag": _in(lambda store: [store.tag(c.id, good="yes") for c in store.list("job")[-1:]]),
}


class Injected:
    """Fails the call of a kind with a number, the n-th time; for paths and descriptors of a store only."""

    def __init__(self, name: str, nth: int, number: int) -> None:
        self.left = nth
        self.has_failed = False
        self._name = name
        self._number = number

    @contextmanager
    def active(self, place: str) -> Iterator[None]:
        import fcntl

        home = fcntl if self._name in LOCKS else os
        call = getattr(home, self._name)

        def wrapper(*arguments: object, **options: object) -> object:
            if _is_of(place, arguments[0] if arguments else None):
                self.left -= 1
                if self.left < 0 and not self.has_failed:
                    self.has_failed = True
                    raise OSError(self._number, os.strerror(self._number), str(arguments[0]))
            return call(*arguments, **options)

        setattr(home, self._name, wrapper)
        try:
            yield
        finally:
            setattr(home, self._name, call)


_readlink = os.readlink


def _is_of(place: str, what: object) -> bool:
    if isinstance(what, int):
        try:
            what = _readlink(f"/proc/self/fd/{what}")
        except OSError:
            return False
    return isinstance(what, str | os.PathLike) and os.fspath(what).startswith(place)


def made(url: str) -> None:
    with kedge.open(url) as store:
        for n in range(10):
            store.save("job", "small", {"n": n})
        store.save("job", "large", LARGE)


@pytest.mark.parametrize("scheme", ["file", "files"])
@pytest.mark.parametrize("call", ["stat", "open"])
def test_opening_fails_with_an_error_of_ours_wherever_the_disk_does(tmp_path: Path, scheme: str, call: str) -> None:
    url = f"{scheme}:{tmp_path / 'store'}"
    made(url)
    for nth in range(1000):
        injected = Injected(call, nth, errno.EIO)
        try:
            with injected.active(str(tmp_path / "store")):
                kedge.open(url).close()
        except kedge.CheckpointError:
            pass
        if not injected.has_failed:
            break
    assert nth > 1


@pytest.mark.filterwarnings("ignore:saved, but not shown")
@pytest.mark.parametrize("scheme", ["file", "files"])
@pytest.mark.parametrize("work", WORKS)
def test_every_error_is_ours(tmp_path: Path, scheme: str, work: str) -> None:
    place = str(tmp_path / "store")
    url = f"{scheme}:{place}"
    made(url)
    failures = 0
    for name in (*CALLS, *LOCKS):
        for nth in (0, 3):
            injected = Injected(name, nth, NUMBERS[failures % len(NUMBERS)])
            try:
                with injected.active(place):
                    WORKS[work](url)
            except kedge.CheckpointError:
                pass
            except Exception as error:
                raise AssertionError(f"{name}, call {nth}, {errno.errorcode[injected._number]}: {error!r}") from error
            failures += injected.has_failed
            if not injected.has_failed:
                break
    with kedge.open(url) as store:  # whatever was refused has harmed nothing
        assert store.verify().is_ok
    assert failures > 5


def test_no_such_user() -> None:
    for url in ("~nobody-here/store", "file:~nobody-here/store", "files:~nobody-here/store"):
        with pytest.raises(kedge.CheckpointError, match="nobody-here"):
            kedge.open(url)


def test_more_threads_than_there_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with kedge.open(tmp_path / "store") as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for save in (store.save, store.save_async):
                with pytest.raises(kedge.StorageError, match="thread"):
                    save("job", "step", random.Random(2).randbytes(8_000_000))
        saved = store.save("job", "step", 1)
        assert store.load(saved) == 1
        assert store.verify().is_ok
