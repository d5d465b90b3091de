"""Stopping many containers of one engine in one process: one interpreter, one open store, several containers at once.

    preempt ── {"number", "root", "id", "deadline_s"} ──▶ here ── {"number", "result", "reason"} ──▶ preempt

Each container is stopped as `kedge-runc kill TERM` would stop it. While one is stored, the next is dumped already.
Containers that share a network are paused one after the other, because CRIU locks a network as a whole. When no more
lines come, those begun are finished.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kedge.containers import network
from kedge.containers.engine import runc
from kedge.containers.preemption import AT_ONCE, Result
from kedge.errors import CheckpointError
from kedge.manager import CheckpointManager

from . import marks
from .arguments import parse
from .container import CalledContainer
from .marks import Mark
from .stop import checkpoint_and_end, signal

# As in kedge-runc: never by PATH, on which `runc` may be kedge-runc itself.
RUNC = ("/usr/local/sbin/runc", "/usr/sbin/runc", "/usr/bin/runc", "/usr/local/bin/runc")


class Batch:
    """What containers of one engine share while they are stopped."""

    def __init__(self) -> None:
        self._program = os.environ.get("KEDGE_RUNC") or next(filter(os.path.exists, RUNC), RUNC[-1])
        self._lock = threading.Lock()
        self._manager: CheckpointManager | None = None
        self._networks: dict[str, threading.Lock] = {}

    def stop(self, root: str, identity: str, deadline_s: float) -> tuple[Result, str]:
        """Checkpoint a container, or pass the signal on: the result, and why if there is no checkpoint."""
        end = time.monotonic() + deadline_s
        call = parse(["--root", root, "kill", identity, "TERM"])
        container = CalledContainer(self._program, call)
        mark = container.mark()
        if mark is None:
            return "ended", "it is not there any more"
        try:
            container = CalledContainer(self._program, call, self._open())
            with self.alone_in_network(mark):
                reason = checkpoint_and_end(container, end - time.monotonic())
        except Exception as error:  # noqa: BLE001 - whatever it is, it was asked to stop, and must
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if not reason:
            return "checkpointed", ""
        return "signalled", f"{reason} {signal(container).stderr}".strip()

    def _open(self) -> CheckpointManager:
        with self._lock:
            if self._manager is None:
                self._manager = marks.store_of(os.environ)
            return self._manager

    def alone_in_network(self, mark: Mark) -> AbstractContextManager[object]:
        """Held while a container is checkpointed: one lock for all that share a network."""
        path = network.network_of(runc.read_spec(Path(mark.bundle)))["path"] if mark.bundle else ""
        if not path:
            return nullcontext()
        with self._lock:
            return self._networks.setdefault(path, threading.Lock())

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


def main() -> None:
    batch = Batch()
    writing = threading.Lock()

    def answer(number: int, root: str, identity: str, deadline_s: float) -> None:
        result, reason = batch.stop(root, identity, deadline_s)
        with writing:
            sys.stdout.write(json.dumps({"number": number, "result": result, "reason": reason}) + "\n")
            sys.stdout.flush()

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for line in sys.stdin:
                request = json.loads(line)
                pool.submit(answer, request["number"], request["root"], request["id"], request["deadline_s"])
    finally:
        batch.close()


if __name__ == "__main__":
    main()
