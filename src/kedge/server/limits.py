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
from urllib.parse import quote

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

_BODY = "kedge.body"  # in the scope of a request
_HEADERS_BY_NAME = "kedge.headers"  # likewise
_DRAIN_S = 2.0  # for what is left of a body, and more for a large one, once the service stops
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

    body_bytes: int = 1 << 30  # of saves
    json_bytes: int = 64 << 20  # of saves as JSON documents, which are held in memory
    document_bytes: int = 1 << 20  # of everything else
    form_bytes: int = 16 << 10  # of strangers, who sign in
    header_bytes: int = 32 << 10
    receive_s: float = 30.0  # for a body, and more for a large one:
    bytes_per_s: int = 64 << 10  # the least that a body comes with
    form_s: float = 10.0
    concurrent: int = 256  # requests of callers who are known
    sign_ins: int = 32
    streams: int = 128  # event streams, which stay open and are counted apart
    threads: int = 24
    private_webhooks: bool = False  # whether webhooks may call private addresses, and plain HTTP


class TooSlow(CheckpointError, code="too_slow", http=408):
    """The body did not come, or the answer took too long."""


class Edge:
    """Around the application. Direct routes (`route`) are called from here, whatever else there is by the framework."""

    def __init__(self, app: ASGIApp, service: Service, hosts: Collection[str], direct: Sequence[DirectRoute]) -> None:
        self.app = app
        self.direct = direct
        self.service = service
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        _put_prefix(scope)
        headers = scope[_HEADERS_BY_NAME] = dict(reversed(scope["headers"]))
        token = request_id.set(choose_request_id(headers.get(b"x-request-id", b"").decode("latin-1")))
        asked = scope["method"]
        if asked == "HEAD":  # every GET route answers it: the same headers, no body
            scope, send = {**scope, "method": "GET"}, _HeadersOnly(send)
        answer = _Answer(send, request_id.get())
        started = time.perf_counter()
        self.service.metrics.in_flight.inc()
        body = Body(receive, self.service, headers.get(b"content-length", b"0"))
        try:
            refusal = self._refuse(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, answer)
            else:
                scope[_BODY] = body
                await self._run(scope, body, answer)
        finally:
            self.service.metrics.in_flight.dec()
            self.service.slots.discard(body)
            self.service.sign_ins.discard(body)
            self._note(asked, scope, answer, time.perf_counter() - started)
            request_id.reset(token)

    async def _run(self, scope: Scope, body: Body, answer: _Answer) -> None:
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
        return None

    def _note(self, asked: str, scope: Scope, answer: _Answer, seconds: float) -> None:
        route = getattr(scope.get("route"), "path_format", None) or getattr(scope.get("route"), "path", None) or "none"
        metrics, method = self.service.metrics, asked if asked in _METHODS else "other"
        metrics.note(method, route, answer.status, seconds)
        if metrics.is_shared:
            metrics.count_work(self.service.managers())
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


def _put_prefix(scope: Scope) -> None:
    """A path begins with the path prefix, as ASGI says, also behind a proxy that takes it off."""
    root = scope.get("root_path", "")
    if root and not (scope["path"] + "/").startswith(root + "/"):
        scope["path"] = root + scope["path"]
        if scope.get("raw_path"):
            scope["raw_path"] = quote(root).encode() + scope["raw_path"]


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"more than {most:,} bytes", hint="save large arrays in parts, or use the store directly")


class Body:
    """`receive` that gives nothing until the gate of a route opens it (`gate`), and gives up on what is too large or
    does not come."""

    def __init__(self, receive: Receive, service: Service, declared: bytes) -> None:
        self._receive = receive
        self._service = service
        self._declared = declared
        self._is_open = False
        self._most_bytes = 0
        self._until = 0.0
        self._seen = 0
        self._is_whole = False
        self._is_hurried = False  # by the stop of the service

    def open(self, most_bytes: int, within_s: float) -> None:
        """Take so much, so long; TooLarge when more was announced."""
        self._is_open, self._most_bytes, self._until = True, most_bytes, time.monotonic() + within_s
        if int(self._declared) > most_bytes:  # the edge has bounded its digits
            self._service.metrics.refused.labels("body").inc()
            raise _too_large(most_bytes)

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()  # waits for the end of the connection
        if not self._is_open:
            return await self._end()
        if self._service.is_draining and not self._is_hurried:
            self._is_hurried, self._until = True, min(self._until, time.monotonic() + _DRAIN_S)
        message = await self._next()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._seen += size
            self._until += size / self._service.limits.bytes_per_s
            self._is_whole = not message.get("more_body", False)
            if self._seen > self._most_bytes:
                raise _too_large(self._most_bytes)
        return message

    async def _end(self) -> Message:
        """The end of the connection, for answers without a gate, such as files of the page. What is sent is dropped."""
        while (message := await self._receive())["type"] == "http.request":
            pass
        return message

    async def _next(self) -> Message:
        """The next piece, by the deadline of the whole body; who sends one while the service stops has less time.

        What is there already is taken without a timer: as a rule a small body comes together with its head.
        """
        if time.monotonic() < self._until:
            receiving = self._receive().__await__()
            try:
                next(receiving)
            except StopIteration as received:
                return received.value  # type: ignore[no-any-return]
            receiving.close()
        while (left_s := self._until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left_s, _DRAIN_S)):
                    return await self._receive()
            except TimeoutError:
                if self._service.is_draining:
                    break
        if self._service.is_draining:
            raise Unavailable("the service is stopping", hint="send it to another one")
        raise TooSlow("the body did not come in time", hint="send it at once")


def body_of(scope: Scope) -> Body:
    body = scope[_BODY]
    assert isinstance(body, Body)
    return body


def headers_of(request: Request) -> dict[bytes, bytes]:
    """The headers by name, of those that come twice the first: quicker than `request.headers`, and made once."""
    headers: dict[bytes, bytes] = request.scope[_HEADERS_BY_NAME]
    return headers


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
            added = (
                _HEADERS if own.keys().isdisjoint(_NAMES) else [header for header in _HEADERS if header[0] not in own]
            )
            message["headers"] = [*message["headers"], *added, (b"x-request-id", self._identity)]
        await self._send(message)


_HEADERS: Sequence[tuple[bytes, bytes]] = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_NAMES = frozenset(dict(_HEADERS))
