"""Whatever is handed in or lies on the disk: a typed error that says what and what to do, and nothing changed."""

from __future__ import annotations

import hashlib
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge
from tests.parts import lack
from tests.torture.disks import mounted, unmount

Manager = kedge.CheckpointManager
ROOT = Path(__file__).parents[2]

BAD_NAMES = {
    "empty": "",
    "dots": "..",
    "dot first": ".hidden",
    "slash": "a/b",
    "climbing": "../../etc/passwd",
    "absolute": "/etc/passwd",
    "backslash": "a\\b",
    "NUL": "a\0b",
    "newline at the end": "job\n",
    "space": "a b",
    "dash first": "-rf",
    "not ASCII": "jöb",
    "half of a pair": "a\ud800",
    "5,000 characters": "a" * 5000,
    "129 characters": "a" * 129,
    "percent": "%2e%2e",
    "quote": "a'--",
    "a number": 5,
    "None in a list": [None],
    "bytes": b"job",
}


class Unregistered(Exception):
    """Integrations register the exceptions of Python itself."""


def cyclic_list() -> list[object]:
    cycle: list[object] = [1]
    cycle.append({"again": cycle})
    return cycle


def deep(levels: int) -> object:
    state: object = 1
    for _ in range(levels):
        state = [state]
    return state


class Unknown:
    pass


class Liar(dict):  # type: ignore[type-arg]
    """Not a dict to be taken for one."""


