"""Checkpoints as OCI images: a layout of blobs whose manifest has annotations that engines look for.

There are two kinds: an image with one layer that holds the files of an archive (buildah, checkpointctl build, CRI-O,
this program), and the index that containerd makes (`ctr containers checkpoint`): CRIU's images as a tar of their own,
the changed files as a layer, the configuration as protobuf. Both are written too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from kedge.containers.protobuf import Message
from kedge.errors import Corrupted, NotFound, Validation, storage_error
from kedge.model import mapping_of

from .layout import CHECKPOINT, CONFIG, ROOTFS_DIFF, SPEC, mappings, read_json, unpack_tar
from .tar import DIRECTORY, Limits, Member
from .tar_writer import TarWriter

LAYOUT, INDEX = "oci-layout", "index.json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CRIU_TYPE = "application/vnd.containerd.container.criu.checkpoint.criu.tar"
CONTAINERD_CONFIG_TYPE = "application/vnd.containerd.container.checkpoint.config.v1+proto"
_INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFEST_TYPES = (MANIFEST_TYPE, "application/vnd.docker.distribution.manifest.v2+json")

_REFERENCE = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME, _CONTAINERD_IMAGE = "io.containerd.image.name", "image.name"
CONTAINERD_RUNTIME = "io.containerd.checkpoint.runtime"

CRIO_NAME = "io.kubernetes.cri-o.annotations.checkpoint.name"
PODMAN_PREFIX = "io.podman.annotations.checkpoint."
CRIU_PREFIX = "org.criu.checkpoint."

_PODMAN_KEYS = (
    "rootfsImageName", "rootfsImageID", "criu.version", "runtime.name", "runtime.version", "host.arch", "host.kernel",
    "cgroup.version",
)  # fmt: skip
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFESTS = 64


def unpack(layout: Path, directory: Path, limits: Limits) -> None:
    """The files of the checkpoint that a layout holds, as an archive has them, below `directory`."""
    named, manifests, facts = _index(layout)
    if any(descriptor.get("mediaType") == CRIU_TYPE for descriptor in named):
        _unpack_containerd(layout, directory, limits, named, facts)
        return
    layers = [layer for manifest in manifests for layer in mappings(_read(layout, manifest).get("layers"))]
    if len(layers) != 1:
        raise Validation(
            f"{layout} has {len(layers)} layers where an image of a checkpoint has one",
            hint="it is not an image of a checkpoint",
        )
    unpack_tar(_blob(layout, layers[0]), directory, limits)


def _unpack_containerd(
    layout: Path, directory: Path, limits: Limits, named: list[dict[str, object]], facts: Mapping[str, object]
) -> None:
    for descriptor in named:
        media_type = str(descriptor.get("mediaType"))
        if media_type == CRIU_TYPE and not (directory / CHECKPOINT).exists():
            (directory / CHECKPOINT).mkdir(mode=0o700)
            unpack_tar(_blob(layout, descriptor), directory / CHECKPOINT, limits)
        elif "image.layer" in media_type or "rootfs.diff" in media_type:
            shutil.copyfile(_blob(layout, descriptor), directory / ROOTFS_DIFF)
        elif media_type == CONTAINERD_CONFIG_TYPE:
            (directory / SPEC).write_text(json.dumps(_spec(_blob(layout, descriptor))))
    made = re.match(r"containerd\.io/checkpoint/([^:/]{1,200}):", str(facts.get(_CONTAINERD_NAME)))
    config = {
        "id": made[1] if made else "",
        "name": made[1] if made else "",
        "rootfsImageName": facts.get(_CONTAINERD_IMAGE) or facts.get(_REFERENCE),
        "runtime": facts.get(CONTAINERD_RUNTIME),
    }
    (directory / CONFIG).write_text(json.dumps(config))


def _spec(path: Path) -> dict[str, object]:
    """The container's configuration: JSON as the value of a google.protobuf.Any."""
    if path.stat().st_size > 16 << 20:
        raise Validation("the configuration in the image is too large", hint="no engine writes that")
    try:
        return _document(json.loads(Message(path.read_bytes()).bytes(2) or b"{}"), "the configuration")
    except (ValueError, RecursionError) as error:
        if isinstance(error, Corrupted):
            raise
        raise Corrupted(f"the configuration in the image is damaged: {error}", hint="get it again") from error


