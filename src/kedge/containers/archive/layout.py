"""Archives of containers as the engines write them: names, shapes, and reading one from a stranger.

podman       tar (zstd, gzip, plain): config.dump spec.dump network.status stats-dump devshm-checkpoint.tar artifacts
             ctr.log checkpoint/ volumes/<name>.tar rootfs-diff.tar deleted.files
cri          CRI-O, kubelet: plain tar: stats-dump dump.log checkpoint/ config.dump spec.dump bind.mounts
             rootfs-diff.tar deleted.files
containerd   plain tar: config.dump spec.dump status.dump status container.log dump.log stats-dump checkpoint/
             rootfs-diff.tar, which is a gzipped layer with .wh. whiteouts
oci          an image layout (a directory or a tar) whose one layer holds the files of any of these
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kedge.errors import Corrupted, NotFound, Validation, storage_error

from .compression import Plain
from .directory import copy_files
from .extraction import Extraction
from .tar import Limits, TarReader

CONFIG, SPEC, STATUS_DUMP, STATUS = "config.dump", "spec.dump", "status.dump", "status"
NETWORK_STATUS, DELETED_FILES, ROOTFS_DIFF = "network.status", "deleted.files", "rootfs-diff.tar"
STATS_DUMP, DUMP_LOG, BIND_MOUNTS, DESCRIPTORS = "stats-dump", "dump.log", "bind.mounts", "descriptors.json"
DEVSHM, VOLUMES, CONTAINER_LOG, PODMAN_LOG = "devshm-checkpoint.tar", "volumes", "container.log", "ctr.log"
CHECKPOINT = "checkpoint"  # the directory of CRIU's images
FORMATS = ("podman", "cri", "containerd", "oci")
ENGINES = {"podman": "podman", "cri": "cri-o", "containerd": "containerd"}
MANAGER_ANNOTATION = "io.container.manager"
MANAGERS = {"podman": "libpod", "cri": "cri-o"}

_MAX_JSON_BYTES = 64 << 20
_PLAIN_MOUNTS = frozenset(("proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"))
_PROCESS_FIELDS = (
    "terminal",
    "user",
    "args",
    "env",
    "cwd",
    "capabilities",
    "rlimits",
    "noNewPrivileges",
    "oomScoreAdj",
)
_LINUX_FIELDS = ("maskedPaths", "readonlyPaths", "seccomp", "sysctl")


@dataclass(frozen=True, slots=True)
class Config:
    """config.dump: what the engine says of the container. podman's has much more, which only podman reads."""

    id: str = ""
    name: str = ""
    image: str = ""
    image_reference: str = ""
    image_name: str = ""
    runtime: str = ""
    created_at: str = ""
    checkpointed_at: str = ""
    restored_at: str = ""
    is_restored: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Config:
        def text(key: str) -> str:
            value = document.get(key)
            return value[:1024] if isinstance(value, str) else ""

        return cls(
            id=text("id"),
            name=text("name"),
            image=text("rootfsImage") or text("rootfsImageID"),
            image_reference=text("rootfsImageRef"),
            image_name=text("rootfsImageName"),
            runtime=text("runtime"),
            created_at=text("createdTime"),
            checkpointed_at=text("checkpointedTime"),
            restored_at=text("restoredTime"),
            is_restored=document.get("restored") is True,
        )

    def document(self) -> dict[str, object]:
        return {
            "id": self.id,
            "name": self.name,
            "rootfsImage": self.image,
            "rootfsImageRef": self.image_reference,
            "rootfsImageName": self.image_name,
            "runtime": self.runtime,
            "createdTime": self.created_at or _NEVER,
            "checkpointedTime": self.checkpointed_at or _NEVER,
            "restoredTime": self.restored_at or _NEVER,
            "restored": self.is_restored,
        }


