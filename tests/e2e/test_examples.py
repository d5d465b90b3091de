"""The examples, killed in the middle and started again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kedge
from tests.parts import library
from tests.servers.models import ModelServer
from tests.waiting import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


HELD = """
import time
pause = time.sleep  # sleep: which stands for work in the examples
def work(seconds):
    if seconds == {seconds}:
        with open({log!r}, "ab", 0) as log:
            log.write(b".")
            while log.tell() > {times}:
                pause(60)
    pause(seconds)
time.sleep = work  # sleep: which never ends after some times
"""


def start(*words: str, **options: Any) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], stdout=pipe, stderr=pipe, text=True, **options)


def start_held(folder: Path, seconds: float, times: int, *words: str) -> "subprocess.Popen[str]":
    """An example that, with all its processes, sleeps for so many seconds so many times, and never wakes up again."""
    (folder / "held").mkdir()
    log = str(folder / "held" / "log")
    (folder / "held" / "sitecustomize.py").write_text(HELD.format(seconds=seconds, log=log, times=times))
    return start(*words, env={**os.environ, "PYTHONPATH": str(folder / "held")})


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("how", [(), ("--processes",)])
def test_tiles(tmp_path: Path, how: tuple[str, ...]) -> None:
    words = (str(EXAMPLES / "tiles.py"), *how, "--pause")
    whole = finish(start(*words, "0", "--store", str(tmp_path / "whole")))
    store = tmp_path / "store"
    process = start_held(tmp_path, 0.01, 8, *words, "0.01", "--store", str(store))

    def done_tiles() -> list[str]:
        if not (store / "kedge-store").exists():
            return []
        with kedge.open(store) as opened:
            batches = opened.list("tiles", level="substep")
            return [str(b.metadata["keys"]) for b in batches if b.metadata.get("kind") == "items"]

    wait_for(lambda: len("".join(done_tiles())) >= 5 * 32, "no tile is done")
    process.kill()
    process.communicate()
    assert len("".join(done_tiles())) < 36 * 32
    assert finish(start(*words, "0", "--store", str(store))) == whole
    everything = "".join(done_tiles())
    assert len(everything) == 36 * 32  # each tile once: those that were kept were not done again
    with kedge.open(store) as opened:
        assert opened.verify().is_ok


def test_documents(tmp_path: Path) -> None:
    """Killed while two calls are under way: those two are asked again, and no other call is paid twice."""
    store = tmp_path / "store"
    with ModelServer() as server:
        words = (str(EXAMPLES / "documents.py"), "--url", f"{server.url}/v1", "--store", str(store))
        server.allow(5)
        process = start(*words)

        def is_stuck() -> bool:
            if not (store / "kedge-store").exists() or len(server.calls) < 7:
                return False
            with kedge.open(store) as opened:
                return len([c for c in opened.list("llm:cache") if c.metadata["url"].startswith("http")]) == 5

        wait_for(lambda: is_stuck() or process.poll() is not None, "five calls are not answered")
        process.kill()
        process.communicate()
        server.allow(None)
        out = finish(start(*words))
        assert out.startswith("13 summaries, ")
        assert sorted(server.calls.values()) == [1] * 11 + [2] * 2  # 12 documents that differ, and the report
        shown = finish(start("-m", "kedge", "runs", "show", "documents", "--store", str(store)))
        assert "models    13 paid, $0.0" in shown
        other = finish(start(*words, "--run", "another"))  # another run: everything is there already
        assert other == out
        assert sum(server.calls.values()) == 15
    stats = finish(start("-m", "kedge", "llm", "stats", "--by", "run", "--json", "--store", str(store)))
    bills = {group["run"]: group for group in json.loads(stats)["groups"]}
    assert bills["another"]["paid"] == 0
    assert float(bills["another"]["saved"]) > 0
    with kedge.open(store) as opened:
        assert opened.verify().is_ok


def test_approval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    words = (str(EXAMPLES / "approval.py"), "2.0")
    process = start_held(tmp_path, 0.3, 2, *words)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.kill()  # while it tests the pages
    process.communicate()
    assert lines == ["building 2.0\n", "testing units of app-2.0.tar\n", "testing pages of app-2.0.tar\n"]
    process = start(*words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert out == "testing pages of app-2.0.tar\ntesting upgrade of app-2.0.tar\n"
    assert "kedge runs resume release-2.0" in err
    shown = finish(start("-m", "kedge", "runs", "show", "release-2.0"))
    assert "approval go live: Publish app-2.0.tar?" in shown
    assert "built and tested app-2.0.tar" in shown
    out = finish(start("-m", "kedge", "approve", "release-2.0", "--by", "ada", "--resume"))
    assert out.splitlines() == [
        "go live of release-2.0 is approved by ada",
        "publishing app-2.0.tar, approved by ada",
        "published at https://example.org/app-2.0.tar",
    ]
    process = start("-m", "kedge", "approve", "release-2.0", "go live", "--deny")
    assert "was approved by ada" in process.communicate(timeout=60)[1]
    assert process.returncode == 5
    process = start("-m", "kedge", "approve", "release-2.0")
    process.communicate(timeout=60)
    assert process.returncode == 4
    start("-m", "kedge", "runs", "signal", "release-2.0", "x", "[1]", "--ahead").communicate(timeout=60)


def test_the_kubernetes_job_is_one() -> None:
    """What the API server and the Job's controller ask of a manifest (batch/v1), and what the example reads."""
    yaml = library("yaml")
    folder = EXAMPLES / "kubernetes"
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert 1 <= spec["parallelism"] <= spec["completions"]
    assert spec["backoffLimitPerIndex"] >= 0
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # asked for by backoffLimitPerIndex and podFailurePolicy
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] == "Ignore"
        assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    (container,) = pod["containers"]
    assert {"name", "image", "command", "env", "resources"} == container.keys()
    python, script, what = container["command"]
    assert (python, what, script.removeprefix("/app/")) == ("python", "work", "items.py")
    read = set(re.findall(r'os\.environ(?:\.get\(|\[)"(\w+)"', (folder / "items.py").read_text()))
    read |= set(re.findall(r"os\.environ\.get\('(\w+)'", (folder / "items.py").read_text()))
    assert "JOB_COMPLETION_INDEX" in read  # which the Job sets by itself
    for entry in container["env"]:
        assert entry["name"] in read
        assert isinstance(entry.get("value", ""), str)
        assert ("value" in entry) != ("valueFrom" in entry)
        if "valueFrom" in entry:
            assert entry["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}
    for amounts in container["resources"].values():
        assert all(re.fullmatch(r"\d+(m|Mi|Gi)?", str(amount)) for amount in amounts.values())
