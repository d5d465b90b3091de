"""Dumps that lie in directories of this machine: what others have made, for `KEDGE_RESTORE=/path`.

A container may only name what lies below a directory that the machine's administrator opened for that, in
KEDGE_RESTORE_ROOTS (several, with colons between); in a cluster, below that directory's subdirectory of the pod's
namespace, or below a directory that was opened to that namespace alone (NAMESPACE=/directory). No link is followed on
the way. What is found is taken for hostile: it is copied, plain files only, checked and imported as a generation of
the workload, once; from then on the newest generation counts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kedge.blobs.group_files import make_own_folder
from kedge.containers.archive import arch, importer
from kedge.containers.attempts import state_directory
from kedge.errors import NotFound, Validation, storage_error
from kedge.manager import CheckpointManager
from kedge.model import Lease

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def opened(path: str, namespace: str = "") -> Iterator[str]:
    """A path by which the file or directory can be reached that a container named; NotFound when it may not."""
    for home in _homes(namespace):
        parts = path.removeprefix(home).split("/")
        if path.startswith(home) and all(part not in ("", ".", "..") for part in parts):
            fd = _descend(home, parts)
            try:
                yield f"/proc/self/fd/{fd}"
            finally:
                os.close(fd)
            return
    raise NotFound(
        f"{path} is in no directory from which containers{f' of {namespace}' if namespace else ''} may be restored",
        hint="the administrator of the machine names such directories in KEDGE_RESTORE_ROOTS",
    )


def _homes(namespace: str) -> Iterator[str]:
    """The directories that are open to a container of this namespace of a cluster, or of none."""
    for root in os.environ.get("KEDGE_RESTORE_ROOTS", "").split(":"):
        owner, _, place = root.partition("=")
        if root.startswith("/"):
            yield f"{root.rstrip('/')}/{namespace}/" if namespace else f"{root.rstrip('/')}/"
        elif owner and owner == namespace and place.startswith("/"):
            yield f"{place.rstrip('/')}/"


def is_finished(path: str) -> bool:
    """Whether ARCH would restore what lies there."""
    with opened(path) as place:
        return arch.is_finished(place)


def _descend(home: str, parts: Sequence[str]) -> int:
    try:
        fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            above, fd = fd, os.open(part, _OPEN, dir_fd=fd)
            os.close(above)
    except FileNotFoundError:
        raise NotFound(f"there is no {home}{'/'.join(parts)}", hint="check the path") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Validation(
                f"{home}{'/'.join(parts)} leads through a link", hint="name what is there itself"
            ) from None
        raise storage_error("open", home + "/".join(parts), error) from error
    return fd


def import_dump(
    manager: CheckpointManager, path: str, *, key: str, namespace: str, spec: Mapping[str, object], lease: Lease
) -> None:
    """Import what lies there as a generation of `key`, unless that was done before."""
    work = state_directory()
    make_own_folder(work)
    with opened(path, namespace) as place:
        if os.path.isfile(f"{place}/inventory.img"):
            importer.import_images(manager, place, key=key, spec=spec, work=work, lease=lease)
        else:
            importer.import_archive(manager, place, key=key, work=work, lease=lease)
