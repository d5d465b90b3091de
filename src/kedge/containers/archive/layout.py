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
from kedge.model import list_of, mapping_of

from .compression import Plain
from .extraction import Extraction
from .tar import Limits, TarReader

CONFIG, SPEC, STATUS_DUMP, STATUS = "config.dump", "spec.dump", "status.dump", "status"
DELETED_FILES, ROOTFS_DIFF = "deleted.files", "rootfs-diff.tar"
STATS_DUMP, DUMP_LOG, DESCRIPTORS = "stats-dump", "dump.log", "descriptors.json"
CHECKPOINT = "checkpoint"  # the directory of CRIU's images
FORMATS = ("podman", "cri", "containerd", "oci")
ENGINES = {"podman": "podman", "cri": "cri-o", "containerd": "containerd"}
MANAGER_ANNOTATION = "io.container.manager"
MANAGERS = {"podman": "libpod", "cri": "cri-o"}

_MAX_JSON_BYTES = 64 << 20
_PLAIN_MOUNTS = frozenset(("proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"))
_PROCESS_FIELDS = (
    "terminal", "user", "args", "env", "cwd", "capabilities", "rlimits", "noNewPrivileges", "oomScoreAdj",
)  # fmt: skip
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
        values = {name: document.get(key) for name, key in _CONFIG_KEYS.items()}
        values["image"] = values["image"] or document.get("rootfsImageID")
        texts = {name: value[:1024] for name, value in values.items() if isinstance(value, str)}
        return cls(**texts, is_restored=document.get("restored") is True)

    def document(self) -> dict[str, object]:
        texts = {key: getattr(self, name) for name, key in _CONFIG_KEYS.items()}
        times = {key: texts[key] or _NEVER for key in ("createdTime", "checkpointedTime", "restoredTime")}
        return {**texts, **times, "restored": self.is_restored}


_CONFIG_KEYS = {
    "id": "id", "name": "name", "image": "rootfsImage", "image_reference": "rootfsImageRef",
    "image_name": "rootfsImageName", "runtime": "runtime", "created_at": "createdTime",
    "checkpointed_at": "checkpointedTime", "restored_at": "restoredTime",
}  # fmt: skip
_NEVER = "0001-01-01T00:00:00Z"  # how Go writes no time


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that was unpacked into a private directory. Nothing in it has been believed yet."""

    directory: Path
    format: str  # podman, cri or containerd
    config: Config
    spec: Mapping[str, Any]

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
        paths = read_json(self.directory / DELETED_FILES) or []
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise Corrupted(f"{DELETED_FILES} is not a list of paths", hint="get the archive again")
        return tuple(path.encode("utf-8", "surrogateescape") for path in paths)


def unpack_tar(path: str | os.PathLike[str], directory: Path, limits: Limits) -> None:
    """The files of a tar, compressed or not, below `directory`."""
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


def annotations_of(spec: Mapping[str, object]) -> dict[str, str]:
    """Annotations of a configuration: text only, whatever else is there."""
    return {key: value for key, value in mapping_of(spec.get("annotations")).items() if isinstance(value, str)}


def format_of(spec: Mapping[str, object]) -> str:
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
    return parse_json(data, path.name)


def parse_json(data: bytes, name: str) -> object:
    """What a JSON file says; None for an empty one."""
    try:
        return json.loads(data) if data.strip() else None
    except (ValueError, RecursionError) as error:
        raise Corrupted(f"{name} is not JSON: {error}", hint="get the archive again") from error


def safe_spec(spec: Mapping[str, object]) -> dict[str, object]:
    """What of a stranger's configuration may be kept: how the process ran, never what the host would do for it.

    Left away: annotations, hooks, devices, mounts from the host, paths of namespaces and cgroups, labels.
    """
    process, linux, root = (mapping_of(spec.get(key)) for key in ("process", "linux", "root"))
    mounts = [mount for mount in mappings(spec.get("mounts")) if _is_plain(mount)]
    types = [space.get("type") for space in mappings(linux.get("namespaces"))]
    namespaces = [{"type": name} for name in types if isinstance(name, str)]
    safe: dict[str, object] = {
        "ociVersion": spec["ociVersion"] if isinstance(spec.get("ociVersion"), str) else "1.0.2",
        "process": {key: process[key] for key in _PROCESS_FIELDS if key in process},
        "root": {"path": "rootfs", "readonly": root.get("readonly") is True},
        "mounts": mounts,
        "linux": {"namespaces": namespaces, **{key: linux[key] for key in _LINUX_FIELDS if key in linux}},
    }
    if isinstance(spec.get("hostname"), str):
        safe["hostname"] = spec["hostname"]
    return safe


def _is_plain(mount: Mapping[str, object]) -> bool:
    words = set(map(str, list_of(mount.get("options"))))
    return str(mount.get("type")) in _PLAIN_MOUNTS and not {"bind", "rbind"} & words


def mappings(value: object) -> list[dict[str, object]]:
    """The objects of a list; [] for anything else."""
    return [item for item in list_of(value) if isinstance(item, dict)]


def go_time(moment: datetime) -> str:
    """A time as Go writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
