"""`kedge-runc kill` and `checkpoint`: a container is checkpointed into the store, and ends or runs on."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.errors import CheckpointError, NotFound

from .container import CalledContainer

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager

    from .marks import Mark

_TERM = ("", "15", "TERM", "SIGTERM")


def kill(container: CalledContainer) -> int | None:
    if container.has_ended():
        return 0
    signal = container.call.rest[0] if container.call.rest else ""
    if signal.upper() not in _TERM or container.call.is_set("all") or not container.is_running():
        mark_killed(container)
        return None
    if reason := checkpoint_and_end(container, float(os.environ.get("KEDGE_DEADLINE_S") or 8)):
        container.log(f"kedge: no checkpoint, the signal is passed on: {reason}", level="warning")
        mark_killed(container)
        return None
    return 0


def checkpoint(container: CalledContainer) -> int | None:
    call = container.call
    if call.is_set("pre-dump") or call.is_set("lazy-pages"):
        return None
    image_path = Path(call.get("image-path") or "checkpoint")
    _checkpoint(container, leave_running=call.is_set("leave-running"), image_path=image_path)
    return 0


def checkpoint_and_end(container: CalledContainer, deadline_s: float) -> str:
    """Checkpoint it into the store, which ends it: why that could not be, "" if it could."""
    if container.has_ended():
        return ""
    try:
        _checkpoint(container, leave_running=False, deadline_s=deadline_s)
    except CheckpointError as error:
        return str(error)
    return ""


def signal(container: CalledContainer) -> subprocess.CompletedProcess[str]:
    """It was asked to stop, and must: the real runc's kill."""
    mark_killed(container)
    return container.runc(*container.call.argv)


def mark_killed(container: CalledContainer) -> None:
    """How it ends from now on says nothing about it."""
    if (mark := container.mark()) is not None:
        container.write(replace(mark, killed=True))


def _checkpoint(
    container: CalledContainer, *, leave_running: bool, image_path: Path | None = None, deadline_s: float | None = None
) -> None:
    # Imported here, because other signals than TERM, which every engine sends, do without
    from kedge.containers.bundle import ContainerSource
    from kedge.containers.checkpoint import Request, make_checkpoint
    from kedge.containers.gpu import memory_for
    from kedge.containers.snapshot import OPTIONS, TIES

    from . import claims

    mark = container.mark()
    if mark is None:
        raise NotFound(
            f"container {container.id}: its mark {container.mark_path} cannot be read",
            hint="without it nobody knows its workload: recreate the container",
        )
    source = ContainerSource.of(container.look_up(), image_path, volumes_asked=mark.wish.volumes)
    options = [option for option in OPTIONS if option in TIES or container.call.is_set(option[2:])]
    with container.store() as manager:
        mark = replace(_claimed(container, mark, manager), ending=None)  # of a call that was killed
        request = Request(
            mark.key, leave_running=leave_running, options=options, lease=mark.claim, deadline_s=deadline_s
        )
        with nullcontext() if leave_running else claims.leaving(manager, mark.key):
            container.write(mark if leave_running else replace(mark, ending=time.time()))
            try:
                make_checkpoint(manager, source, request, gpu=memory_for(source.spec))
            except BaseException:
                container.write(mark)
                raise
            if not leave_running:
                claims.release(manager, mark)
        if not leave_running:  # without its claim, so that `delete` need not open the store
            container.write(replace(mark, claim=None, ended=time.time()))


def _claimed(container: CalledContainer, mark: Mark, manager: CheckpointManager) -> Mark:
    from . import claims

    claimed = claims.ensure(manager, mark, container.root, container.id)
    if claimed is not mark:
        container.log(f"kedge: its checkpoints have the key {claimed.key}", level="info")
    return claimed
