"""Containers that nobody starts or removes any more, because whoever would do so is gone. They hold the claim on their
workload until the next container of it, or the node's guard, removes them.

If a kubelet is killed while containerd creates a container, containerd forgets that container, but its shim goes on
creating it. It has not run since its checkpoint, so nothing is lost when it is removed.

If a shim is killed, containerd ends its container. containerd 2 does not do that for pods: it ends the sandbox, calls
the containers exited and forgets them, while their processes run on. They are ended here, as those of containerd 1 are,
and the next one goes on from the last checkpoint: no engine has their output or their exit status any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from kedge.containers.attempts import only_one
from kedge.containers.pids import stat_of
from kedge.containers.programs import find_program

from . import arguments, marks
from .container import ORPHAN_S, CalledContainer, engine_of, state_of
from .delete import remove
from .marks import Mark

ABANDONED_S = 20.0  # engines start what they have created within a second, and remove what has lost its shim in ten


@dataclass(frozen=True, slots=True)
class Orphans:
    """Those that somebody has seen so, and since when."""

    _since: dict[Path, float] = field(default_factory=dict)

    def remove(self, container: Path) -> str:
        """Remove one, given as `root/identity`, if it has been seen so for too long. If it cannot be removed: why."""
        now_s = time.monotonic()
        if now_s - self._since.setdefault(container, now_s) < ABANDONED_S:
            return ""
        done = _remove(container)
        return f", and cannot be removed: {done.stderr.strip()}" if done is not None and done.returncode else ""


def reason(container: Path, mark: Mark, state: Mapping[str, object]) -> str:
    """What is wrong with a container that lives and may be abandoned; "" of others."""
    status = state.get("status")
    has_shim = engine_of(str(container.parent)) != "runc"
    is_waiting = status == "created" or (mark.awaits_start and status == "paused")
    if is_waiting and (has_shim or mark.wish.namespace):  # people may start theirs whenever they like: `podman init`
        return "was created and is not started"
    if has_shim and stat_of(str(state.get("pid")))[1:2] == ["1"]:
        return "has lost its shim"  # the parent of its first process, which has now become a child of init
    return ""


def _remove(container: Path) -> CompletedProcess[str] | None:
    root, identity = str(container.parent), container.name
    with only_one(root, identity, wait_s=ORPHAN_S):  # `start`, checkpoints and restores have this too
        mark = marks.find_mark(container)
        if mark is None or not reason(container, mark, state_of(container)):
            return None
        program = os.environ.get("KEDGE_RUNC") or find_program("runc")
        call = arguments.parse(["--root", root, "delete", "--force", "--", identity])
        with marks.store_of(mark.environment) as manager:
            return remove(CalledContainer(program, call, manager))
