"""The service as the browser tests and the pictures start it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_for

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


@contextmanager
def served(place: Path, *arguments: str) -> Iterator[str]:
    """`kedge serve` on a free port; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kedge", "serve", "--store", str(place), "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:

        def is_up() -> bool:
            assert process.poll() is None, "the service ended"
            try:
                urllib.request.urlopen(f"{address}/healthz", timeout=5).close()
            except OSError:
                return False
            return True

        wait_for(is_up, "the service does not answer")
        yield address
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def served_here(place: Path, runner: object) -> Iterator[str]:
    """The application with a job runner, in a thread of this process; its address."""
    import uvicorn

    from kedge.server import create_app

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(place, runner), log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
