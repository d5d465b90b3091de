"""What the workers of `queues` carry out: runs whose steps leave a trace when they are executed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import kedge

PARTS = 3


@kedge.pipeline
def work(number: int) -> list[str]:
    run = kedge.current_run()
    marks = [run.step(f"part {part}", perform, number, part) for part in range(PARTS)]
    if number % 7 == 0:
        fail_once(number)
    return marks


def perform(number: int, part: int) -> str:
    """Another answer each time: a result that is not the one that was saved is noticed."""
    mark = os.urandom(6).hex()
    note(f"{number} {part} {mark}")
    time.sleep(0.002)  # sleep: the work
    return mark


def fail_once(number: int) -> None:
    marker = Path(f"failed-{number}")
    if not marker.exists():
        marker.touch()
        raise ConnectionError(f"run {number} fails once")


def note(line: str) -> None:
    handle = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)
