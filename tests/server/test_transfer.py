"""States in chunks over HTTP: everything a store takes, in bounded memory, nothing sent twice, nothing believed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

import kedge
from kedge import codec
from kedge.chunks import Entry
from kedge.cli.app import cli
from kedge.client.store import HttpStore
from kedge.errors import NoSpace
from kedge.llm.cache import Answer, Cache
from kedge.llm.keys import Request
from kedge.ports import digest_of
from kedge.server import create_app
from kedge.server.limits import Limits
from kedge.store import Stored
from kedge.store.chunk_writer import ChunkWriter
from kedge.store.manifest import Manifest, Span, pack_manifest, pack_root
from kedge.store.request import request_again
from kedge.store.transfer import MAX_CHUNK_BYTES
from kedge.store.wire import SAVE_TYPE, framed, length, split_digests
from tests.parts import library, require
from tests.server.conftest import client_of, listening
from tests.torture.races import Background, gate_after, gate_before
from tests.waiting import wait_for

SAVES = "/api/v1/jobs/j/checkpoints"


@pytest.fixture(params=["plain", "encrypted"])
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(place, key=bytes(32) if request.param == "encrypted" else None) as manager:
        yield manager


@pytest.fixture
def remote(store: kedge.CheckpointManager) -> Iterator[kedge.CheckpointManager]:
    with listening(create_app(store)) as url, kedge.open(url) as manager:
        yield manager


@pytest.fixture
def sent(remote: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the body of each save was."""
    assert isinstance(remote.store, HttpStore)
    upload, sizes = remote.store.client.upload, []

    def count(path: str, media_type: str, body: Iterator[bytes], parse: Callable[[Any], Any]) -> Any:
        pieces = list(body)
        sizes.append(sum(map(len, pieces)))
        return upload(path, media_type, iter(pieces), parse)

    monkeypatch.setattr(remote.store.client, "upload", count)
    return sizes


def randoms(size_bytes: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), dtype="u1")


def test_files_and_trees_travel(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, sent: list[int], tmp_path: Path
) -> None:
    source = tmp_path / "tree"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "large").write_bytes(randoms(3 << 20).tobytes())
    (source / "small").write_text("x")
    (source / "zeros").write_bytes(bytes(2 << 20))
    state = {"tree": kedge.Tree(source), "file": kedge.File(source / "small"), "a": randoms(1 << 20, 2)}
    first = remote.save("j", "s", state)
    (source / "small").write_text("y")
    second = remote.save("j", "s", {**state, "tree": kedge.Tree(source), "file": kedge.File(source / "small")})
    assert sent[0] > 4 << 20 > 64 << 10 > sent[1]
    for checkpoint, text in ((first, "x"), (second, "y")):
        for number, manager in enumerate((remote, store)):
            out = tmp_path / f"{checkpoint}-{number}"
            loaded = manager.load(checkpoint)
            loaded["tree"].write_to(out)
            assert (out / "deep" / "large").read_bytes() == (source / "deep" / "large").read_bytes()
            assert (out / "zeros").read_bytes() == bytes(2 << 20)
            assert (out / "small").read_text() == text
            assert b"".join(loaded["file"].stream()) == text.encode()
    assert store.verify().is_ok


def test_what_is_there_is_not_sent_again(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, sent: list[int]
) -> None:
    state: Any = {"w": randoms(4 << 20), "zeros": np.zeros(1 << 20), "names": [f"name {n}" for n in range(50_000)]}
    saved = [remote.save("j", "s", state)]
    state["w"] = state["w"].copy()
    state["w"][0] ^= 1
    saved += [remote.save("j", "s", state), remote.save("other", "s", state)]
    assert sent[0] > 4 << 20 > 2 << 20 > sent[1] > 1 << 20 > 16 << 10 > sent[2]
    for checkpoint in saved[1:]:
        for manager in (remote, store):
            loaded: Any = manager.load(checkpoint)
            assert (loaded["w"] == state["w"]).all()
            assert loaded["names"] == state["names"]
            assert not loaded["zeros"].any()
    assert remote.get(saved[0]).size_bytes == store.get(saved[0]).size_bytes > 4 << 20


