"""The seam of a dump: a socket in the attempt's own folder, so that no killed one leaves anything elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from kedge.containers.attempts import Attempt, attempt
from kedge.containers.criu import relay
from kedge.containers.criu.command import seam


def test_a_folder_with_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sockets have at most 107 characters, those of folders need not; and the folder goes with the attempt."""
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / ("long" * 30)))
    with attempt("checkpoint", "one") as under_way, seam(under_way) as waiting:
        assert list(under_way.bin.iterdir()) == [under_way.bin / "seam"]
        asking = ask(under_way)
        assert waiting.wait(asking)
        waiting.let_go()
        assert asking.wait() == 0
    assert not under_way.bin.exists()
    assert ask(under_way).wait() == 1  # nobody is there any more


def ask(under_way: Attempt) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-IS", relay.__file__, "--ask", str(under_way.bin)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)
