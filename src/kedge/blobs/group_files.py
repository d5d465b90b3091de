"""Whose the files of a store are: its owner's alone, whatever the umask says, or those of a group.

A store is shared if its folder was made for a group to write (`share_with`, or by hand). Whatever is made in it then
belongs to that group and can be written by it, whoever made it.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

OWN_FILE = 0o600
OWN_FOLDER = 0o700
_GROUP_FILE = 0o660
_GROUP_FOLDER = 0o2770  # what is made inside gets the same group


def share(path: str | os.PathLike[str]) -> None:
    """Give a file or folder to the group of the folder it is in, if that is shared.

    By its path: opening and closing a database here would drop the locks that SQLite holds on it. What is not ours
    stays as it is: its owner has made it so.
    """
    folder = os.stat(os.path.dirname(os.path.abspath(path)))
    if not folder.st_mode & stat.S_IWGRP:
        return
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return  # gone again
    bits = _GROUP_FOLDER if stat.S_ISDIR(status.st_mode) else _GROUP_FILE
    if status.st_uid != os.geteuid():
        return
    if status.st_gid != folder.st_gid:
        try:
            os.chown(path, -1, folder.st_gid, follow_symlinks=False)
        except PermissionError:
            return  # a group that we are not in
    if status.st_mode & bits != bits:
        os.chmod(path, stat.S_IMODE(status.st_mode) | bits)


def make_folder(path: Path) -> None:
    """A folder of a store, with those above it, shared as the one it is in."""
    if not path.is_dir():
        make_folder(path.parent)
        make_own_folder(path)
        share(path)


def make_own_folder(path: Path) -> None:
    """A folder, with those above it, that is its owner's alone; one that is there stays as it is."""
    if path.is_dir():
        return
    make_own_folder(path.parent)
    try:
        path.mkdir(mode=OWN_FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise


def make_store_folder(path: Path) -> None:
    """The folder of a new store: its owner's alone or, if it was made for its group to write, that group's."""
    make_own_folder(path)
    status = os.stat(path)
    if status.st_uid == os.geteuid():
        os.chmod(path, _GROUP_FOLDER if status.st_mode & stat.S_IWGRP else OWN_FOLDER)


def share_with(path: Path, group: str) -> None:
    """Make a folder, for a new store, that the users of a group share. LookupError when there is no such group."""
    make_own_folder(path)
    shutil.chown(path, group=group)
    os.chmod(path, _GROUP_FOLDER)


def is_shared_with(path: Path, group: str) -> bool:
    """Whether `share_with` has made this folder. LookupError when there is no such group."""
    import grp  # start time

    status = os.stat(path)
    try:
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        raise LookupError(group) from None
    return status.st_gid == wanted and status.st_mode & _GROUP_FOLDER == _GROUP_FOLDER


def tighten(path: Path) -> None:
    """Take from all users but the owner, and a group that shares it, what they could do with a store."""
    status = os.stat(path)
    excess = 0o007 if status.st_mode & stat.S_IWGRP else 0o077
    if not status.st_mode & excess or status.st_uid != os.geteuid():
        return
    os.chmod(path, stat.S_IMODE(status.st_mode) & ~excess)  # from now on nobody else reaches what is in it
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                inner = os.path.join(folder, name)
                mode = os.lstat(inner).st_mode
                if not stat.S_ISLNK(mode) and mode & excess:
                    os.chmod(inner, stat.S_IMODE(mode) & ~excess)


def open_lock(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file that is only there to be locked; that takes no right to write it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN_FILE)
    share(path)
    return handle


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Whether files can be made in `folder`: by its mode, and by how its disk is mounted."""
    return os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY
