"""Training survives kills, bit for bit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.requires("module:torch")]

ROOT = Path(__file__).parents[2]
BROKEN = """
import sys
from pathlib import Path
from unittest.mock import patch
from kedge.integrations.torch import training
from tests.torture.training import kill_training
for n, (owner, safeguard) in enumerate([(training, "set_random_state"), (training.Batches, "load_state_dict")]):
    place = Path(sys.argv[1], str(n))
    place.mkdir()
    with patch.object(owner, safeguard, lambda *_: None):
        try:
            kill_training(place, kills=3, seed=3, steps=30, by_saves=True)
        except AssertionError as error:
            print(error)
"""


def run(*words: str) -> str:
    """In a process of its own: it forks."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_it_ends_as_if_nobody_had_killed_it() -> None:
    assert int(re.findall(r"'kills': (\d+)", run("-m", "tests.torture.training", "4", "1", "30"))[0]) >= 4


@pytest.mark.mutant
def test_a_run_that_forgets_something_is_found_out(tmp_path: Path) -> None:
    assert run("-c", BROKEN, str(tmp_path)).count("ended with other bits") == 2
