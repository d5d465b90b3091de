"""An S3 server that ignores preconditions, as some do: enough of the protocol for a few objects, in memory."""

from __future__ import annotations

import email.utils
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def do_PUT(self) -> None:
        self.objects[self.key] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_DELETE(self) -> None:
        self.objects.pop(self.key, None)
        self._answer(204)

    def do_POST(self) -> None:
        """Several deletions at once, which is how clients delete."""
        keys = re.findall(r"<Key>(.*?)</Key>", self.rfile.read(int(self.headers["Content-Length"])).decode())
        for key in keys:
            self.objects.pop(key, None)
        rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            names = sorted(n for n in self.objects if n.startswith(query.get("prefix", [""])[0]))
            rows = "".join(
                f"<Contents><Key>{escape(n)}</Key><Size>{len(self.objects[n])}</Size>"
                '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"x"</ETag></Contents>'
                for n in names
            )
            self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())
            return
        data = self.objects.get(self.key)
        if data is None:
            self._answer(404)
        elif "Range" in self.headers:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self._answer(206, data[first : last + 1], f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}")
        else:
            self._answer(200, data)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _answer(self, status: int, data: bytes = b"", content_range: str = "") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        self.send_header("Last-Modified", email.utils.formatdate(time.time(), usegmt=True))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def careless_s3() -> Iterator[str]:
    """The address of such a server; any bucket exists."""

    class Handler(_Handler):
        objects: dict[str, bytes] = {}  # noqa: RUF012 - of this server alone

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
