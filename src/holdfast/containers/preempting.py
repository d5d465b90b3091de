"""Preemption: a machine is to be taken away, and every container on it that opted in is kept, the small ones first.

Small ones first, so that as many as possible are safe when time runs out. Each is stopped the way its engine would stop
it (`holdfast-runc kill`), so the engine sees a container that ended, and whoever recreates it goes on from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import marks, runc, runtime
from .freezing import pids_below
from .programs import find_program

_ANSWER_BYTES = 65536
_URL_TIMEOUT_S = 2
_LEFT_S = 60.0  # a container that was frozen in time may take this much longer to be stored


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running container that opted in. `environment`: where its engine keeps things, as it said at create."""

    id: str
    root: str
    key: str
    memory_bytes: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """kept: durable in the store, and ended. signalled: it could not be kept and got SIGTERM. late: not touched."""

    id: str
    root: str
    key: str
    memory_bytes: int
    result: Literal["kept", "signalled", "late"]
    seconds: float = 0.0
    reason: str = ""


def candidates() -> list[Candidate]:
    """Those that run now, the smallest first."""
    program = os.environ.get("HOLDFAST_RUNC") or find_program("runc")
    found = []
    for mark in marks.marks():
        root, identity = str(mark.parent), mark.name
        state = runc.run(program, root, "state", identity)
        if state.returncode:
            continue
        told = json.loads(state.stdout)
        facts = marks.read_mark(marks.mark_of(root, identity))
        if told.get("status") in ("running", "paused") and not facts.get("ended") and facts.get("wish"):
            size = memory_bytes(int(told["pid"]))
            environment = {str(name): str(value) for name, value in facts.get("environment", {}).items()}
            found.append(Candidate(identity, root, str(facts["wish"]["key"]), size, environment))
    return sorted(found, key=lambda one: (one.memory_bytes, one.root, one.id))


def memory_bytes(pid: int) -> int:
    """What a process and its descendants have in memory."""
    pages = 0
    for one in pids_below(pid):
        try:
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except OSError:  # ended meanwhile
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def preempt(deadline_s: float, report: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Keep all of them, one after the other; what is not begun within the deadline is left alone."""
    end = time.monotonic() + deadline_s
    outcomes = []
    for one in candidates():
        left = end - time.monotonic()
        outcome = _stop(one, left) if left > 0 else _outcome(one, "late")
        outcomes.append(outcome)
        if report is not None:
            report(outcome)
    return outcomes


def _stop(one: Candidate, left_s: float) -> Outcome:
    front = Path(runtime.__file__).with_name("holdfast-runc")
    environment = {**os.environ, **one.environment, "HOLDFAST_PYTHON": sys.executable}
    environment["HOLDFAST_DEADLINE_S"] = f"{left_s:.3f}"
    begun = time.monotonic()
    command = ["/bin/sh", str(front), "--root", one.root, "kill", one.id, "TERM"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False,
            stdin=subprocess.DEVNULL, timeout=left_s + _LEFT_S,
        )  # fmt: skip
        said = done.stderr.strip() or (f"exit status {done.returncode}" if done.returncode else "")
    except subprocess.TimeoutExpired:
        said = f"it took longer than {left_s + _LEFT_S:.0f} s"
    took = round(time.monotonic() - begun, 3)
    return _outcome(one, "signalled", took, said) if said else _outcome(one, "kept", took)


def _outcome(
    one: Candidate, result: Literal["kept", "signalled", "late"], seconds: float = 0.0, reason: str = ""
) -> Outcome:
    return Outcome(one.id, one.root, one.key, one.memory_bytes, result, seconds, reason)


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
        with urlopen(request, timeout=_URL_TIMEOUT_S) as response:  # nosec B310 - the command takes http and https only
            return response.status == 200 and answer in response.read(_ANSWER_BYTES).decode(errors="replace")
    except (OSError, HTTPException):
        return False