def _index(layout: Path) -> tuple[list[dict[str, object]], list[dict[str, object]], dict[str, object]]:
    """(blobs that indexes name, manifests that they name, annotations about the indexes)."""
    named: list[dict[str, object]] = []
    manifests: list[dict[str, object]] = []
    facts: dict[str, object] = {}
    waiting = [_document(read_json(layout / INDEX), INDEX)]
    for seen, document in enumerate(waiting):
        for descriptor in mappings(document.get("manifests")):
            if len(waiting) + len(manifests) + len(named) > _MAX_MANIFESTS or seen > _MAX_MANIFESTS:
                raise Validation(f"{layout} has too many manifests", hint="it is not an image of a checkpoint")
            media_type = descriptor.get("mediaType")
            if media_type in _INDEX_TYPES:
                waiting.append(_read(layout, descriptor))
                facts |= mapping_of(descriptor.get("annotations"))
            else:
                (manifests if media_type in _MANIFEST_TYPES else named).append(descriptor)
        facts |= mapping_of(document.get("annotations"))
    return named, manifests, facts


def _read(layout: Path, descriptor: Mapping[str, object]) -> dict[str, object]:
    return _document(read_json(_blob(layout, descriptor)), str(descriptor.get("digest")))


def _document(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Corrupted(f"{name} is not a JSON object", hint="get the image again")
    return value


def _blob(layout: Path, descriptor: Mapping[str, object]) -> Path:
    """The file of a blob, its digest verified. The name is made of hexadecimal digits only."""
    match = _DIGEST.fullmatch(str(descriptor.get("digest")))
    if match is None:
        raise Validation(f"unsupported digest: {descriptor.get('digest')!r:.100}", hint="use sha256")
    path = layout / "blobs" / "sha256" / match[1]
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise NotFound(f"the layout has no blob {match[0]}", hint="get the image again, whole") from None
    except OSError as error:
        raise storage_error("read", str(path), error) from error
    if digest != match[1]:
        raise Corrupted(f"blob {match[0]} of the layout is damaged", hint="get the image again")
    return path


# Writing


def annotations_of(facts: Mapping[str, str]) -> dict[str, str]:
    """The three families that engines look for. `facts`: container.name, engine.name, rootfsImageName, …"""
    name = facts.get("container.name", "")
    annotations = {CRIO_NAME: name, f"{PODMAN_PREFIX}name": name}
    annotations |= {PODMAN_PREFIX + key: facts[key] for key in _PODMAN_KEYS if facts.get(key)}
    return annotations | {CRIU_PREFIX + key: value for key, value in facts.items() if value}


def write(out: BinaryIO, layer: BinaryIO, facts: Mapping[str, str], *, created_at: str, architecture: str) -> None:
    """A tar with an image layout, whose one layer is the tar in `layer`."""
    blobs = _Blobs()
    content = blobs.file(LAYER_TYPE, layer)
    config = blobs.document(
        CONFIG_TYPE,
        {
            "created": created_at,
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(architecture, architecture),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [content["digest"]]},
        },
    )
    manifest = blobs.document(
        MANIFEST_TYPE,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": config,
            "layers": [content],
            "annotations": annotations_of(facts),
        },
    )
    blobs.write(out, manifest, facts.get("container.name") or "checkpoint")


class _Blobs:
    """Blobs by digest, in files that are read twice: for their digest, and when they are written."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[BinaryIO, int]] = {}

    def file(self, media_type: str, file: BinaryIO) -> dict[str, object]:
        """The descriptor of what is in `file`."""
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type] # a file, or BytesIO
        size = file.seek(0, os.SEEK_END)
        self._files[digest] = (file, size)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}

    def document(self, media_type: str, document: object) -> dict[str, Any]:
        return self.file(media_type, io.BytesIO(_json(document)))

    def write(self, out: BinaryIO, top: Mapping[str, Any], name: str) -> None:
        """The layout, whose index names `top`."""
        entry = {**top, "annotations": {_REFERENCE: name}}
        tar = TarWriter(out)
        for folder in (b"blobs", b"blobs/sha256"):
            tar.add(Member(folder, DIRECTORY, mode=0o755))
        _add(tar, LAYOUT, _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, INDEX, _json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}))
        for digest, (file, size) in self._files.items():
            file.seek(0)
            tar.add(Member(f"blobs/sha256/{digest}".encode(), size=size), iter(partial(file.read, 1 << 20), b""))
        tar.close()


def _add(tar: TarWriter, name: str, data: bytes) -> None:
    tar.add(Member(name.encode(), size=len(data)), [data])


def _json(document: object) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode()