_NEVER = "0001-01-01T00:00:00Z"  # how Go writes no time


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that was unpacked into a private directory. Nothing in it has been believed yet."""

    directory: Path
    format: str  # podman, cri or containerd
    compression: str
    config: Config
    spec: Mapping[str, Any]
    size_bytes: int  # of the file

    @property
    def images(self) -> Path:
        return self.directory / CHECKPOINT

    @property
    def engine(self) -> str:
        return ENGINES[self.format]

    def deleted(self) -> tuple[bytes, ...]:
        """Paths that the container removed from its image."""
        if not (self.directory / DELETED_FILES).is_file():
            return ()
        found = read_json(self.directory / DELETED_FILES)
        if found is None:
            return ()
        if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
            raise Corrupted(f"{DELETED_FILES} is no list of paths", hint="get the archive again")
        return tuple(path.encode("utf-8", "surrogateescape") for path in found)


def unpack(path: str | os.PathLike[str], directory: Path, limits: Limits | None = None) -> Archive:
    """Unpack an archive of any of the formats into `directory`, which must be empty and nobody else's.

    Only plain files are taken; names never lead out; sizes are bounded by `limits`.
    """
    from . import oci

    limits = limits or Limits()
    name = os.fspath(path)
    if os.path.isdir(name):
        layout, size, compression = directory / "archive", 0, "none"
        copy_files(name, layout, limits)
    else:
        target = directory / "archive"
        target.mkdir(mode=0o700)
        compression = unpack_tar(name, target, limits)
        size = os.stat(name).st_size
        layout = target
    if (layout / oci.LAYOUT).is_file():
        target = directory / "layer"
        target.mkdir(mode=0o700)
        oci.unpack(layout, target, limits)
    else:
        target = layout
    return _archive(name, target, compression, size)


def unpack_tar(path: str | os.PathLike[str], directory: Path, limits: Limits) -> str:
    """The files of a tar below `directory`; answers how it was compressed."""
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a fifo must not stop us
    except FileNotFoundError:
        raise NotFound(f"there is no file {name}", hint="give the path of an archive") from None
    except OSError as error:
        raise storage_error("read", name, error) from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Validation(f"{name} is not a plain file", hint="save what comes from a pipe as a file first")
        plain = Plain(file, name=name, limit_bytes=limits.total_bytes)
        with Extraction(directory, name=name, limits=limits) as extraction:
            extraction.files(TarReader(plain, name=name, limits=limits))
        return plain.compression


def _archive(name: str, directory: Path, compression: str, size: int) -> Archive:
    if not (directory / CONFIG).is_file() or not (directory / CHECKPOINT / "inventory.img").is_file():
        raise Validation(
            f"{name} is no archive of a checkpoint: {CONFIG} or {CHECKPOINT}/inventory.img is missing",
            hint="podman, CRI-O, kubelet, containerd and kedge container export write such archives",
        )
    config, spec = read_json(directory / CONFIG), {}
    if (directory / SPEC).is_file():
        spec = read_json(directory / SPEC)
    if not isinstance(config, dict) or not isinstance(spec, dict):
        raise Corrupted(f"{CONFIG} or {SPEC} of {name} is no JSON object", hint="get the archive again")
    return Archive(directory, format_of(spec), compression, Config.of(config), spec, size)


def annotations_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Annotations of a configuration: text only, whatever else is there."""
    found = _mapping(spec.get("annotations"))
    return {key: value for key, value in found.items() if isinstance(value, str)}


def format_of(spec: Mapping[str, Any]) -> str:
    """Whose archive a configuration comes from: podman, cri or containerd."""
    manager = annotations_of(spec).get(MANAGER_ANNOTATION)
    return next((name for name, known in MANAGERS.items() if known == manager), "containerd")


def read_json(path: Path) -> Any:
    """A JSON file of bounded size; no link is followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise storage_error("read", str(path), error) from error
    if len(data) > _MAX_JSON_BYTES:
        raise Validation(f"{path.name} has more than {_MAX_JSON_BYTES:,} bytes", hint="no engine writes that")
    try:
        return json.loads(data) if data.strip() else None
    except (ValueError, RecursionError) as error:
        raise Corrupted(f"{path.name} is no JSON: {error}", hint="get the archive again") from error


def safe_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stranger's configuration may be kept: how the process ran, never what the host would do for it.

    Left away: annotations, hooks, devices, mounts from the host, paths of namespaces and cgroups, labels.
    """
    process, linux, root = (_mapping(spec.get(key)) for key in ("process", "linux", "root"))
    mounts = [mount for mount in _list(spec.get("mounts")) if _is_plain(mount)]
    namespaces = [{"type": one["type"]} for one in _list(linux.get("namespaces")) if isinstance(one.get("type"), str)]
    kept: dict[str, Any] = {
        "ociVersion": spec["ociVersion"] if isinstance(spec.get("ociVersion"), str) else "1.0.2",
        "process": {key: process[key] for key in _PROCESS_FIELDS if key in process},
        "root": {"path": "rootfs", "readonly": root.get("readonly") is True},
        "mounts": mounts,
        "linux": {"namespaces": namespaces, **{key: linux[key] for key in _LINUX_FIELDS if key in linux}},
    }
    if isinstance(spec.get("hostname"), str):
        kept["hostname"] = spec["hostname"]
    return kept


def _is_plain(mount: Mapping[str, Any]) -> bool:
    options = mount.get("options")
    words = options if isinstance(options, list) else []
    return mount.get("type") in _PLAIN_MOUNTS and not {"bind", "rbind"} & {str(word) for word in words}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def go_time(moment: datetime) -> str:
    """A time as Go writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
