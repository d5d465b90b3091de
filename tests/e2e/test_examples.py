"""The examples, killed in the middle and started again."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("how", [(), ("--processes",)])
def test_tiles(tmp_path: Path, how: tuple[str, ...]) -> None:
    words = (str(EXAMPLES / "tiles.py"), *how, "--pause")
    whole = finish(start(*words, "0", "--store", str(tmp_path / "whole")))
    store = tmp_path / "store"
    process = start(*words, "0.2", "--store", str(store))

    def done_tiles() -> list[str]:
        if not (store / "holdfast-store").exists():
            return []
        with holdfast.open(store) as opened:
            batches = opened.list("tiles", level="substep")
            return [str(b.metadata["keys"]) for b in batches if b.metadata.get("kind") == "items"]

    until = time.monotonic() + 60
    while len(done_tiles()) < 5:
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    kept = done_tiles()
    assert 5 <= len(kept) < 36
    assert finish(start(*words, "0", "--store", str(store))) == whole
    everything = "".join(done_tiles())
    assert len(everything) == 36 * 32  # each tile once: those that were kept were not done again
    with holdfast.open(store) as opened:
        assert opened.verify().is_ok
