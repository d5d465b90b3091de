"""Small file systems of our own, on loop devices or in memory: to fill, to make read-only, to cut from power."""

from __future__ import annotations

import array
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN: ext4, xfs, f2fs
_DROP_LOG = 2  # what the journal has in memory only is lost too, as when the power fails


def _run(*command: str) -> None:
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path})
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Disk:
    """A file system in an image file. Whoever makes one unmounts it."""

    def __init__(self, folder: Path, kind: str = "ext4", size_mib: int = 64, *, make: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.kind = kind
        self._is_cut = False
        self.image = folder / f"{kind}.image"
        self.path = folder / "mounted"
        self.path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(size_mib << 20)
        _run(f"mkfs.{kind}", "-q", *make, str(self.image))

    def mount(self, *options: str) -> None:
        if self._is_cut:
            # What reached the disk, on a new one: a container that somebody started meanwhile may have the old one
            # mounted in its own namespace; while it lives, mounting it again shows it as it is, without power.
            new = self.image.with_suffix(".new")
            _run("cp", "--sparse=always", str(self.image), str(new))
            new.replace(self.image)
            self._is_cut = False
        if self.kind == "xfs":
            options = (*options, "nouuid")  # the old one may still be mounted there
        _run("mount", "-t", self.kind, "-o", ",".join(("loop", *options)), str(self.image), str(self.path))

    def cut(self) -> None:
        """Cut the power: from now on nothing reaches the image, and nothing more is promised to have reached it."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, array.array("I", [_DROP_LOG]))
            self._is_cut = True
        finally:
            os.close(handle)

    def unmount(self) -> None:
        unmount(self.path)

    def remove(self) -> None:
        # Not os.path.ismount: of a disk without power it says no.
        mounts = Path("/proc/self/mounts").read_text().split()
        if str(self.path) in mounts:
            self.unmount()
        self.image.unlink(missing_ok=True)


def unmount(path: Path) -> None:
    """Unmount, waiting for the last user to be gone: a mount that stays would show what a cut had lost."""
    for _ in range(100):
        try:
            _run("umount", str(path))
        except OSError:
            time.sleep(0.05)  # sleep: before it is tried again
        else:
            return
    _run("umount", "--lazy", str(path))
    raise AssertionError(f"{path} stays in use")


@contextmanager
def mounted(
    folder: Path, kind: str = "ext4", size_mib: int = 64, *, make: tuple[str, ...] = (), options: tuple[str, ...] = ()
) -> Iterator[Disk]:
    disk = Disk(folder, kind, size_mib, make=make)
    try:
        disk.mount(*options)
        yield disk
    finally:
        disk.remove()


@contextmanager
def tmpfs(path: Path, *options: str) -> Iterator[Path]:
    path.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path))
    try:
        yield path
    finally:
        unmount(path)
