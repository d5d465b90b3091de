"""Checkpoints that lie in directories of this machine: what others have dumped, for `KEDGE_RESTORE=/path`.

A container may only name what lies below a directory that the machine's administrator opened for that, in
KEDGE_RESTORE_ROOTS (several, with colons between); in a cluster, below that directory's subdirectory of the pod's
namespace. No link is followed on the way. What is found is taken for hostile: it is copied, plain files only, checked
and imported as a generation of the workload, once; from then on the newest generation counts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kedge.containers.archive.tar import Limits
from kedge.errors import NotFound, Validation, storage_error

_DEPTH = 3  # an archive that was unpacked has checkpoint/ and volumes/
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PART_BYTES = 1 << 20


@contextmanager
def opened(path: str, namespace: str = "") -> Iterator[str]:
    """A path by which the file or directory can be reached that a container named; NotFound when it may not."""
    roots = [root for root in os.environ.get("KEDGE_RESTORE_ROOTS", "").split(":") if root.startswith("/")]
    for root in roots:
        home = f"{root.rstrip('/')}/{namespace}/" if namespace else f"{root.rstrip('/')}/"
        parts = path.removeprefix(home).split("/")
        if path.startswith(home) and all(part not in ("", ".", "..") for part in parts):
            fd = _descend(home, parts)
            try:
                yield f"/proc/self/fd/{fd}"
            finally:
                os.close(fd)
            return
    raise NotFound(
        f"{path} is in no directory from which containers{f' of {namespace}' if namespace else ''} may be restored",
        hint="the administrator of the machine names such directories in KEDGE_RESTORE_ROOTS",
    )


def _descend(home: str, parts: Sequence[str]) -> int:
    try:
        fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            above, fd = fd, os.open(part, _OPEN, dir_fd=fd)
            os.close(above)
    except FileNotFoundError:
        raise NotFound(f"there is no {home}{'/'.join(parts)}", hint="check the path") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Validation(
                f"{home}{'/'.join(parts)} leads through a link", hint="name what is there itself"
            ) from None
        raise storage_error("open", home + "/".join(parts), error) from error
    return fd


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
                    raise Validation(f"too much lies at {name}", hint="give the directory of one checkpoint")
                one = os.open(name, _OPEN, dir_fd=fd)
                kind = stat.S_IFMT(os.fstat(one).st_mode)
                if kind == stat.S_IFDIR:
                    self.directory(one, target / name, depth + 1)
                elif kind == stat.S_IFREG:
                    self.file(one, target / name)
                else:
                    os.close(one)
                    raise Validation(f"{name} is neither a file nor a directory", hint="no engine writes that")
        except OSError as error:
            raise storage_error("copy", str(target), error) from error
        finally:
            os.close(fd)

    def file(self, fd: int, target: Path) -> None:
        with open(fd, "rb") as source, target.open("xb") as copy:
            while part := source.read(_PART_BYTES):
                self.total_bytes += len(part)
                if self.total_bytes > self.limits.total_bytes:
                    raise Validation(f"more than {self.limits.total_bytes:,} bytes", hint="give a higher limit")
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
            one = os.path.join(folder, name)
            with open(os.open(one, _OPEN), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Validation(f"{name} is not a plain file", hint="no engine writes that")
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{os.path.relpath(one, path)}\0{content}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def bring_in(manager: Any, path: str, *, key: str, namespace: str, spec: Mapping[str, Any], lease: Any) -> str:
    """Import what lies there as a generation of `key`, unless that was done before; answers its checkpoint."""
    from kedge.containers.archive import importer
    from kedge.containers.attempts import state_directory

    work = state_directory()
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    with opened(path, namespace) as found:
        if os.path.isfile(f"{found}/inventory.img"):
            done = importer.import_images(manager, found, key=key, spec=spec, work=work, lease=lease)
        else:
            done = importer.import_archive(manager, found, key=key, work=work, lease=lease)
    return done.checkpoint.id
