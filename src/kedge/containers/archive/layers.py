"""The changed files of a container, from a tree in the store to a layer in a tar.

In the store they are an overlay's upper directory: a removed file is a device 0/0, a directory that replaces one of the
image has an attribute. OCI layers say that with files named .wh.…; podman and CRI-O have a list of what was deleted
beside the tar, and no way to say that a directory was replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kedge.errors import Validation
from kedge.files import FileEntry, Tree

from .tar import BLOCK_DEVICE, CHARACTER, DIRECTORY, FIFO, FILE, HARD_LINK, SYMLINK, Member
from .tar_writer import TarWriter, can_be_sparse

_KINDS = {
    "file": FILE, "hard link": HARD_LINK, "symlink": SYMLINK, "directory": DIRECTORY, "fifo": FIFO,
    "character device": CHARACTER, "block device": BLOCK_DEVICE,
}  # fmt: skip
_OPAQUE = (b"trusted.overlay.opaque", b"user.overlay.opaque")
_OVERLAY = (b"trusted.overlay.", b"user.overlay.")


def write_layer(tree: Tree, out: BinaryIO) -> None:
    """The tree as an OCI layer, with whiteouts."""
    tar = TarWriter(out)
    hidden = whiteouts(tree)
    for entry in tree.entries:
        path = os.fsencode(entry.path)
        if path in hidden:
            above, _, name = path.rpartition(b"/")
            tar.add(Member((above + b"/" if above else b"") + b".wh." + name, mode=0o600, mtime_ns=entry.mtime_ns))
            continue
        _add(tar, tree, entry)
        if is_opaque(tree, entry):
            tar.add(Member(path + b"/.wh..wh..opq", mode=0o600, mtime_ns=entry.mtime_ns))
    tar.close()


def write_difference(tree: Tree, out: BinaryIO) -> list[str]:
    """The tree as podman and CRI-O want it; answers the paths that were deleted.

    Validation where a directory replaces one of the image: nothing is written that would mean something else.
    """
    tar = TarWriter(out)
    hidden = whiteouts(tree)
    for entry in tree.entries:
        if os.fsencode(entry.path) in hidden:
            continue
        if is_opaque(tree, entry):
            raise Validation(
                f"/{entry.path} replaces a directory of the image, which this format cannot express",
                hint="export it with --format containerd",
            )
        _add(tar, tree, entry)
    tar.close()
    return sorted("/" + path.decode("utf-8", "surrogateescape") for path in hidden)


def whiteouts(tree: Tree) -> frozenset[bytes]:
    """Paths of what was removed. Whiteouts may be hard links of each other."""
    hidden = {os.fsencode(e.path) for e in tree.entries if e.kind == "character device" and e.target == "0:0"}
    links = {
        os.fsencode(e.path) for e in tree.entries if e.kind == "hard link" and os.fsencode(e.target or "") in hidden
    }
    return frozenset(hidden | links)


def is_opaque(tree: Tree, entry: FileEntry) -> bool:
    if entry.kind != "directory":
        return False
    attributes = tree.attributes(entry.path)
    return any(attributes.get(name) == b"y" for name in _OPAQUE)


def _add(tar: TarWriter, tree: Tree, entry: FileEntry) -> None:
    kind = _KINDS[entry.kind]
    major, _, minor = (entry.target or "0:0").partition(":") if kind in (CHARACTER, BLOCK_DEVICE) else ("0", "", "0")
    attributes = {} if kind == HARD_LINK else tree.attributes(entry.path)
    member = Member(
        os.fsencode(entry.path),
        kind,
        size=entry.size_bytes if kind == FILE else 0,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        link=os.fsencode(entry.target or "") if kind in (SYMLINK, HARD_LINK) else b"",
        device=(int(major), int(minor)),
        attributes={name: value for name, value in attributes.items() if not name.startswith(_OVERLAY)},
        ranges=_ranges(tree, entry) if kind == FILE else None,
    )
    pieces: Iterable[bytes | memoryview] = tree.stream(entry.path) if kind == FILE else ()
    tar.add(member, pieces if member.ranges is None else _without_holes(pieces, member.ranges))


def _ranges(tree: Tree, entry: FileEntry) -> list[tuple[int, int]] | None:
    ranges = tree.ranges(entry.path)
    return ranges if ranges is not None and can_be_sparse(ranges) else None


def _without_holes(pieces: Iterable[bytes | memoryview], ranges: list[tuple[int, int]]) -> Iterator[bytes | memoryview]:
    """Of a file's bytes from beginning to end, those in the ranges."""
    position, number = 0, 0
    for piece in pieces:
        end = position + len(piece)
        while number < len(ranges) and ranges[number][0] < end:
            offset, length = ranges[number]
            first, last = max(offset, position), min(offset + length, end)
            yield piece[first - position : last - position]
            if offset + length > end:
                break
            number += 1
        position = end
