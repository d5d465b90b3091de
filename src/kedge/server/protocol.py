"""HTTP/1.1 as uvicorn speaks it with httptools, with bounds on what comes before and around a body.

The parser keeps a head until it is complete, however long that takes and however large it gets. Here a request that
does not begin in time, or that sends much more than the body it brings, loses its connection; so does who does not
read what it asked for. What is inside those bounds is judged by the edge (`limits`).

Nothing here speaks another protocol. The parser leaves out the body of a request that asks for one, and takes it for
the next request: whoever stands behind a proxy could hide one there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .limits import SECURITY_HEADERS, Limits
from .logs import choose_request_id, request_id
from .problems import problem

_log = logging.getLogger("kedge.server")


class Joined:
    """A transport that sends the head of an answer together with its body: one call of the system, not two.

    What comes first is held until more comes, at most until the present round of the loop is over. So a stream whose
    body takes its time has sent its head, and no more than one piece, a small one, is ever held.
    """

    most_held: ClassVar[int] = 16 << 10

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if len(data) > self.most_held:  # rather a second call than a copy
            self._flush()
        elif self._held:
            data, self._held = self._held + data, b""
        else:
            self._held = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(self._held)
        self._held = b""

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    head_s: ClassVar[float] = 20.0
    read_s: ClassVar[float] = 60.0  # for a caller to read some of what waits for it
    linger_s: ClassVar[float] = 10.0  # for the rest of a body that was refused: its sender is to read why
    # Bytes that are no body: the head, sizes and extensions of chunks, trailers. The edge refuses less politely sized
    # heads that are complete; this is for those that never are.
    most_around: ClassVar[int] = 2 * Limits().header_bytes
    most_around_chunks: ClassVar[int] = 8  # times the body: a chunk of one byte takes six

    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None
    _is_new = False  # a request began in the piece that is being read
    _is_in_head = True
    _is_in_body = False
    _is_over = False  # what was asked before is answered; what still comes is not looked at
    _refusal = ""
    _around = 0
    _inside = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", Joined(transport, self.loop))
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        before, inside, self._is_new = self.cycle, self._inside, False
        super().data_received(data)
        if self.cycle is not before and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._is_in_head and self._waiting is None:
            self._wait()
        if not self._is_new:
            self._around += len(data) - (self._inside - inside)
            if self._around > self.most_around + self.most_around_chunks * self._inside:
                self._refusal = "the head of the request, or what surrounds its body, is too large"
                self.send_400_response(self._refusal)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_new = self._is_in_head = True
        self._around = self._inside = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # what trails a body is no header: who it claims to be, no proxy has looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(_brings_body(name, value) for name, value in self.headers):
            self._refusal = "a request with a body cannot ask for another protocol"
            raise ValueError(self._refusal)
        super().on_headers_complete()
        self._is_in_head, self._is_in_body = False, True

    def on_message_complete(self) -> None:
        self._is_in_body = False
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._lingering = self.loop.call_later(self.linger_s, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if not self._is_over:
            headers = dict(self.headers or ()) if self._is_in_head or self._is_in_body else {}
            given = headers.get(b"x-request-id", b"").decode("latin-1")
            self._end(_refuse(self._refusal or "this is no request of HTTP/1.1", given))

    def _end(self, refusal: bytes = b"") -> None:
        """End the connection, behind the answers that are under way: nobody is to take a refusal for one of them."""
        self._is_over = True
        if not self._is_in_body and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            return
        if not self._is_in_body or not (self.pipeline or self.cycle.response_started):
            self.transport.write(refusal)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False

    def on_body(self, body: bytes) -> None:
        self._inside += len(body)
        super().on_body(body)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        self._waiting = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the rest may be here, behind requests that wait for their turn
            self._wait()
        else:
            self._end()


def _refuse(detail: str, given_id: str) -> bytes:
    token = request_id.set(choose_request_id(given_id))
    try:
        _log.warning("refused: %s", detail)
        answer = problem(400, "invalid", detail, "send it as RFC 9112 says; a proxy may have changed it on the way")
        ours = {**SECURITY_HEADERS, "x-request-id": request_id.get(), "connection": "close"}
    finally:
        request_id.reset(token)
    headers = [*answer.raw_headers, *((name.encode(), value.encode()) for name, value in ours.items())]
    return b"".join([STATUS_LINE[400], *(b"%s: %s\r\n" % header for header in headers), b"\r\n", bytes(answer.body)])


def _brings_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
