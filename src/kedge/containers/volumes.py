"""Volumes of a pod: which of them a checkpoint contains, and putting those into the volumes of the next pod.

    saved      emptyDir, on disk or in memory, and the pod's /dev/shm: they are gone with the pod
    not saved  whatever outlives the pod (claims, host paths) or is made anew for each (configMap, secret, projected)

A volume that cannot be saved as a whole, because it is larger than KEDGE_VOLUME_BYTES, keeps its container from being
checkpointed: processes would go on without files that they had. KEDGE_VOLUMES=no saves none.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.blobs.libc import file_system_of
from kedge.errors import Conflict, storage_errors
from kedge.files import Tree

from . import pod_starts
from .attempts import undoing
from .pids import read_text
from .runtime.opt_in import SANDBOX, UID, notes_of
from .runtime.settings import chosen, whole_number
from .safe_copy import copy_tree

LIMIT_BYTES = 2 << 30
_HUGETLBFS = 0x958458F6
_EMPTY_DIR, _SHM, _HOST = "emptyDir", "shm", "hostPath"
_OF_POD = re.compile(
    r"(?P<pod>/.*/pods/(?P<uid>[^/]+))/"
    r"(?:volumes/kubernetes\.io~(?P<kind>[^/]+)/(?P<name>[^/]+)(?:/.*)?|volume-subpaths/(?P<part_of>[^/]+)/[^/]+/[0-9]+)"
)
_KINDS = {"empty-dir": _EMPTY_DIR, "configmap": "configMap", "downward-api": "downwardAPI"}
_MADE_ANEW = ("configMap", "secret", "projected", "downwardAPI")
# Files of the pod itself, which its kubelet or engine makes.
_HOUSEKEEPING = (
    "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm", "/dev/termination-log", "/run/.containerenv",
)  # fmt: skip # nosec B108


@dataclass(frozen=True, slots=True)
class Volume:
    """A directory of the machine that a container of a pod has mounted."""

    destination: str
    source: Path
    kind: str  # emptyDir, shm, configMap, secret, projected, hostPath, … as Kubernetes calls it
    name: str  # in its pod; of a subPath, with the place of that
    pod: Path | None = None  # the pod's directory
    is_read_only: bool = False
    is_wanted: bool = True

    @property
    def is_saved(self) -> bool:
        """A volume that a container only reads is filled by another one."""
        return self.kind in (_EMPTY_DIR, _SHM) and not self.is_read_only and self.is_wanted

    @property
    def is_made_anew(self) -> bool:
        """By the kubelet, the same for every pod."""
        return self.kind in _MADE_ANEW

    @property
    def reason(self) -> str:
        """Why it is not saved; "" if it is."""
        if self.is_saved:
            return ""
        if self.kind in (_EMPTY_DIR, _SHM):
            return "read-only in this container: another one fills it" if self.is_read_only else "KEDGE_VOLUMES=no"
        if self.is_made_anew:
            return "made anew for each pod"
        return "on this machine only" if self.kind == _HOST else "outlives the pod"

    def size_bytes(self) -> int:
        """What its files take."""
        total = 0
        for folder, _, names in os.walk(self.source):
            for name in names:
                with suppress(OSError):  # gone meanwhile
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return total

    def to_json(self) -> dict[str, object]:
        return {"path": self.destination, "kind": self.kind, "is_saved": self.is_saved, "reason": self.reason}


def volumes_of(spec: Mapping[str, Any]) -> list[Volume]:
    """The volumes of a container of a pod; none of any other container."""
    notes = notes_of(spec)
    if not notes.get(SANDBOX):
        return []
    mounts = [
        mount
        for mount in spec.get("mounts") or ()
        if mount.get("type") == "bind" or {"bind", "rbind"} & set(mount.get("options") or ())
    ]
    return [volume for mount in mounts if (volume := _volume(mount, notes)) is not None]


def _volume(mount: Mapping[str, Any], notes: Mapping[str, str]) -> Volume | None:
    destination, source = str(mount.get("destination")), Path(str(mount.get("source")))
    is_read_only = "ro" in (mount.get("options") or ())
    if destination == "/dev/shm" and source.name == "shm" and notes[SANDBOX] in source.parts:  # nosec B108
        return Volume(destination, source, _SHM, _SHM, is_read_only=is_read_only)
    path = _OF_POD.fullmatch(str(source))
    # The path of another pod's volume is one of the host: its author, not its kubelet, has written it.
    if path is None or notes.get(UID, path["uid"]) != path["uid"]:
        return None if destination in _HOUSEKEEPING else Volume(destination, source, _HOST, str(source))
    pod = Path(path["pod"])
    if path["name"]:
        kind, name = path["kind"], path["name"]
    else:  # a subPath: what it is part of lies beside it
        whole = next(pod.glob(f"volumes/kubernetes.io~*/{path['part_of']}"), None)
        kind = "unknown" if whole is None else whole.parent.name.partition("~")[2]
        name = f"{path['part_of']}{destination}"
    return Volume(destination, source, _KINDS.get(kind, kind), name, pod, is_read_only)


def saved_volumes(spec: Mapping[str, object], asked: str = "") -> list[Volume]:
    """The volumes that go into a checkpoint. Conflict when one cannot be saved as a whole."""
    if chosen(asked, "KEDGE_VOLUMES", ("yes", "no")) == "no":
        return []
    volumes = [volume for volume in volumes_of(spec) if volume.is_saved]
    for volume in volumes:
        if problem := problem_of(volume, volumes):
            raise Conflict(
                f"volume {volume.destination}: {problem}",
                hint="KEDGE_VOLUMES=no saves the container without its volumes, which it must be able to do without",
            )
    return volumes


def problem_of(volume: Volume, volumes: Sequence[Volume]) -> str:
    """Why a volume cannot be saved as a whole; "" when it can."""
    part_of = volume.name.partition("/")[0]
    if part_of != volume.name and any(other.name == part_of for other in volumes):
        return "it is mounted as a whole, and in part by subPath"
    if _file_system(volume.source) == _HUGETLBFS:
        return "it is made of huge pages, which cannot be written as files"
    size, limit = volume.size_bytes(), whole_number("KEDGE_VOLUME_BYTES", LIMIT_BYTES)
    return f"it has {size:,} bytes, more than KEDGE_VOLUME_BYTES={limit}" if size > limit else ""


def _file_system(folder: Path) -> int:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # the pod goes, or the kubelet is about to make it
        return 0
    try:
        return file_system_of(fd)
    finally:
        os.close(fd)


def facts_of(volumes: Sequence[Volume], spec: Mapping[str, object], root: str) -> dict[str, object]:
    """What the metadata of a checkpoint made now says of the volumes in it: which they are, of which pod, and when; and
    when the containers of the pod were started. `root`: of their runtime."""
    if not volumes:
        return {}
    names = {volume.destination: volume.name for volume in volumes}
    starts = pod_starts.starts_in(root, spec)
    sandbox = notes_of(spec)[SANDBOX]
    return {"volumes": {"sandbox": sandbox, "moment_s": pod_starts.now_s(), "names": names, "starts": starts}}


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the files of one volume wait: `new` before they are put in place, `old` the ones from before.

    Within one mount files are moved, else copied: a volume in memory has no room for both, and a subPath is a mount of
    its own.
    """

    volume: Path
    folder: Path

    @property
    def _moves(self) -> bool:
        return _mount_of(self.folder) == _mount_of(self.volume)

    def put_in_place(self) -> None:
        """`old` has its name as soon as it is complete."""
        part = self.folder / "part"
        if self._moves:
            empty = self.folder / "empty"
            empty.mkdir()
            _take_attributes(empty, self.volume)
            empty.rename(part)
            _move(self.volume, part)
        else:
            copy_tree(self.volume, part)
        part.rename(self.folder / "old")
        _clear(self.volume)
        self._fill(self.folder / "new")

    def put_back(self) -> None:
        """The files from before `put_in_place`, however far that, or an earlier call of this, has come."""
        if not self.folder.is_dir() or not self.volume.is_dir():
            return  # the kubelet has removed all of it
        old, part = self.folder / "old", self.folder / "part"
        if old.is_dir():
            _clear(self.volume)
            if self._moves:
                old.rename(part)  # what is in the volume from now on is old
            else:
                self._fill(old)
                old.rename(self.folder / "done")  # half of it removed must not be taken for all of it
        if part.is_dir() and self._moves:
            self._fill(part)
        self.remove()

    def _fill(self, source: Path) -> None:
        if self._moves:
            _move(source, self.volume)
            _take_attributes(self.volume, source)
        else:
            copy_tree(source, self.volume)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def replaced(
    trees: Mapping[Volume, Tree], work: Path, note: Callable[[dict[str, str]], None]
) -> Iterator[Callable[[], None]]:
    """Gives what makes the files of these volumes those of the trees; if anything fails within, they are what they
    were. `work` is where files can wait; `note` is given, first, what `put_back` needs should this program be killed.

    The directories themselves stay, because other containers of the pod may have them mounted.
    """
    stages = {volume: _stage_for(volume, work) for volume in trees}
    note({str(stage.volume): str(stage.folder) for stage in stages.values()})
    try:
        for volume, tree in trees.items():
            stages[volume].folder.mkdir(mode=0o700, parents=True)
            tree.write_to(stages[volume].folder / "new", exact=True, durable=False)

        def put_in_place() -> None:
            for stage in stages.values():
                with storage_errors("replace", stage.volume):
                    stage.put_in_place()

        yield put_in_place
    except BaseException:
        with undoing():
            put_back({str(stage.volume): str(stage.folder) for stage in stages.values()}, is_restored=False)
        raise
    for stage in stages.values():
        stage.remove()


