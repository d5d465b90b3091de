"""Writes files and directories where the user wants them, whole or not at all. Overwrites nothing by accident."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kedge.blobs.direct import make_directories, sync_directory
from kedge.errors import CheckpointError, Conflict, NotFound, storage_error
from kedge.store.directory import MARKER


def is_stream(target: Path) -> bool:
    """Whether `target` is written into and not replaced: a FIFO, stdout, or /dev/null."""
    if str(target) == "/dev/stdout":
        return True
    try:
        state = target.stat()
        return stat.S_ISFIFO(state.st_mode) or os.path.samestat(state, os.stat(os.devnull))
    except OSError:
        return False


def place_file(target: Path, write: Callable[[BinaryIO], object], *, force: bool, mode: int | None = None) -> int:
    """Write a file durably under another name, then give it its own. Return its size in bytes.

    Its mode is `mode`, else what the umask leaves. Streams are written into. Anything else that is there and no regular
    file is a Conflict, also with `force`.
    """
    if is_stream(target):
        with _os_errors("write", target), _Counted(io.FileIO(target, "w")) as stream:
            write(stream)
        return stream.count
    refuse_other(target, stat.S_ISREG, "a regular file")
    _refuse_existing(target, force)
    with _os_errors("write", target):
        handle, draft = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                size_bytes = file.tell()
            os.chmod(draft, 0o666 & ~_umask() if mode is None else mode)
            _give_name(Path(draft), target, force)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        sync_directory(target.parent)
    return size_bytes


@contextmanager
def placed_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """A new directory to fill, beside `target`; it becomes `target` when the block ends well."""
    refuse_other(target, stat.S_ISDIR, "a directory")
    if os.path.lexists(target / MARKER):
        raise Conflict(f"{target} is a store", hint="choose another name")
    _refuse_existing(target, force)
    with _os_errors("write", target):
        make_directories(str(target.absolute().parent))
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", dir=target.absolute().parent))
        try:
            os.chmod(draft, 0o777 & ~_umask())
            yield draft
            _sync_below(draft)
            if target.exists():
                _take_name(draft, target)
            else:
                os.rename(draft, target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_directory(target.absolute().parent)
        with suppress(FileNotFoundError):
            shutil.rmtree(draft)  # what had the name before


def _take_name(draft: Path, target: Path) -> None:
    """Let two directories change names: one of them has the name of `target` at every moment, also if we are killed."""
    from kedge.blobs.libc import exchange  # it needs ctypes

    try:
        exchange(draft, target)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        _take_name_in_steps(draft, target)


def _take_name_in_steps(draft: Path, target: Path) -> None:
    """The same on a file system that cannot do it at once."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.old.", dir=target.absolute().parent))
    try:
        os.rename(target, aside / "old")
        try:
            os.rename(draft, target)
        except BaseException:
            os.rename(aside / "old", target)
            raise
        os.rename(aside / "old", draft)
    finally:
        with suppress(OSError):
            os.rmdir(aside)


@contextmanager
def added_to_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """A new directory to fill, whose files are put into `target`, beside what is there, when the block ends well.

    A name that is taken is a Conflict before anything is put there; with `force` that file is replaced, no other.
    """
    if not os.path.lexists(target):
        with placed_directory(target, force=False) as draft:
            yield draft
        return
    refuse_other(target, stat.S_ISDIR, "a directory")
    if os.path.lexists(target / MARKER):
        raise Conflict(f"{target} is a store", hint="choose another name")
    with _os_errors("write", target), tempfile.TemporaryDirectory(prefix=".kedge-export.", dir=target) as name:
        draft = Path(name)
        yield draft
        _sync_below(draft)
        files = [Path(folder, file) for folder, _, names in os.walk(draft) for file in names]
        pairs = [(file, target / file.relative_to(draft)) for file in files]
        for _, place in pairs:
            refuse_other(place.parent, stat.S_ISDIR, "a directory")
            refuse_other(place, stat.S_ISREG, "a regular file")
            _refuse_existing(place, force)
        for file, place in pairs:
            make_directories(str(place.parent))
            _give_name(file, place, force)
        for folder in {place.parent for _, place in pairs}:
            sync_directory(folder)


def read_bytes(path: str) -> bytes:
    with _os_errors("read", Path(path)):
        return Path(path).read_bytes()


def refuse_other(target: Path, fits: Callable[[int], bool], what: str) -> None:
    """Conflict if there is something else at `target` than `what`: devices, sockets and the like are not replaced."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return  # nothing there, or nothing that can be reached: writing says which
    if not fits(mode):
        raise Conflict(f"{target} exists and is not {what}", hint="choose another name")


class _Counted(io.BufferedWriter):
    """A stream that knows how much was written to it; nobody can seek in it."""

    count = 0

    def write(self, data: Any, /) -> int:
        self.count += len(memoryview(data).cast("B"))
        return super().write(data)

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")


def _refuse_existing(target: Path, force: bool) -> None:
    if not force and os.path.lexists(target):
        raise Conflict(f"{target} exists already", hint="choose another name, or --force to replace it")


def _give_name(draft: Path, target: Path, force: bool) -> None:
    if force:
        os.replace(draft, target)
        return
    try:
        os.link(draft, target)  # unlike rename, it fails if somebody made the target meanwhile
    except FileExistsError:
        raise Conflict(f"{target} exists already", hint="choose another name, or --force to replace it") from None
    except OSError:  # a file system without hard links
        os.replace(draft, target)
        return
    draft.unlink()


def _sync_below(draft: Path) -> None:
    """Sync everything below a directory, before it gets its name."""
    for folder, _, names in os.walk(draft):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(folder)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextmanager
def _os_errors(action: str, path: Path) -> Iterator[None]:
    """Errors of the operating system as ours, with the path in them; ours pass unchanged."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        what = path if action == "read" else path.parent
        if os.path.exists(what):  # such as /proc, in which nothing can be made
            raise storage_error(action, str(path), error) from error
        raise NotFound(f"there is no {what}", hint="check the path") from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise storage_error(action, str(path), error) from error