BAD_STATES: dict[str, Callable[[], object]] = {
    "an object": lambda: {"model": {"opt": [1, Unknown()]}},
    "a class": lambda: {"kind": Unknown},
    "a function": lambda: [print],
    "a module": lambda: (math,),
    "a generator": lambda: {"g": (n for n in ())},
    "an open file": lambda: [sys.stdin],
    "a subclass of dict": lambda: {"a": Liar()},
    "NaN as a key": lambda: {"a": {math.nan: 1}},
    "a list as part of a key": lambda: {(1, Unknown()): 1},
    "a list that holds itself": cyclic_list,
    "nested too deeply": lambda: deep(100_000),
    "an exception": lambda: {"error": Unregistered("x")},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[Manager]:
    with kedge.open(place) as opened:
        opened.save("job", "first", {"n": 1}, tags={"kind": "first"}, metadata={"loss": 0.5})
        opened.save("job", "second", {"blob": random.Random(1).randbytes(200_000)}, pin=True)
        opened.save("other", "first", [1, 2, 3])
        opened.save("arrays", "first", {"a": np.zeros(5)})
        yield opened


def contents(place: Path) -> dict[str, str]:
    """Every file of a store by the digest of its bytes; not SQLite's shared memory, which belongs to processes."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


def refused(
    call: Callable[[], object], kind: type[kedge.CheckpointError], place: Path | None = None
) -> kedge.CheckpointError:
    """The error of a call, which must be of this kind, say what and what to do, and have changed nothing."""
    before = contents(place) if place else {}
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert isinstance(error, kedge.CheckpointError)
    assert error.message, "the error says nothing"
    assert error.hint, f"no hint: {error}"
    assert len(str(error)) < 1000 or place is None, "an error repeats what it was given"
    assert "\0" not in str(error)
    assert (contents(place) if place else {}) == before, "something was changed on disk"
    return error


# --- names ---

NAMED: dict[str, Callable[[Manager, Any], object]] = {
    "save": lambda s, name: s.save(name, "step", 1),
    "save_async": lambda s, name: s.save_async(name, "step", 1).result(),
    "parent": lambda s, name: s.save("job", "step", 1, parent=name),
    "tag name": lambda s, name: s.save("job", "step", 1, tags={name: "x"} if name != [None] else {None: "x"}),
    "list": lambda s, name: s.list(name),
    "get": lambda s, name: s.get(name),
    "exists": lambda s, name: s.exists(name),
    "load": lambda s, name: s.load(name),
    "load_latest": lambda s, name: s.load_latest(name),
    "restore job": lambda s, name: s.restore(name),
    "restore ID": lambda s, name: s.restore("job", name),
    "resume_from ID": lambda s, name: s.resume_from(name),
    "resume_from job": lambda s, name: s.resume_from(s.list("job")[0].id, name if name != "" else "/"),
    "outline": lambda s, name: s.outline(name),
    "delete job": lambda s, name: s.delete(name, s.list("job")[0].id),
    "delete ID": lambda s, name: s.delete("job", name),
    "pin": lambda s, name: s.pin(name),
    "set_status": lambda s, name: s.set_status(name, "archived"),
    "condemn": lambda s, name: s.condemn(name),
    "tag": lambda s, name: s.tag(name, mood="x"),
    "copy from": lambda s, name: s.copy(name, "new"),
    "copy to": lambda s, name: s.copy("job", name),
    "diff": lambda s, name: s.diff(name, s.list("job")[0].id),
    "cleanup": lambda s, name: s.cleanup(name),
    "set_retention": lambda s, name: s.set_retention(name, None),
    "lease": lambda s, name: s.lease(name).__enter__(),
    "stats": lambda s, name: s.stats(name),
    "verify": lambda s, name: s.verify(name),
    "namespace": lambda s, name: kedge.open(s.url, namespace=name),
}


@pytest.mark.parametrize("operation", NAMED)
def test_names_outside_the_grammar(store: Manager, place: Path, operation: str) -> None:
    for name in BAD_NAMES.values():
        refused(lambda name=name: NAMED[operation](store, name), kedge.InvalidName, place)  # type: ignore[misc]


@pytest.mark.parametrize(
    "step", ["", "a" * 5000, "a\ud800", 7, None, b"step"], ids=["empty", "long", "half", "int", "None", "bytes"]
)
def test_steps(store: Manager, place: Path, step: Any) -> None:
    refused(lambda: store.save("job", step, 1), kedge.InvalidName, place)


def test_a_step_may_be_any_other_text_and_never_becomes_a_path(store: Manager, place: Path, tmp_path: Path) -> None:
    for step in ["../../escape", "a/b", "\0", "\n", "✓" * 1024, "'; DROP TABLE checkpoints; --", "%s%n", "$(id)"]:
        saved = store.save("steps", step, {"step": step})
        assert store.get(saved).step == step
        assert store.load(saved) == {"step": step}
    assert {path.name for path in tmp_path.iterdir()} == {"store"}
    assert not list(place.rglob("*escape*"))


# --- states ---


@pytest.mark.parametrize("state", BAD_STATES)
@pytest.mark.parametrize("how", ["save", "save_async"])
def test_states_that_cannot_be_kept(store: Manager, place: Path, state: str, how: str) -> None:
    made = BAD_STATES[state]()
    error = refused(lambda: getattr(store, how)("job", "step", made), kedge.Validation, place)
    assert "state" in str(error)


def test_an_unknown_type_is_named_with_its_path(store: Manager) -> None:
    with pytest.raises(kedge.UnsupportedType) as caught:
        store.save("job", "step", {"model": {"opt": [0, Unknown()]}})
    assert caught.value.path == 'state["model"]["opt"][1]'
    assert "Unknown" in caught.value.message


# --- other arguments ---

BAD_ARGUMENTS: dict[str, tuple[type[kedge.CheckpointError], Callable[[Manager], object]]] = {
    "level": (kedge.Validation, lambda s: s.save("job", "s", 1, level="galaxy")),
    "level of list": (kedge.Validation, lambda s: s.list("job", level="galaxy")),
    "status": (kedge.Validation, lambda s: s.set_status(s.list("job")[0].id, "great")),
    "tag value": (kedge.Validation, lambda s: s.save("job", "s", 1, tags={"a": 5})),  # type: ignore[dict-item]
    "long tag value": (kedge.Validation, lambda s: s.save("job", "s", 1, tags={"a": "x" * 5000})),
    "many tags": (kedge.Validation, lambda s: s.save("job", "s", 1, tags={f"t{n}": "" for n in range(65)})),
    "metadata object": (kedge.Validation, lambda s: s.save("job", "s", 1, metadata={"a": Unknown()})),
    "metadata NaN": (kedge.Validation, lambda s: s.save("job", "s", 1, metadata={"a": math.nan})),
    "metadata key": (kedge.Validation, lambda s: s.save("job", "s", 1, metadata={5: 1})),  # type: ignore[dict-item]
    "metadata size": (kedge.Validation, lambda s: s.save("job", "s", 1, metadata={"a": "x" * 70_000})),
    "metadata cycle": (kedge.Validation, lambda s: s.save("job", "s", 1, metadata={"a": cyclic_list()})),
    "metadata no mapping": (kedge.Validation, lambda s: s.save("job", "s", 1, metadata=[1])),  # type: ignore[arg-type]
    "tags no mapping": (kedge.Validation, lambda s: s.save("job", "s", 1, tags=["a"])),  # type: ignore[arg-type]
    "empty key": (kedge.Validation, lambda s: s.save("job", "s", 1, idempotency_key="")),
    "long key": (kedge.Validation, lambda s: s.save("job", "s", 1, idempotency_key="k" * 257)),
    "key no text": (kedge.Validation, lambda s: s.save("job", "s", 1, idempotency_key=7)),  # type: ignore[arg-type]
    "key half": (kedge.Validation, lambda s: s.save("job", "s", 1, idempotency_key="\ud800")),
    "schema version": (kedge.Validation, lambda s: s.save("job", "s", 1, schema_version=3)),  # type: ignore[arg-type]
    "long schema version": (kedge.Validation, lambda s: s.save("job", "s", 1, schema_version="1" * 5000)),
    "pin": (kedge.Validation, lambda s: s.save("job", "s", 1, pin="yes")),  # type: ignore[arg-type]
    "lease no lease": (kedge.Validation, lambda s: s.save("job", "s", 1, lease="mine")),  # type: ignore[arg-type]
    "tag NUL": (kedge.Validation, lambda s: s.save("job", "s", 1, tags={"a": "x\0"})),
    "missing parent": (kedge.NotFound, lambda s: s.save("job", "s", 1, parent="step_1_00000000")),
    "limit 0": (kedge.Validation, lambda s: s.list("job", limit=0)),
    "limit text": (kedge.Validation, lambda s: s.list("job", limit="5")),  # type: ignore[arg-type]
    "before": (kedge.Validation, lambda s: s.list("job", before=1.5)),  # type: ignore[arg-type]
    "before missing": (kedge.NotFound, lambda s: s.list("job", before="step_1_00000000")),
    "jobs prefix": (kedge.Validation, lambda s: s.jobs(prefix=5)),  # type: ignore[arg-type]
    "metadata filter": (kedge.Validation, lambda s: s.list("job", metadata={"a": Unknown()})),
    "metadata path": (kedge.Validation, lambda s: s.list("job", metadata={5: 1})),  # type: ignore[dict-item]
    "keep 0": (kedge.Validation, lambda s: s.cleanup("job", keep_last=0)),
    "keep True": (kedge.Validation, lambda s: s.cleanup("job", keep_last=True)),
    "policy": (kedge.Validation, lambda s: s.apply("keep all")),  # type: ignore[arg-type]
    "policy of job": (kedge.Validation, lambda s: s.set_retention("job", "keep all")),  # type: ignore[arg-type]
    "ttl 0": (kedge.Validation, lambda s: s.lease("job", ttl_s=0).__enter__()),
    "ttl NaN": (kedge.Validation, lambda s: s.lease("job", ttl_s=math.nan).__enter__()),
    "ttl for ever": (kedge.Validation, lambda s: s.lease("job", ttl_s=math.inf).__enter__()),
    "ttl text": (kedge.Validation, lambda s: s.lease("job", ttl_s="5").__enter__()),  # type: ignore[arg-type]
    "only and into": (kedge.Validation, lambda s: s.load(s.list("job")[0].id, only="a", into={})),
    "only nothing there": (kedge.NotFound, lambda s: s.load(s.list("job")[0].id, only="no/such/path")),
    "only no text": (kedge.Validation, lambda s: s.load(s.list("job")[0].id, only=5)),  # type: ignore[arg-type]
    "into another shape": (
        kedge.Validation,
        lambda s: s.load(s.list("arrays")[0].id, into={"a": np.zeros(6)}),
    ),
    "copy onto itself": (kedge.Conflict, lambda s: s.copy("job", "job")),
    "pinned": (kedge.Conflict, lambda s: s.delete("job", s.list("job")[1].id)),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments(store: Manager, place: Path, case: str) -> None:
    kind, call = BAD_ARGUMENTS[case]
    refused(lambda: call(store), kind, place)


MISSING: dict[str, Callable[[Manager, str], object]] = {
    "get": lambda s, i: s.get(i),
    "load": lambda s, i: s.load(i),
    "outline": lambda s, i: s.outline(i),
    "restore": lambda s, i: s.restore("job", i),
    "resume_from": lambda s, i: s.resume_from(i),
    "pin": lambda s, i: s.pin(i),
    "tag": lambda s, i: s.tag(i, a="b"),
    "set_status": lambda s, i: s.set_status(i, "archived"),
    "condemn": lambda s, i: s.condemn(i),
    "diff": lambda s, i: s.diff(i, i),
    "restore of no job": lambda s, _: s.restore("nobody"),
    "copy of no job": lambda s, _: s.copy("nobody", "new"),
    "stats of no job": lambda s, _: s.stats("nobody"),
}


@pytest.mark.parametrize("operation", MISSING)
def test_what_does_not_exist(store: Manager, place: Path, operation: str) -> None:
    error = refused(lambda: MISSING[operation](store, "step_1_00000000"), kedge.NotFound, place)
    assert isinstance(error, FileNotFoundError | LookupError)


def test_what_does_not_exist_and_is_only_asked_about(store: Manager, place: Path) -> None:
    before = contents(place)
    assert store.delete("job", "step_1_00000000") is False
    assert store.exists("step_1_00000000") is False
    assert store.list("nobody") == []
    assert store.load_latest("nobody") is None
    assert store.cleanup("nobody") == 0
    assert contents(place) == before


def test_the_wrong_job_for_an_id(store: Manager, place: Path) -> None:
    checkpoint = store.list("other")[0].id
    assert "other" in refused(lambda: store.restore("job", checkpoint), kedge.NotFound, place).hint
    assert "other" in refused(lambda: store.delete("job", checkpoint), kedge.NotFound, place).hint


def test_leases_of_others(store: Manager, place: Path) -> None:
    with store.lease("job", ttl_s=30) as lease:
        refused(lambda: store.save("other", "s", 1, lease=lease), kedge.Validation, place)
        refused(lambda: store.save("job", "s", 1), kedge.LeaseHeld, place)
        refused(lambda: store.lease("job").__enter__(), kedge.LeaseHeld, place)
    with store.lease("job", ttl_s=30) as newer:
        refused(lambda: store.save("job", "s", 1, lease=lease), kedge.LeaseLost, place)
        store.save("job", "s", 1, lease=newer)


def test_a_closed_store(place: Path) -> None:
    store = kedge.open(place)
    saved = store.save("job", "step", 1)
    store.close()
    store.close()
    for call in (
        lambda: store.save("job", "step", 1),
        lambda: store.save_async("job", "step", 1).result(),
        lambda: store.load(saved),
        lambda: store.list("job"),
        store.gc,
        lambda: store.delete("job", saved),
    ):
        refused(call, kedge.CheckpointError, place)


# --- places ---

URLS: dict[str, str] = {"NUL": "a\0b", "empty file URL": "file:", "unknown scheme": "gopher:hole", "s3": "s3://bucket"}


@pytest.mark.parametrize("case", URLS)
def test_urls(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: kedge.open(URLS[case]), kedge.Validation, tmp_path)


def test_no_store_and_not_to_be_made(tmp_path: Path) -> None:
    refused(lambda: kedge.open(tmp_path / "none", create=False), kedge.NotFound, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    refused(lambda: kedge.open(tmp_path / "photos"), kedge.NotAStore, tmp_path)
    refused(lambda: kedge.open(tmp_path / "photos", create=False), kedge.CheckpointError, tmp_path)
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(lambda: kedge.open(tmp_path / "file"), kedge.StorageError, tmp_path)
    refused(lambda: kedge.open(tmp_path / "file" / "store"), kedge.StorageError, tmp_path)


def test_a_link_that_leads_in_circles(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(lambda: kedge.open(tmp_path / "loop"), kedge.StorageError)


def test_a_path_too_long(tmp_path: Path) -> None:
    refused(lambda: kedge.open(tmp_path / ("a" * 5000)), kedge.StorageError)
    assert list(tmp_path.iterdir()) == []


def filled(place: Path) -> dict[str, object]:
    """A closed store with a little of everything: states by ID."""
    states: list[object] = [{"n": 1}, random.Random(2).randbytes(200_000), ["x" * 50] * 3000]
    with kedge.open(place) as store:
        return {store.save("job", "step", state): state for state in states}


def edit_marker(place: Path, old: bytes, new: bytes) -> None:
    marker = place / "kedge-store"
    text = marker.read_bytes()
    assert old in text
    marker.write_bytes(text.replace(old, new))


def test_a_newer_format_by_the_marker(place: Path) -> None:
    filled(place)
    edit_marker(place, b"format: 1\n", b"format: 3\n")
    error = refused(lambda: kedge.open(place), kedge.UnsupportedFormat, place)
    assert "3" in error.message
    assert "pgrade" in error.hint or "pdate" in error.hint


def test_a_newer_format_by_the_index(place: Path) -> None:
    filled(place)
    with sqlite3.connect(place / "index.sqlite") as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        assert version >= 1
        database.execute(f"PRAGMA user_version = {version + 1}")
    database.close()
    refused(lambda: kedge.open(place), kedge.UnsupportedFormat, place)


def test_two_stores_mixed(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    filled(tmp_path / "two")
    shutil.copy(tmp_path / "one" / "index.sqlite", tmp_path / "two" / "index.sqlite")
    refused(lambda: kedge.open(tmp_path / "two"), kedge.Corrupted, tmp_path / "two")


def test_the_packs_of_another_store(tmp_path: Path) -> None:
    states = filled(tmp_path / "one")
    filled(tmp_path / "two")
    shutil.rmtree(tmp_path / "one" / "packs")
    shutil.copytree(tmp_path / "two" / "packs", tmp_path / "one" / "packs")
    with kedge.open(tmp_path / "one") as store:
        answers = [answer(lambda i=i: store.load(i)) for i in states]  # type: ignore[misc]
        assert any(isinstance(found, kedge.Corrupted) for found in answers)
        assert exact_or_refused(answers, states)
        assert not store.verify().is_ok


def answer(call: Callable[[], object]) -> object:
    """What a call returns, or the typed error it raises, which must say what to do."""
    try:
        return call()
    except kedge.CheckpointError as refusal:
        if not refusal.hint:
            raise AssertionError(f"no hint: {refusal}") from refusal
        return refusal


def exact_or_refused(answers: list[object], states: dict[str, object]) -> bool:
    return all(
        isinstance(found, kedge.CheckpointError) or found == state
        for found, state in zip(answers, states.values(), strict=True)
    )


GARBAGE: dict[str, Callable[[Path], object]] = {
    "random": lambda path: path.write_bytes(random.Random(3).randbytes(max(path.stat().st_size, 100))),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("this was a store once\n" * 500),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a dead link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("file", ["kedge-store", "index.sqlite", "pack", "packs", "index.sqlite-wal", "lock"])
def test_garbage_in_every_file(place: Path, file: str, garbage: str) -> None:
    """Exact states or typed errors from every operation, and a further save never makes it worse."""
    states = filled(place)
    path = next((place / "packs").iterdir()) if file == "pack" else place / file
    if file == "packs":
        if garbage not in ("missing", "text", "a dead link"):
            pytest.skip("a directory")  # skip: garbage for files only
        shutil.rmtree(path)
        path.write_text("")
    elif not path.exists():
        path.write_bytes(b"")
    GARBAGE[garbage](path)
    store = answer(lambda: kedge.open(place, create=False))
    if not isinstance(store, Manager):
        return
    with store:
        assert exact_or_refused([answer(lambda i=i: store.load(i)) for i in states], states)  # type: ignore[misc]
        for call in (lambda: store.list("job"), store.jobs, store.stats, store.verify, store.gc, store.events):
            answer(call)
        new = random.Random(9).randbytes(300_000)
        saved = answer(lambda: store.save("after", "step", new))
        if isinstance(saved, str):
            assert store.load(saved) == new


# --- permissions ---

ATTEMPT = """
import os, sys
import tests.torture.preload, kedge  # everything, while we may still read it
if len(sys.argv) > 2:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
done = []
def attempt(name, call):
    try:
        call()
        done.append(name)
    except kedge.CheckpointError as error:
        assert error.message and error.hint, repr(error)
        print(name, type(error).__name__, error.code, sep=":")
try:
    store = kedge.open(sys.argv[1])
except kedge.CheckpointError as error:
    assert error.message and error.hint, repr(error)
    print("open", type(error).__name__, error.code, sep=":")
else:
    attempt("load", lambda: store.restore("job"))
    attempt("save", lambda: store.save("job", "step", 1))
    attempt("large", lambda: store.save("job", "step", bytes(range(256)) * 2000))
    attempt("delete", lambda: store.delete("job", store.list("job")[0].id))
    attempt("gc", lambda: store.gc())
    attempt("close", lambda: store.close())
print("did", *done)
"""


def attempt(place: Path, *, user: int | None = None) -> dict[str, str]:
    """What a process gets: {operation: error class}, and under "did" what it could do."""
    command = [sys.executable, "-c", ATTEMPT, str(place), *([] if user is None else [str(user)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("did"):
            found["did"] = line[4:]
        else:
            name, kind, _ = line.split(":")
            found[name] = kind
    return found


@pytest.mark.requires("root")
@pytest.mark.parametrize("mode", [0o000, 0o500, 0o555], ids=["nothing", "own read", "read"])
def test_no_permission(place: Path, mode: int) -> None:
    """Somebody who may not write the store, or not even see it."""
    filled(place)
    for folder in (*place.parents[:3], place):
        folder.chmod(0o755)
    place.chmod(mode)
    (place / "packs").chmod(mode)
    before = contents(place)
    found = attempt(place, user=65534)
    assert "save" not in found["did"].split()
    assert "delete" not in found["did"].split()
    assert set(found.values()) - {found["did"]} <= {"ReadOnly"}
    assert contents(place) == before


@pytest.mark.requires("root")
def test_no_permission_to_make_a_store(tmp_path: Path) -> None:
    for folder in (*tmp_path.parents[:2], tmp_path):
        folder.chmod(0o755)
    assert attempt(tmp_path / "store", user=65534) == {"open": "ReadOnly", "did": ""}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requires("ext4")
@pytest.mark.xdist_group("loop")
def test_a_disk_mounted_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", size_mib=16) as disk:
        states = filled(disk.path / "store")
        before = contents(disk.path)
        disk.unmount()
        disk.mount("ro")
        found = attempt(disk.path / "store")
        assert not {"save", "large", "delete"} & set(found["did"].split())
        assert set(found.values()) - {found["did"]} <= {"ReadOnly"}
        assert attempt(disk.path / "new") == {"open": "ReadOnly", "did": ""}
        assert contents(disk.path) == before
        disk.unmount()
        disk.mount()
        with kedge.open(disk.path / "store") as store:
            assert [store.load(i) for i in states] == list(states.values())


@pytest.mark.requires("tmpfs")
def test_a_read_only_view_of_a_store_in_use(place: Path, tmp_path: Path) -> None:
    """The same store, bind-mounted read-only, while its owner goes on writing."""
    filled(place)
    view = tmp_path / "view"
    view.mkdir()
    subprocess.run(["mount", "--bind", str(place), str(view)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        with kedge.open(place) as owner:
            found = attempt(view)
            assert not {"save", "large", "delete"} & set(found["did"].split())
            assert set(found.values()) - {found["did"]} <= {"ReadOnly"}
            owner.save("job", "still", 1)
            assert owner.verify().is_ok
    finally:
        unmount(view)


@pytest.mark.requires("root")
def test_packs_that_may_not_be_removed(place: Path) -> None:
    """gc of an immutable file: a typed error, nothing lost."""
    states = filled(place)
    pack = next((place / "packs").iterdir())
    if subprocess.run(["chattr", "+i", str(pack)], capture_output=True).returncode:
        lack("chattr", "no immutable files here")
    try:
        with kedge.open(place) as store:
            doomed = list(states)[1:]
            for checkpoint in doomed:
                store.delete("job", checkpoint)
            with pytest.raises(kedge.ReadOnly):
                store.gc()
            assert store.restore("job") == next(iter(states.values()))
    finally:
        subprocess.run(["chattr", "-i", str(pack)], check=True)
    with kedge.open(place) as store:
        assert store.gc().packs_removed >= 1
        assert pack.name not in os.listdir(place / "packs")
