"""Files that processes watch by inotify, as far as CRIU must be told their paths.

CRIU finds what is watched by its file handle. An overlay, which the root of most containers is, opens none by handle;
there CRIU looks for the inode in the paths that its option `irmap-scan-path` names. So they are looked up before
anything is paused.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence

from kedge.blobs.kernel import mounts
from kedge.containers.pids import list_names, read_text
from kedge.errors import Conflict

_WATCH = re.compile(r"^inotify wd:\S+ ino:([0-9a-f]+) sdev:([0-9a-f]+) ", re.MULTILINE)
_PLAIN = re.compile(r"""[^\s"'#\\\x00-\x1f]+""")  # what a line of a CRIU configuration can say
_MINOR_BITS = 20  # of a device as the kernel writes it

Inode = tuple[int, int]  # device and number, as in os.stat


def config_for(pids: Sequence[int]) -> list[str]:
    """The lines that CRIU's configuration needs for a dump of these processes, the first of them first; Conflict when
    one watches what cannot be found."""
    paths, missing = find_watched(pids)
    odd = [path for path in paths if not _PLAIN.fullmatch(path)]
    if missing or odd:
        what = repr(odd[0]) if odd else "a file that has no name any more"
        raise Conflict(
            f"inotify watches {what} on an overlay, which CRIU cannot dump",
            hint="watch files of a volume instead, or end the watch before the checkpoint",
        )
    return [f"irmap-scan-path {path}" for path in paths]


def find_watched(pids: Sequence[int]) -> tuple[list[str], int]:
    """The paths, in their container, of what the processes watch on overlays; and how many of them have none."""
    points = _overlays(pids[0])
    wanted = {inode for pid in pids for inode in _watched(pid) if inode[0] in points}
    paths = []
    for device in {device for device, _ in wanted}:
        for inode, path in _walk(f"/proc/{pids[0]}/root", points[device], device):
            if inode in wanted:
                wanted.remove(inode)
                paths.append(path)
            if not any(left == device for left, _ in wanted):
                break
    return sorted(paths), len(wanted)


def _watched(pid: int) -> Iterator[Inode]:
    for descriptor in list_names(f"/proc/{pid}/fdinfo"):
        for inode, device in _WATCH.findall(read_text(f"/proc/{pid}/fdinfo/{descriptor}")):
            number = int(device, 16)
            yield os.makedev(number >> _MINOR_BITS, number & ((1 << _MINOR_BITS) - 1)), int(inode, 16)


def _overlays(pid: int) -> dict[int, str]:
    """Where overlays are mounted, by their devices."""
    points: dict[int, str] = {}
    for mount in mounts(pid):
        if mount.kind == "overlay":
            points.setdefault(mount.device, mount.point)
    return points


def _walk(root: str, point: str, device: int) -> Iterator[tuple[Inode, str]]:
    """Every file of one file system, those near its root first. No link is followed."""
    waiting = deque([point])
    status = os.stat(f"{root}{point}")
    yield (status.st_dev, status.st_ino), point
    while waiting:
        folder = waiting.popleft()
        try:
            entries = list(os.scandir(f"{root}{folder}"))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            path = f"{folder.rstrip('/')}/{entry.name}"
            yield (status.st_dev, status.st_ino), path
            if entry.is_dir(follow_symlinks=False) and status.st_dev == device:
                waiting.append(path)
