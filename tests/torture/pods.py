"""Pods that are stopped and started again and again, while somebody below containerd is killed at a random moment.

The pod counts in memory, in its root and in an emptyDir volume, and compares all three at each step. After every kill
it runs on, or goes on from its last checkpoint: never before it, never with a file of another moment.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import kedge
from kedge.errors import CheckpointError
from tests.cri import Cri, Failed
from tests.e2e.test_pods import Volumes
from tests.engine import IMAGE, Containerd, containerd
from tests.lab import PYTHON, lab
from tests.parts import missing
from tests.waiting import wait_for

KILLS = 20
JOB = "container:default+torture"
_TRIES = 5  # a kubelet starts a container again as often as it takes
_ANSWER_S = 90
_GRACE_S = 40  # containerd 2 sends no second SIGTERM after a stop that failed, only SIGKILL when this is over
VICTIMS: dict[str, Callable[[list[bytes]], bool]] = {
    # A create begins in `early`, which is given as code.
    "kedge-runc": lambda words: (
        any(b"kedge.containers.runtime." in word for word in words[:5]) and b"look-ahead" not in words
    ),
    "runc": lambda words: words[0].endswith(b"/runc") and any(word in (b"checkpoint", b"restore") for word in words),
    # Between `kedge-runc` and the runc that restores: kedge.containers.guard.
    "guard": lambda words: words[:2] == [b"sh", b"-c"] and b"restore" in words[2] and b"read -r word <&9" in words[2],
    "relay": lambda words: any(word.endswith(b"/relay.py") for word in words),
    # While it works, CRIU is called "criu: dump …" or "criu: restore …", and so is what it makes.
    "criu": lambda words: any(word == b"swrk" or word.startswith(b"criu: ") for word in words) and b"-IS" not in words,
    "shim": lambda words: b"containerd-shim" in words[0],
}
COUNTER = """
import os, time
places = ("/work/log", "/volume/log")
n = 0
while True:
    there = [len(open(place).read().split()) if n else 0 for place in places]
    if there != [n, n]:
        open("/volume/broken", "w").write(f"{n} {there}")
        break
    n += 1
    for place in places:
        with open(place, "a") as log:
            log.write(f"{n}\\n")
    time.sleep(0.005)  # sleep: the pace of the counter