def test_no_state_is_too_large(store: kedge.CheckpointManager) -> None:
    limits = Limits(body_bytes=1 << 20, json_bytes=1 << 20)
    with listening(create_app(store, limits=limits)) as url, kedge.open(url) as remote:
        state = randoms(5 << 20)
        assert (remote.load(remote.save("j", "s", state)) == state).all()
        with pytest.raises(kedge.TooLarge):
            remote.store.client.save_json("j", "s", "x" * (2 << 20))


def test_a_key_stands_for_the_same_state(remote: kedge.CheckpointManager, store: kedge.CheckpointManager) -> None:
    state = {"w": randoms(300_000)}
    key = "schlüssel 1"
    saved = remote.save("j", "s", state, idempotency_key=key)
    assert remote.save("j", "s", state, idempotency_key=key) == saved
    assert store.save("j", "s", state, idempotency_key=key) == saved
    with pytest.raises(kedge.IdempotencyConflict):
        remote.save("j", "s", {"w": randoms(300_000, 2)}, idempotency_key=key)


def test_a_state_goes_to_a_device(remote: kedge.CheckpointManager) -> None:
    torch = library("torch")

    saved = remote.save("j", "s", {"t": torch.arange(500_000), "n": 1})
    loaded = remote.load(saved, device="cpu")
    assert loaded["n"] == 1
    assert torch.equal(loaded["t"], torch.arange(500_000))


def test_a_thread_of_an_agent(remote: kedge.CheckpointManager, store: kedge.CheckpointManager) -> None:
    require("module:langgraph")
    from langgraph.checkpoint.base import empty_checkpoint

    from kedge.integrations.langgraph import KedgeSaver

    with KedgeSaver(remote.url) as saver:
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        messages: list[str] = []
        for turn in range(40):
            messages.append(f"message {turn} " + "x" * 3000)
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"messages": list(messages)}
            checkpoint["channel_versions"] = {"messages": turn + 1}
            config = saver.put(config, checkpoint, {"step": turn}, checkpoint["channel_versions"])
        found = saver.get_tuple(config)
        assert found is not None
        assert found.checkpoint["channel_values"]["messages"] == messages
    with KedgeSaver(remote.url) as saver:  # which remembers nothing
        again = saver.get_tuple(config)
        assert again is not None
        assert again.checkpoint["channel_values"]["messages"] == messages
    assert store.verify().is_ok
    job = store.jobs()[0].name
    assert store.stats()["stored_bytes"] < 3 * sum(map(len, messages))
    assert len(store.list(job)) == 40


def test_copies_go_both_ways(remote: kedge.CheckpointManager, store: kedge.CheckpointManager, tmp_path: Path) -> None:
    with kedge.open(tmp_path / "here") as here, kedge.open(tmp_path / "back") as back:
        for n in range(3):
            here.save("a", f"small {n}", n, idempotency_key=f"k{n}", tags={"n": str(n)})
            here.save("a", f"large {n}", {"w": randoms(600_000), "n": n})
        here.save("b", "spilled", [bytes([n % 251]) * 5000 + b"%d" % n for n in range(9000)])
        here.pin(here.list("a")[0].id)
        here.set_status(here.list("a")[1].id, "archived")
        report = here.copy_to(remote)
        assert (report.copied, here.copy_to(remote).present) == (7, 7)
        assert remote.copy_to(back).chunks_moved == report.chunks_moved
        assert (back.list("a"), back.list("b")) == (here.list("a"), here.list("b"))
        assert store.load_by_key("a", "k1") == (store.list("a")[2], 1)
        gone = here.list("a")[0].id
        here.pin(gone, False)
        here.delete("a", gone)
        assert here.copy_to(remote, mirror=True).deleted == 1
        assert back.load(back.list("b")[0].id) == here.load(here.list("b")[0].id)
        assert [manager.verify().is_ok for manager in (store, back)] == [True, True]


