"""The edge: what every request passes before and after its route.

Request ID, hosts that may be named, how large, how slow and how many at once; the log line, the numbers and the
headers of every answer. One plain ASGI layer, because it is on the way of everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import CheckpointError, TooLarge, Unavailable

from .logs import choose_request_id, request_id
from .problems import answer_to, of_error, of_surprise, problem

if TYPE_CHECKING:
    from .route import DirectRoute
    from .service import Service

_log = logging.getLogger("kedge.access")

CLIENT_LEFT = 499  # in log and numbers, of a caller who went away before the body was there
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

# No script, style or image from anywhere but here, nothing inline; no frame around it; no type guessed.
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer browsers would hide the Origin of our own forms
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the service takes at once."""

    body_bytes: int = 1 << 30
    json_bytes: int = 64 << 20  # of JSON documents, which are held in memory
    header_bytes: int = 32 << 10
    receive_s: float = 30.0  # without another piece of the body
    concurrent: int = 256
    streams: int = 128  # event streams, which stay open and are counted apart
    threads: int = 24


class TooSlow(CheckpointError):
    """The body did not come, or the answer took too long."""

    code = "too_slow"
    http_status = 408


class Edge:
    """Around the application. Direct routes (`route`) are called from here, whatever else there is by the framework."""

    def __init__(self, app: ASGIApp, service: Service, hosts: Collection[str], direct: Sequence[DirectRoute]) -> None:
        self.app = app
        self.direct = direct
        self.service = service
        self.hosts = frozenset(host.lower() for host in hosts)
        self.in_flight = 0
        service.metrics.in_flight.set_function(lambda: self.in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        token = request_id.set(choose_request_id(headers.get(b"x-request-id", b"").decode("latin-1")))
        asked = scope["method"]
        if asked == "HEAD":  # every GET route answers it: the same headers, no body
            scope, send = {**scope, "method": "GET"}, _HeadersOnly(send)
        answer = _Answer(send, request_id.get())
        started = time.perf_counter()
        self.in_flight += 1
        try:
            refusal = self._refuse(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, answer)
            else:
                await self._run(scope, _Body(receive, self.service.limits), answer)
        finally:
            self.in_flight -= 1
            self._note(asked, scope, answer, time.perf_counter() - started)
            request_id.reset(token)

    async def _run(self, scope: Scope, body: Receive, answer: _Answer) -> None:
        try:
            app = next((route.app for route in self.direct if route.takes(scope)), self.app)
            await app(scope, body, answer)
        except (CheckpointError, HTTPException, RequestValidationError) as error:  # of a direct route
            if answer.status:
                raise
            await (await answer_to(Request(scope), error))(scope, body, answer)
        except ClientDisconnect:
            answer.status = answer.status or CLIENT_LEFT
        except Exception as error:
            if answer.status:
                raise
            await of_surprise(error)(scope, body, answer)

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        limits, refused = self.service.limits, self.service.metrics.refused
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name, _, port = host.rpartition(":")
        called = name if port.isdecimal() else host
        if self.hosts and called not in self.hosts:
            refused.labels("host").inc()
            return problem(421, "wrong_host", "host name not allowed", "start it with --allow-host NAME")
        size, hosts = len(scope.get("raw_path") or b"") + len(scope["query_string"]), 0
        for name, value in scope["headers"]:
            size += len(name) + len(value) + 4
            hosts += name == b"host"
        if hosts != 1:  # a proxy may have looked at another one
            refused.labels("host").inc()
            return problem(400, "invalid", "a request has one Host header", "send it once")
        if size > limits.header_bytes:
            refused.labels("headers").inc()
            return problem(431, "headers_too_large", "the headers are too large", "send fewer or shorter ones")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limits.body_bytes:
            refused.labels("body").inc()
            return of_error(_too_large(limits.body_bytes))
        if self.in_flight > limits.concurrent:
            refused.labels("busy").inc()
            return of_error(Unavailable("the service has too much to do", hint="try again in a moment"))
        return None

    def _note(self, asked: str, scope: Scope, answer: _Answer, seconds: float) -> None:
        route = getattr(scope.get("route"), "path_format", None) or getattr(scope.get("route"), "path", None) or "none"
        metrics, method = self.service.metrics, asked if asked in _METHODS else "other"
        metrics.note(method, route, answer.status, seconds)
        if _log.isEnabledFor(logging.INFO):
            client = scope.get("client")
            facts = {
                "method": asked,
                "path": scope["path"],
                "status": answer.status,
                "ms": round(seconds * 1000, 3),
                "client": client[0] if client else None,
                "actor": scope.get("state", {}).get("actor"),
            }
            _log.info("%s %s %s", asked, scope["path"], answer.status, extra={"facts": facts})


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"more than {most:,} bytes", hint="save large arrays in parts, or use the store directly")


class _Body:
    """`receive` that gives up on bodies that are too large, or that do not come."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive = receive
        self._limits = limits
        self._seen = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()  # waits for the end of the connection
        try:
            async with asyncio.timeout(self._limits.receive_s):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow("the body did not come", hint="send it at once") from None
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            if self._seen > self._limits.body_bytes:
                raise _too_large(self._limits.body_bytes)
        return message


class _HeadersOnly:
    """`send` for HEAD: ends the answer after its headers; whoever goes on sending hears that nobody listens."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        if not self._is_over:
            self._is_over = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        if message.get("more_body", False):
            raise ClientDisconnect


class _Answer:
    """`send` that adds our headers and remembers the status."""

    def __init__(self, send: Send, identity: str) -> None:
        self._send = send
        self._identity = identity.encode()
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = dict(message["headers"])
            added = _HEADERS if own.keys().isdisjoint(_NAMES) else [each for each in _HEADERS if each[0] not in own]
            message["headers"] = [*message["headers"], *added, (b"x-request-id", self._identity)]
        await self._send(message)


_HEADERS: Sequence[tuple[bytes, bytes]] = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_NAMES = frozenset(dict(_HEADERS))
