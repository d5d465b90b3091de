"""Files of the machine that a restore of processes replaces, and puts back if it fails or is killed.

    note      which files, and the second name that each will have, goes into the attempt
    link      the file as it is gets that second name, beside it
    write     the saved file takes its place; where there was no file, it is written under the second name and moved
    …         CRIU restores the processes
    unlink    the second names go

Killed before CRIU was done, the next attempt puts the files under their second names back; killed after it, it only
removes those names, because the processes run on the files that were saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from kedge.blobs.direct import sync_directory
from kedge.errors import storage_errors
from kedge.files import File
from kedge.files.restore import remove_leftover_of

from .attempts import Attempt, undoing


@contextmanager
def replaced(files: Mapping[str, File], work: Attempt) -> Iterator[None]:
    """The files as they were saved; if what follows fails, they are again what they were before."""
    names = {path: f"{path}.kedge-{work.id}" for path in files}
    made: dict[str, list[int]] = {}  # where there was no file: the one that is ours, once it is whole
    work.describe(moved=names, made=made)
    try:
        for path, file in files.items():
            if _is_linked(path, names[path]):
                file.write_to(path, overwrite=True)
                continue
            made[path] = []
            work.describe(made=made)
            file.write_to(names[path])
            made[path] = _identity(names[path])
            work.describe(made=made)
            with storage_errors("write", path):
                os.rename(names[path], path)
                sync_directory(os.path.dirname(path))
        yield
    except BaseException:
        with undoing():
            put_back(names, made, is_restored=False)
        raise
    try:
        work.describe(is_restored=True)
    finally:
        with undoing():
            put_back(names, made, is_restored=True)


def put_back(names: Mapping[str, str], made: Mapping[str, list[int]], *, is_restored: bool) -> None:
    """After a restore that failed or was killed: the files from before it; after one that was done, those it wrote."""
    for path, name in names.items():
        with storage_errors("put back", path):
            remove_leftover_of(os.fsencode(path))
            remove_leftover_of(os.fsencode(name))
            if path not in made and os.path.lexists(name) and not is_restored:
                os.replace(name, path)
            with suppress(FileNotFoundError):  # two names of one file are not renamed
                os.unlink(name)
            if path in made and not is_restored and os.path.lexists(path) and _identity(path) == list(made[path]):
                os.unlink(path)  # nobody has put another one there since


def _is_linked(path: str, name: str) -> bool:
    """Whether a file has got its second name; False when there is no file."""
    if not os.path.lexists(path):
        return False
    with storage_errors("link", path):
        os.link(path, name, follow_symlinks=False)
    return True


def _identity(path: str) -> list[int]:
    status = os.lstat(path)
    return [status.st_dev, status.st_ino]
