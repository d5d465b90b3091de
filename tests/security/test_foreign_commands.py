"""A run's command comes from its store: whoever else may write that store does not run code on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli.app import cli
from kedge.server import create_app
from tests.server.conftest import listening

MAIN = "from kedge.cli import main; main()"


def plant(store: Any, proof: Path) -> None:
    """A paused run that waits for an approval, as anybody with scope write can save one."""
    code = f"open({str(proof)!r}, 'w')"
    state = {"command": {"argv": [sys.executable, "-c", code], "cwd": "/"}, "ran": [], "reused": []}
    waiting = [{"for": "approval", "name": "go", "prompt": ""}]
    metadata = {"kind": "run", "status": "paused", "session": 1, "version": "", "waiting": waiting}
    store.save("nightly", "paused", state, level="pipeline", tags={"kind": "run"}, metadata=metadata)


def kedge_command(place: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KEDGE_STORE": place}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words], env=environment, capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that the attacker's code makes."""
    return tmp_path / "proof"


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process would have become."""
    commands: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: commands.append(argv))
    return commands


def refuses(place: str, proof: Path, executed: list[Any]) -> None:
    for words in (["runs", "resume", "nightly"], ["approve", "nightly", "go", "--resume"]):
        done = CliRunner().invoke(cli, [*words, "--store", place])
        assert done.exit_code != 0
        assert "--print" in done.output
    assert not executed
    shown = CliRunner().invoke(cli, ["runs", "resume", "nightly", "--print", "--store", place])
    assert str(proof) in shown.output


def test_a_command_from_a_service_is_not_run(tmp_path: Path, proof: Path, executed: list[Any]) -> None:
    with kedge.open(tmp_path / "store") as store:
        plant(store, proof)
    with listening(create_app(tmp_path / "store")) as url:
        refuses(url, proof, executed)


def test_a_command_from_a_shared_directory_is_not_run(tmp_path: Path, proof: Path, executed: list[Any]) -> None:
    with kedge.open(tmp_path / "store") as store:
        plant(store, proof)
    (tmp_path / "store").chmod(0o777)
    refuses(str(tmp_path / "store"), proof, executed)
    with kedge.open(tmp_path / "store") as store:  # nothing was decided either: a decision is final
        assert len(store.list("nightly")) == 1


@pytest.mark.parametrize(("answer", "runs"), [("n\n", False), ("\n", False), ("y\n", True)], ids=["no", "enter", "yes"])
def test_a_person_is_shown_the_command_and_asked(tmp_path: Path, proof: Path, answer: str, runs: bool) -> None:
    with kedge.open(tmp_path / "store") as store:
        plant(store, proof)
    (tmp_path / "store").chmod(0o777)
    ours, theirs = os.openpty()
    try:
        os.write(ours, answer.encode())
        done = kedge_command(str(tmp_path / "store"), "runs", "resume", "nightly", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert str(proof) in done.stderr
    assert proof.exists() is runs


def test_ones_own_command_runs(tmp_path: Path, proof: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        plant(store, proof)
    (tmp_path / "store").chmod(0o755)
    assert kedge_command(str(tmp_path / "store"), "runs", "resume", "nightly").returncode == 0
    assert proof.exists()


def test_a_stranger_owns_nothing(tmp_path: Path, proof: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.cli.commands.runs import confirm_foreign

    (tmp_path / "store").mkdir(mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(kedge.NotAllowed):
        confirm_foreign("nightly", ["rm", "-rf", "/"], "/", str(tmp_path / "store"))


@pytest.mark.parametrize(
    "command",
    [
        None,
        "rm -rf /",
        {"argv": "rm", "cwd": "/"},
        {"argv": [], "cwd": "/"},
        {"argv": [1], "cwd": "/"},
        {"argv": ["a"]},
    ],
    ids=str,
)
def test_a_command_that_is_none_is_not_run(tmp_path: Path, command: object) -> None:
    from kedge.pipeline.origin import command_of

    with kedge.open(tmp_path / "store") as store:
        metadata = {"kind": "run", "status": "paused", "session": 1}
        store.save("nightly", "paused", {"command": command}, level="pipeline", tags={"kind": "run"}, metadata=metadata)
        with pytest.raises(kedge.NotFound):
            command_of(store, "nightly")
