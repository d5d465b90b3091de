"""The service as the browser tests and the pictures start it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


@contextmanager
def served(place: Path, *arguments: str) -> Iterator[str]:
    """`kedge serve` on a free port; its address."""
    command = [sys.executable, "-m", "kedge", "serve", "--store", str(place), "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "running on" in line), "")
        assert said, "the service did not start"
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        try:
            yield next(word for word in json.loads(said)["message"].split() if word.startswith("http://"))
        finally:
            process.terminate()
            drain.join()


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
        thread.join(60)
