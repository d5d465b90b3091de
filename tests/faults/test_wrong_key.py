"""A lost index and the wrong key: nothing is written, and nobody takes the store for empty, which gc would clear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
from kedge.blobs.packs import PackBlobs
from kedge.care.repair import repair
from kedge.care.repair_files import refile
from kedge.cli.app import cli
from tests.parts import require
from tests.torture import mutants

require("module:cryptography")
from kedge.crypto import parse_master

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
    return CliRunner().invoke(cli, words, env={"KEDGE_KEY": key, "KEDGE_KEY_FILE": None}).exit_code


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
    assert run("gc --dry-run", url, key) == run("gc", url, key) != 0
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


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("directory", "nothing"),
        ("directory", "index"),
        ("directory", "keyrings"),
        ("files", "nothing"),
        ("files", "index"),
    ],
)
def test_what_is_under_another_key_stays_until_that_is_given(tmp_path: Path, kind: str, lost: str) -> None:
    url, other = make(kind, tmp_path), {"small": {"n": 2}, "large": bytes(range(255, -1, -1)) * 1300}
    with kedge.open(url, namespace="other", key=WRONG) as store:
        parent = store.save("small", "deleted", 0)
        child = store.save("small", "step", other["small"], parent=parent, tags={"k": "v"}, idempotency_key="once")
        store.save("large", "step", other["large"])
        store.delete("small", parent)
    if lost != "nothing":
        lose_index(url, keyrings=lost == "keyrings")
    make_anew = refile if kind == "files" else repair
    make_anew(Path(url.removeprefix("files:")), actor="t", master=parse_master(KEY))
    assert run("gc", url, KEY) == 0
    with kedge.open(url, namespace="other", key=WRONG) as store:
        store.gc()
        if lost == "nothing":
            assert {job: store.restore(job) for job in other} == other
    assert run("rebuild --namespace other", url, WRONG) in REPAIRED
    with kedge.open(url, namespace="other", key=WRONG) as store:
        assert {job: store.restore(job) for job in other} == other
        if lost == "nothing":
            assert store.get(child).tags == {"k": "v"}
            assert store.save("small", "step", other["small"], idempotency_key="once") == child
            assert store.get(store.save("small", "next", 3)).seq == 3
        assert store.verify().is_ok
        for job in other:
            store.delete_job(job)
        assert store.gc().packs_removed  # as anywhere, now that all packs have been read
    with kedge.open(url, key=KEY) as store:
        assert {job: store.restore(job) for job in STATES} == STATES
        assert store.verify().is_ok


def check_gc_keeps_every_pack(place: Path) -> None:
    """A save tells of itself in its last pack only: those before hold nothing but chunks, and say not whose."""
    state = {f"part {n}": os.urandom(150_000) for n in range(6)}
    with kedge.open(place, key=KEY) as store:
        store.save("kept", "step", os.urandom(100_000))
        store.save("gone", "step", os.urandom(100_000))
    before = packs_of(str(place)).keys()
    with kedge.open(place, namespace="other", key=WRONG) as store:
        saved = store.save("job", "step", state)
    theirs = packs_of(str(place)).keys() - before
    assert len(theirs) > 1
    lose_index(str(place), keyrings=False)
    repair(place, actor="t", master=parse_master(KEY))
    with kedge.open(place, key=KEY) as store:
        store.delete_job("gone")
        foreseen, done = store.gc(dry_run=True), store.gc()
        assert done.packs_removed  # what is known to be garbage goes
        assert foreseen.chunks_removed == done.chunks_removed
        assert (foreseen.packs_removed, foreseen.packs_rewritten) == (done.packs_removed, done.packs_rewritten)
    assert theirs <= packs_of(str(place)).keys()
    assert run("rebuild --namespace other", str(place), WRONG) in REPAIRED
    with kedge.open(place, namespace="other", key=WRONG) as store:
        assert store.load(saved) == state
        assert store.verify().is_ok


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PackBlobs.__init__.__kwdefaults__, "roll_bytes", 64 << 10)


@pytest.mark.usefixtures("small_packs")
def test_gc_keeps_packs_that_do_not_say_whose_they_are(tmp_path: Path) -> None:
    check_gc_keeps_every_pack(tmp_path / "store")


@pytest.mark.mutant
@pytest.mark.usefixtures("small_packs")
def test_a_gc_that_removes_them_is_noticed(tmp_path: Path) -> None:
    with mutants.applied("packs without records removed"), pytest.raises((AssertionError, kedge.CheckpointError)):
        check_gc_keeps_every_pack(tmp_path / "store")
