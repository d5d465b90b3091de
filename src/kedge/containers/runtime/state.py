"""`kedge-runc state`, `resume` and `pause` of a container that was checkpointed and has ended, which runc forgot; and
`state` of one that was restored and waits for its `start`: it is created, and only runc calls it paused."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .container import CalledContainer
    from .marks import Mark


def state(container: CalledContainer) -> int | None:
    mark = container.settled_mark()
    if mark is None:
        return None
    if mark.ended:
        return _say(
            {"ociVersion": "1.0.2-dev", "id": container.id, "pid": 0, "status": "stopped", "bundle": mark.bundle,
             "rootfs": os.path.join(mark.bundle, "rootfs"), "created": _created(mark), "owner": ""}
        )  # fmt: skip
    if not mark.awaits_start:
        return None
    done = container.runc(*container.call.argv)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return done.returncode
    answer = json.loads(done.stdout)
    return _say({**answer, "status": "created"} if answer.get("status") == "paused" else answer)


def _say(answer: dict[str, object]) -> int:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def _created(mark: Mark) -> str:
    """When the container was: its configuration is as old. Engines parse it."""
    try:
        seconds = os.stat(os.path.join(mark.bundle, "config.json")).st_mtime
    except OSError:
        seconds = mark.ended or 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def resume(container: CalledContainer) -> int | None:
    return 0 if container.has_ended() else None


pause = resume
