"""Between a client and an HTTP server, losing and spoiling what it is told to."""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("lost request", "lost answer", "busy", "error", "cut off")
HARSH = (*FAULTS, "late", "spoilt request", "spoilt answer")  # late: it arrives after it was taken for lost


class FaultProxy:
    """`rate` of the requests meet a fault, drawn with `seed`; `struck` counts which."""

    def __init__(self, target: str, *, rate: float, seed: int, faults: tuple[str, ...]) -> None:
        self.target = urlsplit(target).netloc
        self.rate = rate
        self.faults = faults
        self.late: list[threading.Thread] = []
        self.struck: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()

    def draw(self) -> str:
        with self._lock:
            fault = self._dice.choice(self.faults) if self._dice.random() < self.rate else ""
            self.struck[fault] += 1
            return fault


@contextmanager
def fault_proxy(
    target: str, *, rate: float, seed: int = 1, faults: tuple[str, ...] = FAULTS
) -> Iterator[tuple[str, FaultProxy]]:
    """The address of a proxy to `target`, and the proxy itself."""
    proxy = FaultProxy(target, rate=rate, seed=seed, faults=faults)

    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", proxy
    finally:
        server.shutdown()
        thread.join()
        for each in proxy.late:
            each.join()
        server.server_close()


def _spoilt(data: bytes) -> bytes:
    """The same with one bit turned, in the middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else data


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.draw()
        self.close_connection = True
        if fault == "lost request":
            return
        if fault == "late":
            self.proxy.late.append(threading.Timer(0.1, self._forward, (body,)))
            self.proxy.late[-1].start()
            return
        if fault in ("busy", "error"):
            self._answer(503 if fault == "busy" else 500, [], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "spoilt request" and body:
            body = _spoilt(body)
        status, headers, data = self._forward(body)
        if fault == "spoilt answer" and "/packs/" in self.path and status in (200, 206):
            data = _spoilt(data)
        if fault == "lost answer":
            return
        self._answer(status, headers, data, cut=len(data) // 2 if fault == "cut off" else None)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815 - http.server's names

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        # With the client's own Host: it is part of what the client has signed.
        upstream = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        sized = self.command == "HEAD" and any(name.lower() == "content-length" for name, _ in headers)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding") and (sized or name.lower() != "content-length"):
                self.send_header(name, value)
        if not sized:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])

    def log_message(self, format: str, *args: object) -> None:
        return
