"""How many modules a small save and a small load pass: more are more to read, and more for each of them to do."""

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import kedge
from kedge import CheckpointManager

Work = Callable[[CheckpointManager], object]


def save(store: CheckpointManager) -> object:
    return store.save("job", "step", {"payload": bytes(1024)})


def load_latest(store: CheckpointManager) -> object:
    return store.load_latest("job")


def passed_by(work: Work, store: CheckpointManager) -> set[str]:
    """The modules that a call enters in its own thread, which has no signal handlers to care for."""
    modules: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and str(name := frame.f_globals.get("__name__")).startswith("kedge"):
            modules.add(str(name))

    def call() -> None:
        work(store)  # what only the first one passes
        gc.collect()  # else something else may be taken apart meanwhile
        gc.disable()
        sys.setprofile(note)
        try:
            work(store)
        finally:
            sys.setprofile(None)
            gc.enable()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return modules


@pytest.mark.parametrize(("work", "most"), [(save, 16), (load_latest, 10)])
def test_a_small_state_passes_no_more_modules_than_before(tmp_path: Path, work: Work, most: int) -> None:
    """The aim is 7 for each. Whoever makes a walk shorter makes the number smaller."""
    with kedge.open(tmp_path / "store") as store:
        for _ in range(3):
            save(store)
        assert 0 < len(modules := passed_by(work, store)) <= most, sorted(modules)
