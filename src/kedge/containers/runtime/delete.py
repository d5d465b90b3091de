"""`kedge-runc delete`: the real one, and what the end of a container says about its checkpoints.

A container that died right after it was restored marks its checkpoint as bad. One that ended well takes its checkpoints
with it, if it asked for that.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from subprocess import CompletedProcess

from kedge.containers.attempts import only_one, put_right
from kedge.containers.criu.command import urgent
from kedge.errors import CheckpointError, Conflict

from . import exits
from .container import ORPHAN_S, CalledContainer, engine_of
from .marks import Mark, remove_mark

CRASH_S = 10.0  # one that ends this soon after it was restored, by itself, is not restored from there again


def delete(container: CalledContainer) -> int | None:
    with urgent():  # see _remove_orphan
        # What a killed call had started: a restore whose processes are killed half-way hangs.
        with suppress(Conflict), only_one(container.root, container.id, wait_s=ORPHAN_S):
            pass
        done = _remove_orphan(container) if _has_lost_its_shim(container) else remove(container)
    sys.stderr.write(done.stderr)
    return done.returncode


def remove(container: CalledContainer) -> CompletedProcess[str]:
    mark = container.settled_mark()
    has_ended = mark is not None and mark.ended
    if has_ended or not container.status():  # or somebody was killed before it could forget it
        done = container.other("delete", "--force")
        _forget(container, mark)
        return CompletedProcess(done.args, 0, "", "")
    if mark is not None and not mark.killed and not container.is_running() and not _end_history(container, mark):
        _blame_checkpoint(container, mark)
    done = _runc_delete(container, mark)
    if done.returncode == 0:
        _forget(container, mark)
    return done


def _runc_delete(container: CalledContainer, mark: Mark | None) -> CompletedProcess[str]:
    """runc deletes what was created and not started, but calls ours paused."""
    if (mark is not None and mark.awaits_start) or container.call.is_set("force"):
        return container.remove()
    return container.runc(*container.call.argv)


def _has_lost_its_shim(container: CalledContainer) -> bool:
    """containerd forces a removal only then."""
    return container.call.is_set("force") and engine_of(container.root) != "runc"


def _remove_orphan(container: CalledContainer) -> CompletedProcess[str]:
    """What a dead shim left. containerd gives that five seconds, mounts and bundle included, which it leaves lying
    about else: what can wait is done by a process of its own, and if that fails, by who comes next. It is not known
    what the container died of."""
    mark = container.mark()
    done = _runc_delete(container, mark)
    if done.returncode == 0 and os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        try:
            if mark is not None:
                _end_history(container, mark)
            _forget(container, mark)
        finally:
            os._exit(0)
    return done


def _end_history(container: CalledContainer, mark: Mark) -> bool:
    """Delete its checkpoints, if it asked for that and ended by itself with status 0; answers whether it did."""
    if not mark.wish.is_until_success or exits.status_of(str(container.mark_path)) != 0:
        return False
    from kedge.containers import snapshot

    with container.store() as manager:
        for checkpoint in snapshot.generations(manager, "container", mark.key):
            if not checkpoint.is_pinned:
                manager.delete(checkpoint.job, checkpoint.id)
    return True


def _blame_checkpoint(container: CalledContainer, mark: Mark) -> None:
    """If it died right after it was restored, that speaks against its checkpoint."""
    if mark.restored and time.time() - (mark.started or time.time()) < CRASH_S:
        with container.store() as manager:
            if manager.exists(mark.restored):
                manager.tag(mark.restored, crashed="after-restore")


def _forget(container: CalledContainer, mark: Mark | None) -> None:
    if mark is not None and mark.claim is not None:
        _release(container, mark)
    put_right()  # what a killed call left
    exits.forget(str(container.mark_path))
    remove_mark(container.mark_path)


def _release(container: CalledContainer, mark: Mark) -> None:
    """Its claim, now that it is gone. What fails here must not keep it from being removed: claims run out."""
    from . import claims

    try:
        with container.store() as manager:
            claims.release(manager, mark)
    except CheckpointError as error:
        container.log(f"kedge: {mark.key} stays claimed for a while: {error}", level="warning")
