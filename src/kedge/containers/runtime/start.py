"""`kedge-runc start`: a container that was restored is resumed; any other one is started by the real runc."""

from __future__ import annotations

import time
from dataclasses import replace

from kedge.containers.attempts import only_one

from . import exits
from .container import ORPHAN_S, CalledContainer


def start(container: CalledContainer) -> int | None:
    with only_one(container.root, container.id, wait_s=ORPHAN_S):  # whoever takes it for abandoned has this too
        return _start(container)


def _start(container: CalledContainer) -> int | None:
    mark = container.mark()
    if mark is None:
        return None
    if not mark.awaits_start and not mark.wish.is_until_success:
        return None
    if mark.wish.is_until_success:
        watch(container)
    done = container.other("resume") if mark.awaits_start else container.runc(*container.call.argv)
    runs_already = mark.awaits_start and done.returncode != 0 and container.status() == "running"  # it was never paused
    if done.returncode == 0 or runs_already:
        container.write(replace(mark, started=time.time()))
    else:
        container.log(done.stderr.strip())
    return 0 if runs_already else done.returncode


def watch(container: CalledContainer) -> None:
    """Have its exit status noted, for one whose checkpoints go when it succeeds."""
    exits.watch(str(container.mark_path), container.look_up().pid)
