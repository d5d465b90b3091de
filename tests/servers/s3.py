"""A real S3 server: SeaweedFS, from PyPI."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

KEY, SECRET = "kedge-test", "kedge-test-secret"
BUCKET = "kedge"
QUIET = ("-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0")


def weed() -> str | None:
    """The program, beside this interpreter or on the PATH."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The address of a server with one bucket, whose data lies in `folder`."""
    server, address = _start(folder)
    try:
        make_bucket(address)
        yield address
    finally:
        server.terminate()
        server.wait(60)


class Server:
    """A server that can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process, self.address = _start(folder)
        self._command = self._process.args

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        for _ in range(5):  # its ports may not be free at once
            self._process = _run(self._command, self._folder)
            if _is_up(f"{self.address}/healthz", self._process) and self._is_writable():
                return
            self.stop()
        raise RuntimeError(f"the S3 server did not start again:\n{_log(self._folder)}")

    def _is_writable(self) -> bool:
        def has_bucket() -> bool:
            try:
                make_bucket(self.address)
            except Exception:
                return False
            return True

        try:
            return wait_for(has_bucket, "the S3 server takes no bucket", 30)
        except AssertionError:
            return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def restartable_server(folder: Path) -> Iterator[Server]:
    """A server with one bucket, whose data lies in `folder`."""
    server = Server(folder)
    try:
        make_bucket(server.address)
        yield server
    finally:
        server.stop()


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    for _ in range(3):  # somebody else may take a port between finding it free and using it
        server, address = _start_once(folder)
        if _is_up(f"{address}/healthz", server):
            return server, address
        server.kill()
        server.wait()
    raise RuntimeError(f"the S3 server did not start:\n{_log(folder)}")


def _log(folder: Path) -> str:
    return (folder / "weed.log").read_text(errors="replace")[-3000:]


def _start_once(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    program = weed()
    assert program is not None
    names = ["s3", "master", "volume", "filer", "admin"]
    ports = _free_ports(2 * len(names))
    options = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    options += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[len(names) :], strict=True)]
    command = [program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *QUIET, *options]
    return _run(command, folder), f"http://127.0.0.1:{ports[0]}"


def _run(command: Any, folder: Path) -> subprocess.Popen[bytes]:
    with open(folder / "weed.log", "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder,
            env={**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
        )  # fmt: skip


def environment(address: str) -> dict[str, str]:
    """What tells clients of S3 about the server."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))  # port: another one is tried
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _is_up(url: str, server: subprocess.Popen[bytes]) -> bool:
    def is_decided() -> bool:
        if server.poll() is not None:
            return True
        try:
            urllib.request.urlopen(url, timeout=5).close()  # limit: of one look
        except (OSError, urllib.error.URLError):
            return False
        return True

    wait_for(is_decided, f"{url} does not answer")
    return server.poll() is None


def make_bucket(address: str) -> None:
    """The first object makes the bucket: with these credentials everything is allowed."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=address,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    obstore.put(store, "made", b"", use_multipart=False)
