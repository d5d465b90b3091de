"""A program without a main guard gets one short error before any process is started."""

import subprocess
import sys
from pathlib import Path

import pytest

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
