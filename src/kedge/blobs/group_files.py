"""Who owns the files of a store: only its owner, whatever the umask, or a group.

A store is shared if its directory was made group-writable (`share_with`, or by hand). Everything created in it then
belongs to that group and is group-writable, whoever created it.
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
_GROUP_FOLDER = 0o2770  # what is created inside inherits the group


def share(path: str | os.PathLike[str]) -> None:
    """Give a file or directory to the group of its directory if that is shared.

    Uses its path: opening and closing a database here would drop SQLite's locks on it. Files of other users stay as
    they are: their owner has set them up.
    """
    folder = os.stat(os.path.dirname(os.path.abspath(path)))
    if not folder.st_mode & stat.S_IWGRP:
        return
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return  # deleted meanwhile
    bits = _GROUP_FOLDER if stat.S_ISDIR(status.st_mode) else _GROUP_FILE
    if status.st_uid != os.geteuid():
        return
    if status.st_gid != folder.st_gid:
        try:
            os.chown(path, -1, folder.st_gid, follow_symlinks=False)
        except PermissionError:
            return  # we are not in that group
    if status.st_mode & bits != bits:
        os.chmod(path, stat.S_IMODE(status.st_mode) | bits)


def make_folder(path: Path) -> None:
    """Create a store's directory and those above it, shared like the one it is in."""
    if not path.is_dir():
        make_folder(path.parent)
        make_own_folder(path)
        share(path)


def make_own_folder(path: Path) -> None:
    """Create a directory and those above it, accessible only to the owner; an existing one stays as it is."""
    if path.is_dir():
        return
    make_own_folder(path.parent)
    try:
        path.mkdir(mode=OWN_FOLDER)
    except FileExistsError:
        if not path.is_dir():
            raise


def make_store_folder(path: Path) -> None:
    """Create the directory of a new store: only the owner's or, if it is group-writable, that group's."""
    make_own_folder(path)
    status = os.stat(path)
    if status.st_uid == os.geteuid():
        os.chmod(path, _GROUP_FOLDER if status.st_mode & stat.S_IWGRP else OWN_FOLDER)


def share_with(path: Path, group: str) -> None:
    """Make a directory for a new store that a group shares. Raises LookupError if there is no such group."""
    make_own_folder(path)
    shutil.chown(path, group=group)
    os.chmod(path, _GROUP_FOLDER)


def is_shared_with(path: Path, group: str) -> bool:
    """Return whether `share_with` made this directory. Raises LookupError if there is no such group."""
    import grp  # start time

    status = os.stat(path)
    try:
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        raise LookupError(group) from None
    return status.st_gid == wanted and status.st_mode & _GROUP_FOLDER == _GROUP_FOLDER


def tighten(path: Path) -> None:
    """Remove all access to a store for others than its owner and a group that shares it."""
    status = os.stat(path)
    excess = 0o007 if status.st_mode & stat.S_IWGRP else 0o077
    if not status.st_mode & excess or status.st_uid != os.geteuid():
        return
    os.chmod(path, stat.S_IMODE(status.st_mode) & ~excess)  # from now on nobody else can reach its content
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                inner = os.path.join(folder, name)
                mode = os.lstat(inner).st_mode
                if not stat.S_ISLNK(mode) and mode & excess:
                    os.chmod(inner, stat.S_IMODE(mode) & ~excess)


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a file that exists only to be locked, which needs no permission to write it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN_FILE)
    share(path)
    return handle


def is_writable(folder: str | os.PathLike[str]) -> bool:
    """Return whether files can be created in `folder`, by its mode and by how its disk is mounted."""
    return os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY
