"""From an archive of any engine to a checkpoint in the store.

The archive is unpacked into a private directory, checked, and saved like a container that was checkpointed here:
its images with pages cut by address, its changed files as an overlay's upper directory. What else it holds (the
engine's own documents, logs, volumes) is saved beside, for an export to the same engine, and never acted on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kedge.containers import snapshot
from kedge.containers.criu import images
from kedge.containers.criu.pages import validate_images
from kedge.containers.network import Network, network_of
from kedge.errors import Corrupted, Validation
from kedge.files import Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Lease, mapping_of

from . import arch
from . import layout as formats
from .compression import Plain
from .directory import copy_files, digest_of
from .extraction import Extraction
from .layout import Archive
from .scratch import private_directory
from .tar import LIMITS, Limits, TarReader
from .unpack import unpack

ENGINE_FILES = "archive"  # the name of the tree with what only the archive's engine understands
_OF_KYBERNATE = "kybernate-metadata.json"
_LEFT = (formats.CHECKPOINT, formats.ROOTFS_DIFF, formats.DELETED_FILES)


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of an import. `left_out`: (path, what) of the changed files that were not taken."""

    checkpoint: Checkpoint
    archive_format: str
    left_out: tuple[tuple[str, str], ...]
    is_new: bool = True  # False: the same archive had been imported before


def import_archive(
    manager: CheckpointManager,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    limits: Limits = LIMITS,
    work: str | os.PathLike[str] | None = None,
    lease: Lease | None = None,
) -> Imported:
    """Save an archive as the newest checkpoint of container `key` (the container's name if not given).

    The same archive again answers the checkpoint that there is. Needs root: files keep their owners, and removed files
    are devices. Nothing is saved unless all of it is sound.
    """
    _refuse_others()
    with private_directory(work) as home:
        archive = unpack(path, home, limits)
        images.check_inventory(archive.images)
        upper, left_out = _unpack_rootfs(archive, home, limits)
        taken = _snapshot(
            archive.config.id,
            archive.images,
            upper,
            engine=archive.engine,
            spec=formats.safe_spec(archive.spec),
            network=_network(archive),
            descriptors=_descriptors(archive),
            extra={ENGINE_FILES: Tree(archive.directory, exclude=_LEFT)},
        )
        config = archive.config
        origin = {"format": archive.format, "image": config.image_name, "at": config.checkpointed_at}
        return _save(manager, key or _key_of(archive), taken, origin, left_out, digest_of(path), lease)


def import_images(
    manager: CheckpointManager,
    path: str,
    *,
    key: str,
    spec: Mapping[str, object],
    work: str | os.PathLike[str] | None = None,
    lease: Lease | None = None,
) -> Imported:
    """Save a directory of CRIU's images, which tells nothing of its container: that is said to be one of `spec`."""
    _refuse_others()
    with private_directory(work) as home:
        copy_files(path, home / "images", LIMITS)
        digest = digest_of(home / "images")
        upper, left_out = _unpack_arch_files(home)
        folder = home / "images"
        origin = _take_kybernate_facts(folder) or {"format": "images"}
        taken = _snapshot(
            key,
            folder,
            upper,
            engine="runc",
            spec=dict(spec),
            network=network_of(spec),
            descriptors=snapshot.read_descriptors(folder),
            borders=validate_images(folder),
        )
        return _save(manager, key, taken, origin, left_out, digest, lease)


def _unpack_arch_files(home: Path) -> tuple[Path | None, list[tuple[str, str]]]:
    """The files that ARCH kept beside the images, out of these and as an upper directory."""
    tar = home / "images" / arch.FILES
    if not tar.is_file():
        return None, []
    left_out = arch.unpack(tar, home / "upper")
    tar.unlink()
    return home / "upper", left_out


def _take_kybernate_facts(folder: Path) -> dict[str, str] | None:
    """Out of the images: what kybernate wrote beside them; None when it did not write them."""
    path = folder / _OF_KYBERNATE
    if not path.is_file():
        return None
    facts = formats.read_json(path)
    if not isinstance(facts, dict):
        raise Corrupted(f"{_OF_KYBERNATE} is not an object", hint="get the checkpoint again")
    path.unlink()
    pid = facts.get("gpuPID")
    if isinstance(pid, int) and pid > 0:
        raise Validation(
            "kybernate left the memory of a GPU in the process: only it can put that back",
            hint="restore it with kybernate, and checkpoint it with Kedge",
        )
    names = [str(facts.get(name, ""))[:200] for name in ("namespace", "pod", "container")]
    return {"format": "kybernate", "container": "/".join(names), "at": str(facts.get("timestamp", ""))[:200]}


