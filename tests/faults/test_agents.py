"""Agents survive kills: nothing acknowledged is lost, no node that another one followed runs again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import require

require("module:langgraph")

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_no_completed_node_runs_again() -> None:
    command = [sys.executable, "-m", "tests.torture.agents", "30", "1"]  # a process of its own: it forks
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    kills, threads = (int(number) for number in re.findall(r"'(?:kills|threads)': (\d+)", done.stdout))
    assert kills >= 30
    assert threads >= 2


def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    script = ROOT / "examples" / "agent.py"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )

    killed = run("ask", "--kill-in", "draft")
    assert killed.returncode == -9, killed.stderr
    asked = run("ask")
    assert asked.returncode == 0, asked.stderr
    assert "resuming" in asked.stdout
    assert "waiting for approval" in asked.stdout
    assert "research" not in asked.stdout, "that node had completed"
    approved = run("approve", "yes")
    assert "published" in approved.stdout, approved.stderr
    history = run("history")
    assert history.stdout.count("thread:report") == 0
    assert len(history.stdout.splitlines()) >= 5
    again = run("redo")
    assert "draft 2" in again.stdout, again.stderr