def put_back(noted: Mapping[str, object], *, is_restored: bool) -> None:
    """After a restore that failed or was killed: the files from before it, unless it had been done."""
    for volume, folder in noted.items():
        stage = Stage(Path(volume), Path(str(folder)))
        with storage_errors("replace", stage.volume):
            stage.remove() if is_restored else stage.put_back()


def _stage_for(volume: Volume, work: Path) -> Stage:
    """Not within the volume, where processes would see it."""
    name = f".kedge-{os.urandom(6).hex()}"
    is_beside = volume.pod is not None and volume.pod.stat().st_dev == volume.source.stat().st_dev
    return Stage(volume.source, (volume.pod if is_beside and volume.pod is not None else work) / name)


def _mount_of(folder: Path) -> str:
    """The number of the mount that it is in, as the kernel says it of a descriptor."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return next(line for line in read_text(f"/proc/self/fdinfo/{fd}").splitlines() if line.startswith("mnt_id:"))
    finally:
        os.close(fd)


def _move(source: Path, target: Path) -> None:
    for name in os.listdir(source):
        os.rename(source / name, target / name)


def _clear(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def _take_attributes(target: Path, source: Path) -> None:
    """Those of a directory: owner, mode, extended attributes, times."""
    status = os.stat(source)
    os.chown(target, status.st_uid, status.st_gid)
    shutil.copystat(source, target)