"""


def torture(minutes: float, folder: Path, seed: int | None = None) -> dict[str, float]:
    if reason := missing("criu") or missing("containerd") or missing("cc"):
        raise RuntimeError(reason)
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"  seed {seed}", flush=True)
    draw = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    with lab(folder) as made, containerd(made, pods=True) as engine:
        pods = _Pods(engine, draw)
        pods.start(victim="")
        while sum(pods.kills.values()) < KILLS or time.monotonic() < deadline:
            victim = draw.choice([*VICTIMS, "containerd"])
            is_stop = draw.random() < 0.5
            pods.stop(victim if is_stop else "")
            pods.start("" if is_stop else victim)
        pods.stop("")
        return {**pods.kills, "rounds": pods.rounds, "ran on": pods.ran_on, "checkpoints": pods.generations()}


class _Pods:
    """One workload, in one pod after the other."""

    def __init__(self, engine: Containerd, draw: random.Random) -> None:
        self._engine, self._draw = engine, draw
        self._cri = Cri(engine.home / "socket", IMAGE, answer_s=_ANSWER_S)
        self._volumes = Volumes(engine)
        self._pod = self._container = ""
        self._volume = Path()
        self._saved = 0  # how far its last checkpoint is
        self.kills: dict[str, float] = dict.fromkeys([*VICTIMS, "containerd"], 0.0)
        self.rounds = self.ran_on = 0.0

    def generations(self) -> int:
        with kedge.open(self._engine.lab.store, namespace="containers") as store:
            return max((checkpoint.seq for checkpoint in store.list(JOB)), default=0)

    def stop(self, victim: str) -> None:
        """Until it is gone: checkpointed, or ended with its shim."""
        self._wait_beyond(self._count() + 5)
        before, reached = self.generations(), self._count()
        self._while_killing(victim, lambda: self._cri.stop(self._container, _GRACE_S))
        if self._state() == "running":
            self.ran_on += 1
            self._wait_beyond(self._count())
            self._answered(lambda: self._cri.stop(self._container, _GRACE_S))
        if self.generations() > before:  # it may have run on afterwards, and ended with its grace period
            self._saved = reached
        self._answered(lambda: self._cri.remove_pod(self._pod))
        self._volumes.remove(self._volume)

    def start(self, victim: str) -> None:
        """In a new pod, with a new volume."""
        self.rounds += 1
        name = f"torture-{self.rounds:.0f}"
        self._pod = self._cri.run_pod(name)
        self._volume = self._volumes.make(name, "volume", self._draw.choice(["", "Memory"]))
        attempts = itertools.count()
        policy = self._draw.choice(["fresh", "fail"])  # what speaks against no checkpoint lets none begin anew

        def start() -> None:
            mounts = [("/usr", "/usr", True), (str(self._volume), "/volume", False)]
            wishes = {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "torture", "KEDGE_POLICY": policy}
            program = (PYTHON, "-c", COUNTER)
            self._container = self._cri.start(self._pod, "main", program, wishes, mounts=mounts, attempt=next(attempts))

        def start_anew() -> None:
            """In a new sandbox of the pod, which may have ended with its shim: its volume stays."""
            self._cri.remove_pod(self._pod)
            self._pod = self._cri.run_pod(name)
            start()

        if not self._while_killing(victim, start):
            self._answered(start_anew)
        assert (count := self._count()) >= self._saved, f"it began at {count}, and was saved at {self._saved}"
        self._wait_beyond(self._saved)

    def _count(self) -> int:
        volume = self._volumes.seen(self._volume)
        broken = volume / "broken"
        assert not broken.exists(), broken.read_text()
        log = volume / "log"
        return log.read_text().count("\n") if log.exists() else 0

    def _wait_beyond(self, number: int) -> None:
        wait_for(lambda: self._count() > number, f"it does not go on beyond {number}", timeout_s=60)

    def _state(self) -> str:
        states: list[str] = []
        self._answered(lambda: states.append(self._cri.state(self._container)[0]))
        return states[-1]

    def _answered(self, call: Callable[[], None]) -> None:
        """As often as it takes: an engine that has just been started is not ready yet."""
        for left in reversed(range(_TRIES)):
            try:
                call()
                break
            except (Failed, CheckpointError):
                if not left:
                    raise
                time.sleep(1)  # sleep: at least a moment between two tries

    def _while_killing(self, victim: str, call: Callable[[], None]) -> bool:
        """Whether the call succeeded although the victim, if it ever was there, was killed."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            while victim and not future.done():
                if pids := list(self._pids(victim)):
                    time.sleep(self._draw.uniform(0, 0.2))  # sleep: a random moment
                    if self._kill(victim, pids[0]):
                        break
                time.sleep(0.001)  # sleep: between two looks
            if victim == "containerd" and not self._engine.is_up:
                self._engine.start()
            with suppress(Failed, CheckpointError):
                future.result()
                return True
        return False

    def _kill(self, victim: str, pid: int) -> bool:
        """Whether it was still there."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills[victim] += 1
            if victim == "containerd":
                self._engine.stop(how=None)
            return True
        return False

    def _pids(self, victim: str) -> Iterator[int]:
        """Processes below this containerd: what it starts has its environment, and containers have their own."""
        if victim == "containerd":
            yield self._engine.daemon_pid
            return
        ours = f"KEDGE_STATE_DIR={self._engine.lab.state}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if VICTIMS[victim](words) and ours in (process / "environ").read_bytes().split(b"\0"):
                    yield int(process.name)
