"""Writing stored files to disk, treating the entry table as hostile.

    stage    a new private directory beside or in the destination; everything is written there, through descriptors
             that never follow a link; links come last
    sync     each file, or the file system if there are many: the bytes are durable before they have a name
    move     a new destination appears by one rename; in an existing one each file or new directory moves by one

So a file under its final name is complete at any moment, even after a kill or a power cut, and on return all of it is
durable. The next restore to the same place removes what a killed one left.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from kedge.blobs.direct import make_directories
from kedge.chunks import StoredStream
from kedge.errors import Conflict, storage_errors

from .directories import OPEN_DIRECTORY, Directories
from .output import Filling, Wishes
from .table import DIRECTORY, Table, shown

STAGE_PREFIX = b".kedge-restore-"
_SYNC_EACH_UP_TO = 100


def write_tree(table: Table, stream: StoredStream | None, destination: bytes, wishes: Wishes) -> None:
    """Restore all of `table` as the directory `destination`, with the guarantees above."""
    destination = os.path.abspath(destination)
    with storage_errors("restore to", shown(destination)):
        make_directories(os.path.dirname(destination))
        is_new = not os.path.lexists(destination)
        with _opened(os.path.dirname(destination) if is_new else destination) as home:
            for name in map(os.fsencode, os.listdir(home)):
                if name.startswith(STAGE_PREFIX):
                    _remove_leftover(name, home)
            if not is_new:
                _refuse_conflicts(table, home, destination, wishes)
            with _stage(home) as (name, stage):
                Filling(table, stream, stage, wishes, sync_each=wishes.durable and _has_few(table)).run()
                if is_new:
                    _dress_directories(table, stage, wishes)
                    _sync(table, stage, wishes)
                    _rename_to(home, name, destination)
                    wishes.dress(stage, table, 0)  # last: a directory without write permission could not be moved
                    if wishes.durable:
                        os.fsync(stage)
                        os.fsync(home)
                else:
                    _sync(table, stage, wishes)
                    _move_into(table, stage, home)
                    _dress_directories(table, home, wishes)
            if not is_new:
                wishes.dress(home, table, 0)
                _sync(table, home, wishes)


def write_file(table: Table, stream: StoredStream | None, destination: bytes, wishes: Wishes) -> None:
    """Restore a single file as `destination`, with the same guarantees."""
    destination = os.path.abspath(destination)
    with storage_errors("restore to", shown(destination)):
        make_directories(os.path.dirname(destination))
        with _opened(os.path.dirname(destination)) as home:
            target = os.path.basename(destination)
            file_type = _type_of(target, home)
            if file_type == stat.S_IFDIR or (file_type is not None and not wishes.overwrite):
                raise _exists(destination, file_type)
            name = _stage_of(target)
            _remove_leftover(name, home)
            with _stage(home, name) as (_, stage):
                Filling(table, stream, stage, wishes, sync_each=True).run()
                if wishes.overwrite:
                    os.rename(table.names[0], target, src_dir_fd=stage, dst_dir_fd=home)
                else:
                    _rename_new(table.names[0], stage, target, home, destination)
                os.fsync(home)


def remove_leftover_of(destination: bytes) -> None:
    """Remove what a killed `write_file` to that place left beside it."""
    folder, target = os.path.split(os.path.abspath(destination))
    if not os.path.isdir(folder):
        return
    with storage_errors("restore to", shown(destination)), _opened(folder) as home:
        _remove_leftover(_stage_of(target), home)


def _stage_of(target: bytes) -> bytes:
    """Return a stage's name, always the same for a target: remains of a kill are found without a listing."""
    return STAGE_PREFIX + hashlib.sha256(target).hexdigest()[:16].encode()


@contextmanager
def _opened(path: bytes) -> Iterator[int]:
    """Open a directory and yield its descriptor."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise Conflict(f"{shown(path)} is not a directory", hint="choose another destination") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _type_of(name: bytes, fd: int) -> int | None:
    """Return the type of an entry of directory `fd`, without following links; None if there is none."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _exists(path: bytes, file_type: int) -> Conflict:
    if file_type == stat.S_IFDIR:
        return Conflict(f"{shown(path)} is a directory", hint="remove it first, or choose another destination")
    return Conflict(f"{shown(path)} exists already", hint="choose another destination, or pass overwrite=True")


def _refuse_conflicts(table: Table, home: int, destination: bytes, wishes: Wishes) -> None:
    """Raise Conflict if the destination is not empty or, with overwrite, has something that cannot be replaced."""
    if not wishes.overwrite:
        if any(not name.startswith(STAGE_PREFIX) for name in map(os.fsencode, os.listdir(home))):
            raise Conflict(
                f"{shown(destination)} is not empty",
                hint="choose a new destination, or pass overwrite=True to replace what has the same name",
            )
        return
    existing = {0}
    with Directories(table, os.dup(home)) as directories:
        for row in range(1, len(table)):
            if table.parent[row] not in existing:
                continue
            file_type = _type_of(table.names[row], directories.fd(table.parent[row]))
            if file_type is None:
                continue
            if (file_type == stat.S_IFDIR) != (table.kind[row] == DIRECTORY):
                type_name = "a directory" if file_type == stat.S_IFDIR else "no directory"
                raise Conflict(
                    f"{shown(os.path.join(destination, table.path(row)))} is {type_name} and cannot be replaced",
                    hint="remove it first, or choose another destination",
                )
            if file_type == stat.S_IFDIR:
                existing.add(row)


