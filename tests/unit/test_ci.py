"""What CI runs: the checks and the tests, both whatever the other says."""

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.parametrize("failing", ["nothing", "check", "test"])
def test_both_run_and_either_may_fail_it(tmp_path: Path, failing: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    dev = tmp_path / "dev"
    dev.write_text(f'#!/bin/sh\necho "$1 $KEDGE_REQUIRE" >>log\n[ "$1" != {failing} ]\n')
    dev.chmod(0o755)
    done = subprocess.run([str(tmp_path / ".ci" / "run")], capture_output=True, text=True, cwd="/")
    assert (tmp_path / "log").read_text() == "check all\ntest all\n"
    assert (done.returncode == 0) == (failing == "nothing")
    assert (f"./dev {failing}" in done.stderr) == (failing != "nothing")