def test_the_command_copies_to_a_service(remote: kedge.CheckpointManager, tmp_path: Path) -> None:
    with kedge.open(tmp_path / "here") as here:
        here.save("a", "s", {"w": randoms(600_000)})
    done = CliRunner().invoke(cli, ["copy", f"{tmp_path}/here", remote.url, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["copied"] == 1
    done = CliRunner().invoke(cli, ["copy", remote.url, f"{tmp_path}/back", "--json"])
    assert done.exit_code == 0, done.output
    with kedge.open(tmp_path / "back") as back:
        assert back.load_latest("a") is not None


def test_chunks_that_were_lost_are_sent_again(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, place: Path
) -> None:
    """The index knows them, their pack is gone: the service notices before it acknowledges."""
    state = {"w": randoms(3 << 20)}
    remote.save("j", "s", state)
    pack_of(place).unlink()
    saved = remote.save("other", "s", state)
    assert (store.load(saved)["w"] == state["w"]).all()


@pytest.mark.parametrize("store", ["encrypted"], indirect=True)
def test_a_branch_while_keys_are_changed(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, place: Path
) -> None:
    """Its source is there all the time, under the names of one data key, then of two, then of the other."""
    state = {"w": randoms(3 << 20)}
    source = remote.save("j", "s", state)
    with kedge.open(place, key=bytes(32)) as other, gate_before(store.store.index, "commit") as committing:
        branching = Background(remote.resume_from, source, "before")
        committing.wait_until_reached()
        with gate_before(other.store.index, "reseal") as sealing:
            changing = Background(other.rekey, rewrite=True)
            sealing.wait_until_reached()
            committing.open()
            branches = [branching.result()[0].id, remote.resume_from(source, "during")[0].id]
            sealing.open()
            assert changing.result().unreadable == ()
    branches.append(remote.resume_from(source, "after")[0].id)
    store.gc()
    for branch in branches:
        assert (remote.load(branch)["w"] == state["w"]).all()
    assert store.verify(deep=True).is_ok


def branch_late(remote: kedge.CheckpointManager, stored: Stored) -> Any:
    """What was read before is branched only now."""
    return remote.store.branch(stored, request_again(stored[0], job="late", parent=None), actor="test")


def test_a_branch_whose_source_is_deleted(remote: kedge.CheckpointManager, store: kedge.CheckpointManager) -> None:
    stored = remote.catalogue.read(remote.save("j", "s", randoms(3 << 20)))
    store.delete("j", stored[0].id)
    store.gc()
    with pytest.raises(kedge.NotFound, match="deleted"):
        branch_late(remote, stored)
    assert store.list("late") == []


def test_a_branch_whose_source_is_damaged_is_not_called_deleted(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, place: Path
) -> None:
    stored = remote.catalogue.read(remote.save("j", "s", randoms(6 << 20)))
    flip_a_bit(place)
    assert store.verify(deep=True).corrupted == (stored[0].id,)
    with pytest.raises(kedge.Corrupted):
        branch_late(remote, stored)
    assert store.list("late") == []


def test_a_refusal_is_heard_while_a_state_is_sent(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NoSpace("the disk is full", hint="make room")

    monkeypatch.setattr(ChunkWriter, "add_named", refuse)
    with pytest.raises(NoSpace):
        remote.save("j", "s", randoms(40 << 20))
    assert store.list("j") == []


def test_who_goes_away_leaves_nothing(remote: kedge.CheckpointManager, store: kedge.CheckpointManager) -> None:
    host, _, port = remote.url.removeprefix("http://").partition(":")
    body = framed(json.dumps({"step": "s"}).encode()) + framed(randoms(2 << 20).tobytes())
    head = (
        f"POST {SAVES} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {SAVE_TYPE}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"%x\r\n" % len(body) + body + b"\r\n")
        in_flight = f"{remote.url}/metrics"
        wait_for(lambda: _in_flight(in_flight) == 2, "the save is not under way")
    wait_for(lambda: _in_flight(in_flight) == 1, "the save goes on without its client")
    assert store.list("j") == []
    assert store.verify().is_ok


def _in_flight(url: str) -> int:
    """Requests at work, this one among them."""
    import httpx

    lines = httpx.get(url, timeout=60).text.splitlines()
    return int(float(next(line for line in lines if line.startswith("kedge_http_in_flight")).split()[-1]))


def pack_of(place: Path) -> Path:
    """The file that holds the only large state of a store."""
    [pack] = (place / "packs").rglob("*.pack")
    return pack


def flip_a_bit(place: Path) -> None:
    with pack_of(place).open("r+b") as file:
        file.seek(5 << 20)
        byte = file.read(1)[0]
        file.seek(5 << 20)
        file.write(bytes([byte ^ 1]))


# What is not believed


def body_of(chunks: list[bytes], packed: bytes, spilled: bytes = b"", **head: object) -> bytes:
    sent = framed(json.dumps({"step": "s", **head}).encode()) + b"".join(map(framed, chunks)) + length(0)
    return sent + framed(packed) + framed(spilled) + digest_of(packed + spilled)


def manifest_of(data: bytes, *, size: int | None = None, claims: int | None = None, lazy: bool = False) -> bytes:
    encoded = codec.encode({"b": data if claims is None else bytes(claims)})
    stream = [Entry(len(data) if size is None else size, digest_of(data))]
    span = Span(0, 0, len(data) if size is None else size, lazy)
    return pack_manifest(Manifest(encoded.tree, -1, [span], [stream]))


DATA = bytes(range(256)) * 40
ABSENT = digest_of(b"nobody has this")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (body_of([DATA], manifest_of(DATA)), 201),
        (body_of([], manifest_of(DATA)), 409),  # a chunk that nobody has
        (body_of([DATA[1:]], manifest_of(DATA)), 409),  # changed on its way
        (body_of([DATA], manifest_of(DATA, size=5)), 422),  # another length
        (body_of([DATA], manifest_of(DATA, claims=9000)), 422),  # the tree says something else
        (body_of([DATA], manifest_of(DATA, lazy=True)), 422),  # an array is no file
        (body_of([DATA], manifest_of(DATA))[:-1], 422),
        (body_of([DATA], manifest_of(DATA))[:5000], 422),
        (body_of([DATA], manifest_of(DATA))[:-1] + b"x", 422),
        (body_of([DATA], b""), 422),
        (body_of([DATA], b"\x03nonsense"), 422),
        (body_of([DATA], b"\x09"), 422),
        (body_of([], b"\x01\xc1"), 422),  # no tree
        (body_of([DATA], pack_root(len(DATA), [Entry(len(DATA), digest_of(DATA))])), 422),
        (body_of([DATA], pack_root(3, [Entry(3, digest_of(b"abc"))]), b"abd"), 409),
        (body_of([ABSENT * 3], b"\x05" + b"\x91\x92\x01\xc4\x20" + digest_of(ABSENT * 3)), 409),  # digests of nothing
        (body_of([b"abc"], b"\x05" + b"\x91\x92\x01\xc4\x20" + digest_of(b"abc")), 422),  # no digests
        (length(1 << 30), 413),
        (framed(b"{}"), 422),
        (framed(b'{"step": "s"}') + length(MAX_CHUNK_BYTES + 1), 413),
        (body_of([DATA], manifest_of(DATA), copied={"seq": 1, "codec": "kedge1", "status": "created"}), 422),
        (body_of([], b"\x01\x01", id="../x"), 422),
    ],
)
def test_nothing_is_believed(place: Path, body: bytes, status: int) -> None:
    with kedge.open(place) as store, client_of(create_app(store)) as client:
        answer = client.post(SAVES, content=body, headers={"content-type": SAVE_TYPE})
        assert answer.status_code == status, answer.text
        assert len(store.list("j")) == (status == 201)
        assert store.verify().is_ok
        store.gc()  # which reads every manifest


def test_chunks_of_other_namespaces_do_not_exist(place: Path, make_token: Callable[..., str]) -> None:
    secret = randoms(1 << 20).tobytes()
    with kedge.open(place, namespace="theirs") as theirs:
        saved = theirs.save("j", "s", secret)
    digest = digest_of(secret)
    ours, all_of_them = make_token("a", "write", "ours"), make_token("b", "write", "ours", "theirs")
    with client_of(create_app(place)) as client:

        def ask(path: str, token: str, namespace: str, content: bytes = digest) -> Any:
            headers = {"authorization": f"Bearer {token}", "content-type": "application/octet-stream"}
            return client.post(f"/api/v1/chunks/{path}?namespace={namespace}", content=content, headers=headers)

        assert ask("missing", all_of_them, "theirs").content == b""
        assert secret in ask("read", all_of_them, "theirs").content
        for token in (ours, all_of_them):
            assert split_digests(ask("missing", token, "ours").content) == [digest]
            assert ask("read", token, "ours").status_code == 404
        assert ask("missing", ours, "theirs").status_code == 403
        assert ask("read", ours, "theirs").status_code == 403
        reading = make_token("c", "read", "theirs")
        assert ask("missing", reading, "theirs").status_code == 403
        # naming a chunk is not having it
        headers = {"authorization": f"Bearer {all_of_them}", "content-type": SAVE_TYPE}
        body = body_of([], manifest_of(secret))
        assert client.post(f"{SAVES}?namespace=ours", content=body, headers=headers).status_code == 409
        path = f"/api/v1/checkpoints/{saved}/manifest"
        assert client.get(path, headers={"authorization": f"Bearer {ours}"}).status_code == 404
    for bad in (b"x", os.urandom(32 * 4097)):
        with client_of(create_app(place)) as client:
            assert ask("missing", ours, "ours", bad).status_code == 422


def test_a_chunk_that_is_damaged_is_told(remote: kedge.CheckpointManager, place: Path) -> None:
    saved = remote.save("j", "s", randoms(6 << 20))
    flip_a_bit(place)
    with pytest.raises(kedge.Corrupted):
        remote.load(saved)


def test_json_and_parts_still_have_limits(store: kedge.CheckpointManager) -> None:
    with client_of(create_app(store, limits=Limits(json_bytes=1000, body_bytes=2000))) as client:
        assert isinstance(client, TestClient)
        assert client.post(SAVES, json={"step": "s", "state": "x" * 1500}).status_code == 413
        long = {"content-type": "application/json"}
        assert client.post(SAVES, content=iter([b"x" * 900] * 9), headers=long).status_code == 413


@pytest.mark.parametrize("size", [10, 500_000])  # in its row, and in chunks
def test_an_llm_answer_is_replaced_through_a_service(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, size: int
) -> None:
    cache, request = Cache.of(remote), Request("POST", "u", {"model": "m"})
    for number in range(2):
        answer = Answer({"headers": {}, "body": os.urandom(size)}, "m", None, None)
        cache.keep(request, answer, is_paid=True, replace=number > 0)
    newest = cache.find(request)
    assert newest is not None
    assert newest.content == answer.content
    assert len(store.list("llm:cache")) == 1
    assert store.verify().is_ok


@pytest.mark.parametrize("is_replaced", [True, False])
def test_what_a_key_stands_for_is_replaced_or_deleted_while_it_is_loaded(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, is_replaced: bool
) -> None:
    """The key stands for something all the time, or for nothing: never for what cannot be found."""
    cache, request = Cache.of(store), Request("POST", "u", {"model": "m"})
    cache.keep(request, Answer({"headers": {}, "body": b"old"}, "m", None, None))
    with gate_after(remote.catalogue, "find") as gate:
        loading = Background(remote.load_by_key, "llm:cache", request.key)
        gate.wait_until_reached()
        [old] = store.list("llm:cache")
        if is_replaced:
            cache.keep(request, Answer({"headers": {}, "body": b"new"}, "m", None, None), replace=True)
        else:
            store.delete("llm:cache", old.id)
        gate.open()
        loaded = loading.result()
    assert (loaded is not None) == is_replaced
    assert not is_replaced or loaded == store.load_by_key("llm:cache", request.key)
