"""`kedge-runc delete`: the real one, and what the end of a container says about its checkpoints.

A container that died right after it was restored marks its checkpoint as bad. One that ended well takes its checkpoints
with it, if it asked for that. Both need the store, and whoever still has the container is waited for: neither for
longer than an engine waits (see patience).
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from subprocess import CompletedProcess

from kedge.containers.attempts import only_one, put_right
from kedge.containers.criu.command import urgent
from kedge.errors import CheckpointError, Conflict

from . import exits
from .container import CalledContainer, engine_of
from .marks import Mark, remove_mark
from .patience import Patience, beside

CRASH_S = 10.0  # one that ends this soon after it was restored, by itself, is not restored from there again


def delete(container: CalledContainer) -> int | None:
    has_lost_its_shim = _has_lost_its_shim(container)
    patience = Patience("delete of a dead shim" if has_lost_its_shim else "delete")
    with urgent():  # see _remove_orphan
        _wait_for_others(container, patience)
        done = _remove_orphan(container) if has_lost_its_shim else remove(container, patience)
    sys.stderr.write(done.stderr)
    return done.returncode


def _wait_for_others(container: CalledContainer, patience: Patience) -> None:
    """What a killed call had started; or one that stores what has ended meanwhile, and whose files must stay."""
    try:
        with only_one(container.root, container.id, wait_s=patience.left_s):
            pass
    except Conflict:
        if not container.call.is_set("force"):
            raise


def remove(container: CalledContainer, patience: Patience | None = None) -> CompletedProcess[str]:
    """Nobody waits for the one whose patience is not given."""
    mark = container.settled_mark()
    has_ended = mark is not None and mark.ended
    if has_ended or not container.status():  # or somebody was killed before it could forget it
        done = container.other("delete", "--force")
        _forget(container, mark, patience)
        return CompletedProcess(done.args, 0, "", "")
    is_telling = mark is not None and _says_something(mark) and not container.is_running()
    is_judged = mark is None or not is_telling or _is_judged(container, mark, patience)
    if not is_judged and not container.call.is_set("force"):
        return CompletedProcess([], 1, "", "kedge: the store did not answer in time: delete it again\n")
    done = _runc_delete(container, mark)
    if done.returncode == 0:
        _forget(container, mark, patience)
    return done


def _says_something(mark: Mark) -> bool:
    """Whether the store may have to know how it ended."""
    return not mark.killed and (mark.wish.is_until_success or _has_crashed(mark))


def _has_crashed(mark: Mark) -> bool:
    """It ended right after it was restored."""
    return mark.restored is not None and time.time() - (mark.started or time.time()) < CRASH_S


def _is_judged(container: CalledContainer, mark: Mark, patience: Patience | None) -> bool:
    if patience is None:
        _judge(container, mark)
        return True

    def judge() -> None:
        with only_one(container.root, container.id):  # the next call waits for it, if we may not
            _judge(container, mark)
            if container.mark() is not None:
                container.write(replace(mark, killed=True))  # its end says nothing more

    return patience.do(judge, container.log)


def _judge(container: CalledContainer, mark: Mark) -> None:
    if not _end_history(container, mark):
        _blame_checkpoint(container, mark)


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

    def clear_away() -> None:
        if mark is not None:
            _end_history(container, mark)
        _forget(container, mark)

    if done.returncode == 0:
        beside(clear_away, container.log)
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
    if mark.restored is not None and _has_crashed(mark):
        with container.store() as manager:
            if manager.exists(mark.restored):
                manager.tag(mark.restored, crashed="after-restore")


def _forget(container: CalledContainer, mark: Mark | None, patience: Patience | None = None) -> None:
    def clear() -> None:
        if mark is not None and mark.claim is not None:
            _release(container, mark)
        put_right()  # what a killed call left

    if patience is None:
        clear()
    else:
        patience.do(clear, container.log)
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
