"""`kedge-runc` for the containers that opted in: what it does instead of runc, or besides it.

    create, run  claim its workload; restore the newest good checkpoint, paused; else the real create       (create)
    start        resumes it, if it was restored; else the real start                                         (start)
    kill TERM    checkpoints it into the store, which ends it; if that fails, the signal                      (stop)
    checkpoint   checkpoints it into the store, and gives the caller the images it asked for                  (stop)
    state, resume, pause   of one that was checkpointed and has ended: answered, because runc forgot it      (state)
    delete       the real one, and what its end says about its checkpoints                                  (delete)

A mark per container remembers what it is (`marks`); its checkpoints are in the store and outlive it. Nothing is
printed to stdout but what runc would print. Errors go to runc's log and to stderr, in words.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from kedge.errors import CheckpointError

from . import arguments
from .container import CalledContainer

# A function answers the exit status, or None: then the real runc does it. Only the module of the one is imported:
# an engine waits for every call.
_MODULES = {
    "create": "create", "run": "create", "start": "start", "kill": "stop", "checkpoint": "stop", "state": "state",
    "resume": "state", "pause": "state", "delete": "delete",
}  # fmt: skip


def main(argv: list[str]) -> int:
    real, *words = argv
    call = arguments.parse(words)
    is_named = "/" not in call.container_id and call.container_id not in ("", ".", "..")
    if call.problem is not None or call.command not in _MODULES or not is_named:
        return pass_on(real, words)
    container = CalledContainer(real, call)
    try:
        status = _function(call.command)(container)
    except CheckpointError as error:
        container.log(f"kedge: {error}")
        return 1
    except Exception as error:  # noqa: BLE001 - a fault of ours must not keep a container from being stopped or removed
        container.log(f"kedge: {type(error).__name__}: {error}")
        status = 1 if call.command in ("create", "run", "checkpoint") else None
    return pass_on(real, words) if status is None else status


def _function(command: str) -> Callable[[CalledContainer], int | None]:
    function: Callable[[CalledContainer], int | None] = getattr(
        import_module(f"{__package__}.{_MODULES[command]}"), command
    )
    return function


def pass_on(real: str, words: list[str]) -> NoReturn:
    os.execv(real, [real, *words])  # nosec B606


if __name__ == "__main__":
    atexit.register(gc.freeze)  # an engine waits: nobody looks for garbage on the way out
    sys.exit(main(sys.argv[1:]))
