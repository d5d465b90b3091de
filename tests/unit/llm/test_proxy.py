"""The cache as a proxy, under SDKs that take a base URL only."""

import http.client
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import kedge
from kedge.llm import Budget
from kedge.llm.keys import MAX_BODY_BYTES
from kedge.llm.proxy import Proxy
from tests.parts import library
from tests.servers.models import ModelServer

SECRET = "sk-very-secret-4711"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@contextmanager
def proxy(server: ModelServer, store: Any, mode: str = "record", **options: Any) -> Iterator[Proxy]:
    vendors = {"openai": server.url, "anthropic": server.url}
    with kedge.llm.http_client(mode, store=store, **options) as client, Proxy(client, vendors=vendors) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


def test_langchain_and_openai(server: ModelServer, tmp_path: Path) -> None:
    anthropic = library("langchain_anthropic")
    for _ in range(2):
        with proxy(server, tmp_path / "store") as running:
            model = anthropic.ChatAnthropic(
                model="claude-haiku-4-5", base_url=f"{running.url}/anthropic", api_key=SECRET
            )
            assert model.invoke("one two three").text == "3 words, such as: one two three"
            assert "".join(chunk.text for chunk in model.stream("a stream")) == "2 words, such as: a stream"
            with openai.OpenAI(api_key=SECRET, base_url=f"{running.url}/openai/v1") as client:
                question: Any = [{"role": "user", "content": "hello you"}]
                stream = client.chat.completions.create(model="gpt-4o-mini", messages=question, stream=True)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "2words,suchas:youhello"
    assert server.calls == {"one two three": 1, "a stream": 1, "hello you": 1}
    assert SECRET in str(server.headers), "the caller pays"
    bill = sum(kedge.llm.totals(tmp_path / "store").values(), kedge.llm.Bill())
    assert (bill.paid, bill.found) == (3, 3)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in files)


def test_what_litellm_sends(server: ModelServer, tmp_path: Path) -> None:
    """As litellm 1.106.2 was seen to send it; it cannot be installed beside the openai of these tests."""
    to_claude = [{"role": "user", "content": [{"type": "text", "text": "to claude"}]}]
    claude = {"model": "claude-haiku-4-5", "messages": to_claude, "max_tokens": 64000}
    gpt = {"messages": [{"role": "user", "content": "hello you"}], "model": "gpt-4o-mini"}
    with proxy(server, tmp_path / "store") as running, httpx2.Client(timeout=60) as plain:
        for path, asked in (("openai/v1/chat/completions", gpt), ("anthropic/v1/messages", claude)):
            for body in (asked, {**asked, "stream": True}):
                first, again = (plain.post(f"{running.url}/{path}", json=body) for _ in range(2))
                assert first.status_code == again.status_code == 200
                assert again.text == first.text
    assert server.calls == {"hello you": 2, "to claude": 2}


def test_answers_are_those_of_other_clients(server: ModelServer, tmp_path: Path) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "same"}]}
    with kedge.llm.http_client(store=tmp_path / "store") as client:
        first = client.post(f"{server.url}/v1/chat/completions", json=asked).json()
    with proxy(server, tmp_path / "store", "replay") as running, httpx2.Client(timeout=60) as plain:
        again = plain.post(f"{running.url}/openai/v1/chat/completions", json=asked)
        assert again.json() == first
        assert again.headers["x-kedge-cache"] == "hit"
    assert server.calls == {"same": 1}


def test_refusals(server: ModelServer, tmp_path: Path) -> None:
    question: Any = [{"role": "user", "content": "never"}]
    with proxy(server, tmp_path / "store", "replay") as running:
        client = openai.OpenAI(api_key="k", base_url=f"{running.url}/openai/v1")
        with client, pytest.raises(openai.NotFoundError, match="no answer of m is recorded"):
            client.chat.completions.create(model="m", messages=question)
    with proxy(server, tmp_path / "store", budget=Budget(day=0)) as running, httpx2.Client(timeout=60) as plain:
        asked = {"model": "gpt-4o-mini", "messages": question}
        refused = plain.post(f"{running.url}/openai/v1/chat/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["type"]) == (402, "budget_exceeded")
        for path, headers in (
            ("/", {}),
            ("/evil.example.org/v1/messages", {}),
            ("//169.254.169.254/latest", {}),
            ("/openai/v1/chat/completions", {"host": "evil.example.org"}),
        ):
            assert plain.post(f"{running.url}{path}", json=asked, headers=headers).status_code == 422
    assert server.calls == {}


def test_a_body_that_is_too_large_or_has_no_length(server: ModelServer, tmp_path: Path) -> None:
    with proxy(server, tmp_path / "store") as running:
        for header, status in (
            (("content-length", str(MAX_BODY_BYTES + 1)), 413),
            (("transfer-encoding", "chunked"), 422),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", running.server_address[1], timeout=60)
            connection.putrequest("POST", "/openai/v1/chat/completions")
            connection.putheader(*header)
            connection.endheaders()
            assert connection.getresponse().status == status
            connection.close()


def test_a_vendor_that_is_not_there(tmp_path: Path) -> None:
    with (
        kedge.llm.http_client(store=tmp_path / "store") as client,
        Proxy(client, vendors={"openai": "http://127.0.0.1:9"}) as running,
        httpx2.Client(timeout=60) as plain,
    ):
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        answer = plain.post(f"{running.url}/openai/v1/chat/completions", json={"model": "m"})
        running.shutdown()
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "unavailable")


def test_on_the_command_line(server: ModelServer, tmp_path: Path) -> None:
    words = ["llm", "proxy", "--store", str(tmp_path / "store"), "--port", "0", "--vendor", f"mine={server.url}"]
    process = subprocess.Popen([sys.executable, "-m", "kedge", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().partition("/anthropic is ")[0]
        asked = {"model": "m", "messages": [{"role": "user", "content": "from afar"}]}
        with httpx2.Client(timeout=60) as plain:
            for _ in range(2):
                assert plain.post(f"{url}/mine/v1/chat/completions", json=asked).status_code == 200
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert server.calls == {"from afar": 1}
