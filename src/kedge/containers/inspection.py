"""What is in a checkpoint of a container: of an archive, or of a checkpoint in the store, in the same words."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kedge.errors import CheckpointError
from kedge.files import Tree
from kedge.manager import CheckpointManager

from . import snapshot
from .archive import layout as formats
from .archive.compression import Plain
from .archive.importer import KEPT
from .archive.layers import whiteouts
from .archive.layout import Config
from .archive.scratch import private_directory
from .archive.tar import KINDS, Limits, TarReader
from .criu import images
from .criu.image_files import Directory, ImageFiles, StoredImages
from .criu.images import Process, Statistics

MAX_CHANGES = 10_000
HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is shown. `changes`: paths of the container's own files, (path, kind)."""

    source: str
    engine: str
    format: str
    config: Config
    processes: tuple[Process, ...]
    images_bytes: int
    pages_bytes: int
    rootfs_bytes: int
    changes: tuple[tuple[str, str], ...]
    statistics: Statistics | None
    mounts: tuple[tuple[str, str, str], ...]  # destination, type, source
    commands: Mapping[int, tuple[str, ...]]
    environment: Mapping[str, str]


def inspect_archive(path: str | os.PathLike[str], *, limits: Limits | None = None, reveal: bool = False) -> Inspection:
    """An archive of any format, unpacked into a private directory for the time of this call."""
    limits = limits or Limits()
    with private_directory() as home:
        found = formats.unpack(path, home, limits)
        files = Directory(found.images)
        sizes = {name: (found.images / name).lstat().st_size for name in files.names()}
        statistics = None
        for directory in (found.directory, found.images):
            if (directory / formats.STATS_DUMP).is_file():
                statistics = images.statistics(directory)
        changes, rootfs_bytes = _changes_in(found, limits)
        return _inspection(
            source=os.fspath(path), engine=found.engine, format=found.format, config=found.config, files=files,
            sizes=sizes, changes=changes, rootfs_bytes=rootfs_bytes, statistics=statistics, spec=found.spec,
            reveal=reveal,
        )  # fmt: skip


def inspect_stored(manager: CheckpointManager, checkpoint_id: str, *, reveal: bool = False) -> Inspection:
    """A checkpoint in the store; only what is shown is read."""
    checkpoint, taken = snapshot.load(manager, checkpoint_id)
    sizes = {entry.path: entry.size_bytes for entry in taken.images.entries if entry.kind in ("file", "hard link")}
    kept = taken.extra.get(KEPT)
    statistics, config = None, Config()
    if isinstance(kept, Tree):
        names = {entry.path for entry in kept.entries}
        if formats.STATS_DUMP in names:
            statistics = images.statistics(StoredImages(kept, checkpoint.id))
        config = _stored_config(kept) if formats.CONFIG in names else config
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
    return _inspection(
        source=checkpoint.id, engine=str(taken.runtime.get("name", "")), format="kedge", config=config,
        files=StoredImages(taken.images, checkpoint.id), sizes=sizes, changes=changes,
        rootfs_bytes=sum(entry.size_bytes for entry in entries if entry.kind == "file"), statistics=statistics,
        spec=taken.spec, reveal=reveal,
    )  # fmt: skip


def _inspection(
    *,
    source: str,
    engine: str,
    format: str,
    config: Config,
    files: ImageFiles,
    sizes: Mapping[str, int],
    changes: tuple[tuple[str, str], ...],
    rootfs_bytes: int,
    statistics: Statistics | None,
    spec: Mapping[str, Any],
    reveal: bool,
) -> Inspection:
    found = images.processes(files)
    return Inspection(
        source=source,
        engine=engine,
        format=format,
        config=config,
        processes=found,
        images_bytes=sum(sizes.values()),
        pages_bytes=sum(size for name, size in sizes.items() if name.startswith("pages-")),
        rootfs_bytes=rootfs_bytes,
        changes=changes,
        statistics=statistics,
        mounts=_mounts(spec),
        commands={one.pid: _command(files, one.pid) for one in found},
        environment=_environment(files, found[0].pid, spec, reveal=reveal),
    )


def _command(files: ImageFiles, pid: int) -> tuple[str, ...]:
    """() where its memory is not in these images: that is worth no failure of all the rest."""
    try:
        return images.command_line(files, pid)
    except CheckpointError:
        return ()


def _environment(files: ImageFiles, pid: int, spec: Mapping[str, Any], *, reveal: bool) -> dict[str, str]:
    """Of the first process, from its memory; from the configuration where that is not there. Values are secrets."""
    try:
        found = images.environment(files, pid)
    except CheckpointError:
        found = {}
    if not found:
        process = spec.get("process")
        lines = process.get("env") if isinstance(process, Mapping) else None
        pairs = (line.partition("=") for line in lines or () if isinstance(line, str))
        found = {name: value for name, _, value in pairs}
    return found if reveal else dict.fromkeys(found, HIDDEN)


def _mounts(spec: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    found = spec.get("mounts")
    rows = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    return tuple((str(one.get("destination")), str(one.get("type")), str(one.get("source"))) for one in rows[:1000])


def _changes_in(found: formats.Archive, limits: Limits) -> tuple[tuple[tuple[str, str], ...], int]:
    """What rootfs-diff.tar and the list of deleted files name; nothing is unpacked."""
    changes: list[tuple[str, str]] = []
    total = 0
    difference = found.directory / formats.ROOTFS_DIFF
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
    deleted = found.deleted()[: MAX_CHANGES - len(changes)]
    return (*changes, *((_text((path.lstrip(b"/"),)), "deleted") for path in deleted)), total


def _text(parts: tuple[bytes, ...]) -> str:
    return b"/".join(parts).decode("utf-8", "backslashreplace")


def _stored_config(kept: Tree) -> Config:
    try:
        found = json.loads(kept.read(formats.CONFIG))
    except ValueError:
        return Config()
    return Config.of(found) if isinstance(found, dict) else Config()
