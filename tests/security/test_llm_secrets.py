"""Credentials in calls of models: nobody gets the answer of another's tools, and none of them is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import kedge
from kedge.llm.keys import http_request

URL = "https://api.example.org/v1/responses"
SECRET = "sk-very-secret-4711"

# Each carries the credential of one user where vendors and SDKs put them.
CARRIERS: dict[str, Any] = {
    "MCP authorization": lambda s: {"tools": [{"type": "mcp", "server_url": "https://t.org/", "authorization": s}]},
    "MCP authorization as a dict": lambda s: {"tools": [{"type": "mcp", "authorization": {"bearer": s}}]},
    "MCP headers": lambda s: {"tools": [{"type": "mcp", "headers": {"X-User": s}}]},
    "MCP headers as pairs": lambda s: {"tools": [{"type": "mcp", "headers": [["X-User", s]]}]},
    "MCP headers as objects": lambda s: {"tools": [{"type": "mcp", "headers": [{"name": "X-User", "value": s}]}]},
    "MCP address": lambda s: {"tools": [{"type": "mcp", "server_url": f"https://t.org/?token={s}"}]},
    "MCP path": lambda s: {"mcp_servers": [{"type": "url", "url": f"https://mcp.example/s/{s}/mcp"}]},
    "MCP server": lambda s: {"mcp_servers": [{"type": "url", "url": "https://t.org/", "authorization_token": s}]},
    "environment": lambda s: {"tools": [{"type": "stdio", "env": {"HOME": "/", "USER_TOKEN": s}}]},
    "Azure key": lambda s: {
        "data_sources": [{"parameters": {"authentication": {"type": "api_key", "key": s}, "index_name": "mail"}}]
    },
    "Azure connection": lambda s: {"data_sources": [{"parameters": {"connection_string": s}}]},
    "Azure, older": lambda s: {"dataSources": [{"parameters": {"endpoint": "https://x.example", "key": s}}]},
    "bearer_token": lambda s: {"extra": {"deep": [{"er": {"bearer_token": s}}]}},
    "accessToken": lambda s: {"connector": {"accessToken": s}},
    "client-secret": lambda s: {"connector": {"client-secret": s}},
    "password": lambda s: {"login": {"user": "a", "Password": s}},
    "cookie": lambda s: {"tools": [{"fetch": {"cookie": f"session={s}"}}]},
    "number": lambda s: {"tools": [{"pin_token": sum(map(ord, s))}]},
    "link to a picture": lambda s: {"input": [{"image_url": f"https://bucket.example/p.png?X-Amz-Signature={s}"}]},
    "user of a link": lambda s: {"input": [{"url": f"https://user:{s}@bucket.example/p.png"}]},
}


def request(secret: str, carrier: str) -> Any:
    body = {"model": "m", "input": "what is in my mailbox?", **CARRIERS[carrier](secret)}
    found = http_request("POST", URL, json.dumps(body).encode())
    assert found is not None
    return found


@pytest.mark.parametrize("carrier", CARRIERS)
def test_two_users_share_no_answer(carrier: str) -> None:
    assert request(SECRET, carrier).key != request("sk-of-somebody-else", carrier).key
    assert request(SECRET, carrier).key == request(SECRET, carrier).key


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_credential_is_stored(carrier: str) -> None:
    made = request(SECRET, carrier)
    for text in (json.dumps(made.document()), made.where, made.key, repr(made)):
        assert SECRET not in text
        assert str(sum(map(ord, SECRET))) not in text


def test_the_answer_about_a_mailbox_stays_with_its_owner(tmp_path: Path) -> None:
    """The whole way: two clients of one store, each with the token of a user."""

    def vendor(request: httpx.Request) -> httpx.Response:
        user = json.loads(request.content)["tools"][0]["authorization"]
        return httpx.Response(200, json={"model": "m", "status": "completed", "output": f"the mail of {user}"})

    with (
        kedge.open(tmp_path / "store") as store,
        kedge.llm.http_client(store=store, library="httpx", transport=httpx.MockTransport(vendor)) as client,
    ):

        def ask(user: str) -> str:
            tools = [{"type": "mcp", "server_url": "https://mail.example", "authorization": user}]
            body = {"model": "m", "input": "summarise my mail", "tools": tools}
            return str(client.post(URL, json=body).json()["output"]).removeprefix("the mail of ")

        assert [ask(user) for user in ("alice", "bob", "alice")] == ["alice", "bob", "alice"]


def test_descriptions_of_parameters_are_no_secrets() -> None:
    schema = {"type": "object", "properties": {"token": {"type": "string"}, "key": {"type": "string"}}}
    body = {"model": "m", "tools": [{"type": "function", "name": "f", "parameters": schema}], "max_tokens": 5}
    made = http_request("POST", URL, json.dumps(body).encode())
    assert made is not None
    assert made.document()["body"] == body
    assert not made.hidden


def test_a_short_credential_is_not_guessed_from_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored key is no quick hash of the request with the credential in it."""
    slow: list[bytes] = []

    def record(secrets: bytes) -> bytes:
        slow.append(secrets)
        return b"x" * 32

    monkeypatch.setattr("kedge.llm.keys.slow_hash", record)
    assert request("1234", "password").key
    assert len(slow) == 1
