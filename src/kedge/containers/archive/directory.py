"""Directories that others have written, such as an unpacked archive: copies of them, plain files only, and digests."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from kedge.errors import Validation, storage_error

from .tar import Limits

_DEPTH = 3  # an archive that was unpacked has checkpoint/ and volumes/
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PART_BYTES = 1 << 20


def copy_files(source: str, target: Path, limits: Limits) -> None:
    """The plain files and directories of a directory; Validation when there is anything else, or too much."""
    _Copy(limits).directory(os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), target, 0)


class _Copy:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.members = self.total_bytes = 0

    def directory(self, fd: int, target: Path, depth: int) -> None:
        try:
            target.mkdir(mode=0o700)
            for name in os.listdir(fd):
                self.members += 1
                if self.members > self.limits.members or depth > _DEPTH:
                    raise Validation(
                        f"{name}: too many files, or nested too deep", hint="give the directory of one checkpoint"
                    )
                entry = os.open(name, _OPEN, dir_fd=fd)
                kind = stat.S_IFMT(os.fstat(entry).st_mode)
                if kind == stat.S_IFDIR:
                    self.directory(entry, target / name, depth + 1)
                elif kind == stat.S_IFREG:
                    self.file(entry, target / name)
                else:
                    os.close(entry)
                    raise Validation(f"{name} is neither a file nor a directory", hint="no engine writes that")
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Validation(
                    f"{error.filename} is a link", hint="no engine writes that: copy what it leads to"
                ) from error
            raise storage_error("copy", str(target), error) from error
        finally:
            os.close(fd)

    def file(self, fd: int, target: Path) -> None:
        with open(fd, "rb") as source, target.open("xb") as copy:
            while part := source.read(_PART_BYTES):
                self.total_bytes += len(part)
                if self.total_bytes > self.limits.total_bytes:
                    raise Validation(
                        f"the directory holds more than {self.limits.total_bytes:,} bytes", hint="give a higher limit"
                    )
                copy.write(part)


def digest_of(path: str | os.PathLike[str]) -> str:
    """What tells one archive, or one directory with files, from another."""
    digest = hashlib.sha256()
    if not os.path.isdir(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            place = os.path.join(folder, name)
            with open(os.open(place, _OPEN), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Validation(f"{name} is not a plain file", hint="no engine writes that")
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{os.path.relpath(place, path)}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
