"""The files of a container: where they are, a copy of one moment, and putting a saved tree in their place."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from kedge.blobs import libc
from kedge.blobs.kernel import mounts
from kedge.errors import CheckpointError, Conflict, Validation, storage_error, storage_errors
from kedge.files import Tree

from .attempts import NotUndone, undoing
from .programs import find_program, run

_NOTED = ("kind", "point", "changes", "mount_options", "base")  # for `put_back`


@dataclass(frozen=True, slots=True)
class Rootfs:
    """`kind` overlay: what the container changed is in `changes`, the upper directory; directory: it is all of it.

    `base`: where relative paths in the mount options begin. Engines use them for roots of many layers, whose absolute
    paths are more than mount(2) takes. `is_mount`: of a directory that is mounted, as some snapshotters do, only the
    files can be exchanged.
    """

    kind: str
    point: Path
    changes: Path
    mount_options: str = ""
    base: Path = Path("/")
    is_mount: bool = False


def find_rootfs(bundle: Path, spec_root: str) -> Rootfs:
    """What a bundle's root file system is made of."""
    point = Path(os.path.realpath(bundle / spec_root))
    if not point.is_dir():
        raise Validation(f"the bundle has no root file system at {point}", hint="mount or make it first")
    options = _overlay_options(point)
    if options is None:
        return Rootfs("directory", point, point, is_mount=any(mount.point == str(point) for mount in mounts()))
    upper = _option(options, "upperdir")
    if upper is None:
        return Rootfs("none", point, point)  # an overlay without upper directory cannot be written
    base = _base_of(point, options)
    changes = base / _unescaped(upper)
    if not changes.is_dir():
        raise Validation(
            f"the upper directory of {point} cannot be found: {changes}",
            hint="run kedge where the overlay was mounted: in the same mount namespace",
        )
    return Rootfs("overlay", point, changes, options, base)


def _base_of(point: Path, options: str) -> Path:
    """The directory where relative paths begin: the nearest above the root or a layer that has all of them."""
    values = (_option(options, name) or "" for name in ("lowerdir", "upperdir", "workdir"))
    layers = [Path(_unescaped(layer)) for value in values for layer in re.split(r"(?<!\\):", value) if layer]
    relative = [layer for layer in layers if not layer.is_absolute()]
    if not relative:
        return Path("/")
    for place in (point, *(layer for layer in layers if layer.is_absolute())):
        for base in place.parents:
            if all((base / layer).is_dir() for layer in relative):
                return base
    raise Validation(
        f"a layer of {point} cannot be found: {relative[0]}",
        hint="run kedge where the overlay was mounted: in the same mount namespace",
    )


def _option(options: str, name: str) -> str | None:
    """The value of a mount option, escaped as it is there."""
    match = re.search(rf"(?:^|,){name}=((?:[^,\\]|\\.)*)", options)
    return match and match[1]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _overlay_options(point: Path) -> str | None:
    """The options of the overlay mounted last at `point`, those of the mount (nodev) and of the overlay; None when that
    is none."""
    options = None
    for mount in mounts():
        if mount.point == str(point):
            options = mount.options if mount.kind == "overlay" else None
    return options


