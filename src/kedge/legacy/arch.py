"""arch: its checkpoint handler on its own directories: `dump.log` and CRIU's images, `container_files.tar` beside them.

Corrected: the tar is durable before it takes the place of an older one, and keeps attributes and hard links; a restore
writes nothing outside its directory and changes nothing unless the whole tar is sound. Errors are raised.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path as _Path
from typing import BinaryIO

from kedge.blobs.direct import make_directories, sync_directory
from kedge.containers.archive.arch import FILES, is_finished, unpack
from kedge.containers.archive.export import replace_file
from kedge.containers.rootfs import exchange
from kedge.containers.snapshot import Snapshot
from kedge.errors import Conflict, Validation, storage_errors
from kedge.model import Checkpoint

__all__ = [
    "CheckpointHandler", "cleanup_checkpoint", "restore_checkpoint", "restore_checkpoint_file",
    "rollback_restore_file", "save_checkpoint", "save_checkpoint_file", "validate_checkpoint",
]  # fmt: skip

Path = str | os.PathLike[str]

_XATTR = "SCHILY.xattr."
_OVERLAY = ("trusted.overlay.origin", "trusted.overlay.uuid")  # of one host only


def validate_checkpoint(checkpoint_path: Path) -> bool:
    """Whether the last line of CRIU's log in this directory says that the dump is complete."""
    return is_finished(checkpoint_path)


def save_checkpoint_file(upperdir: Path, checkpoint_path: Path) -> bool:
    """Save the files of a container beside its dump; False when there is no such directory."""
    if not os.path.isdir(upperdir):
        return False
    with storage_errors("save", checkpoint_path):
        os.makedirs(checkpoint_path, exist_ok=True)

    def fill(out: BinaryIO) -> None:
        with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT, compresslevel=6) as tar:
            _add(tar, _Path(upperdir), os.path.basename(os.path.abspath(upperdir)))

    replace_file(_Path(checkpoint_path, FILES), fill)
    return True


def _add(tar: tarfile.TarFile, path: _Path, name: str) -> None:
    """A file or a directory with all below it; attributes as GNU tar writes them."""
    if path.is_socket():
        return  # it means nothing without its process
    member = tar.gettarinfo(str(path), name)
    if not path.is_symlink():
        for attribute in os.listxattr(path):
            if attribute not in _OVERLAY:
                member.pax_headers = {
                    **member.pax_headers,
                    _XATTR + attribute: os.getxattr(path, attribute).decode("utf-8", "surrogateescape"),
                }
    if member.isreg():
        with open(path, "rb") as file:
            tar.addfile(member, file)
    else:
        tar.addfile(member)
    if member.isdir():
        for inside in sorted(os.listdir(path)):
            _add(tar, path / inside, f"{name}/{inside}")


def restore_checkpoint_file(checkpoint_path: Path, upperdir: Path) -> bool:
    """Restore the files; False when there are none, or no such directory. What has the same name is replaced."""
    tar = os.path.join(checkpoint_path, FILES)
    if not os.path.isdir(upperdir) or not os.path.isfile(tar):
        return False
    with tempfile.TemporaryDirectory(dir=upperdir, prefix=".kedge-restore-") as work:
        new, old = _Path(work, "new"), _Path(work, "old")
        unpack(tar, new)
        old.mkdir()
        for name in os.listdir(new):
            place = os.path.join(upperdir, name)
            if os.path.lexists(place):
                os.rename(place, old / name)
            os.rename(new / name, place)
        shutil.copystat(new, upperdir)
    if os.path.isdir(leftover := os.path.join(upperdir, "fs.bak")):
        shutil.rmtree(leftover)  # what an interrupted restore of ARCH had put aside
    return True


def rollback_restore_file(upperdir: Path) -> None:
    """Remove what a failed restore left."""
    if os.path.exists(upperdir):
        shutil.rmtree(upperdir)


def cleanup_checkpoint(checkpoint_path: Path) -> bool:
    """Delete a checkpoint; False when there is none."""
    if not checkpoint_path or not os.path.exists(checkpoint_path):
        return False
    shutil.rmtree(checkpoint_path)
    return True


def export(checkpoint: Checkpoint, taken: Snapshot, path: Path, *, overwrite: bool = False) -> int:
    """Write a stored checkpoint as a directory that ARCH restores from, whole or not at all; return its size.

    Its place there is `<checkpoint path>/<namespace>/<container ID>`. With `overwrite`, an empty directory or a
    checkpoint of ARCH is replaced there, at once; anything else is left alone.
    """
    target = _Path(path).absolute()
    if os.path.lexists(target):
        if not overwrite:
            raise Conflict(f"{target} exists", hint="choose another destination, or pass overwrite=True")
        _refuse_to_replace(target)
    if taken.kind != "container" or taken.rootfs_kind not in ("none", "overlay"):
        raise Validation(
            f"{checkpoint.id} has no changes to the image of a container, which ARCH wants",
            hint="export a container that ran on an overlay",
        )
    with storage_errors("write", target):
        make_directories(str(target.parent))
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
            new, files = _Path(work, "new"), _Path(work, "fs")
            taken.images.write_to(new)
            if taken.rootfs is None:
                files.mkdir()
            else:
                taken.rootfs.write_to(files, exact=True)
            save_checkpoint_file(files, new)
            log = [f"kedge: {checkpoint.id}\n".encode(), b"Dumping finished successfully\n"]
            replace_file(new / "dump.log", lambda out: out.writelines(log))
            if os.path.lexists(target) and os.listdir(target):
                _refuse_to_replace(target)  # it may have changed meanwhile
                exchange(new, target)
            else:
                os.rename(new, target)
        sync_directory(target.parent)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def _refuse_to_replace(target: _Path) -> None:
    is_directory = target.is_dir() and not target.is_symlink()
    if not is_directory or (os.listdir(target) and not is_finished(target)):
        raise Conflict(f"{target} is no checkpoint of ARCH, nor empty", hint="choose another destination")


save_checkpoint, restore_checkpoint = save_checkpoint_file, restore_checkpoint_file


class CheckpointHandler:
    """The same as methods."""

    validate_checkpoint = staticmethod(validate_checkpoint)
    save_checkpoint_file = save_checkpoint = staticmethod(save_checkpoint_file)
    restore_checkpoint_file = restore_checkpoint = staticmethod(restore_checkpoint_file)
    rollback_restore_file = staticmethod(rollback_restore_file)
    cleanup_checkpoint = staticmethod(cleanup_checkpoint)
