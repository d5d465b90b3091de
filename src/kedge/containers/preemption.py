"""Preemption: a machine is to be taken away, and every container that opted in is checkpointed, the small ones first.

Small ones first, so that as many as possible are safe when time runs out, and a few at once (see `runtime.batch`). Each
is stopped the way its engine would stop it (`kedge-runc kill`), so the engine sees a container that ended, and whoever
recreates it resumes it there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, Self

from .engine import runc
from .pids import pids_below, read_text
from .programs import URGENT, find_program
from .runtime import marks

# A dump mostly waits for the kernel. On two cores, 6 at once took a seventh less time than 3; 8 of 200 MB took longer.
AT_ONCE = min(8, max(6, os.cpu_count() or 1))
_ANSWER_BYTES = 65536
_URL_TIMEOUT_S = 2
# The machine is to go, and what is being checkpointed stands still: nothing on it is more urgent. Where Linux weighs
# sessions against each other (autogroup, see sched(7)), a nice value counts only within one. This session is ours
# alone. It comes first from its first instruction on: on a busy machine, importing took longer than dumping.
_START = f"""
{{ echo {URGENT} > /proc/self/autogroup; }} 2> /dev/null  # there may be none, or it may not be changed
f=/etc/kedge/runc.env; if [ -r $f ]; then set -a; . $f; set +a; fi
exec "$@"
"""  # settings as in kedge-runc
_LEFT_S = 60.0  # a container that was dumped in time may take this much longer to be stored


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running container that opted in. `environment`: which store its engine uses, as it said at create."""

    id: str
    root: str
    key: str
    memory_bytes: int
    environment: Mapping[str, str]


