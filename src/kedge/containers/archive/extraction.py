"""Writing the members of a stranger's archive below one directory, and nowhere else.

Every directory on the way is opened by its name in the one above, never following a link; a file is always a new one.
So no order of links, names and repetitions leads out. Two ways:

    files    only plain files and directories: the parts of an archive of a checkpoint. Anything else is refused
    layer    the changes of a root file system as an overlay's upper directory: whiteouts (.wh.name) become devices 0/0
             and opaque directories (.wh..wh..opq) their attribute; links, owners, times and safe attributes are kept;
             devices and attributes that could act on the host are left out and reported
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from kedge.errors import CheckpointError, Corrupted, Validation, storage_error

from .tar import DEVICES, DIRECTORY, FIFO, FILE, KINDS, LIMITS, SYMLINK, Limits, Member, TarReader, path_parts

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WHITEOUT, _OPAQUE = b".wh.", b".wh..wh..opq"
OPAQUE_ATTRIBUTE = "trusted.overlay.opaque"
# What concerns only who uses the file, in a container as on the host; not trusted.*, which overlayfs obeys.
_SAFE_ATTRIBUTES = (b"user.", b"system.posix_acl_", b"security.capability")
MAX_REPORTED = 1000


class Extraction:
    """A directory that is being filled. `left_out` says what was not written, and why."""

    def __init__(self, directory: str | os.PathLike[str], *, name: str, limits: Limits = LIMITS) -> None:
        self._root = os.open(directory, _OPEN_DIRECTORY)
        self._name = name
        self._limits = limits
        self._times: dict[tuple[bytes, ...], int] = {}  # of directories, set when all is in them
        self.left_out: list[tuple[str, str]] = []

    def files(self, tar: TarReader) -> None:
        """Plain files and directories, each name once, readable by their owner only."""
        for member in tar:
            parts = member.parts(self._limits)
            with self._naming(member):
                if member.kind == DIRECTORY:
                    with self._directory(parts):
                        pass
                elif member.kind == FILE and parts:
                    self._write(member, parts, tar)
                else:
                    raise Validation(
                        f"{self._name} has a {KINDS[member.kind]} named {member.name[:200]!r}",
                        hint="an archive of a checkpoint holds only files and directories",
                    )

    def layer(self, tar: TarReader, deleted: tuple[bytes, ...] = ()) -> None:
        """The changes of a root file system; `deleted` are paths that were removed from it besides."""
        for member in tar:
            parts = member.parts(self._limits)
            with self._naming(member):
                if parts and parts[-1].startswith(_WHITEOUT):
                    self._hide(parts)
                else:
                    self._place(member, parts, tar)
        for path in deleted:
            parts = path_parts(path, self._limits)
            if parts:
                with self._naming(Member(path)):
                    self._whiteout(parts)
        self._set_times()

    # One member

    def _place(self, member: Member, parts: tuple[bytes, ...], tar: TarReader) -> None:
        if member.kind in DEVICES:
            self._leave(member, "a device")
        elif member.kind == DIRECTORY:
            with self._directory(parts) as directory:
                self._dress(directory, member)
            self._times[parts] = member.mtime_ns
        elif not parts:
            raise Validation(f"{self._name} has a {KINDS[member.kind]} without a name", hint="it is not a layer")
        elif member.kind == FILE:
            self._write(member, parts, tar, replace=True)
        else:
            self._link(member, parts)

    def _write(self, member: Member, parts: tuple[bytes, ...], tar: TarReader, *, replace: bool = False) -> None:
        with self._directory(parts[:-1]) as above:
            if replace:
                self._remove(above, parts[-1])
            fd = os.open(parts[-1], _OPEN_NEW, 0o600, dir_fd=above)
        with open(fd, "wb", buffering=0) as file:
            if member.ranges is None:
                for piece in tar.pieces():
                    _write_all(file.fileno(), piece)
            else:
                _write_ranges(file.fileno(), member, tar)
            if replace:
                self._dress(file.fileno(), member)
                os.utime(file.fileno(), ns=(member.mtime_ns, member.mtime_ns))

    def _link(self, member: Member, parts: tuple[bytes, ...]) -> None:
        with self._directory(parts[:-1]) as above:
            self._remove(above, parts[-1])
            if member.kind == SYMLINK:
                os.symlink(member.link, parts[-1], dir_fd=above)
            elif member.kind == FIFO:
                os.mkfifo(parts[-1], 0o600, dir_fd=above)
            else:
                self._hard_link(member, parts[-1], above)
                return
            os.chown(parts[-1], member.uid, member.gid, dir_fd=above, follow_symlinks=False)
            if member.kind == FIFO:
                os.chmod(parts[-1], member.mode, dir_fd=above)
            os.utime(parts[-1], ns=(member.mtime_ns, member.mtime_ns), dir_fd=above, follow_symlinks=False)

    def _hard_link(self, member: Member, name: bytes, above: int) -> None:
        target = path_parts(member.link, self._limits)
        if not target:
            raise Corrupted(f"{self._name} has a hard link to nothing", hint="get it again")
        with self._directory(target[:-1], create=False) as source:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise Validation(
                    f"{self._name} has a hard link to something that is not a file", hint="it is not a layer"
                )
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)

    def _hide(self, parts: tuple[bytes, ...]) -> None:
        if parts[-1] == _OPAQUE:
            with self._directory(parts[:-1]) as directory:
                os.setxattr(directory, OPAQUE_ATTRIBUTE, b"y")
            return
        name = parts[-1].removeprefix(_WHITEOUT)
        if name.startswith(_WHITEOUT) or name in (b"", b".", b".."):
            raise Validation(f"{self._name} hides {parts[-1][:100]!r}", hint="it is not a layer that Kedge knows")
        self._whiteout((*parts[:-1], name))

    def _whiteout(self, parts: tuple[bytes, ...]) -> None:
        with self._directory(parts[:-1]) as above:
            if not _exists(above, parts[-1]):  # a layer that deletes and makes anew says both
                os.mknod(parts[-1], 0o600 | stat.S_IFCHR, os.makedev(0, 0), dir_fd=above)

    def _dress(self, fd: int, member: Member) -> None:
        os.fchown(fd, member.uid, member.gid)
        os.fchmod(fd, member.mode)
        for name, value in member.attributes.items():
            if not name.startswith(_SAFE_ATTRIBUTES) or len(name) > 255 or len(value) > 65536:
                self._leave(member, f"attribute {name[:100].decode('utf-8', 'backslashreplace')}")
                continue
            os.setxattr(fd, name, value)

    def _leave(self, member: Member, what: str) -> None:
        if len(self.left_out) < MAX_REPORTED:
            self.left_out.append((member.name.decode("utf-8", "backslashreplace"), what))

    def _set_times(self) -> None:
        for parts, mtime_ns in sorted(self._times.items(), key=lambda item: -len(item[0])):
            with self._naming(Member(b"/".join(parts))), self._directory(parts) as directory:
                os.utime(directory, ns=(mtime_ns, mtime_ns))

    # Directories

    @contextmanager
    def _directory(self, parts: tuple[bytes, ...], *, create: bool = True) -> Iterator[int]:
        """A descriptor of a directory below the root, made if it is missing."""
        directory = os.dup(self._root)
        try:
            for part in parts:
                if create:
                    try:
                        os.mkdir(part, 0o755, dir_fd=directory)
                    except FileExistsError:
                        pass
                above, directory = directory, os.open(part, _OPEN_DIRECTORY, dir_fd=directory)
                os.close(above)
            yield directory
        finally:
            os.close(directory)

    def _remove(self, above: int, name: bytes) -> None:
        """What has the name already; a later member of a layer takes its place. A directory must be empty."""
        try:
            os.unlink(name, dir_fd=above)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=above)
        except FileNotFoundError:
            pass

    @contextmanager
    def _naming(self, member: Member) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT, errno.EISDIR):
                raise Validation(
                    f"{self._name} has a member {member.name[:200]!r} that does not fit what came before: "
                    + os.strerror(error.errno),
                    hint="a name twice, or a path through a link: no engine writes such archives",
                ) from error
            raise storage_error("unpack", member.name[:200].decode("utf-8", "backslashreplace"), error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)


def _exists(above: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _write_ranges(fd: int, member: Member, tar: TarReader) -> None:
    """A sparse file: its data at their offsets, holes left as holes."""
    os.ftruncate(fd, member.size)
    pieces = tar.pieces()
    waiting = memoryview(b"")
    for offset, length in member.ranges or ():
        while length:
            if not waiting:
                waiting = memoryview(next(pieces))
            part = waiting[:length]
            written = os.pwrite(fd, part, offset)
            waiting, offset, length = waiting[written:], offset + written, length - written
