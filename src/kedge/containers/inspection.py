"""What is in a checkpoint of a container: of an archive, or of a checkpoint in the store, in the same words."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kedge.errors import CheckpointError
from kedge.files import Tree
from kedge.manager import CheckpointManager

from . import snapshot
from .archive import layout as formats
from .archive.compression import Plain
from .archive.importer import ENGINE_FILES
from .archive.layers import whiteouts
from .archive.layout import Config
from .archive.scratch import private_directory
from .archive.tar import KINDS, LIMITS, Limits, TarReader
from .archive.unpack import unpack
from .criu import images
from .criu.image_files import Directory, ImageFiles, StoredImages
from .criu.images import Process

MAX_CHANGES = 10_000
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is shown. `changes`: paths of the container's own files, (path, kind)."""

    source: str
    engine: str
    format: str
    config: Config
    changes: tuple[tuple[str, str], ...]
    rootfs_bytes: int
    statistics: Mapping[str, int] | None
    # What the images and the container's configuration say.
    processes: tuple[Process, ...] = ()
    images_bytes: int = 0
    pages_bytes: int = 0
    mounts: tuple[tuple[str, str, str], ...] = ()  # destination, type, source
    commands: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def inspect_archive(path: str | os.PathLike[str], *, limits: Limits = LIMITS, reveal: bool = False) -> Inspection:
    """An archive of any format, unpacked into a private directory for the time of this call."""
    with private_directory() as home:
        archive = unpack(path, home, limits)
        files = Directory(archive.images)
        sizes = {name: (archive.images / name).lstat().st_size for name in files.names()}
        statistics = None
        for directory in (archive.directory, archive.images):
            if (directory / formats.STATS_DUMP).is_file():
                statistics = images.statistics(directory)
        changes, rootfs_bytes = _changes_in(archive, limits)
        content = Inspection(
            os.fspath(path), archive.engine, archive.format, archive.config, changes, rootfs_bytes, statistics
        )
        return _with_images(content, files, sizes, archive.spec, reveal=reveal)


def inspect_stored(manager: CheckpointManager, checkpoint_id: str, *, reveal: bool = False) -> Inspection:
    """A checkpoint in the store; only what is shown is read."""
    checkpoint, taken = snapshot.load(manager, checkpoint_id)
    sizes = {entry.path: entry.size_bytes for entry in taken.images.entries if entry.kind in ("file", "hard link")}
    engine_files = taken.extra.get(ENGINE_FILES)
    statistics, config = None, Config()
    if isinstance(engine_files, Tree):
        names = {entry.path for entry in engine_files.entries}
        if formats.STATS_DUMP in names:
            statistics = images.statistics(StoredImages(engine_files, checkpoint.id))
        config = _stored_config(engine_files) if formats.CONFIG in names else config
    if not config.id:
        config = Config(
            id=taken.id,
            name=checkpoint.job.partition(":")[2],
            runtime=str(taken.runtime.get("name", "")),
            checkpointed_at=formats.go_time(checkpoint.created_at),
        )
    hidden = whiteouts(taken.rootfs) if taken.rootfs is not None else frozenset()
    entries = taken.rootfs.entries if taken.rootfs is not None else []
    changes = tuple(
        (entry.path, "deleted" if os.fsencode(entry.path) in hidden else entry.kind) for entry in entries[:MAX_CHANGES]
    )
    engine = str(taken.runtime.get("name", ""))
    rootfs_bytes = sum(entry.size_bytes for entry in entries if entry.kind == "file")
    content = Inspection(checkpoint.id, engine, "kedge", config, changes, rootfs_bytes, statistics)
    return _with_images(content, StoredImages(taken.images, checkpoint.id), sizes, taken.spec, reveal=reveal)


def _with_images(
    content: Inspection, files: ImageFiles, sizes: Mapping[str, int], spec: Mapping[str, object], *, reveal: bool
) -> Inspection:
    processes = images.processes(files)
    return replace(
        content,
        processes=processes,
        images_bytes=sum(sizes.values()),
        pages_bytes=sum(size for name, size in sizes.items() if name.startswith("pages-")),
        mounts=_mounts(spec),
        commands={process.pid: _command(files, process.pid) for process in processes},
        environment=_environment(files, processes[0].pid, spec, reveal=reveal),
    )


def _command(files: ImageFiles, pid: int) -> tuple[str, ...]:
    """() where its memory is not in these images: that is worth no failure of all the rest."""
    try:
        return images.command_line(files, pid)
    except CheckpointError:
        return ()


def _environment(files: ImageFiles, pid: int, spec: Mapping[str, object], *, reveal: bool) -> dict[str, str]:
    """Of the first process, from its memory; from the configuration where that is not there. Values are secrets."""
    try:
        variables = images.environment(files, pid)
    except CheckpointError:
        variables = {}
    if not variables:
        process = spec.get("process")
        lines = process.get("env") if isinstance(process, Mapping) else None
        pairs = (line.partition("=") for line in lines or () if isinstance(line, str))
        variables = {name: value for name, _, value in pairs}
    return variables if reveal else dict.fromkeys(variables, HIDDEN)


def _mounts(spec: Mapping[str, object]) -> tuple[tuple[str, str, str], ...]:
    mounts = spec.get("mounts")
    rows = [mount for mount in mounts if isinstance(mount, Mapping)] if isinstance(mounts, list) else []
    return tuple(
        (str(mount.get("destination")), str(mount.get("type")), str(mount.get("source"))) for mount in rows[:1000]
    )


def _changes_in(archive: formats.Archive, limits: Limits) -> tuple[tuple[tuple[str, str], ...], int]:
    """What rootfs-diff.tar and the list of deleted files name; nothing is unpacked."""
    changes: list[tuple[str, str]] = []
    total = 0
    difference = archive.directory / formats.ROOTFS_DIFF
    if difference.is_file():
        with open(difference, "rb") as file:
            plain = Plain(file, name=formats.ROOTFS_DIFF, limit_bytes=limits.total_bytes)
            for member in TarReader(plain, name=formats.ROOTFS_DIFF, limits=limits):
                parts = member.parts(limits)
                total += member.size
                if not parts or len(changes) >= MAX_CHANGES or parts[-1] == b".wh..wh..opq":
                    continue
                kind = "deleted" if parts[-1].startswith(b".wh.") else KINDS[member.kind]
                changes.append((_text((*parts[:-1], parts[-1].removeprefix(b".wh."))), kind))
    deleted = archive.deleted()[: MAX_CHANGES - len(changes)]
    return (*changes, *((_text((path.lstrip(b"/"),)), "deleted") for path in deleted)), total


def _text(parts: tuple[bytes, ...]) -> str:
    return b"/".join(parts).decode("utf-8", "backslashreplace")


def _stored_config(engine_files: Tree) -> Config:
    try:
        document = json.loads(engine_files.read(formats.CONFIG))
    except ValueError:
        return Config()
    return Config.of(document) if isinstance(document, dict) else Config()
