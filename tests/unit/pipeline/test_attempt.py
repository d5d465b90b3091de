"""Steps in processes of their own: the guard that a program needs for them, their errors, and their end."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kedge.pipeline.attempt import Isolation

STEP = """
import kedge, sys
def work(item=1):
    return item
{guard}with kedge.run("r", store=sys.argv[1]) as run:
    {indent}{call}
    {indent}print("done")
"""


def start(tmp_path: Path, call: str, *, guard: bool) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    lines = STEP.format(guard="", indent="", call=call).splitlines()
    if guard:
        at = next(number for number, line in enumerate(lines) if line.startswith("with"))
        lines = [*lines[:at], 'if __name__ == "__main__":', *(f"    {line}" for line in lines[at:])]
    program.write_text("\n".join(lines) + "\n")
    words = [sys.executable, str(program), str(tmp_path / "store")]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "call",
    [
        'run.step("work", work, timeout_s=60, retries=5)',
        'run.map(work, range(3), executor="process", workers=2)',
    ],
)
def test_processes_need_a_guard(tmp_path: Path, call: str) -> None:
    bare = start(tmp_path, call, guard=False)
    assert bare.returncode == 1
    assert bare.stderr.count("Traceback") == 1
    assert 'put what the program does below `if __name__ == "__main__":`' in bare.stderr
    guarded = start(tmp_path, call, guard=True)
    assert (guarded.returncode, guarded.stdout) == (0, "done\n"), guarded.stderr
    again = start(tmp_path, call, guard=True)
    assert "kedge: run r already completed on" in again.stderr


OWN_ERROR = """
import kedge, sys
class CardError(Exception):
    def __init__(self, code, *, amount):
        super().__init__(f"refused: {code}")
        self.amount = amount
def charge():
    raise CardError("expired", amount=3)
if __name__ == "__main__":
    with kedge.run("r", store=sys.argv[1]) as run:
        try:
            run.step("charge", charge, timeout_s=60)
        except CardError as error:
            run.step("release", int)
            print(error, error.amount)
"""


def test_errors_of_the_program_itself_come_back_from_processes_and_from_the_store(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OWN_ERROR)
    for _ in range(2):
        words = [sys.executable, str(program), str(tmp_path / "store")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "refused: expired 3\n"), done.stderr


def test_who_closes_waits_for_what_another_thread_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has ended leaves no process behind, not even one that is about to end."""
    isolation = Isolation()
    pool = isolation.pool(1)
    begun, go, join = threading.Event(), threading.Event(), pool.join

    def join_late() -> None:
        begun.set()
        go.wait()
        join()

    monkeypatch.setattr(pool, "join", join_late)
    with ThreadPoolExecutor(2) as threads:
        killed = threads.submit(isolation.drop, 1)
        begun.wait()
        closed = threads.submit(isolation.close)
        try:
            with pytest.raises(TimeoutError):
                closed.result(0.2)  # limit: it would come at once if it did not wait
        finally:
            go.set()
        killed.result()
        closed.result()
