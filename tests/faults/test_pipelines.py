"""Killed at any durable write, a run goes on: what was completed is not executed again, and the result is the same."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge.pipeline.step import Steps
from tests.torture.pipelines import Violation, case_for_real, case_in_process

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("part", range(4))
def test_killed_at_any_durable_write(part: int) -> None:
    kills = sum(case_in_process(f"{part}-{number}") for number in range(75))
    assert kills > 75


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_for_real(tmp_path: Path, seed: int) -> None:
    assert case_for_real(seed, tmp_path) >= 0


KILLED = """
import os, signal, sys, kedge
with kedge.open(sys.argv[1]) as store:
    commit = store.store.index.commit

    def deadly(*args, **options):
        if sys.argv[2] == "behind":
            commit(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    store.store.index.commit = deadly
    with kedge.run("r", store=store):
        pass
"""


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_killed_at_its_first_record(tmp_path: Path, moment: str) -> None:
    """With which it takes the lease: the next one goes on at once, not when that ends."""
    words = [sys.executable, "-c", KILLED, str(tmp_path / "store"), moment]
    killed = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with kedge.run("r", store=tmp_path / "store") as run:
        assert run.session == (1 if moment == "before" else 2)
        with pytest.raises(kedge.LeaseHeld), kedge.run("r", store=tmp_path / "store"):
            pass  # this one is alive


@pytest.mark.mutant
def test_a_lease_of_the_dead_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.pipeline.owner.is_holder_gone", lambda holder: False)
    with pytest.raises(kedge.LeaseHeld):
        test_killed_at_its_first_record(tmp_path, "behind")


@pytest.mark.mutant
def test_a_step_that_is_not_found_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "_saved", lambda steps, step: None)
    with pytest.raises((Violation, kedge.Conflict)):
        for number in range(20):
            case_in_process(number)


@pytest.mark.mutant
def test_a_map_that_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.pipeline.map import Map

    monkeypatch.setattr(Map, "_catch_up", lambda map, *, with_results: None)
    with pytest.raises(Violation):
        for number in range(50):
            case_in_process(number)


@pytest.mark.mutant
def test_a_handled_failure_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.pipeline.final_failures.kept_failures", lambda store, run, newest: {})
    with pytest.raises(Violation, match="was undone"):
        for number in range(100):
            case_in_process(number)
