"""What comes before and around a body is bounded, by size and time; what is inside the bounds is served."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from kedge.server import create_app
from kedge.server.protocol import BoundedHttp, Joined
from tests.server.conftest import listening
from tests.waiting import wait_for

HOST = b"Host: 127.0.0.1\r\n"
JSON = {"Content-Type": "application/json"}
CHUNKED = b"POST /api/v1/jobs/j/checkpoints HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
CHUNKED += b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    app = create_app(tmp_path_factory.mktemp("protocol") / "store")
    with listening(app, http=BoundedHttp) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


@contextmanager
def connection(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=60) as caller:
        yield caller


def answers(caller: socket.socket, count: int = 1) -> list[int]:
    """The statuses of what comes back, until that many came or the connection ends."""
    data = b""
    while data.count(b"HTTP/1.1 ") < count or not data.endswith(b"}"):
        piece = caller.recv(1 << 16)
        if not piece:
            break
        data += piece
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def whole_answer(caller: socket.socket) -> dict[str, Any]:
    answer = HTTPResponse(caller)
    answer.begin()
    assert answer.getheader("content-type") == "application/problem+json"
    told: dict[str, Any] = json.loads(answer.read())
    assert (told["status"], told["request_id"]) == (answer.status, answer.getheader("x-request-id"))
    return told


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /healthz?", b"a" * 4096),
        (b"GET /healthz HTTP/1.1\r\nX-Endless: ", b"a" * 4096),
        (b"GET /healthz HTTP/1.1\r\n", b"X-Many: a\r\n" * 400),
        (CHUNKED + b"1;x=", b"y" * 4096),
        (CHUNKED + b"1\r\n{\r\n0\r\nX-Trailer: ", b"z" * 4096),
    ],
    ids=["address", "header", "headers", "chunk extension", "trailer"],
)
def test_what_never_ends_loses_its_connection(address: tuple[str, int], start: bytes, piece: bytes) -> None:
    most = 4096 * BoundedHttp.most_around  # far more than lies in the system's buffers while the service is busy
    with connection(address) as caller:
        caller.sendall(start)
        sent = 0
        try:
            while sent < most:
                caller.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        assert sent < most


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\n\x00\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        b"nonsense\r\n\r\n",
        b"POST /healthz HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"POST /healthz HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"Host: evil.example\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /healthz?" + b"a" * 40_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
def test_what_is_no_request_is_refused(address: tuple[str, int], request_bytes: bytes) -> None:
    with connection(address) as caller:
        caller.sendall(request_bytes)
        told = whole_answer(caller)
    assert 400 <= told["status"] < 500
    assert all(told[name] for name in ("code", "detail", "hint", "request_id"))


def test_a_refusal_keeps_the_id_it_was_given_and_goes_into_the_log(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with connection(address) as caller:
        caller.sendall(b"GET /healthz HTTP/1.1\r\nX-Request-ID: mine-0001\r\nX: y\r\n\x00\r\n\r\n")
        assert whole_answer(caller)["request_id"] == "mine-0001"
    assert "refused: this is no request" in caplog.text


@pytest.mark.parametrize("ending", [b"nonsense\r\n\r\n", b"GET /healthz HTTP/1.1\r\nX: "], ids=["refused", "too slow"])
def test_what_was_asked_before_is_answered_and_nothing_else(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    """The stream would go on for ever; what comes behind its request neither disturbs it nor keeps the connection."""
    has_ended = threading.Event()
    real = BoundedHttp._end

    def end(self: BoundedHttp, refusal: bytes = b"") -> None:
        real(self, refusal)
        has_ended.set()

    monkeypatch.setattr(BoundedHttp, "_end", end)
    with connection(address) as caller:
        caller.sendall(b"GET /api/v1/events HTTP/1.1\r\n" + HOST + b"\r\n")
        data = caller.recv(1 << 16)
        with monkeypatch.context() as patch:
            patch.setattr(BoundedHttp, "head_s", 0.05)
            caller.sendall(ending)
            assert has_ended.wait(60)
        client = HTTPConnection(*address, timeout=60)
        client.request("POST", "/api/v1/jobs/j/checkpoints", b'{"step": "s", "state": 1}', JSON)
        assert client.getresponse().status == 201
        client.close()
        while b"event: save" not in data:
            piece = caller.recv(1 << 16)
            assert piece
            data += piece
    assert data.count(b"HTTP/1.1 ") == 1


def test_what_is_inside_the_bounds_is_served(address: tuple[str, int]) -> None:
    get = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    body = b'{"step": "s", "state": "' + b"x" * 300_000 + b'"}'
    head = b"POST /api/v1/jobs/j/checkpoints HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    with connection(address) as caller:
        caller.sendall(get * 5)  # one behind the other
        assert answers(caller, 5) == [200] * 5
        caller.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answers(caller) == [201]
        for byte in get:  # after a large body, a head that comes byte by byte
            caller.sendall(bytes([byte]))
        assert answers(caller) == [200]
        small = b'{"step": "s", "state": "' + b"x" * 20_000 + b'"}'
        caller.sendall(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in small) + b"0\r\n\r\n")
        assert answers(caller) == [201]


def test_two_hosts_are_one_too_many(tmp_path: Path) -> None:
    """Also where any name is allowed: a proxy may have looked at the other one."""
    app = create_app(tmp_path / "store", allow_hosts=())
    with listening(app, http=BoundedHttp) as url, connection(("127.0.0.1", int(url.rpartition(":")[2]))) as caller:
        caller.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + b"Host: evil.example\r\n\r\n")
        assert answers(caller) == [400]


def test_what_trails_a_body_is_no_header(address: tuple[str, int]) -> None:
    """A proxy that takes headers off, or sets them, does not look there."""
    body = b'{"step": "s", "state": 1}'
    with connection(address) as caller:
        for trailer in (b"Authorization: Bearer x", b"Host: evil.example", b"X-Forwarded-For: 192.0.2.1"):
            caller.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(body), body, trailer))
            assert answers(caller) == [201]


def test_a_body_is_never_taken_for_the_next_request(address: tuple[str, int]) -> None:
    """Of a request that asks for another protocol the parser leaves out the body."""
    inner = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    ask = b" /healthz HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: %s\r\n"
    for protocol in (b"h2c", b"websocket"):
        with connection(address) as caller:
            caller.sendall(b"GET" + ask % protocol + b"Content-Length: 0\r\n\r\n")  # as some clients begin
            assert answers(caller) == [200]
            caller.sendall(b"POST" + ask % protocol + b"Content-Length: %d\r\n\r\n" % len(inner))
            try:
                caller.sendall(inner)
                assert answers(caller, 2) == [400]
            except OSError:
                pass  # the connection was gone before the body came


@pytest.mark.parametrize("host", [b"127.0.0.1:80@evil.example", b"127.0.0.1:80/x", b"evil.example:7420", b""])
def test_a_host_is_a_name_and_a_port(address: tuple[str, int], host: bytes) -> None:
    with connection(address) as caller:
        caller.sendall(b"GET /healthz HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert answers(caller) == [421]
        for ours in (b"127.0.0.1", b"localhost:7420", b"[::1]", b"[::1]:7420"):
            caller.sendall(b"GET /healthz HTTP/1.1\r\nHost: " + ours + b"\r\n\r\n")
            assert answers(caller) == [200]


def test_who_goes_away_is_no_defect(address: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    with connection(address) as caller:
        caller.sendall(CHUNKED + b"5\r\n12")

    def is_noticed() -> bool:
        client = HTTPConnection(*address, timeout=60)
        client.request("GET", "/metrics")
        answer = client.getresponse()
        text = answer.read().decode()
        client.close()
        assert answer.status == 200, text
        return 'status="499"' in text

    wait_for(is_noticed, "nobody noticed that the caller went away")
    assert "unexpected" not in caplog.text


# --- the head of an answer goes out with its body ---


class _Wire:
    """A transport that writes down what is done with it."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    abort = close

    def is_closing(self) -> bool:
        return "closed" in self.done


LARGE = b"l" * (Joined.most_held + 1)


@pytest.mark.parametrize(
    ("steps", "done"),
    [
        ([b"head", b"body"], [b"headbody"]),
        ([b"head", "next round", b"body", "next round"], [b"head", b"body"]),
        ([b"head", b"a", b"b", b"c"], [b"heada", b"bc"]),
        ([b"head", LARGE, b"rest", "next round"], [b"head", LARGE, b"rest"]),
        ([b"head", "close"], [b"head", "closed"]),
        ([b"head", "abort", "next round"], ["closed"]),
    ],
    ids=["together", "a stream", "pieces", "large", "closed", "aborted"],
)
def test_what_is_written_arrives_in_order_and_in_few_calls(steps: list[bytes | str], done: list[bytes | str]) -> None:
    wire = _Wire()

    async def act() -> None:
        joined = Joined(wire, asyncio.get_running_loop())  # type: ignore[arg-type]
        for step in steps:
            if isinstance(step, bytes):
                joined.write(step)
            elif step == "next round":
                await asyncio.sleep(0)  # sleep: one round of the loop
            else:
                getattr(joined, step)()

    asyncio.run(act())
    assert wire.done == done
