"""A lost index and the wrong key: nothing is written, and nobody takes the store for empty, which gc would clear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli.app import cli
from tests.parts import require

require("module:cryptography")
pytestmark = pytest.mark.faults

KEY, WRONG = bytes(range(32)).hex(), bytes(range(1, 33)).hex()
REPAIRED = (0, kedge.Corrupted.exit_code)  # it says that what was in the index alone may be missing
STATES = {"small": {"n": 1}, "large": bytes(range(256)) * 1200}


def make(kind: str, folder: Path) -> str:
    url = str(folder / "store") if kind == "directory" else f"files:{folder / 'store'}"
    with kedge.open(url, key=KEY) as store:
        for job, state in STATES.items():
            store.save(job, "step", state)
    return url


def lose_index(url: str, *, keyrings: bool) -> None:
    folder = Path(url.removeprefix("files:"))
    names = [folder / ".kedge" / "journal"] if url.startswith("files:") else list(folder.glob("index.sqlite*"))
    if keyrings:
        names += folder.rglob("keyrings*")
    assert all(name.is_file() for name in names)
    for name in names:
        name.unlink()


def run(command: str, url: str, key: str | None) -> int:
    words = [*command.split(), "--store", url]
    return CliRunner().invoke(cli, words, env={"KEDGE_KEY": key or "", "KEDGE_KEY_FILE": ""}).exit_code


def packs_of(url: str) -> dict[str, bytes]:
    folder = Path(url.removeprefix("files:"))
    return {str(path): path.read_bytes() for path in folder.rglob("*.pack")}


# Files show sealed rows, which need their keyring: without that copy they are lost with the journal.
@pytest.mark.parametrize(("kind", "is_keyring_lost"), [("directory", False), ("directory", True), ("files", False)])
@pytest.mark.parametrize("command", ["rebuild", "check --repair"])
@pytest.mark.parametrize("key", [WRONG, None], ids=["wrong", "none"])
def test_the_wrong_key_changes_nothing(
    tmp_path: Path, kind: str, command: str, key: str | None, is_keyring_lost: bool
) -> None:
    url = make(kind, tmp_path)
    lose_index(url, keyrings=is_keyring_lost)
    packs = packs_of(url)
    assert run(command, url, key) == kedge.Validation.exit_code
    assert run("gc", url, key) != 0
    assert packs_of(url) == packs
    assert run(command, url, KEY) in REPAIRED
    with kedge.open(url, key=KEY, create=False) as store:
        assert {job: store.restore(job) for job in STATES} == STATES


def test_an_index_that_cannot_be_read_and_the_wrong_key(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with kedge.open(place, key=KEY) as store:
        store.save("job", "step", STATES["large"])
    (place / "index.sqlite").write_bytes(os.urandom(20_000))
    packs = packs_of(str(place))
    assert run("check --repair", str(place), WRONG) == kedge.Validation.exit_code
    assert packs_of(str(place)) == packs
    assert run("check --repair", str(place), KEY) in REPAIRED
    with kedge.open(place, key=KEY, create=False) as store:
        assert store.restore("job") == STATES["large"]
