"""HTTP/1.1 as uvicorn speaks it with httptools, with bounds on what comes before and around a body.

The parser keeps a head until it is complete, however long that takes and however large it gets. Here a request that
does not begin in time, or that sends much more than the body it brings, loses its connection. What is inside those
bounds is judged by the edge (`limits`).

Nothing here speaks another protocol. The parser leaves out the body of a request that asks for one, and takes it for
the next request: whoever stands behind a proxy could hide one there.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .limits import Limits


class BoundedHttp(HttpToolsProtocol):
    head_s: ClassVar[float] = 20.0
    # Bytes that are no body: the head, sizes and extensions of chunks, trailers. The edge refuses less politely sized
    # heads that are complete; this is for those that never are.
    most_around: ClassVar[int] = 2 * Limits().header_bytes
    most_around_chunks: ClassVar[int] = 8  # times the body: a chunk of one byte takes six

    _waiting: asyncio.TimerHandle | None = None
    _is_new = False  # a request began in the piece that is being read
    _is_in_head = True
    _refusal = ""
    _around = 0
    _inside = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        before, inside, self._is_new = self.cycle, self._inside, False
        super().data_received(data)
        if self.cycle is not before:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
        elif self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()
        if not self._is_new:
            self._around += len(data) - (self._inside - inside)
            if self._around > self.most_around + self.most_around_chunks * self._inside:
                self.send_400_response("The head of the request, or what surrounds its body, is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_new = self._is_in_head = True
        self._around = self._inside = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # what trails a body is no header: who it claims to be, no proxy has looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self.parser.should_upgrade() and any(_brings_body(name, value) for name, value in self.headers):
            self._refusal = "A request with a body cannot ask for another protocol."
            raise ValueError(self._refusal)
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._refusal or msg)

    def _should_upgrade(self) -> bool:
        return False

    def on_body(self, body: bytes) -> None:
        self._inside += len(body)
        super().on_body(body)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def _brings_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
