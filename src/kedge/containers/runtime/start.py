"""`kedge-runc start`: a container that was restored is resumed; any other one is started by the real runc."""

from __future__ import annotations

import time
from dataclasses import replace

from . import exits
from .container import CalledContainer


def start(container: CalledContainer) -> int | None:
    mark = container.mark()
    if mark is None:
        return None
    is_paused = mark.restored is not None and not mark.started
    if not is_paused and not mark.wish.is_until_success:
        return None
    if mark.wish.is_until_success:
        watch(container)
    done = container.other("resume") if is_paused else container.runc(*container.call.argv)
    if done.returncode == 0:
        container.write(replace(mark, started=time.time()))
    else:
        container.log(done.stderr.strip())
    return done.returncode


def watch(container: CalledContainer) -> None:
    """Have its exit status noted, for one whose checkpoints go when it succeeds."""
    exits.watch(str(container.mark_path), container.look_up().pid)