def _refuse_others() -> None:
    if os.geteuid() != 0:
        raise Validation(
            "files of containers belong to many users, and only root can write them", hint="run it as root"
        )


def _snapshot(
    identity: str,
    folder: Path,
    upper: Path | None,
    *,
    engine: str,
    spec: Mapping[str, object],
    network: Network,
    descriptors: tuple[str, ...],
    borders: Mapping[str, list[int]] | None = None,
    extra: Mapping[str, Tree] | None = None,
) -> snapshot.Snapshot:
    """What was imported: the images in `folder`, and the changed files in `upper`, if there are any."""
    return snapshot.Snapshot(
        kind="container",
        id=identity,
        images=snapshot.images_tree(folder, borders),
        runtime={"name": engine, "version": "", "root": ""},
        spec=spec,
        descriptors=descriptors,
        network=network,
        criu={"version": "", "options": []},
        processes=snapshot.read_processes(folder),
        rootfs_kind="none" if upper is None else "overlay",
        rootfs=None if upper is None else snapshot.files_tree(upper),
        extra=extra or {},
    )


def _save(
    manager: CheckpointManager,
    key: str,
    taken: snapshot.Snapshot,
    origin: Mapping[str, str],
    left_out: Sequence[tuple[str, str]],
    digest: str,
    lease: Lease | None,
) -> Imported:
    """Save it once; the same again answers the checkpoint that there is."""
    job, once = snapshot.job_of("container", key), f"archive:{digest}"
    known = manager.get_by_key(job, once)
    if known is not None:
        return Imported(known, origin["format"], tuple(left_out), is_new=False)
    facts = {"kind": "container", "id": taken.id, "runtime": taken.runtime["name"], "network": taken.network["mode"]}
    metadata = {**facts, **taken.totals(), "is_running": False, "imported": dict(origin)}
    checkpoint_id = manager.save(job, key, taken.state(), metadata=metadata, lease=lease, idempotency_key=once)
    return Imported(manager.get(checkpoint_id), origin["format"], tuple(left_out))


def _unpack_rootfs(archive: Archive, home: Path, limits: Limits) -> tuple[Path | None, list[tuple[str, str]]]:
    """The changed files as an upper directory, and what was left out of them."""
    difference = archive.directory / formats.ROOTFS_DIFF
    if not difference.is_file():
        return None, []
    upper = home / "upper"
    upper.mkdir(mode=0o755)
    with open(difference, "rb") as file, Extraction(upper, name=formats.ROOTFS_DIFF, limits=limits) as extraction:
        plain = Plain(file, name=formats.ROOTFS_DIFF, limit_bytes=limits.total_bytes)
        extraction.layer(TarReader(plain, name=formats.ROOTFS_DIFF, limits=limits), archive.deleted())
        return upper, extraction.left_out


def _descriptors(archive: Archive) -> tuple[str, ...]:
    path = archive.images / formats.DESCRIPTORS
    names = formats.read_json(path) if path.is_file() else None
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > 1024:
        raise Corrupted(f"{formats.DESCRIPTORS} is not a list of names", hint="get the archive again")
    return tuple(names)


def _network(archive: Archive) -> Network:
    """How the container was connected, as far as its configuration tells; a restore compares it."""
    for namespace in formats.mappings(mapping_of(archive.spec.get("linux")).get("namespaces")):
        if namespace.get("type") == "network":
            return Network(mode="external" if namespace.get("path") else "own", path="")
    return Network(mode="host", path="")


def _key_of(archive: Archive) -> str:
    """A key from the container's name, without what our names cannot have."""
    name = (
        formats.annotations_of(archive.spec).get("io.kubernetes.cri.container-name")
        or archive.config.name
        or archive.config.id
    )
    key = re.sub(r"[^A-Za-z0-9._@+-]+", "-", name).strip("-._@+")[:100]
    if not key:
        raise Validation("the archive does not say what its container was called", hint="give a name with --key")
    return key