def copy_away(source: Path, target: Path) -> None:
    """A copy that keeps everything, sharing blocks where the file system can. For files nobody writes meanwhile."""
    command = [find_program("cp"), "-a", "--reflink=auto", "-T", "--", str(source), str(target)]
    done = run(command, timeout_s=None, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        number = 28 if "No space left" in done.stderr else 5
        raise storage_error("copy", f"{source} ({done.stderr.strip()[-300:]})", OSError(number, os.strerror(number)))


def seeing(rootfs: Rootfs, command: Sequence[str]) -> list[str]:
    """A command that sees the container's files as they are mounted now, whoever unmounts them meanwhile, and whose
    own mounts are nobody else's.

    An engine unmounts them when the call that has started it is killed. Then it would make its mount points in the bare
    folder of the bundle, which could not be removed any more. And runc's restore binds volumes with all that is mounted
    below them, and unmounts that again: where / is shared, it would be unmounted on the machine too.
    """
    own = [find_program("unshare"), "--mount", "--propagation=slave"]
    if rootfs.kind != "overlay":
        return [*own, *command]
    script = 'mount --make-private "$0" && mount --make-shared "$0" && exec "$@"'
    return [*own, "sh", "-c", script, str(rootfs.point), *command]


@contextmanager
def replaced(rootfs: Rootfs, tree: Tree, note: Callable[[dict[str, object]], None]) -> Iterator[Callable[[], None]]:
    """Gives what makes the container's files those of `tree`; if anything fails within, they are what they were.

    A live overlay's upper directory must not change: it is unmounted, changed and mounted again with the same options.
    The new files are complete beside the old ones before one rename exchanges both. `note` is given, before anything
    happens, what `put_back` needs should this program be killed.
    """
    new = rootfs.changes.parent / f".kedge-{os.urandom(6).hex()}"
    facts = {name: str(getattr(rootfs, name)) for name in _NOTED}
    facts |= {"new": str(new), "inode": str(rootfs.changes.stat().st_ino)}
    is_exchanged = False

    @contextmanager
    def away() -> Iterator[None]:
        note({**facts, "is_mounted": False})
        with _unmounted(rootfs):
            yield
        note({**facts, "is_mounted": True})

    note({**facts, "is_mounted": True})
    try:
        tree.write_to(new, exact=True, durable=False)
        with ExitStack() as unmounted:
            unmounted.enter_context(away())

            def put_in_place() -> None:
                nonlocal is_exchanged
                exchange(new, rootfs.changes)
                try:
                    unmounted.close()
                except BaseException:
                    with undoing():
                        exchange(new, rootfs.changes)
                    raise
                is_exchanged = True

            try:
                yield put_in_place
            except BaseException:
                if is_exchanged:
                    with undoing(), away():
                        exchange(new, rootfs.changes)
                raise
    except NotUndone:
        raise  # the files from before are in `new`
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(new, ignore_errors=True)


def put_back(noted: Mapping[str, object], *, is_restored: bool) -> None:
    """After a kill within `replaced`: the files are those from before it, unless the restore had been done."""
    new = Path(str(noted["new"]))
    kind, point, changes, options, base = (str(noted[name]) for name in _NOTED)
    rootfs = Rootfs(kind, Path(point), Path(changes), options, Path(base))
    if not rootfs.changes.is_dir() or not rootfs.point.is_dir():
        return  # the engine has removed all of it
    is_mounted = kind != "overlay" or _overlay_options(rootfs.point) is not None
    away = _unmounted if is_mounted else nullcontext if noted["is_mounted"] else _mounted_after
    if new.is_dir() and str(rootfs.changes.stat().st_ino) != noted["inode"] and not is_restored:
        with away(rootfs):
            exchange(new, rootfs.changes)
    elif not is_mounted:
        with away(rootfs):
            pass
    shutil.rmtree(new, ignore_errors=True)


@contextmanager
def _unmounted(rootfs: Rootfs) -> Iterator[None]:
    if rootfs.kind != "overlay":
        yield
        return
    _mount_tool("umount", str(rootfs.point))
    with _mounted_after(rootfs):
        yield


@contextmanager
def _mounted_after(rootfs: Rootfs) -> Iterator[None]:
    try:
        yield
    finally:
        _empty_workdir(rootfs)
        command = ("mount", "-t", "overlay", "overlay", "-o", rootfs.mount_options, str(rootfs.point))
        _mount_tool(*command, cwd=rootfs.base, failure=NotUndone)  # nothing may start on a root that is not mounted


def _empty_workdir(rootfs: Rootfs) -> None:
    """What the old upper directory left in the work directory says nothing about the new one."""
    work = _option(rootfs.mount_options, "workdir")
    if work is not None:
        shutil.rmtree(rootfs.base / _unescaped(work) / "work", ignore_errors=True)


def _mount_tool(*command: str, cwd: Path | None = None, failure: type[CheckpointError] = Conflict) -> None:
    done = run([find_program(command[0]), *command[1:]], timeout_s=None, cwd=cwd)
    if done.returncode:
        raise failure(
            f"{command[0]} of {command[-1]} failed: {done.stderr.strip()[-300:]}",
            hint="nothing else may use the container's files while it is restored. Where / is private (findmnt -o "
            "PROPAGATION /), other mount namespaces keep what is unmounted: mount --make-rshared /, restart the engine",
        )


def exchange(a: Path, b: Path) -> None:
    """Let two names change places, at once."""
    with storage_errors("exchange", f"{a} and {b}"):
        libc.exchange(a, b)
