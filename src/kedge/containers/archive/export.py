"""From a checkpoint in the store to an archive that another engine reads.

What came from an archive of the same engine goes back as it was, byte for byte; only the tar of changed files is made
anew. For any other the documents are made from what Kedge knows: enough to be read, not for a restore by podman,
whose own configuration of a container cannot be made up (docs/container-archives.md).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from kedge.blobs.direct import sync_directory
from kedge.containers.snapshot import Snapshot
from kedge.errors import Conflict, Validation, storage_errors
from kedge.files import Tree
from kedge.model import Checkpoint

from . import layout as formats
from . import oci
from .importer import ENGINE_FILES
from .layers import write_difference, write_layer
from .layout import Config, go_time
from .tar import DIRECTORY, Member
from .tar_writer import TarWriter

COMPRESSIONS = ("none", "gzip", "zstd")
_NATIVE = {"podman": "zstd"}  # the others do not compress


def export(
    checkpoint: Checkpoint,
    taken: Snapshot,
    path: str | os.PathLike[str],
    *,
    format: str,
    compression: str | None = None,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint as an archive at `path`, whole or not at all; answers its size."""
    if format not in formats.FORMATS:
        raise Validation(f"unknown format: {format!r}", hint=f"use one of: {', '.join(formats.FORMATS)}")
    chosen = compression or _NATIVE.get(format, "none")
    if chosen not in COMPRESSIONS:
        raise Validation(f"unknown compression: {chosen!r}", hint=f"use one of: {', '.join(COMPRESSIONS)}")
    if taken.kind != "container":
        raise Validation(
            f"{checkpoint.id} is a checkpoint of a process", hint="only checkpoints of containers can be exported"
        )
    target = Path(path).absolute()
    if target.exists() and not overwrite:
        raise Conflict(f"{target} exists", hint="choose another destination, or pass overwrite=True")

    def fill(out: BinaryIO) -> None:
        if format == "oci":
            _write_image(out, checkpoint, taken, target.parent)
        else:
            _write_archive(out, checkpoint, taken, format, target.parent)

    return replace_file(target, lambda out: _compressed(out, chosen, fill))


def replace_file(target: Path, fill: Callable[[BinaryIO], None]) -> int:
    """A file under its name only when it is whole and durable; answers its size."""
    with storage_errors("write", target):
        handle, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(handle, "wb") as out:
                fill(out)
                out.flush()
                os.fsync(out.fileno())
            size = os.stat(draft).st_size
            os.replace(draft, target)
        except BaseException:
            os.unlink(draft)
            raise
        sync_directory(target.parent)
        return size


def _compressed(out: BinaryIO, compression: str, fill: Callable[[BinaryIO], None]) -> None:
    if compression == "zstd":
        with zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False) as writer:
            _fill_joined(writer, fill)
    elif compression == "gzip":
        with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0) as file:
            _fill_joined(file, fill)
    else:
        fill(out)


def _fill_joined(out: Any, fill: Callable[[BinaryIO], None]) -> None:
    """Small writes joined: compressors make each a work of its own."""
    joined = io.BufferedWriter(_Raw(out), 1 << 20)
    fill(joined)
    joined.flush()


class _Raw(io.RawIOBase):
    """A compressor as the file below a buffer."""

    def __init__(self, out: Any) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._out.write(bytes(data))
        return len(data)


def _write_image(out: BinaryIO, checkpoint: Checkpoint, taken: Snapshot, work: Path) -> None:
    """An image whose layer is the archive of the engine the checkpoint came from, else of CRI-O."""
    inner = _came_from(taken) or "cri"
    parsed = Config.of(_documents(checkpoint, taken, inner)[0])
    with tempfile.TemporaryFile(dir=work) as layer:
        _write_archive(layer, checkpoint, taken, inner, work)
        facts = {
            "container.name": parsed.name,
            "engine.name": formats.ENGINES[inner],
            "rootfsImageName": parsed.image_name,
            "rootfsImageID": parsed.image,
            "runtime.name": parsed.runtime,
            "criu.version": str(taken.criu.get("version") or ""),
            "host.arch": str(taken.host.get("arch") or os.uname().machine),
            "host.kernel": str(taken.host.get("kernel") or ""),
            "cgroup.version": str(taken.host.get("cgroup") or ""),
        }
        architecture = facts["host.arch"]
        oci.write(out, layer, facts, created_at=go_time(checkpoint.created_at), architecture=architecture)


def _write_archive(out: BinaryIO, checkpoint: Checkpoint, taken: Snapshot, format: str, work: Path) -> None:
    tar = TarWriter(out)
    engine_files = taken.extra.get(ENGINE_FILES)
    if engine_files is not None and _came_from(taken) == format:
        _add_tree(tar, engine_files, "")
    else:
        config, spec = _documents(checkpoint, taken, format)
        _add_json(tar, formats.CONFIG, config)
        _add_json(tar, formats.SPEC, spec)
        if engine_files is not None:
            _add_tree(tar, engine_files, "", only=(formats.STATS_DUMP, formats.DUMP_LOG))
        if format == "containerd":
            _add_json(tar, formats.STATUS, _status(checkpoint))
            _add_json(tar, formats.STATUS_DUMP, _cri_status(checkpoint, Config.of(config)))
    tar.add(Member(formats.CHECKPOINT.encode(), DIRECTORY, mode=0o700))
    _add_tree(tar, taken.images, f"{formats.CHECKPOINT}/")
    if taken.rootfs is not None:
        _add_rootfs(tar, taken, taken.rootfs, format, work)
    tar.close()


