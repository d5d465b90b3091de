"""A store behind a service is used like any other: the manager, pipelines, workflows and the command line."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

import kedge
from kedge.care import Care
from kedge.care.local import LocalCare
from kedge.cli.app import cli
from kedge.client import AsyncClient, Client, catalogue
from kedge.client.calls import Endpoint, Endpoints
from kedge.client.care import HttpCare
from kedge.client.catalogue import HttpCatalogue
from kedge.client.store import HttpStore
from kedge.codec import encode
from kedge.errors import Unavailable
from kedge.index.encrypted import EncryptedIndex
from kedge.index.sqlite.index import SqliteIndex
from kedge.model import Checkpoint, Lease
from kedge.ports import Catalogue, Then
from kedge.process.workflow import Workflows
from kedge.server import create_app
from kedge.store import Store
from kedge.store.local import LocalStore
from kedge.store.request import Request
from tests.server.conftest import listening
from tests.waiting import wait_for


@pytest.fixture
def url(store: kedge.CheckpointManager) -> Iterator[str]:
    with listening(create_app(store)) as url:
        yield url


@pytest.fixture
def remote(url: str) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(url) as manager:
        yield manager


def test_any_state_comes_back_as_it_was(remote: kedge.CheckpointManager, store: kedge.CheckpointManager) -> None:
    assert isinstance(remote.store, HttpStore)
    state = {
        "tuple": (1, {2, 3}, frozenset({4})),
        "big": np.arange(300_000, dtype="f8").reshape(3, -1),
        "small": np.ones(3, "i2"),
        "decimal": Decimal("1.10"),
        "bytes": b"\x00" * 10_000,
        7: None,
    }
    saved = remote.save("j", "step", state, tags={"a": "b"}, metadata={"loss": 0.5}, pin=True, level="stage")
    here: Any = store.load(saved)
    there: Any = remote.load(saved)
    for loaded in (here, there):
        assert (loaded["big"] == state["big"]).all()
        assert loaded["big"].dtype == state["big"].dtype  # type: ignore[attr-defined]
        assert [loaded[key] for key in ("tuple", "decimal", "bytes", 7)] == [
            state[key] for key in ("tuple", "decimal", "bytes", 7)
        ]
    there["big"][0, 0] = 5  # its memory is ours
    part: Any = remote.load(saved, only="small")
    assert list(part) == ["small"]
    into = {"big": np.zeros((3, 100_000)), "small": np.zeros(3, "i2")}
    remote.load(saved, into={**state, **into})
    assert (into["big"] == state["big"]).all()
    assert remote.get(saved) == store.get(saved)


def test_finding_and_changing(remote: kedge.CheckpointManager, store: kedge.CheckpointManager) -> None:
    ids = [remote.save("j", f"s{n}", n, idempotency_key=f"k{n}") for n in range(5)]
    assert [c.id for c in remote.list("j")] == ids
    assert [c.id for c in remote.list("j", limit=2)] == ids[-2:]
    assert [c.id for c in remote.list("j", limit=2, before=ids[2])] == ids[:2]
    assert [c.id for c in remote.list("j", after=2, limit=2)] == ids[2:4]
    assert [job.name for job in remote.jobs()] == ["j"]
    assert remote.load_latest("j") == (store.get(ids[-1]), 4)
    assert remote.load_by_key("j", "k2") == (store.get(ids[2]), 2)
    assert [key for key, _ in remote.read_ahead("j", 3).items()] == ["k3", "k4"]
    assert remote.restore("j", ids[1]) == 1
    assert remote.tag(ids[0], a="1").tags == {"a": "1"}
    assert remote.pin(ids[0]).is_pinned
    with pytest.raises(kedge.Conflict):
        remote.delete("j", ids[0])
    assert remote.delete("j", ids[1])
    assert not remote.delete("j", ids[1])
    branch, state = remote.resume_from(ids[0], "b")
    assert (branch.job, branch.parent, state) == ("b", ids[0], 0)
    assert len(remote.copy("j", "c")) == 4
    with pytest.raises(kedge.Conflict):
        remote.copy("j", "b")
    assert remote.load("j") == remote.load("j#5") == 4
    with pytest.raises(kedge.Conflict):
        remote.delete_job("c")  # the copy of a pinned checkpoint is pinned
    assert remote.delete_job("c", even_pinned=True) == 4
    assert [job.name for job in remote.jobs()] == ["b", "j"]
    assert remote.diff(ids[2], ids[3]).changed == 1
    plan = remote.apply(kedge.RetentionPolicy(keep_last=1), job="j")
    assert [c.id for c in plan.delete] == [ids[2], ids[3]]
    assert remote.cleanup("j", 1) == 2
    assert remote.verify().is_ok
    assert remote.gc(dry_run=True).bytes_freed == 0
    assert remote.gc().bytes_freed == 0
    wait_for(lambda: remote.stats() == store.stats(), "packs still grow behind the last save")
    assert [e.id for e in remote.events()] == [e.id for e in store.events()]
    assert [e.id for e in remote.events(newest=True, limit=2)] == [e.id for e in store.events(newest=True, limit=2)]
    assert remote.audit() == store.audit()


def test_the_log_is_read_in_as_many_pages_as_asked_for(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_EVENTS", 3)
    for n in range(8):
        store.save("j", f"s{n}", n)
    for asked in (
        {"limit": 7},
        {"limit": 100},
        {"limit": 7, "newest": True},
        {"limit": 100, "newest": True},
        {"after": 2, "limit": 100, "before": 7},
        {"after": 2, "limit": 100, "before": 7, "newest": True},
        {"limit": 3, "before": 1},
    ):
        there, here = (manager.events(**asked) for manager in (remote, store))  # type: ignore[arg-type]
        assert [event.id for event in there] == [event.id for event in here]


def test_errors_are_the_same(remote: kedge.CheckpointManager) -> None:
    with pytest.raises(kedge.NotFound):
        remote.get("none_1_00000000")
    with pytest.raises(kedge.InvalidName):
        remote.save("a b", "s", 1)
    with pytest.raises(kedge.UnsupportedType):
        remote.save("j", "s", {"x": object()})
    remote.save("j", "s", 1, idempotency_key="k")
    with pytest.raises(kedge.IdempotencyConflict):
        remote.save("j", "s", 2, idempotency_key="k")
    with remote.lease("j"), pytest.raises(kedge.LeaseHeld):
        remote.save("j", "s", 1)
    with pytest.raises(kedge.Unavailable), kedge.open("http://127.0.0.1:9") as nobody:
        nobody.list("j")


def test_what_is_not_available_says_so(remote: kedge.CheckpointManager) -> None:
    saved = remote.save("j", "s", 1)
    for attempt in (
        lambda: remote.load(saved, mapped=True),
        lambda: remote.follow_to(kedge.open("memory:"), stop=threading.Event()),
        remote.rebuild,
    ):
        with pytest.raises(kedge.Validation, match="not available over HTTP"):
            attempt()


def test_a_service_believes_nobody_that_a_checkpoint_is_damaged(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client got may be spoilt on its way: the service reads for itself."""
    saved = remote.save("j", "s", {"blob": random.Random(1).randbytes(300_000)})
    assert remote.condemn(saved).status == "created"
    read = store.store.blobs.read_into

    def spoil(pack: str, offset: int, target: memoryview) -> None:
        read(pack, offset, target)
        target[0] ^= 1

    monkeypatch.setattr(store.store.blobs, "read_into", spoil)
    assert remote.condemn(saved).status == "corrupted"