Result = Literal["checkpointed", "signalled", "ended", "unfinished", "late"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """checkpointed: durable in the store, and ended. signalled: it could not be checkpointed and got SIGTERM.
    ended: by itself, before its turn. unfinished: nobody answered in time; it may run on. late: not touched."""

    id: str
    root: str
    key: str
    memory_bytes: int
    result: Result
    seconds: float = 0.0
    reason: str = ""


def candidates(on_found: Callable[[Candidate], object] = lambda _: None) -> list[Candidate]:
    """Those that run now, the smallest first. `on_found` is told of each as soon as it is known."""
    program = os.environ.get("KEDGE_RUNC") or find_program("runc")

    def look(container: Path) -> Candidate | None:
        root, identity = str(container.parent), container.name
        state = runc.run(program, root, "state", identity)
        if state.returncode:
            return None
        runtime_state = json.loads(state.stdout)
        mark = marks.find_mark(container)
        if runtime_state.get("status") not in ("running", "paused") or mark is None or mark.ended:
            return None
        candidate = Candidate(identity, root, mark.key, memory_bytes(int(runtime_state["pid"])), mark.environment)
        on_found(candidate)
        return candidate

    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = filter(None, pool.map(look, marks.marks()))
        return sorted(running, key=lambda candidate: (candidate.memory_bytes, candidate.root, candidate.id))


def memory_bytes(pid: int) -> int:
    """What a process and its descendants have in memory."""
    sizes = [read_text(f"/proc/{descendant}/statm").split() for descendant in pids_below(pid)]
    return sum(int(fields[1]) for fields in sizes if fields) * os.sysconf("SC_PAGE_SIZE")


def preempt(deadline_s: float, report: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Checkpoint all of them, a few at once; what is not begun within the deadline is left alone."""
    end = time.monotonic() + deadline_s
    outcomes = []
    with Stoppers() as stoppers, ThreadPoolExecutor(AT_ONCE) as pool:

        def stop(candidate: Candidate) -> Outcome:
            begun = time.monotonic()
            if begun >= end:
                return _outcome(candidate, "late")
            stopper = stoppers.for_(candidate)
            result, reason = stopper.stop(candidate, end - begun)
            if (
                result == "unfinished" and stopper.is_gone
            ):  # killed, perhaps for want of memory: nobody passed a signal on
                result, reason = stoppers.for_(candidate).stop(candidate, max(0.0, end - time.monotonic()))
            return _outcome(candidate, result, round(time.monotonic() - begun, 3), reason)

        # A stopper takes a while to start: it does so while the others are still looked for.
        for outcome in pool.map(stop, candidates(stoppers.for_ if deadline_s > 0 else lambda _: None)):
            outcomes.append(outcome)
            if report is not None:
                report(outcome)
    return outcomes


class Stoppers:
    """One process for each engine, because which store an engine uses is said by its environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stoppers: dict[tuple[tuple[str, str], ...], Stopper] = {}
        self._all: list[Stopper] = []  # with those that were killed

    def for_(self, candidate: Candidate) -> Stopper:
        engine = tuple(sorted(candidate.environment.items()))
        with self._lock:
            if engine not in self._stoppers or self._stoppers[engine].is_gone:
                self._stoppers[engine] = Stopper(candidate.environment)
                self._all.append(self._stoppers[engine])
            return self._stoppers[engine]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stopper in self._all:
            stopper.close()


class Stopper:
    """A process that stops containers (see `runtime.batch`), asked from any number of threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        command = ["/bin/sh", "-c", _START, "sh", sys.executable, "-I", "-m", "kedge.containers.runtime.batch"]
        # In a session of its own: who interrupts us does not interrupt what has begun.
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, text=True, bufsize=1, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._asked: dict[int, SimpleQueue[tuple[Result, str]]] = {}
        self.is_gone = False
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def stop(self, candidate: Candidate, left_s: float) -> tuple[Result, str]:
        """The result, and why if there is no checkpoint."""
        answer: SimpleQueue[tuple[Result, str]] = SimpleQueue()
        with self._lock:
            number = len(self._asked)
            self._asked[number] = answer
            line = json.dumps({"number": number, "root": candidate.root, "id": candidate.id, "deadline_s": left_s})
            if self.is_gone:
                return "unfinished", self._reason()
            try:
                print(line, file=self.process.stdin)
            except BrokenPipeError:
                self.is_gone = True
                return "unfinished", self._reason()
        try:
            return answer.get(timeout=left_s + _LEFT_S)
        except Empty:
            return "unfinished", f"it took longer than {left_s + _LEFT_S:.0f} s"

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answered = json.loads(line)
            self._asked[answered["number"]].put((answered["result"], answered["reason"]))
        with self._lock:
            self.is_gone = True
            for answer in self._asked.values():  # whoever was answered does not look any more
                answer.put(("unfinished", self._reason()))

    def _reason(self) -> str:
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        return f"the process that stops containers has ended: {lines[-1] if lines else 'it was killed'}"

    def close(self) -> None:
        """What has begun is finished, unless it takes too long: then it is given up, and the container runs on."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_LEFT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listening.join()
        self.process.stdout.close()
        self._said.close()


def _outcome(candidate: Candidate, result: Result, seconds: float = 0.0, reason: str = "") -> Outcome:
    return Outcome(candidate.id, candidate.root, candidate.key, candidate.memory_bytes, result, seconds, reason)


def wait_for_notice(
    files: Sequence[Path], urls: Sequence[str], answer: str, every_s: float, signalled: threading.Event
) -> str:
    """Wait until the machine is to go; what said so. A URL does by status 200 and, if given, this text in its body."""
    while True:
        if signalled.is_set():
            return "signal"
        for file in files:
            if file.exists():
                return str(file)
        for url in urls:
            if _says_so(url, answer):
                return url
        signalled.wait(every_s)


def _says_so(url: str, answer: str) -> bool:
    """No answer, or another one, is no notice: metadata services answer 404 until there is one."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    request = Request(url, headers={"Metadata-Flavor": "Google", "Metadata": "true"})
    try:
        with urlopen(request, timeout=_URL_TIMEOUT_S) as response:  # nosec B310 # the command takes http and https only
            return response.status == 200 and answer in response.read(_ANSWER_BYTES).decode(errors="replace")
    except (OSError, HTTPException):
        return False
