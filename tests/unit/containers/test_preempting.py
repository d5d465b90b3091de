"""The notice that a machine must go: what counts as one, and what does not."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.containers.preempting import wait_for_notice


class _Metadata(ThreadingHTTPServer):
    """Answers as metadata services do; once all answers are given, the last one stays."""

    answers: list[tuple[int, bytes]]
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Metadata

    def do_GET(self) -> None:
        status, body = self.server.answers[min(self.server.asked, len(self.server.answers) - 1)]
        self.server.asked += 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(name="metadata")
def _metadata() -> Iterator[_Metadata]:
    with _Metadata(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_that_answers(metadata: _Metadata) -> None:
    url = f"http://127.0.0.1:{metadata.server_port}/preempted"
    metadata.answers = [(404, b""), (500, b"TRUE"), (200, b"FALSE"), (200, b"TRUE")]
    unreachable = "http://127.0.0.1:1/"
    assert wait_for_notice([], [unreachable, url], "TRUE", 0.001, threading.Event()) == url
    assert metadata.asked == 4
    metadata.answers, metadata.asked = [(404, b""), (200, b"{}")], 0
    assert wait_for_notice([], [url], "", 0.001, threading.Event()) == url
    assert metadata.asked == 2


def test_a_file_and_a_signal(tmp_path: Path) -> None:
    signalled = threading.Event()
    threading.Timer(0.05, signalled.set).start()
    assert wait_for_notice([tmp_path / "no"], [], "", 60, signalled) == "signal"
    (tmp_path / "yes").touch()
    assert wait_for_notice([tmp_path / "no", tmp_path / "yes"], [], "", 60, threading.Event()) == str(tmp_path / "yes")