def test_every_method_of_both_doors_is_there() -> None:
    """What a manager asks of a store, its catalogue and its care, a service answers too or refuses in words."""
    doors: Sequence[tuple[Any, Sequence[type]]] = (
        (Store, (LocalStore, HttpStore)),
        (Catalogue, (SqliteIndex, EncryptedIndex, HttpCatalogue)),
        (Care, (LocalCare, HttpCare)),
    )
    for protocol, implementations in doors:
        names = {name for name in vars(protocol) if not name.startswith("_")} - {"is_encrypted", "row_bytes"}
        for implementation in implementations:
            assert names <= set(dir(implementation)), implementation
            # a method of the protocol itself has no body
            assert not [n for n in names if getattr(implementation, n) is getattr(protocol, n)], implementation


def test_pipelines_and_workflows_over_http(url: str, store: kedge.CheckpointManager) -> None:
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        return 42

    for _ in range(2):
        with kedge.run("nightly", store=url) as run:
            assert run.step("one", work) == 42
            assert run.map(lambda n: n * 2, range(5), key=str, name="double", workers=2) == [0, 2, 4, 6, 8]
    assert calls == [1]
    with kedge.open(url) as remote:
        workflows = Workflows(remote)
        execution = workflows.start_workflow_execution("c", "w")
        workflows.create_checkpoint(execution, "ask", "agent", approval_required=True)
        assert workflows.approve_checkpoint(execution, "ask", True)
    assert Workflows(store).get_execution_status(execution)["state"] == "running"


