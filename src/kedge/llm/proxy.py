"""A local HTTP proxy with the cache, for SDKs that take a base URL but no client: `kedge llm proxy`.

`http://127.0.0.1:PORT/anthropic/v1/messages` is `https://api.anthropic.com/v1/messages`, answered from the store or
sent there with the caller's own credentials. It reaches only the vendors it was started with, and serves only this
machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kedge.errors import CheckpointError, TooLarge, Validation

from .keys import MAX_BODY_BYTES

VENDORS = {
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
    "openai": "https://api.openai.com",
}
_OF_THE_CONNECTION = {
    "connection", "content-length", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Proxy(ThreadingHTTPServer):
    """Serves until it is shut down; `client` comes from `kedge.llm.http_client`, `vendors` maps names to URLs."""

    daemon_threads = True

    def __init__(self, client: Any, port: int = 0, vendors: Mapping[str, str] = VENDORS) -> None:
        super().__init__(("127.0.0.1", port), _Call)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.client = client
        self.vendors = vendors

    def handle_error(self, request: Any, client_address: object) -> None:
        """Ignore a caller that hangs up during a response."""


class _Call(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _forward(self) -> None:
        try:
            response = self._send()
            _ = response.is_success  # raises what the cache refuses
        except CheckpointError as error:
            self._refuse(error.http_status, error.code, str(error))
        except Exception as error:  # noqa: BLE001 - from the HTTP library: the vendor cannot be reached
            self._refuse(502, "unavailable", f"the vendor cannot be reached: {error}")
        else:
            try:
                self._pass_on(response)
            finally:
                response.close()

    do_GET = do_POST = do_DELETE = _forward  # noqa: N815 - the names that http.server calls

    def _send(self) -> Any:
        """Return the response of the cache or the vendor."""
        body = self._body()
        if (self.headers.get("host") or "").rpartition(":")[0] not in _LOCAL:
            raise Validation("host name not allowed", hint=f"use {self.server.url}")
        name, _, rest = self.path.lstrip("/").partition("/")
        if name not in self.server.vendors:
            names = ", ".join(f"{self.server.url}/{vendor}" for vendor in self.server.vendors)
            raise Validation(f"{name[:100]!r} is not a known vendor", hint=f"use one of these as base URL: {names}")
        client = self.server.client
        request = client.build_request(
            self.command,
            f"{self.server.vendors[name].rstrip('/')}/{rest}",
            headers=[(name, value) for name, value in self.headers.items() if name.lower() not in _OF_THE_CONNECTION],
            content=body,
        )
        return client.send(request, stream=True)

    def _body(self) -> bytes:
        length = self.headers.get("content-length", "0")
        if self.headers.get("transfer-encoding") or not length.isdecimal():
            self.close_connection = True
            raise Validation("the request has no content-length", hint="send the body in one piece")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise TooLarge(f"the request has {int(length):,} bytes", hint=f"at most {MAX_BODY_BYTES:,} are taken")
        return self.rfile.read(int(length))

    def _pass_on(self, response: Any) -> None:
        self.send_response(response.status_code)
        for name, value in response.headers.multi_items():
            if name not in _OF_THE_CONNECTION:
                self.send_header(name, value)
        self._write_chunks([response.content] if response.is_stream_consumed else response.iter_raw())

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("x-should-retry", "false")  # the vendors' SDKs obey this
        self._write_chunks([json.dumps({"type": "error", "error": {"type": code, "message": message}}).encode()])

    def _write_chunks(self, pieces: Iterable[bytes]) -> None:
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
