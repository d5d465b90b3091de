"""`kedge mcp`: a real client over a process, and messages that no client sends."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.integrations.mcp.protocol import MAX_MESSAGE_BYTES, VERSIONS, serve
from kedge.integrations.mcp.tools import MAX_STATE_BYTES, Checkpoints
from tests.parts import library

library("mcp")
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def agent(store: kedge.CheckpointManager) -> Checkpoints:
    return Checkpoints(store)


def command(*words: str) -> list[str]:
    return ["-m", "kedge", "mcp", *words]


def test_a_client_over_a_process(tmp_path: Path) -> None:
    async def talk(client: Client) -> None:
        async def call(name: str, **arguments: Any) -> Any:
            result = await client.call_tool(name, arguments)
            assert not result.is_error, result
            return result.structured_content

        assert [tool.name for tool in (await client.list_tools()).tools] == [
            "save", "list", "show", "diff", "restore", "fork",
        ]  # fmt: skip
        first = await call("save", job="plan", state={"todo": ["look", "write"], "done": []}, step="began")
        second = await call("save", job="plan", state={"todo": ["write"], "done": ["look"]})
        assert (first["number"], second["number"], first["step"]) == (1, 2, "began")
        assert (await call("list"))["jobs"] == [{"job": "plan", "checkpoints": 2}]
        assert [c["id"] for c in (await call("list", job="plan"))["checkpoints"]] == [second["id"], first["id"]]
        assert (await call("show", checkpoint="plan"))["state"] == {"todo": ["write"], "done": ["look"]}
        changes = (await call("diff", old="plan~1", new="plan"))["changes"]
        assert {change["path"] for change in changes} >= {"done/0"}
        assert (await call("restore", checkpoint=first["id"]))["state"]["todo"] == ["look", "write"]
        forked = await call("fork", checkpoint="plan#1", job="another-way")
        assert (forked["job"], forked["forked_from"]) == ("another-way", first["id"])
        assert (await call("restore", checkpoint="another-way"))["state"]["done"] == []
        refused = await client.call_tool("restore", {"checkpoint": "nothing"})
        assert refused.is_error
        assert refused.structured_content == {
            "error": "not_found",
            "message": "checkpoint 'nothing' not found",
            "hint": "list names jobs and checkpoints",
        }

    async def main() -> None:
        server = StdioServerParameters(command=sys.executable, args=command("--store", str(tmp_path / "store")))
        async with Client(stdio_client(server)) as client:
            await talk(client)

    asyncio.run(main())
    with kedge.open(tmp_path / "store") as store:
        assert [job.name for job in store.jobs()] == ["agent:another-way", "agent:plan"]
        assert store.restore("agent:plan") == {"todo": ["write"], "done": ["look"]}
        assert {event.actor for event in store.events()} == {"mcp"}


def test_nothing_outside_of_the_prefix_is_reached(store: kedge.CheckpointManager, agent: Checkpoints) -> None:
    secret = store.save("secret", "s", {"password": 1})
    near = store.save("agents", "s", {"password": 1})
    other = Checkpoints(store, "agent-2:").call("save", {"job": "plan", "state": 1})["id"]
    mine = agent.call("save", {"job": "plan", "state": 2})["id"]
    for reference in (secret, near, other, "secret", "../secret", "agent-2:plan", "secret#1", "secret~0", ""):
        for tool, arguments in (
            ("show", {"checkpoint": reference}),
            ("restore", {"checkpoint": reference}),
            ("fork", {"checkpoint": reference, "job": "x"}),
            ("diff", {"old": mine, "new": reference}),
        ):
            with pytest.raises((kedge.NotFound, kedge.Validation)):
                agent.call(tool, arguments)
    assert agent.call("list", {})["jobs"] == [{"job": "plan", "checkpoints": 1}]
    agent.call("save", {"job": "secret", "state": 3})
    assert store.restore("secret") == {"password": 1}
    assert store.restore("agent:secret") == 3


@pytest.mark.parametrize("job", ["", "a/b", "../x", "a b", "x" * 200, "-x", "ä"])
def test_names_never_become_paths(store: kedge.CheckpointManager, agent: Checkpoints, job: str) -> None:
    with pytest.raises(kedge.InvalidName):
        agent.call("save", {"job": job, "state": 1})
    assert store.jobs() == []


def test_a_server_that_only_reads(store: kedge.CheckpointManager) -> None:
    store.save("agent:plan", "s", {"a": 1})
    reader = Checkpoints(store, is_read_only=True)
    assert [tool["name"] for tool in reader.describe()] == ["list", "show", "diff", "restore"]
    for name, arguments in (("save", {"job": "j", "state": 1}), ("fork", {"checkpoint": "plan"})):
        with pytest.raises(kedge.NotAllowed, match="read-only"):
            reader.call(name, arguments)
    assert reader.call("restore", {"checkpoint": "plan"})["state"] == {"a": 1}
    assert len(store.list("agent:plan")) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("save", {"job": "j"}),
        ("save", {"job": 7, "state": 1}),
        ("save", {"job": "j", "state": 1, "path": "/etc/passwd"}),
        ("save", {"job": "j", "state": 1, "step": "x" * 10_000}),
        ("list", {"limit": 0}),
        ("list", {"limit": 10_000}),
        ("list", {"limit": True}),
        ("list", {"job": None}),
        ("show", {}),
    ],
)
def test_bad_input_changes_nothing(
    store: kedge.CheckpointManager, agent: Checkpoints, name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(kedge.Validation):
        agent.call(name, arguments)
    assert store.jobs() == []


def test_saves_and_lists_in_pages(agent: Checkpoints) -> None:
    for _ in range(2):
        agent.call("save", {"job": "once", "state": 1, "idempotency_key": "k"})
    assert len(agent.call("list", {"job": "once"})["checkpoints"]) == 1
    with pytest.raises(kedge.IdempotencyConflict):
        agent.call("save", {"job": "once", "state": 2, "idempotency_key": "k"})
    for number in range(5):
        agent.call("save", {"job": f"job-{number}", "state": number})
        agent.call("save", {"job": "many", "state": number})
    page = agent.call("list", {"job": "many", "limit": 2})["checkpoints"]
    assert [entry["number"] for entry in page] == [5, 4]
    page = agent.call("list", {"job": "many", "limit": 2, "before": 4})["checkpoints"]
    assert [entry["number"] for entry in page] == [3, 2]
    assert [entry["job"] for entry in agent.call("list", {"limit": 2, "after": "job-1"})["jobs"]] == ["job-2", "job-3"]
    back = agent.call("fork", {"checkpoint": "many#2"})
    assert (back["job"], back["number"]) == ("many", 6)
    assert agent.call("restore", {"checkpoint": "many"})["state"] == 1


def test_what_is_too_large_for_an_answer(store: kedge.CheckpointManager, agent: Checkpoints) -> None:
    store.save("agent:big", "s", {"text": "x" * (MAX_STATE_BYTES + 1), "items": list(range(1000))})
    with pytest.raises(kedge.TooLarge, match="more than fit into an answer"):
        agent.call("restore", {"checkpoint": "big"})
    shown = agent.call("show", {"checkpoint": "big"})["state"]
    assert shown["items"][-1] == {"$truncated": 950}
    assert len(json.dumps(shown)) < 10_000
    store.save("agent:odd", "s", {"tuple": (1, 2)})
    with pytest.raises(kedge.Validation, match="JSON does not have"):
        agent.call("restore", {"checkpoint": "odd"})


def answers(store: kedge.CheckpointManager, *lines: bytes) -> list[Any]:
    outgoing = io.BytesIO()
    serve(Checkpoints(store), "1", io.BytesIO(b"".join(lines)), outgoing)
    return [json.loads(line) for line in outgoing.getvalue().splitlines()]


def request(method: str, number: Any = 1, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode() + b"\n"


def test_versions(store: kedge.CheckpointManager) -> None:
    asked = [*VERSIONS, "2099-01-01", 7]
    answered = answers(store, *(request("initialize", protocolVersion=version) for version in asked))
    assert [a["result"]["protocolVersion"] for a in answered] == [*VERSIONS, VERSIONS[0], VERSIONS[0]]
    assert answered[0]["result"]["serverInfo"]["name"] == "kedge"


def test_messages_that_no_client_sends(store: kedge.CheckpointManager) -> None:
    lines = [
        b"not json\n",
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b'{"id": NaN, "method": "ping"}\n',
        b'[{"id": 1, "method": "ping"}]\n',
        b'{"id": 1, "result": {}}\n',
        b'{"id": true, "method": "ping"}\n',
        b'{"id": 1, "method": "ping", "params": [1]}\n',
        b"x" * (MAX_MESSAGE_BYTES + 10) + b"\n",
        request("resources/list"),
        request("tools/call", name="rm -rf"),
        request("tools/call", name="save", arguments=[1]),
        request("tools/call"),
    ]
    codes = [answer["error"]["code"] for answer in answers(store, *lines)]
    assert codes == [-32700] * 4 + [-32600] * 5 + [-32601] + [-32602] * 3
    quiet = [b"\n", b'{"method": "notifications/initialized"}\n', b'{"method": "notifications/cancelled"}\n']
    assert answers(store, *quiet, request("ping", "a")) == [{"jsonrpc": "2.0", "id": "a", "result": {}}]
    assert store.jobs() == []


def test_numbers_that_are_none(store: kedge.CheckpointManager) -> None:
    for loss in (float("nan"), float("inf")):
        store.save("agent:fit", "epoch", {"loss": loss, "all": [1.5, loss]})
    lines = [
        request("tools/call", name=name, arguments=arguments)
        for name, arguments in [
            ("show", {"checkpoint": "fit"}),
            ("restore", {"checkpoint": "fit"}),
            ("diff", {"old": "fit~1", "new": "fit"}),
        ]
    ]
    outgoing = io.BytesIO()
    serve(Checkpoints(store), "1", io.BytesIO(b"".join(lines)), outgoing)

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    for line in outgoing.getvalue().splitlines():
        result = json.loads(line, parse_constant=refuse)["result"]
        document = json.loads(result["content"][0]["text"], parse_constant=refuse)
        assert document == result["structuredContent"]
        assert result["isError"] or "inf" in json.dumps(document)
        assert not result["isError"] or document["error"] == "invalid", "restore gives a whole state, or none"


def test_the_server_ends_with_its_client_and_needs_a_store_to_read(tmp_path: Path) -> None:
    def run(*words: str, sent: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            [sys.executable, *command(*words)], input=sent, capture_output=True, timeout=60, cwd=tmp_path, check=False
        )

    assert run("--store", "s").returncode == 0
    missing = run("--store", "nowhere", "--scope", "read")
    assert missing.returncode == 4
    assert run("--store", "s", "--prefix", "a/b").returncode == 3
    half = run("--store", "s", sent=request("tools/call", name="save", arguments={"job": "j", "state": 1})[:-1])
    assert json.loads(half.stdout)["result"]["isError"] is False, "the last line needs no end"
