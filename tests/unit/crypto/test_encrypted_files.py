"""I10 where people read along: `files:dir` keeps its layout, sealed; `memory:dir` seals what it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

import kedge
from kedge.errors import Conflict, Corrupted, Validation
from kedge.index.files.index import FilesIndex
from tests.parts import require

require("module:cryptography")
from tests.unit.crypto.test_encryption import (
    KEY,
    MUTANTS,
    NAMES,
    OTHER,
    SECRETS,
    TAMPERED,
    assert_absent,
    bytes_on_disk,
    chunk_names,
    fill,
    history,
    same,
    states,
)

Schemes = pytest.mark.parametrize("scheme", ["files", "memory"])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


def documents(place: Path) -> list[Path]:
    return sorted(p for p in place.glob("**/*.json") if ".kedge" not in p.parts)


@pytest.mark.parametrize("hidden", [False, True])
@Schemes
def test_nothing_secret_is_on_disk(place: Path, scheme: str, hidden: bool) -> None:
    words = (*SECRETS, *NAMES, "salaries") if hidden else SECRETS
    with kedge.open(f"{scheme}:{place}", key=KEY, encrypt_names=hidden) as store:
        ids = fill(store)
        store.delete(NAMES[0], ids["text"])
        before = states(store, {name: i for name, i in ids.items() if name != "text"})
    assert_absent(place, words)
    with kedge.open(f"{scheme}:{place}", key=KEY) as store:
        assert (store.encryption or {})["encrypts_names"] == hidden
        assert all(same(store.load(ids[name]), state) for name, state in before.items())
        assert store.list(NAMES[0], tags={"tag-name": "prod-env"}, metadata={"loss-figure": 7})
        assert store.verify().is_ok
    assert_absent(place, words)


def test_a_sealed_checkpoint_is_still_a_file(place: Path) -> None:
    with kedge.open(f"files:{place}", key=KEY) as store:
        saved = store.save("train", "epoch 3", {"w": "hunter2"}, tags={"env": "prod"}, level="stage")
    shown = json.loads((place / "train" / "stage" / f"{saved}.json").read_text())
    assert (shown["id"], shown["job"], shown["step"], shown["seq"]) == (saved, "train", "epoch 3", 1)
    assert "state" not in shown
    assert shown["sealed"].startswith("4")  # an envelope: 0xE1 in base64
    assert list(shown["metadata"]) == ["sealed"]
    assert all(name.startswith("~") for name in shown["tags"])


def test_hidden_names_are_no_folders(place: Path) -> None:
    with kedge.open(f"files:{place}", key=KEY, encrypt_names=True) as store:
        kept = store.save("payroll", "salaries", 1)
        gone = store.save("payroll", "salaries", 2)
        store.delete("payroll", gone)
    (document,) = documents(place)
    assert document.name == f"{kept}.json"
    assert document.parent.parent.name.startswith("~")
    document.unlink()
    kedge.open(f"files:{place}", key=KEY).close()
    assert documents(place) == [document]


@Schemes
def test_without_the_right_key_nothing_opens(place: Path, scheme: str) -> None:
    url = f"{scheme}:{place}"
    with kedge.open(url, key=KEY) as store:
        store.save("j", "s", 1)
    with pytest.raises(Validation, match="encrypted, and no key was given"):
        kedge.open(url)
    with pytest.raises(Validation, match=r"is encrypted under key .*, and the one given is"):
        kedge.open(url, key=OTHER)
    with kedge.open(f"{scheme}:{place}-2") as plain:
        plain.save("j", "s", 1)
    with pytest.raises(Conflict, match="not encrypted, and a key was given"):
        kedge.open(f"{scheme}:{place}-2", key=KEY)
    with kedge.open(f"{scheme}:{place}-2") as plain:
        assert plain.restore("j") == 1


def test_a_plain_writer_that_was_there_first_is_refused(place: Path) -> None:
    plain = kedge.open(f"files:{place}")
    with kedge.open(f"files:{place}", key=KEY) as store:
        with pytest.raises(Conflict, match="this save is not encrypted"):
            plain.save("k", "s", "plain text")
        store.save("k", "s", 1)
        assert_absent(place, ("plain text",))
    plain.close()


def alter(place: Path, *statements: str) -> None:
    """Change rows as somebody would who can write the journal, whose digests are no secret."""
    index = FilesIndex(place)
    for statement in statements:
        index._connection.execute(statement)
    with index._journal.locked():
        index._publish()
    index.close()


def read_everything(place: Path) -> None:
    with kedge.open(f"files:{place}", key=KEY) as store:
        for job in store.jobs():
            for checkpoint in store.list(job.name):
                store.load(checkpoint.id)


CHANGES = ("manifests swapped", "plain manifest", "a plain row", "another level", "another job")


@pytest.mark.parametrize("what", CHANGES)
def test_changed_rows_are_refused_and_told(place: Path, what: str) -> None:
    with kedge.open(f"files:{place}", key=KEY) as store:
        history(store)
    read_everything(place)
    alter(place, *TAMPERED[what])
    with pytest.raises(Corrupted):
        read_everything(place)
    with kedge.open(f"files:{place}", key=KEY) as store:
        assert store.verify().corrupted


@pytest.mark.parametrize(("mutant", "what"), [("no associated data", CHANGES[0]), ("plain accepted", CHANGES[2])])
def test_the_checks_that_refuse_them_are_needed(place: Path, mutant: str, what: str) -> None:
    with MUTANTS[mutant]():
        with kedge.open(f"files:{place}", key=KEY) as store:
            history(store)
        alter(place, *TAMPERED[what])
        read_everything(place)


@Schemes
def test_another_master_key(place: Path, scheme: str) -> None:
    url = f"{scheme}:{place}"
    with kedge.open(url, key=KEY) as store:
        first = store.save("j", "before", {"n": 1})
        assert not store.rekey(OTHER).is_rewritten
        store.save("j", "after", {"n": 2})
    with pytest.raises(Validation):
        kedge.open(url, key=KEY)
    with kedge.open(url, key=OTHER) as store:
        assert (store.load(first), store.restore("j")) == ({"n": 1}, {"n": 2})


def rewrite(url: str, place: Path) -> None:
    with kedge.open(url, key=KEY) as store:
        ids = fill(store)
        before = states(store, ids)
    with kedge.open(url, key=KEY) as store:
        vault = store.store.at_rest().vault
        assert vault is not None
        old, old_names = vault.current, chunk_names(store) if url.startswith("files") else set()
        assert store.rekey(rewrite=True).unreadable == ()
        store.gc()
        assert store.verify().is_ok
        store.save("j", "after", 1)
    for path, data in bytes_on_disk(place):
        if path.suffix == ".json":
            data = json.dumps(json.loads(data)).encode()
        for form in _forms(b"\xe1" + old.id):
            assert form not in data, path
        assert not any(form in data for name in old_names for form in _forms(name)), path
    with kedge.open(url, key=KEY) as store:
        assert (store.encryption or {})["old_data_keys"] == []
        assert all(same(store.load(ids[name]), state) for name, state in before.items())


def _forms(data: bytes) -> tuple[bytes, ...]:
    """As it is, as SQL and JSON have it."""
    import base64

    return data, data.hex().upper().encode(), base64.b64encode(data[: len(data) // 3 * 3])


@Schemes
def test_rewriting_leaves_nothing_under_the_old_key(place: Path, scheme: str) -> None:
    rewrite(f"{scheme}:{place}", place)


def test_without_a_new_journal_the_old_rows_would_stay(place: Path) -> None:
    """The mutant of the test above."""
    with mock.patch.object(FilesIndex, "scrub"), pytest.raises(AssertionError):
        rewrite(f"files:{place}", place)


def test_tenants_have_keys_of_their_own(place: Path) -> None:
    with kedge.open(f"files:{place}", key=KEY) as store:
        store.save("j", "s", "ours")
        with kedge.open(f"files:{place}", namespace="t", key=OTHER) as tenant:
            tenant.save("j", "s", "theirs")
        assert store.restore("j") == "ours"
    with pytest.raises(Validation):
        kedge.open(f"files:{place}", namespace="t", key=KEY)
    assert set(json.loads((place / ".kedge" / "keyrings").read_bytes())) == {"default", "t"}


def test_memory_draws_no_telling_ids_where_names_are_hidden(place: Path) -> None:
    with kedge.open(f"memory:{place}", key=KEY, encrypt_names=True) as store:
        assert store.save("j", "salaries", 1).startswith("checkpoint_")