@contextmanager
def _stage(home: int, name: bytes = b"") -> Iterator[tuple[bytes, int]]:
    """Create a directory in `home`; yield (name, descriptor). It is locked, and removed afterwards unless moved."""
    while True:
        name = name or _new_name()
        try:
            os.mkdir(name, 0o700, dir_fd=home)
            fd = os.open(name, OPEN_DIRECTORY, dir_fd=home)
        except (FileExistsError, FileNotFoundError):  # in use; or removed as a leftover before it was locked
            name = b""
            continue
        if _lock(fd, if_impossible=True) and os.fstat(fd).st_nlink:
            break
        os.close(fd)
        name = b""
    try:
        yield name, fd
    finally:
        _remove(name, home)
        os.close(fd)


def _new_name() -> bytes:
    return STAGE_PREFIX + os.urandom(8).hex().encode()


def _lock(fd: int, *, if_impossible: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return if_impossible
    return True


def _remove_leftover(name: bytes, home: int) -> None:
    """Remove what a killed restore of this user left in `home`. A running one holds a lock."""
    try:
        fd = os.open(name, OPEN_DIRECTORY, dir_fd=home)
    except OSError:
        return
    try:
        if os.fstat(fd).st_uid == os.geteuid() and _lock(fd, if_impossible=False):
            _remove(name, home)
    finally:
        os.close(fd)


def _remove(name: bytes, home: int) -> None:
    """Remove a directory of `home` with its content, of any depth, by first moving inner directories up to `home`.

    Never fails: what cannot be removed is left for the next restore.
    """
    waiting = [name]
    while waiting:
        name = waiting.pop()
        try:
            fd = os.open(name, OPEN_DIRECTORY, dir_fd=home)
            try:
                os.fchmod(fd, 0o700)
                for item in map(os.fsencode, os.listdir(fd)):
                    if _type_of(item, fd) == stat.S_IFDIR:
                        waiting.append(_new_name())
                        os.rename(item, waiting[-1], src_dir_fd=fd, dst_dir_fd=home)
                    else:
                        os.unlink(item, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=home)
        except OSError:
            continue


def _rename_new(name: bytes, source: int, target: bytes, home: int, destination: bytes) -> None:
    """Rename a file, but never onto another one, even if that has just appeared."""
    try:
        os.link(name, target, src_dir_fd=source, dst_dir_fd=home, follow_symlinks=False)
    except FileExistsError as error:
        raise _exists(destination, stat.S_IFREG) from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=home)  # a file system without hard links


def _rename_to(home: int, name: bytes, destination: bytes) -> None:
    try:
        os.rename(name, os.path.basename(destination), src_dir_fd=home, dst_dir_fd=home)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise Conflict(f"{shown(destination)} appeared meanwhile", hint="choose another destination") from error
        raise


def _move_into(table: Table, stage: int, home: int) -> None:
    """Move the staged entries to their places: whole directories if they are new, otherwise their content."""
    existing = {0}
    with Directories(table, os.dup(stage)) as sources, Directories(table, os.dup(home)) as targets:
        for row in range(1, len(table)):
            if table.parent[row] not in existing:
                continue  # moved with its directory
            source, target = sources.fd(table.parent[row]), targets.fd(table.parent[row])
            name = table.names[row]
            if table.kind[row] == DIRECTORY and _type_of(name, target) == stat.S_IFDIR:
                existing.add(row)
            else:
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


def _dress_directories(table: Table, root: int, wishes: Wishes) -> None:
    """Set owners, modes and times of all directories but the root; inner ones first, while they can be entered."""
    with Directories(table, os.dup(root)) as directories:
        for row in reversed(table.rows(DIRECTORY)):
            if row:
                wishes.dress(directories.fd(row), table, row)


def _has_few(table: Table) -> bool:
    return len(table) <= _SYNC_EACH_UP_TO


def _sync(table: Table, root: int, wishes: Wishes) -> None:
    """Make all entries below `root` durable; if there are few, their files already are."""
    if not wishes.durable:
        return
    if not _has_few(table):
        from kedge.blobs import libc  # start time

        libc.sync_file_system(root)  # one wait, not one per file; only for many, because it includes others' writes
        return
    with Directories(table, os.dup(root)) as directories:
        for row in reversed(table.rows(DIRECTORY)):
            os.fsync(directories.fd(row))
