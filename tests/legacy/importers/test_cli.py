"""`kedge import` as users meet it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kedge
from kedge.cli import cli
from tests.waiting import wait_for

from .writers import artemis, jobs


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    folder = tmp_path / "old"
    folder.mkdir()
    for n in range(3):
        jobs.write(folder, jobs.checkpoint("job", f"s{n}", {"n": n}, n))
    (folder / "card.json").write_text(json.dumps(artemis.card("card", {"a": artemis.stage("a", 0)})))
    (folder / "exec.json").write_text(jobs.truncated(jobs.execution("c1", [jobs.step("draft")])))
    return folder


def run(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def test_dry_run_import_and_again(old: Path, tmp_path: Path) -> None:
    plan = run("import", str(old), "--dry-run", code=6)
    assert "7 checkpoints would be imported, 4 jobs" in plan.stdout
    assert "corrupted: exec.json: the file is cut off" in plan.stdout
    assert not (tmp_path / "store").exists()
    done = run("import", str(old), code=6)
    assert "found 7 checkpoints: 3 artemis, 4 jobs" in done.stderr
    assert "7 checkpoints imported, 4 jobs" in done.stdout
    assert "files: 4 taken whole, 1 in part, 0 skipped" in done.stdout
    again: Any = json.loads(run("import", str(old), "--json", code=6).stdout)
    assert (again["imported"], again["present"], again["jobs"]) == (0, 7, 4)
    assert again["corrupted"][0]["paths"] == ["checkpoints[0] draft"]
    assert (again["files"]["card.json"], again["files"]["exec.json"]) == ("whole", "part")
    assert json.loads(run("restore", "job").stdout) == {"n": 2}


def test_a_card_cut_before_its_first_stage_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    card = json.dumps(artemis.card("card", {"a": artemis.stage("a", 0)}), indent=1)
    old = tmp_path / "old"
    old.mkdir()
    (old / "card.json").write_text(card[:300])
    report = json.loads(run("import", str(old), "--json", code=6).stdout)
    assert (report["imported"], report["jobs"], report["files"]) == (0, 0, {"card.json": "skipped"})
    assert report["corrupted"][0]["reason"] == "the file is cut off; nothing of it can be used"
    (old / "card.json").write_text(card)
    assert json.loads(run("import", str(old), "--json").stdout)["files"] == {"card.json": "whole"}


def test_wrong_words(old: Path) -> None:
    run("import", str(old / "nowhere"), code=4)
    run("import", str(old), "--from", "floppy", code=2)
    run("import", str(old), "--allow", "no name", "--dry-run", code=3)
    run("import", str(old), "--job-prefix", "../", code=3)
    run("import", str(old), "--watch", "--dry-run", code=2)


def test_watch_brings_what_is_new(old: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "kedge", "import", str(old), "--watch", "--every", "0.1", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        first = ""
        while not first.endswith("\n}\n"):
            first += process.stdout.readline()
        assert json.loads(first)["imported"] == 6  # the one that is cut may just be written
        jobs.write(old, jobs.checkpoint("job", "s9", {"n": 9}, 9))
        with kedge.open(tmp_path / "store") as store:
            wait_for(lambda: len(store.list("job")) == 4, "what is new is not imported")
            assert store.restore("job") == {"n": 9}
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
