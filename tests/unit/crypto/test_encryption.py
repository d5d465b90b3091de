"""I10: what is in an encrypted store, who can read it, and what happens to somebody who changes it."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kedge
from kedge.errors import CheckpointError, Conflict, Corrupted, Validation
from kedge.process.workflow import Workflows
from kedge.store.request import Request
from kedge.store.rope import PartedTree, Piece, Pieces
from tests.parts import require

require("module:cryptography")
import kedge.index.encrypted
from kedge.crypto import DataKey, Vault, new_master_text, open_keyring, parse_master
from kedge.index.sealed_rows import Proof

KEY = "kdk1_" + "A" * 42 + "E"
OTHER = bytes(range(32))
SECRETS = ("hunter2", "crown-jewels", "loss-figure", "prod-env", "retry-key-7", "conversation-line", "tag-name")
NAMES = ("payroll-job", "count the salaries")


def fill(store: kedge.CheckpointManager) -> dict[str, str]:
    """Everything a store can hold, with secrets in each place that may hold one."""
    draw = random.Random(3)
    job, step = NAMES
    ids = {
        "small": store.save(
            job, step, {"password": "hunter2"}, tags={"tag-name": "prod-env"}, metadata={"loss-figure": 7},
            idempotency_key="retry-key-7",
        ),
        "text": store.save(job, step, ["crown-jewels " * 5] * 9000),
        "inline chunks": store.save(job, step, {"b": b"crown-jewels" * 700, "r": draw.randbytes(30_000)}),
        "large": store.save(job, step, {"a": np.frombuffer(draw.randbytes(3_000_000), np.uint8), "t": "hunter2" * 999}),
        "zeros": store.save(job, step, bytes(2_000_000)),
    }  # fmt: skip
    head = b"\xdc" + (40).to_bytes(2, "big")
    run = Pieces([Piece(b"\xd9\x28" + f"conversation-line {n:>22}".encode()) for n in range(40)])
    parted = store.store.save(Request(job=job, step=step), PartedTree([head, run]), actor=store.actor)
    ids["parted"] = parted.id
    store.tag(ids["text"], **{"tag-name": "prod-env"})
    store.set_retention(job, kedge.RetentionPolicy(keep_last=100, keep_tags={"tag-name": "prod-env"}))
    store.store.index.append_event("note", actor=store.actor, job=job, detail='{"who": "hunter2"}')
    return ids


def states(store: kedge.CheckpointManager, ids: dict[str, str]) -> dict[str, object]:
    return {name: store.load(i) for name, i in ids.items()}


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(place, key=KEY) as opened:
        yield opened


def bytes_on_disk(place: Path) -> Iterator[tuple[Path, bytes]]:
    for path in place.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def assert_absent(place: Path, words: tuple[str, ...]) -> None:
    for path, data in bytes_on_disk(place):
        for word in words:
            for form in (word.encode(), word.encode().hex().encode(), word.encode("utf-16-le")):
                assert form not in data, f"{word!r} is in {path.name}"


def chunk_names(store: kedge.CheckpointManager) -> set[bytes]:
    index = store.store.index
    return {chunk.digest for use in index.packs() for chunk in index.chunks_of(use.pack)}


# What is on disk


@pytest.mark.parametrize("hidden", [False, True])
def test_nothing_secret_is_on_disk_after_any_operation(place: Path, hidden: bool) -> None:
    words = (*SECRETS, *NAMES, "salaries") if hidden else SECRETS
    with kedge.open(place, key=KEY, encrypt_names=hidden) as store:
        ids = fill(store)
        assert_absent(place, words)  # the log included, which is not yet moved into the database
        store.copy(NAMES[0], "payroll-job-copy")
        store.resume_from(ids["large"])
        with store.lease(NAMES[0]) as lease:
            store.save(NAMES[0], NAMES[1], {"again": "hunter2"}, lease=lease)
        store.save_async(NAMES[0], NAMES[1], {"later": ["crown-jewels"] * 9000}).result()
        store.verify()
        store.delete(NAMES[0], ids["text"])
        store.gc()
        assert_absent(place, words)
        before = states(store, {name: i for name, i in ids.items() if name != "text"})
        store.rekey(rewrite=True)
        store.gc()
        assert_absent(place, words)
        assert all(same(store.load(ids[name]), state) for name, state in before.items())
    assert_absent(place, words)


def work_on(store: kedge.CheckpointManager) -> None:
    """What is built on states: a run, a paid call of a model, an item of a map, an approval, the log of who did it."""

    def ask(**asked: Any) -> dict[str, Any]:
        usage = {"prompt_tokens": 10, "completion_tokens": 10}
        return {"model": asked["model"], "choices": [{"message": {"content": "the crown-jewels"}}], "usage": usage}

    messages = [{"role": "user", "content": "where is hunter2?"}]
    for _ in range(2):
        with kedge.run("payroll-job", store=store.acting_as("eve@payroll-host")) as run:
            run.llm("count the salaries", ask, model="gpt-4o-mini", messages=messages)
            run.map(lambda item: f"crown-jewels of {item}", ["hunter2", "prod-env"], key=str, executor="thread")
            run.log("retry-key-7 was used")
    executions = Workflows(store)
    executions.start_workflow_execution("payroll-job", "salaries", {"password": "hunter2"})
    assert store.audit().broken_at is None
    assert [e for e in store.events(limit=1000) if e.actor == "eve@payroll-host"]


@pytest.mark.parametrize("scheme", ["", "files:"])
def test_calls_of_models_and_the_log_of_changes_are_encrypted(place: Path, scheme: str) -> None:
    with kedge.open(f"{scheme}{place}", key=KEY, encrypt_names=True) as store:
        work_on(store)
        assert_absent(place, (*SECRETS, *NAMES, "salaries", "payroll-host"))
    with kedge.open(f"{scheme}{place}-plain") as plain:
        work_on(plain)
        for word in ("hunter2", "crown-jewels", "salaries", "payroll-host"):
            with pytest.raises(AssertionError):
                assert_absent(Path(f"{place}-plain"), (word,))


def test_the_search_finds_what_is_plain(place: Path) -> None:
    """The mutant of the test above: without encryption it must fail."""
    with kedge.open(place) as store:
        fill(store)
        for word in (*SECRETS, *NAMES):
            with pytest.raises(AssertionError):
                assert_absent(place, (word,))


def test_equal_content_is_not_recognised_but_stored_once(place: Path, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(500_000)
    names: list[set[bytes]] = []
    for n, key in enumerate((KEY, OTHER)):
        with kedge.open(tmp_path / str(n), key=key) as store:
            store.save("a", "s", data)
            first = store.stats()["pack_bytes"]
            store.save("b", "s", data)
            assert store.stats()["pack_bytes"] == first
            names.append(chunk_names(store))
    with kedge.open(place) as plain:
        plain.save("a", "s", data)
        names.append(chunk_names(plain))
    assert len(names[0] | names[1] | names[2]) == 3 * len(names[0])


# Keys


def test_without_the_right_key_nothing_opens(place: Path, store: kedge.CheckpointManager) -> None:
    store.save("j", "s", 1)
    for attempt in (lambda: kedge.open(place), lambda: kedge.open(place, namespace="other")):
        with pytest.raises(Validation, match="encrypted, and no key was given"):
            attempt()
    assert store.encryption is not None
    with pytest.raises(Validation, match=f"it needs the key {store.encryption['master_key']}"):
        kedge.open(place)
    with pytest.raises(Validation, match=r"is encrypted under key .*, and the one given is"):
        kedge.open(place, key=OTHER)


def test_a_plain_store_is_not_opened_with_a_key(place: Path) -> None:
    with kedge.open(place) as store:
        store.save("j", "s", 1)
    with pytest.raises(Conflict, match="not encrypted, and a key was given"):
        kedge.open(place, key=KEY)
    with kedge.open(place) as store:
        assert store.restore("j") == 1


def test_a_plain_writer_that_was_there_first_is_refused(place: Path) -> None:
    plain = kedge.open(place)
    with kedge.open(place, key=KEY) as store:
        with plain.lease("j") as lease, pytest.raises(Conflict, match="this save is not encrypted"):
            plain.save("j", "s", "plain text", lease=lease)
        with pytest.raises(Conflict, match="this save is not encrypted"):
            plain.save("k", "s", "plain text")
        store.save("k", "s", 1)
    plain.close()


def test_tenants_have_keys_of_their_own(place: Path) -> None:
    with kedge.open(place, key=KEY) as store, kedge.open(place, namespace="t", key=OTHER) as tenant:
        store.save("j", "s", "ours")
        tenant.save("j", "s", "theirs")
    with pytest.raises(Validation):
        kedge.open(place, namespace="t", key=KEY)


def test_keys_come_from_everywhere(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    raw = tmp_path / "raw"
    raw.write_bytes(parse_master(KEY).secret)
    with kedge.open(place, key=KEY) as store:
        store.save("j", "s", 1)
    sources = [KEY.encode(), f"file:{file}", f"file:{raw}", parse_master(KEY).secret.hex()]
    sources.append(f"command:{sys.executable} -c 'print(\"{KEY}\")'")
    for source in sources:
        with kedge.open(place, key=source) as store:
            assert store.restore("j") == 1
    monkeypatch.setenv("KEDGE_KEY_FILE", str(file))
    with kedge.open(place) as store:
        assert store.restore("j") == 1
    with kedge.open(tmp_path / "plain", key="none") as store:
        assert store.encryption is None
    monkeypatch.setenv("KEDGE_KEY", KEY)
    with pytest.raises(Validation, match="both set"):
        kedge.open(place)
    monkeypatch.delenv("KEDGE_KEY_FILE")
    with kedge.open(place) as store:
        assert store.restore("j") == 1


@pytest.mark.parametrize(
    "wrong",
    ["", "passphrase", b"short", bytes(33), "kdk1_" + "A" * 42, "kdk1_" + "é" * 43, "command:", "command:'", 7,
     "file:/nowhere/at/all", "command:/nowhere/at/all", "command:false", f"command:{sys.executable} -c ''"],
)  # fmt: skip
def test_what_is_no_key_is_refused_and_not_shown(place: Path, wrong: Any) -> None:
    with pytest.raises(CheckpointError) as refusal:
        kedge.open(place, key=wrong)
    assert "AAAA" not in str(refusal.value)
    assert not place.exists()


def test_hiding_names_is_decided_once(place: Path) -> None:
    kedge.open(place, key=KEY, encrypt_names=True).close()
    with kedge.open(place, key=KEY) as store:
        assert (store.encryption or {})["encrypts_names"]
    with pytest.raises(Validation, match="are hidden"):
        kedge.open(place, key=KEY, encrypt_names=False)
    with pytest.raises(Validation, match="needs a key"):
        kedge.open(place, encrypt_names=True)


def test_secrets_are_in_no_representation(store: kedge.CheckpointManager) -> None:
    vault = store.store.vault
    assert vault is not None
    shown = repr((store, vault.keyring, parse_master(KEY), store.encryption, vault))
    for secret in (*vault.keyring.secrets, vault.keyring.name_secret, parse_master(KEY).secret):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown
    assert KEY not in shown


def test_the_plain_way_imports_no_cryptography(place: Path) -> None:
    code = (
        "import sys, kedge; s = kedge.open(sys.argv[1]); s.save('j', 's', 1); s.gc(); s.close();"
        "sys.exit('cryptography' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(place)], check=False).returncode == 0


def test_a_crash_before_the_marker_says_so_heals(place: Path, store: kedge.CheckpointManager) -> None:
    store.close()
    marker = place / "kedge-store"
    marker.write_bytes(marker.read_bytes().replace(b"encrypted: yes", b"encrypted: no"))
    (place / "keyrings").unlink()
    kedge.open(place, key=KEY).close()
    assert b"encrypted: yes\n" in marker.read_bytes()
    assert (place / "keyrings").exists()


# Somebody who changes things


def alter(place: Path, *statements: str) -> None:
    with sqlite3.connect(place / "index.sqlite", isolation_level=None) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def _swap(table: str, columns: tuple[str, ...], a: str, b: str) -> list[str]:
    names = ", ".join(columns)
    rest = ", ".join(f"(SELECT {c} FROM temp.kept WHERE which = 2)" for c in columns)
    first = ", ".join(f"(SELECT {c} FROM temp.kept WHERE which = 1)" for c in columns)
    return [
        f"CREATE TEMP TABLE kept AS SELECT 1 AS which, {names} FROM {table} WHERE {a}",
        f"INSERT INTO temp.kept SELECT 2, {names} FROM {table} WHERE {b}",
        f"UPDATE {table} SET ({names}) = ({rest}) WHERE {a}",
        f"UPDATE {table} SET ({names}) = ({first}) WHERE {b}",
    ]


_COPY = "SELECT manifest, digest, metadata FROM checkpoint WHERE"
_FORGED = (
    "row + 50, 'forged_1_00000000', step, level, parent, created_us, status, size_bytes, stored_bytes, digest, codec, "
    "schema_version, tags, 0, NULL, 0, x'01c3'"
)
_OTHER_BYTE = "substr(manifest, 1, 60) || x'00' || substr(manifest, 62)"
A, B = "row = 1 << 32 | 1", "row = 1 << 32 | 2"
TAMPERED: dict[str, list[str]] = {
    "manifests swapped": _swap("checkpoint", ("manifest", "digest"), A, B),
    "metadata swapped": _swap("checkpoint", ("metadata",), A, B),
    "old row replayed under a new ID": [
        f"UPDATE checkpoint SET (manifest, digest, metadata) = ({_COPY} {A}) WHERE {B}"
    ],
    "manifest cut": [f"UPDATE checkpoint SET manifest = substr(manifest, 1, length(manifest) - 1) WHERE {A}"],
    "manifest emptied": [f"UPDATE checkpoint SET manifest = x'' WHERE {A}"],
    "a bit of the manifest": [f"UPDATE checkpoint SET manifest = CAST({_OTHER_BYTE} AS BLOB) WHERE {A}"],
    "plain manifest": [f"UPDATE checkpoint SET manifest = x'01c3', digest = x'{'00' * 32}' WHERE {A}"],
    "plain metadata": [f"""UPDATE checkpoint SET metadata = '{{"loss": 1}}' WHERE {A}"""],
    "no metadata": [f"UPDATE checkpoint SET metadata = NULL WHERE {A}"],
    "another step": [f"UPDATE checkpoint SET step = 'other' WHERE {A}"],
    "another level": [f"UPDATE checkpoint SET level = 'stage' WHERE {A}"],
    "another time": [f"UPDATE checkpoint SET created_us = created_us + 1 WHERE {A}"],
    "another job": ["UPDATE checkpoint SET row = 2 << 32 | 9 WHERE row = 1 << 32 | 1"],
    "another size": [f"UPDATE checkpoint SET size_bytes = size_bytes + 1 WHERE {A}"],
    "plain tags": [f"""UPDATE checkpoint SET tags = '{{"env": "prod"}}' WHERE {A}"""],
    "a plain row": [f"INSERT INTO checkpoint SELECT {_FORGED} FROM checkpoint WHERE {A}"],
}


def history(store: kedge.CheckpointManager) -> list[str]:
    ids = [store.save("j", "s", {"n": n}, tags={"env": "prod"}, metadata={"loss": n}) for n in range(2)]
    store.save("k", "s", 1)
    return [*map(str, ids)]


def read_everything(place: Path) -> None:
    with kedge.open(place, key=KEY) as store:
        for job in store.jobs():
            for checkpoint in store.list(job.name):
                store.load(checkpoint.id)


@pytest.mark.parametrize("what", TAMPERED)
def test_changed_rows_are_refused_and_told(place: Path, what: str) -> None:
    with kedge.open(place, key=KEY) as store:
        history(store)
    read_everything(place)
    alter(place, *TAMPERED[what])
    with pytest.raises(Corrupted):
        read_everything(place)
    with kedge.open(place, key=KEY) as store:
        report = store.verify()
        assert report.corrupted
        assert "decrypt" in str(report.problems)
        assert store.verify(job="k" if "job" in what else "j").problems  # also when asked for the job alone


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        ("no associated data", "manifests swapped"),
        ("no associated data", "old row replayed under a new ID"),
        ("row not bound", "another level"),
        ("row not bound", "another time"),
        ("row not bound", "another job"),
        ("plain accepted", "plain manifest"),
        ("plain accepted", "a plain row"),
    ],
)
def test_the_checks_that_refuse_them_are_needed(place: Path, mutant: str, what: str) -> None:
    """Each safeguard taken out: then the change goes unnoticed, which the test above would tell."""
    with MUTANTS[mutant]():
        with kedge.open(place, key=KEY) as store:
            history(store)
        alter(place, *TAMPERED[what])
        read_everything(place)


def _unbound() -> Any:
    return mock.patch.object(DataKey, "_bound_to", return_value=b"")


def _plain_accepted() -> Any:
    index = kedge.index.encrypted.EncryptedIndex
    real = index._open_row, Vault.open

    def open_row(self: Any, row: Any, *fields: Any) -> Proof:
        if "sealed" in fields[-1]:
            return real[0](self, row, *fields)
        return Proof(row.step, fields[-1], {}, None, b"", 0)

    def open_any(self: Any, kind: str, identity: bytes, sealed: bytes) -> bytes:
        return real[1](self, kind, identity, sealed) if sealed[:1] == b"\xe1" else sealed

    stack = mock.patch.multiple(index, _open_row=open_row)
    both = mock.patch.object(Vault, "open", open_any)

    class Both:
        def __enter__(self) -> None:
            stack.__enter__()
            both.__enter__()

        def __exit__(self, *error: object) -> None:
            both.__exit__(*error)
            stack.__exit__(*error)

    return Both()


MUTANTS: dict[str, Callable[[], Any]] = {
    "no associated data": _unbound,
    "row not bound": lambda: mock.patch("kedge.index.sealed_rows._bound", return_value=b""),
    "plain accepted": _plain_accepted,
}


def test_chunks_that_are_swapped_cut_or_changed_are_refused(place: Path) -> None:
    draw = random.Random(5)
    with kedge.open(place, key=KEY) as store:
        ids = [store.save("j", "s", draw.randbytes(200_000)) for _ in range(2)]
    chunks = "SELECT digest FROM chunk ORDER BY size_bytes DESC LIMIT 2"
    columns = ("pack_no", "offset", "stored_bytes", "encoding", "data")
    swap = _swap("chunk", columns, f"digest = (SELECT min(digest) FROM ({chunks}))",
                 f"digest = (SELECT max(digest) FROM ({chunks}))")  # fmt: skip
    damages = [
        swap,
        ["UPDATE chunk SET stored_bytes = stored_bytes - 1"],
        ["UPDATE chunk SET encoding = encoding - 2"],
        ["UPDATE chunk SET encoding = 3"],
        ["UPDATE chunk SET size_bytes = size_bytes - 1"],
        ["UPDATE chunk SET offset = offset + 4096"],
    ]
    whole = (place / "index.sqlite").read_bytes()
    for statements in damages:
        alter(place, *statements)
        with kedge.open(place, key=KEY) as store:
            with pytest.raises(Corrupted):
                [store.load(i) for i in ids]
            assert not store.verify().is_ok
        (place / "index.sqlite").write_bytes(whole)
    (pack,) = (place / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    with kedge.open(place, key=KEY) as store, pytest.raises(Corrupted):
        [store.load(i) for i in ids]


def test_rows_of_another_namespace_or_store_do_not_open(place: Path, tmp_path: Path) -> None:
    for url, namespace in ((place, "default"), (place, "t"), (tmp_path / "twin", "default")):
        with kedge.open(url, namespace=namespace, key=KEY) as store:
            history(store)
    alter(place, *_swap("checkpoint", ("manifest", "digest", "metadata"), A, "row = 3 << 32 | 1"))
    with pytest.raises(Corrupted):
        read_everything(place)
    alter(
        tmp_path / "twin",
        f"ATTACH '{place / 'index.sqlite'}' AS other",
        "UPDATE checkpoint SET (id, manifest, digest, metadata) = (SELECT id, manifest, digest, metadata "
        f"FROM other.checkpoint WHERE {B}) WHERE {B}",
    )
    with pytest.raises(Corrupted):
        read_everything(tmp_path / "twin")


def test_a_keyring_that_was_changed_is_told(place: Path, store: kedge.CheckpointManager) -> None:
    store.save("j", "s", 1)
    store.close()
    alter(
        place,
        """UPDATE meta SET value = replace(value, '"names": false', '"names": true') WHERE key LIKE 'keyring:%'""",
    )
    with pytest.raises(Corrupted, match="keyring"):
        kedge.open(place, key=KEY)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_make_the_envelope_parser_fail_otherwise(data: bytes) -> None:
    key = DataKey(bytes(32), "s", "n")
    sealed = key.seal("kind", b"id", b"some content")
    draw = random.Random(data)
    changed = bytearray(sealed)
    changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
    for attempt in (data, b"\xe1" + data, sealed[: len(data) % len(sealed)], sealed + data[:1] * 3, bytes(changed)):
        if attempt != sealed:
            with pytest.raises(Corrupted):
                key.open("kind", b"id", attempt)


@given(st.text(max_size=80) | st.binary(max_size=80).map(lambda b: b.decode("latin-1")))
@settings(max_examples=100, deadline=None)
def test_no_text_makes_the_keyring_parser_fail_otherwise(text: str) -> None:
    master = parse_master(OTHER)
    for attempt in (text, json.dumps({"kedge keyring": 1, "master": text}), "[" * 5000):
        with pytest.raises(CheckpointError):
            open_keyring(attempt, master, "s", "n")


# Changing keys


def test_another_master_key_rewrites_nothing(place: Path, store: kedge.CheckpointManager) -> None:
    ids = fill(store)
    packs = {p.name: p.stat().st_mtime_ns for p in (place / "packs").iterdir()}
    before = states(store, ids)
    new = new_master_text()
    report = store.rekey(new)
    assert (report.is_rewritten, report.master) == (False, parse_master(new).id)
    store.save("j", "after", 1)
    assert {p.name: p.stat().st_mtime_ns for p in (place / "packs").iterdir()} == packs
    store.close()
    with pytest.raises(Validation):
        kedge.open(place, key=KEY)
    with kedge.open(place, key=new) as again:
        assert all(same(again.load(ids[name]), state) for name, state in before.items())


def test_rewriting_leaves_nothing_under_the_old_key(place: Path, store: kedge.CheckpointManager) -> None:
    ids = fill(store)
    store.copy(NAMES[0], "copy")
    vault = store.store.vault
    assert vault is not None
    before, old = states(store, ids), vault.current
    old_names = chunk_names(store)
    listed = [replace(c, digest="", stored_bytes=0) for c in store.list(NAMES[0])]
    report = store.rekey(rewrite=True)
    assert (report.checkpoints, report.unreadable) == (12, ())
    store.gc()
    assert store.verify().is_ok
    assert [replace(c, digest="", stored_bytes=0, status=c.status) for c in store.list(NAMES[0])] == [
        replace(c, status=d.status) for c, d in zip(listed, store.list(NAMES[0]), strict=True)
    ]
    assert all(same(store.load(ids[name]), state) for name, state in before.items())
    assert store.list(NAMES[0], tags={"tag-name": "prod-env"})
    assert store.save(NAMES[0], NAMES[1], {"password": "hunter2"}, idempotency_key="retry-key-7") == ids["small"]
    assert store.save_async("j", "s", before["large"]).result()
    assert (store.encryption or {})["old_data_keys"] == []
    store.close()
    for path, data in bytes_on_disk(place):
        assert b"\xe1" + old.id not in data, path
        assert not any(name in data for name in old_names), path


def test_a_saver_with_the_old_key_writes_with_the_new_one(place: Path, store: kedge.CheckpointManager) -> None:
    large = {"a": random.Random(2).randbytes(300_000)}
    store.save("j", "s", large)
    with kedge.open(place, key=KEY) as other:
        store.rekey(rewrite=True)
        store.gc()
        kept = [other.save("j", "s", {"n": 1}), other.save("j", "s", large), other.copy("j", "k")[-1].id]
        assert other.restore("j") == large
        other.gc()
    assert [same(store.load(i), s) for i, s in zip(kept, ({"n": 1}, large, large), strict=True)] == [True] * 3
    assert store.verify().is_ok


def test_tags_changed_by_many_at_once_are_all_there(place: Path, store: kedge.CheckpointManager) -> None:
    """The envelope of a row proves its tags: nobody may put there one that proves what somebody else has changed."""
    saved = store.save("j", "s", 1, tags={"first": "yes"}, idempotency_key="once")
    with kedge.open(place, key=KEY) as other, ThreadPoolExecutor(5) as pool:
        tagging = [pool.submit((store, other)[n % 2].tag, saved, **{f"name-{n}": "yes"}) for n in range(20)]
        rewriting = pool.submit(store.rekey, rewrite=True)
        for future in tagging:
            future.result()
        rewriting.result()
        assert other.tag(saved, first=None).tags == {f"name-{n}": "yes" for n in range(20)}
        assert store.verify().problems == ()
        assert store.save("j", "s", 1, idempotency_key="once") == saved


def test_what_cannot_be_read_keeps_the_old_key(place: Path) -> None:
    with kedge.open(place, key=KEY) as store:
        ids = history(store)
    alter(place, TAMPERED["manifest cut"][0])
    with kedge.open(place, key=KEY) as store:
        assert store.rekey(rewrite=True).unreadable == (ids[0],)
        assert (store.encryption or {})["old_data_keys"]
        store.verify()  # marks it, so that it can be deleted
        store.delete("j", ids[0])
        assert store.rekey(rewrite=True).unreadable == ()
        assert not (store.encryption or {})["old_data_keys"]
        assert store.load(ids[1]) == {"n": 1}
