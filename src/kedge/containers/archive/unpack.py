"""Reading an archive of any format, from a stranger, into a private directory."""

from __future__ import annotations

import os
from pathlib import Path

from kedge.errors import Corrupted, Validation

from . import layout, oci
from .directory import copy_files
from .layout import Archive, Config
from .tar import LIMITS, Limits


def unpack(path: str | os.PathLike[str], directory: Path, limits: Limits = LIMITS) -> Archive:
    """Unpack an archive of any of the formats into `directory`, which must be empty and nobody else's.

    Only plain files are taken; names never lead out; sizes are bounded by `limits`.
    """
    name, target = os.fspath(path), directory / "archive"
    if os.path.isdir(name):
        copy_files(name, target, limits)
    else:
        target.mkdir(mode=0o700)
        layout.unpack_tar(name, target, limits)
    if (target / oci.LAYOUT).is_file():
        image, target = target, directory / "layer"
        target.mkdir(mode=0o700)
        oci.unpack(image, target, limits)
    return _archive(name, target)


def _archive(name: str, directory: Path) -> Archive:
    if not (directory / layout.CONFIG).is_file() or not (directory / layout.CHECKPOINT / "inventory.img").is_file():
        raise Validation(
            f"{name} is not an archive of a checkpoint: it lacks {layout.CONFIG} or {layout.CHECKPOINT}/inventory.img",
            hint="podman, CRI-O, kubelet, containerd and kedge container export write such archives",
        )
    config, spec = layout.read_json(directory / layout.CONFIG), {}
    if (directory / layout.SPEC).is_file():
        spec = layout.read_json(directory / layout.SPEC)
    if not isinstance(config, dict) or not isinstance(spec, dict):
        raise Corrupted(
            f"{layout.CONFIG} or {layout.SPEC} of {name} is not a JSON object", hint="get the archive again"
        )
    return Archive(directory, layout.format_of(spec), Config.of(config), spec)
