"""arch: the three file operations of its checkpoint handler, on directories (`kedge-runc` is the rest of it).

Corrected: a dump counts only when CRIU said so at the end and its inventory is there; the files are kept durably, with
attributes, owners, whiteouts and hard links, and an older checkpoint stays until the new one is whole.
"""

from __future__ import annotations

import os
from typing import Any

from kedge.errors import NotFound
from kedge.files import Tree
from kedge.manager import CheckpointManager

__all__ = ["CheckpointHandler", "restore_checkpoint", "save_checkpoint", "validate_checkpoint"]

Path = str | os.PathLike[str]

_FINISHED = b"Dumping finished successfully"
_STORE, _JOB = "kedge", "upperdir"
_OVERLAY = ("trusted.overlay.origin", "trusted.overlay.uuid")  # of one host only


def validate_checkpoint(path: Path) -> bool:
    """Whether CRIU's dump in this directory is complete."""
    try:
        with open(os.path.join(path, "dump.log"), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().splitlines()
    except OSError:
        return False
    return bool(lines) and _FINISHED in lines[-1] and os.path.isfile(os.path.join(path, "inventory.img"))


def save_checkpoint(upperdir: Path, checkpoint_path: Path) -> bool:
    """Keep the files of a container beside its dump; False when there is no such directory. Errors are raised."""
    if not os.path.isdir(upperdir):
        return False
    os.makedirs(checkpoint_path, exist_ok=True)
    with CheckpointManager(os.path.join(checkpoint_path, _STORE)) as store:
        is_root = os.geteuid() == 0
        files = Tree(upperdir, exact=is_root, skip_special=not is_root, without_attributes=_OVERLAY if is_root else ())
        store.save(_JOB, "files", {"files": files})
        store.cleanup(_JOB, keep_last=2)
    return True


def restore_checkpoint(checkpoint_path: Path, upperdir: Path) -> bool:
    """Bring the files back; False when none were kept. Files of the same name are replaced. Errors are raised."""
    try:
        with CheckpointManager(os.path.join(checkpoint_path, _STORE), create=False) as store:
            state: Any = store.restore(_JOB)
            state["files"].write_to(upperdir, overwrite=True, exact=os.geteuid() == 0)
    except NotFound:
        return False
    return True


class CheckpointHandler:
    """The same as methods."""

    validate_checkpoint = staticmethod(validate_checkpoint)
    save_checkpoint = staticmethod(save_checkpoint)
    restore_checkpoint = staticmethod(restore_checkpoint)
