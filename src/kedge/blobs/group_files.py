"""Files of a store that the users of a group share.

A folder that its group may write is shared: whatever is made in it belongs to the folder's group and can be written by
it, whoever made it and whatever their umask says. Elsewhere the umask decides, as always.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

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
    """A folder, with those above it, shared as the one it is in."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    share(path)


def share_folder(path: Path) -> None:
    """Keep a folder of ours that its group may write in the hands of that group."""
    status = os.stat(path)
    if status.st_mode & stat.S_IWGRP and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISGID:
        os.chmod(path, stat.S_IMODE(status.st_mode) | stat.S_ISGID)


def open_lock(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file that is only there to be locked; that takes no right to write it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    share(path)
    return handle


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Whether files can be made in `folder`: by its mode, and by how its disk is mounted."""
    return os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY
