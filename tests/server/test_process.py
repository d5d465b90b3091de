"""`kedge serve` as a process: started, stopped in the middle of work, attacked slowly."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

import kedge
from kedge.cli.app import cli
from tests.waiting import wait_for


@contextmanager
def serving(place: Path, *arguments: str, before: str = "pass") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it is ready; `before` is Python that it runs first."""
    start = f"{before}\nfrom kedge.cli import main\nmain()"
    command = [sys.executable, "-c", start, "serve", "--store", str(place), "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        for line in process.stderr:
            told = json.loads(line)["message"]
            if "running on" in told:
                url = next((word for word in told.split() if word.startswith("http://")), "")
                break
        else:
            pytest.fail("it did not start")
        drain.start()
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if drain.ident is not None:
            drain.join()
        process.stderr.close()


def test_sigterm_loses_no_acknowledged_save(tmp_path: Path) -> None:
    stop_under_load(tmp_path / "store")


def stop_under_load(place: Path, before: str = "pass") -> None:
    """Savers at work, an event stream open: everything that was answered 201 is there afterwards, and it ends."""
    acknowledged: list[str] = []
    enough, is_open = threading.Event(), threading.Event()

    with serving(place, before=before) as (process, url):

        def work(n: int) -> None:
            with httpx.Client(timeout=60) as client:
                for k in range(10_000):
                    try:
                        body = {"step": "s", "state": {"n": n, "k": k}}
                        answer = client.post(f"{url}/api/v1/jobs/j{n}/checkpoints", json=body)
                    except httpx.HTTPError:
                        return  # not acknowledged
                    if answer.status_code != 201:
                        return
                    acknowledged.append(answer.json()["id"])
                    if len(acknowledged) > 60:
                        enough.set()

        def listen() -> int:
            count = 0
            with httpx.stream("GET", f"{url}/api/v1/events", params={"after": 0}, timeout=60) as answer:
                for line in answer.iter_lines():
                    count += line.startswith("id:")
                    is_open.set()
            return count

        with ThreadPoolExecutor(5) as threads:
            savers = [threads.submit(work, n) for n in range(4)]
            listener = threads.submit(listen)
            assert enough.wait(60)
            assert is_open.wait(60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) in (0, -signal.SIGTERM)
            for saver in savers:
                saver.result()
            assert listener.result() > 0  # the stream ended by itself
    with kedge.open(place) as store:
        assert len(acknowledged) > 60
        for each in acknowledged:
            assert store.exists(each)
        assert store.verify().is_ok


def test_two_workers_share_a_store(tmp_path: Path) -> None:
    with serving(tmp_path / "store", "--workers", "2") as (process, url):

        def is_ready() -> bool:  # uvicorn says that it runs before its workers do
            try:
                return httpx.get(f"{url}/readyz", timeout=60).status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(is_ready, "it is not ready")
        saved = [
            httpx.post(f"{url}/api/v1/jobs/j/checkpoints", json={"step": "s", "state": n}, timeout=60).json()["seq"]
            for n in range(10)
        ]
        assert saved == list(range(1, 11))
        task = httpx.post(f"{url}/api/v1/gc", timeout=60).json()
        found = {httpx.get(f"{url}/api/v1/tasks/{task['id']}", timeout=60).status_code for _ in range(10)}
        assert found == {200}  # whichever worker is asked

        def saves() -> list[str]:
            return [
                line
                for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
                if line.startswith("kedge_saves_t")
            ]

        for _ in range(10):  # each on a connection of its own, which one worker takes
            wait_for(lambda: saves() == ['kedge_saves_total{namespace="default"} 10.0'], "the workers are not summed")
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def test_it_may_open_as_many_files_as_the_system_lets_it(tmp_path: Path) -> None:
    """Each part of an upload may be one, and where nobody asks for more, 1,024 are allowed."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 5000))"
    with serving(tmp_path / "store", before=few) as (process, _):
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (5000, 5000)


def test_other_addresses_need_a_token(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    refused = CliRunner().invoke(cli, ["--store", place, "serve", "--host", "0.0.0.0", "--port", "0"])
    assert refused.exit_code == 3
    assert f"kedge --store {place} token create NAME" in refused.stderr
    assert not Path(place).exists()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = CliRunner().invoke(cli, ["--store", str(tmp_path / "store"), "serve", "--port", str(port)])
    assert refused.exit_code == 7
    assert f"127.0.0.1:{port} cannot be served: Address already in use" in refused.stderr
    assert "--port" in refused.stderr
    assert not (tmp_path / "store").exists()


def test_the_token_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(cli, ["--store", str(tmp_path / "store"), "--json", *arguments])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    made = run("token", "create", "ci", "--scope", "write", "--namespace", "team", "--for", "other", "--expires", "30")
    assert made["token"].startswith("kd_")
    assert made["about"]["namespaces"] == ["team", "other"]
    assert "digest" not in made["about"]
    assert run("token", "list")["tokens"][0]["valid"]
    assert not run("token", "revoke", "ci")["valid"]
    refused = CliRunner().invoke(cli, ["--store", "http://127.0.0.1:9", "token", "list"])
    assert (refused.exit_code, "over HTTP" in refused.stderr) == (3, True)


def test_the_audit_command(tmp_path: Path) -> None:
    import sqlite3

    place = tmp_path / "store"
    with kedge.open(place) as store:
        for n in range(3):
            store.save("j", "s", n)

    def verify(*arguments: str) -> tuple[int, Any]:
        done = CliRunner().invoke(cli, ["--store", str(place), "--json", "audit", "verify", *arguments])
        return done.exit_code, json.loads(done.stdout)

    code, first = verify()
    assert (code, first["ok"], first["entries"]) == (0, True, 3)
    with kedge.open(place) as store:
        store.save("j", "s", 4)
    assert verify("--expect", first["mark"])[0] == 0
    with sqlite3.connect(place / "index.sqlite") as db:
        db.execute("DELETE FROM event WHERE id > 1")  # cut off: what is left is a chain too
    assert verify()[0] == 0
    assert verify("--expect", first["mark"])[0] == 6


def test_slow_callers_do_not_hold_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body, or a head, that does not come."""
    from kedge.server import create_app
    from kedge.server.limits import Limits
    from kedge.server.protocol import BoundedHttp
    from tests.server.conftest import listening

    app = create_app(tmp_path / "store", limits=Limits(receive_s=0.3))
    with listening(app, http=BoundedHttp) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=60) as body:
            head = "POST /api/v1/jobs/j/checkpoints HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            body.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
            assert body.recv(1000).startswith(b"HTTP/1.1 408")
        with monkeypatch.context() as patch, socket.create_connection(address, timeout=60) as head_only:
            patch.setattr(BoundedHttp, "head_s", 0.3)
            head_only.sendall(b"GET /healthz HTTP/1.1\r\nHos")
            assert head_only.recv(1000) == b""  # closed
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
    assert os.environ.get("KEDGE_SERVE") is None


def test_no_more_streams_than_allowed_even_when_all_come_at_once(tmp_path: Path) -> None:
    """Whoever leaves gives the place back."""
    from kedge.server import create_app
    from kedge.server.limits import Limits
    from tests.server.conftest import listening

    app = create_app(tmp_path / "store", limits=Limits(streams=2))
    with listening(app) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(2):
            callers = [socket.create_connection(address, timeout=60) for _ in range(6)]
            for caller in callers:
                caller.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            told = sorted(caller.recv(12)[9:] for caller in callers)
            for caller in callers:
                caller.close()
            assert told == [b"200"] * 2 + [b"503"] * 4
            while app.state.service.feeds.streams:
                assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
        app.state.service.is_draining = True


def on_a_terminal(place: Path, *arguments: str) -> tuple[list[str], str]:
    """`kedge serve` with a terminal as stderr: its first lines until one request is logged, and its URL."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "kedge", "serve", "--store", str(place), "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=there)
    os.close(there)
    lines: list[str] = []
    url = ""
    try:
        with open(here, encoding="utf-8", closefd=True) as terminal:
            for line in terminal:
                lines.append(line.strip())
                if not url:
                    url = next(word for word in line.split() if word.startswith("http://"))
                    assert httpx.get(f"{url}/api/v1/jobs", timeout=60).status_code == 200
                if "/api/v1/jobs" in line:
                    break
    finally:
        process.terminate()
        process.wait()
    return lines, url


@pytest.mark.parametrize("workers", ["1", "2"])
def test_on_a_terminal_the_url_comes_first_and_the_log_is_words(tmp_path: Path, workers: str) -> None:
    lines, url = on_a_terminal(tmp_path / "store", "--workers", workers)
    assert lines[0] == f"Kedge serves on {url}   (stop it with Ctrl-C)"
    assert re.fullmatch(r"\d\d:\d\d:\d\d  GET /api/v1/jobs 200  \d+ ms", lines[-1])
    assert len(lines) == 2, lines


@pytest.mark.parametrize("workers", ["1", "2"])
def test_systemd_hears_when_it_is_ready_and_when_it_stops(tmp_path: Path, workers: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(60)
        before = f"import os; os.environ['NOTIFY_SOCKET'] = {str(tmp_path / 'notify')!r}"
        with serving(tmp_path / "store", "--workers", workers, before=before) as (process, url):
            try:
                assert heard.recv(100) == b"READY=1"
                assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
            finally:
                process.terminate()  # a kill would leave its workers behind
                process.wait()
            while (said := heard.recv(100)) == b"READY=1":  # each worker says so
                pass
            assert said == b"STOPPING=1"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(private, hashes.SHA256())
    )
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, plain))
    return cert, key


def test_https_on_a_unix_socket_with_smaller_bodies(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    path = tmp_path / "kedge.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()  # as a killed service leaves it
    arguments = ["--unix-socket", str(path), "--tls-cert", str(cert), "--tls-key", str(key), "--max-body", "1"]
    with serving(tmp_path / "store", *arguments) as (process, _):
        assert path.stat().st_mode & 0o777 == 0o660
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path), verify=trusted), timeout=60) as client:
            answer = client.get("https://localhost/readyz")
            assert answer.status_code == 200
            large = b"x" * (1 << 20) + b"x"
            refused = client.post("https://localhost/api/v1/jobs/j/checkpoints", content=large)
            assert refused.status_code == 413
        taken = CliRunner().invoke(
            cli, ["serve", "--store", str(tmp_path / "store"), "--unix-socket", str(path)], catch_exceptions=False
        )
        assert "something is there already" in taken.output
        assert path.exists()
        process.terminate()
        process.wait()
    assert not path.exists()


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    for arguments in (["--tls-cert", str(cert)], ["--tls-cert", str(tmp_path / "none")], ["--tls-key", str(cert)]):
        refused = CliRunner().invoke(cli, ["serve", "--store", str(tmp_path / "store"), *arguments])
        assert refused.exit_code == 3, refused.output
        assert "--tls" in refused.output
