"""How programs end: what was staged is committed, what saves until the last moment is durable, what fails is told (I1).

Python closes its own thread pools before other threads and exit handlers are done, so large saves are the ones at risk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kedge

pytestmark = pytest.mark.faults

BEGIN = """
import atexit, sys, threading
{before}
import kedge
import numpy as np

def state(n):
    return {{"n": n, "array": np.full(3_000_000, n, np.uint8), "text": "x" * 100_000}}

store = kedge.open(sys.argv[1])
"""

PROGRAMS = {
    "save_async, then the end": """
        for n in range(4):
            store.save_async("job", "step", state(n))
        """,
    "save_async, then an exception": """
        for n in range(4):
            store.save_async("job", "step", state(n))
        raise SystemExit(0)
        """,
    "from an exit handler": """
        @atexit.register
        def last():
            store.save("job", "step", state(0))
            store.save_async("job", "step", state(1))
            store.save("job", "step", state(2))
            store.save_async("job", "step", state(3))
        """,
    "from a thread that runs on": """
        import asyncio

        def work():
            threading.main_thread().join()
            store.save("job", "step", state(0))
            store.save_async("job", "step", state(1)).result()
            asyncio.run(store.aio.save("job", "step", state(2)))
            checkpoint, loaded = store.load_latest("job")
            assert loaded["n"] == 2 and loaded["array"][-1] == 2
            store.save_async("job", "step", state(3))

        threading.Thread(target=work).start()
        """,
    "in a child of multiprocessing": """
        import multiprocessing

        def work():
            for n in range(4):
                store.save_async("job", "step", state(n))

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        """,
}


def _run(place: str, program: str, before: str = "", text: str = "") -> subprocess.CompletedProcess[str]:
    text = text.format(before=before, program=program) or BEGIN.format(before=before) + textwrap.dedent(program)
    command = [sys.executable, "-c", text, str(place)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})


@pytest.mark.parametrize(("how", "kind"), [*((how, "file:") for how in PROGRAMS), (next(iter(PROGRAMS)), "files:")])
def test_nothing_is_lost_at_the_end(tmp_path: Path, how: str, kind: str) -> None:
    place = f"{kind}{tmp_path / 'store'}"
    ended = _run(place, PROGRAMS[how])
    assert (ended.returncode, ended.stderr) == (0, "")
    with kedge.open(place) as store:
        assert [store.load(c.id)["n"] for c in store.list("job")] == [0, 1, 2, 3]  # type: ignore[index]


BARE = """
{before}
import os, sys
import kedge
store = kedge.open(sys.argv[1])
state = os.urandom(3_000_000)
{program}
"""


@pytest.mark.parametrize("kind", ["file:", "files:"])
def test_nothing_is_lost_without_numpy(tmp_path: Path, kind: str) -> None:
    """Nothing but Kedge has finalizers then, so Python calls them before exit handlers unless Kedge sees to it."""
    place = f"{kind}{tmp_path / 'store'}"
    ended = _run(place, 'store.save_async("job", "step", state)', text=BARE)
    assert (ended.returncode, ended.stderr) == (0, "")
    with kedge.open(place) as store:
        assert len(store.list("job")) == 1
        assert store.verify().is_ok


def test_a_save_in_a_handler_that_is_called_too_late_is_refused(tmp_path: Path) -> None:
    handler = "import atexit; atexit.register(lambda: store.save_async('job', 'step', state))"
    ended = _run(str(tmp_path / "store"), "", handler, text=BARE)
    assert "is closed" in ended.stderr


FAILING = """
for n, parent in enumerate(["nobody", None, "nobody-else"]):
    other = kedge.open(sys.argv[1], namespace=f"space-{n}")
    other.save_async("job", "step", state(n), parent=parent)
sys.exit(0)
"""


def test_what_fails_at_the_end_is_told(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    ended = _run(place, FAILING, "atexit.register(lambda: print('the other handlers run'))")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("a save_async failed as the program ended") == 2
    assert "parent nobody not found" in ended.stderr
    assert "parent nobody-else not found" in ended.stderr
    assert ended.stdout == "the other handlers run\n"
    with kedge.open(place, namespace="space-1") as store:
        assert [store.load(c.id)["n"] for c in store.list("job")] == [1]  # type: ignore[index]