def _add_rootfs(tar: TarWriter, taken: Snapshot, tree: Tree, format: str, work: Path) -> None:
    with tempfile.TemporaryFile(dir=work) as spool:
        deleted = _spool_layer(taken, tree, format, spool)
        size = spool.tell()
        spool.seek(0)
        tar.add(Member(formats.ROOTFS_DIFF.encode(), size=size, mode=0o600), iter(lambda: spool.read(1 << 20), b""))
    if deleted:
        _add_json(tar, formats.DELETED_FILES, deleted)


def _spool_layer(taken: Snapshot, tree: Tree, format: str, spool: BinaryIO) -> list[str]:
    """The changed files as the format has them, into a file; answers what must be told to be deleted besides."""
    if taken.rootfs_kind != "overlay":
        raise Validation(
            "this checkpoint has all files of its container, not the changes to an image",
            hint="engines want changes: run the container on an overlay (containerd, podman and Docker do)",
        )
    if format != "containerd":
        return write_difference(tree, spool)
    _compressed(spool, "gzip", lambda file: write_layer(tree, file))
    return []


def _documents(checkpoint: Checkpoint, taken: Snapshot, format: str) -> tuple[dict[str, Any], dict[str, object]]:
    """config.dump and spec.dump, made from what is known."""
    engine_files = taken.extra.get(ENGINE_FILES)
    config = Config.of((None if engine_files is None else _json_in(engine_files, formats.CONFIG)) or {})
    config = replace(
        config,
        id=config.id or taken.id,
        name=config.name or checkpoint.job.partition(":")[2],
        runtime=config.runtime or str(taken.runtime.get("name", "")),
        created_at=config.created_at or go_time(checkpoint.created_at),
        checkpointed_at=config.checkpointed_at or go_time(checkpoint.created_at),
    )
    annotations = formats.annotations_of(taken.spec)
    annotations.pop(formats.MANAGER_ANNOTATION, None)
    if format in formats.MANAGERS:
        annotations[formats.MANAGER_ANNOTATION] = formats.MANAGERS[format]
    if format == "cri":
        annotations.setdefault("io.kubernetes.cri-o.Metadata", json.dumps({"name": config.name}))
        annotations.setdefault("io.kubernetes.cri-o.Created", config.created_at)
    if format == "containerd":
        annotations.setdefault("io.kubernetes.cri.container-name", config.name)
    return config.document(), {**taken.spec, "annotations": annotations}


def _came_from(taken: Snapshot) -> str | None:
    """The format of the archive that was imported; None for what was checkpointed here."""
    engine_files = taken.extra.get(ENGINE_FILES)
    spec = None if engine_files is None else _json_in(engine_files, formats.SPEC)
    return None if spec is None else formats.format_of(spec)


def _json_in(tree: Tree, name: str) -> dict[str, Any] | None:
    sizes = {entry.path: entry.size_bytes for entry in tree.entries}
    if not 0 < sizes.get(name, 0) <= 64 << 20:
        return None
    try:
        document = json.loads(tree.read(name))
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _status(checkpoint: Checkpoint) -> dict[str, object]:
    """What containerd keeps of a container's life."""
    moment = int(checkpoint.created_at.timestamp() * 1e9)
    return {
        "CreatedAt": moment, "StartedAt": moment, "FinishedAt": 0, "ExitCode": 0, "Pid": 0, "Reason": "", "Message": "",
    }  # fmt: skip


def _cri_status(checkpoint: Checkpoint, config: Config) -> dict[str, object]:
    """The same as kubelet is told: a ContainerStatus of the CRI."""
    return {
        "id": config.id,
        "metadata": {"name": config.name},
        "state": 1,  # running
        "created_at": int(checkpoint.created_at.timestamp() * 1e9),
        "image": {"image": config.image_name},
        "image_ref": config.image_reference,
    }


def _add_json(tar: TarWriter, name: str, document: object) -> None:
    data = json.dumps(document, indent=2).encode()
    tar.add(Member(name.encode(), size=len(data), mode=0o600), [data])


def _add_tree(tar: TarWriter, tree: Tree, prefix: str, only: Iterable[str] | None = None) -> None:
    """The files of a tree; with `only`, those names and what is below them, each once."""
    wanted = None if only is None else frozenset(only)
    for entry in tree.entries:
        if wanted is not None and entry.path.partition("/")[0] not in wanted:
            continue
        name = os.fsencode(prefix + entry.path)
        if entry.kind == "directory":
            tar.add(Member(name, DIRECTORY, mode=0o700, mtime_ns=entry.mtime_ns))
        elif entry.kind in ("file", "hard link"):
            member = Member(name, size=entry.size_bytes, mode=entry.mode, mtime_ns=entry.mtime_ns)
            tar.add(member, tree.stream(entry.path))
