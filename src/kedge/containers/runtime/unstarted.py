"""Containers that were created and are never started, because whoever asked for them is gone.

If a kubelet is killed while containerd creates a container, containerd forgets that container, but its shim goes on
creating it. Then nobody starts it and nobody deletes it, and it holds the claim on its workload. It has not run since
its checkpoint, so nothing is lost when it is removed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from kedge.containers.attempts import only_one
from kedge.containers.programs import find_program

from . import arguments, marks
from .container import ORPHAN_S, CalledContainer
from .delete import remove

ABANDONED_S = 20.0  # engines start what they have created within a second


@dataclass(frozen=True, slots=True)
class Unstarted:
    """Those that somebody has seen waiting for their start, and since when."""

    _since: dict[Path, float] = field(default_factory=dict)

    def remove_abandoned(self, container: Path) -> str:
        """Remove one, given as `root/identity`, that waits for its start, if it has been seen so for too long. If it
        cannot be removed: why."""
        now_s = time.monotonic()
        if now_s - self._since.setdefault(container, now_s) < ABANDONED_S:
            return ""
        done = _remove(container)
        return f", and cannot be removed: {done.stderr.strip()}" if done is not None and done.returncode else ""


def _remove(container: Path) -> CompletedProcess[str] | None:
    root, identity = str(container.parent), container.name
    with only_one(root, identity, wait_s=ORPHAN_S):  # `start` has this too
        mark = marks.find_mark(container)
        if mark is None or mark.started:
            return None
        program = os.environ.get("KEDGE_RUNC") or find_program("runc")
        call = arguments.parse(["--root", root, "delete", "--", identity])
        with marks.store_of(mark.environment) as manager:
            return remove(CalledContainer(program, call, manager))