def test_a_run_is_completed_whatever_becomes_of_what_is_done_behind_its_last_save(
    remote: kedge.CheckpointManager, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(*args: object, **_options: object) -> None:
        asked.append(type(args[0]).__name__)
        raise Unavailable("the service is away")

    for name in ("delete", "release_lease"):
        monkeypatch.setattr(remote.catalogue, name, fail)
    lease = remote.take_lease("job", "me", 60)
    entry = remote.save("queue", "entry", 1)
    then = Then(delete=(entry,), releases_lease=True)
    saved = remote.store.save(Request("job", "end", lease=lease, then=then), encode(1), actor="me")
    assert asked == ["tuple", "Lease"]
    assert [each.id for each in store.list("job")] == [saved.id]


def test_the_command_line_over_http(url: str, tmp_path: Path) -> None:
    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(cli, ["--store", url, "--json", *arguments])
        assert done.exit_code == code, (arguments, done.output, done.stderr)
        return json.loads(done.stdout or done.stderr)

    state = tmp_path / "state.json"
    state.write_text('{"a": 1, "b": [1, 2]}')
    first = run("save", "j", "one", str(state))["id"]
    state.write_text('{"a": 2, "b": [1, 2]}')
    run("save", "j", "two", str(state))
    assert [c["step"] for c in run("list", "j")["checkpoints"]] == ["one", "two"]
    assert run("jobs")["jobs"][0]["name"] == "j"
    assert run("show", first)["state"]["a"] == 1
    assert run("diff", "j~1", "j")["changed"] == 1
    assert run("restore", "j")["state"] == {"a": 2, "b": [1, 2]}
    assert run("tag", first, "k=v")["tags"] == {"k": "v"}
    assert run("check")["ok"]
    assert run("stats")["checkpoints"] == 2
    assert run("gc")["packs_removed"] == 0
    assert run("cleanup", "j", "--keep-last", "1", "--apply")["applied"]
    assert run("show", "none_1_00000000", code=4)["code"] == "not_found"
    assert len(run("events")["events"]) >= 3
    found = {each["subject"]: each for each in run("doctor")["findings"]}
    assert (found["service"]["status"], found["store"]["status"]) == ("ok", "note")
    assert found["service"]["what"].startswith("1 job, 1 checkpoint")


def test_both_clients_have_every_call(url: str) -> None:
    names = [name for name, value in vars(Endpoints).items() if isinstance(value, Endpoint)]
    assert len(names) > 30

    async def asked() -> Any:
        async with AsyncClient(url) as client:
            saved = await client.save_json("j", "s", {"n": 1}, idempotency_key="k")
            page = await client.checkpoints("j")
            with pytest.raises(kedge.NotFound):
                await client.checkpoint("none_1_00000000")
            return saved, page.items, await client.state(saved.id)

    saved, items, state = asyncio.run(asked())
    assert items == [saved]
    assert state == {"n": 1}
    with Client(url) as client:
        assert client.checkpoint(saved.id) == saved
        assert client.whoami()["scope"] == "admin"
        for name in names:
            assert callable(getattr(client, name))


def test_every_operation_is_a_call(store: kedge.CheckpointManager) -> None:
    """But what only a browser needs, and bytes and streams, which are no documents."""
    policy = kedge.RetentionPolicy(keep_last=1)
    values = {"str": "x", "bool": True, "Lease": Lease("j", 1, "", 1), "RetentionPolicy": policy}
    described = []
    for endpoint in vars(Endpoints).values():
        if isinstance(endpoint, Endpoint):
            wanted = inspect.signature(endpoint._describe).parameters.values()
            needed = [each for each in wanted if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
            given = {each.name: values.get(each.annotation.removesuffix(" | None"), {}) for each in needed[1:]}
            described.append(endpoint._describe(None, **given))
    described.append(Endpoints.__dict__["retention"]._describe(None, policy, dry_run=False))
    missing = set()
    for path, operations in create_app(store).openapi()["paths"].items():
        shape = re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        taken = {call.method for call in described if shape.fullmatch(call.path)}
        missing |= {(method.upper(), path) for method in operations if method.upper() not in taken}
    download = {("GET", "/api/v1/checkpoints/{checkpoint_id}/download")}
    streams = {("GET", "/api/v1/events"), ("POST", "/api/v1/session"), ("DELETE", "/api/v1/session")}
    assert {each for each in missing if each[1].startswith("/api/v1")} == download | streams


def test_a_workflow_by_calls(url: str) -> None:
    with Client(url) as client:
        execution = client.start_execution("order-7", "orders")
        client.add_step(execution, "pay", "agent", {"sum": 7}, approval_required=True)
        assert [each["name"] for each in client.approvals().items] == ["pay"]
        client.decide(execution, "pay", approved=True)
        assert client.complete_step(execution, "pay", {"paid": True})
        assert client.pause_execution(execution)
        assert client.resume_execution(execution)
        assert client.end_execution(execution)
        assert client.executions("completed").items[0]["execution_id"] == execution
        assert (client.tasks(), client.containers().items, client.llm_stats()["answers"]) == ([], [], 0)
        with pytest.raises(kedge.NotFound):
            client.attempts("none")


def test_a_token_in_the_address_or_the_environment(
    place: Path, make_token: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make_token("remote", "write", "tenant")
    with listening(create_app(place)) as url:
        with pytest.raises(kedge.Unauthorized), kedge.open(url) as nobody:
            nobody.jobs()
        with kedge.open(url.replace("://", f"://:{text}@")) as known:
            saved = known.save("j", "s", 1)
            assert text not in repr(known)
        monkeypatch.setenv("KEDGE_TOKEN", text)
        with kedge.open(url, namespace="tenant") as known:
            assert known.get(saved).job == "j"
        with pytest.raises(kedge.NotAllowed), kedge.open(url, namespace="other") as other:
            other.jobs()


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:notaport", "http://127.0.0.1:99999", "http://[::1", "http://", "http://127.0.0.1:7420/api/v1"],
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(kedge.errors.Validation, match="is not the address of a service"):
        kedge.open(address)
    result = CliRunner().invoke(cli, ["list", "x", "--store", address])
    assert result.exit_code == 3
    assert ("without the path" in result.stderr) == ("/api" in address)


def test_a_refused_address_shows_no_token() -> None:
    with pytest.raises(kedge.errors.Validation) as refused:
        kedge.open("http://:kd_secret@127.0.0.1:99999")
    assert "kd_secret" not in str(refused.value)


def test_why_a_service_cannot_be_reached(url: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # port: kept by this socket, which does not listen
        refusing = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for address, reason in (
            (refusing, "the connection was refused"),
            ("http://nowhere.invalid:7420", "there is no host of this name"),
            (url.replace("http:", "https:"), "it does not speak TLS"),
        ):
            with kedge.open(address) as remote, pytest.raises(kedge.errors.Unavailable, match=reason) as failed:
                remote.save("j", "s", 1)
            assert "repeat saves" not in failed.value.hint  # nothing was sent
            assert failed.value.__suppress_context__  # one message, no chain of tracebacks
    with (
        pytest.raises(kedge.CheckpointError, match="nothing at this address") as wrong,
        kedge.open(f"{url}/x") as remote,
    ):
        remote.jobs()
    assert "without a path" in wrong.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<!doctype html><p>Sign in"),
        httpx.Response(200, json={"ok": True}),
        httpx.Response(200, json=[1]),
        httpx.Response(200),
        httpx.Response(301, headers={"location": "https://elsewhere.example/"}),
        httpx.Response(302, text="<p>moved", headers={"location": "/login"}),
        httpx.Response(404, text="nothing here"),
        httpx.Response(502, text="<h1>Bad Gateway"),
    ],
    ids=["page", "document", "list", "nothing", "moved", "login", "unknown", "gateway"],
)
def test_what_is_no_service_is_called_that(answer: httpx.Response) -> None:
    """Proxies sign people in, lead them elsewhere and speak for what is down; other services answer, too."""
    client = Client("http://service.example", transport=httpx.MockTransport(lambda _: answer))
    store = HttpStore(client)
    with client:
        calls: list[Callable[[], object]] = [
            client.jobs,
            lambda: client.checkpoint("s_1"),
            lambda: store.catalogue.read("s_1"),
            lambda: client.exchange("/api/v1/chunks/missing", b""),
            lambda: client.upload("/api/v1/jobs/j/checkpoints", "x/y", iter([b""]), Checkpoint.from_json),
        ]
        for call in calls:
            with pytest.raises(kedge.CheckpointError, match="the service answered") as refused:
                call()
            assert "is this a Kedge service" in refused.value.hint
            assert ("elsewhere.example" in str(refused.value)) == (answer.status_code == 301)


def test_keys_are_not_shown_over_http(url: str) -> None:
    result = CliRunner().invoke(cli, ["key", "show", "--store", url])
    assert result.exit_code == 3
    assert "not available over HTTP" in result.stderr


def test_the_document_runs_as_it_stands(url: str) -> None:
    """The Python of docs/service.md, against this service."""
    text = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block.replace("http://127.0.0.1:7420", url).replace('"my-store"', '"memory:"'), "doc", "exec"), {})
