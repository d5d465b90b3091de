"""Running the application: uvicorn with our limits, one process or several, and a stop that loses nothing.

On SIGTERM a worker takes no new connection, ends its event streams, answers what it has begun, then closes the store.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from kedge.blobs.libc import return_memory_from
from kedge.errors import NotFound, StorageError, Validation
from kedge.manager import CheckpointManager

from . import logs, metrics
from .app import create_app
from .auth import is_loopback
from .limits import LOOPBACK_NAMES, Limits
from .page import templates
from .protocol import BoundedHttp
from .service import Service
from .tokens import ACCESS, Tokens

_LARGE_BYTES = 256 << 10  # chunks of states, of which many come and go at once
_OPEN_FILES = 1 << 16  # each connection and each part of an upload is one; many systems allow 1,024 unless asked
_SETTINGS = "KEDGE_SERVE"  # how a worker process learns what to serve


@dataclass(frozen=True, slots=True)
class Settings:
    """What `kedge serve` was told."""

    store: str
    namespace: str = "default"
    host: str = "127.0.0.1"
    port: int = 7420
    workers: int = 1
    root_path: str = ""
    allow_hosts: tuple[str, ...] = ()
    proxies: str = "127.0.0.1"  # whose X-Forwarded-* headers are believed
    drain_s: int = 30
    log_level: str = "info"
    log_format: str = "auto"  # as `logs.configure` takes it
    tls_cert: str | None = None
    tls_key: str | None = None  # None: it is in the file of the certificate
    unix_socket: str | None = None  # instead of host and port
    body_bytes: int = Limits().body_bytes
    json_bytes: int = Limits().json_bytes
    allow_private_webhooks: bool = False


def serve(settings: Settings) -> None:
    """Serve until a signal comes. What is refused leaves no new store behind."""
    _check(settings)
    _allow_open_files()
    os.environ[_SETTINGS] = json.dumps(asdict(settings))
    config = uvicorn.Config(
        "kedge.server.process:make_app",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        log_config=None,
        access_log=False,
        proxy_headers=True,
        forwarded_allow_ips="*" if settings.unix_socket else settings.proxies,  # who may connect says the file
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=settings.drain_s,
        lifespan="on",
        timeout_worker_healthcheck=60,  # a worker that is still starting, on a busy machine, is not a dead one
        http=BoundedHttp,
        ws="none",
    )
    logs.configure(settings.log_level, settings.log_format)
    if settings.unix_socket is None:
        _make_store(settings)
        _serve(config, None)
        return
    with _unix_listener(settings.unix_socket) as listening:
        _make_store(settings)
        logging.getLogger("uvicorn.error").info("running on unix socket %s", settings.unix_socket)
        _serve(config, listening)


def _serve(config: uvicorn.Config, listening: socket.socket | None) -> None:
    if config.workers == 1:
        server = _Server(config)
        server.run(None if listening is None else [listening])
        if not server.started:
            raise StorageError(f"{config.host}:{config.port} cannot be served", hint="the log above says why")
        return
    listening = listening or config.bind_socket()
    listening.listen(config.backlog)  # who comes before the first worker waits for it
    logs.announce(_address(config, listening))
    with tempfile.TemporaryDirectory(prefix="kedge-metrics-") as shared:
        os.environ[metrics.SHARED] = shared
        _Workers(config, sockets=[listening]).run()


@contextmanager
def _unix_listener(path: str) -> Iterator[socket.socket]:
    """A Unix socket for this user and group alone; one that a killed service left behind is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_served(path):
                os.unlink(path)
        except FileNotFoundError:
            pass
        before = os.umask(0o117)
        try:
            listening.bind(path)
        except OSError as error:
            why = "something is there already" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise StorageError(f"socket {path} cannot be served: {why}", hint="choose another path") from error
        finally:
            os.umask(before)
        listening.listen()
        inode = os.stat(path).st_ino
        try:
            yield listening
        finally:
            _remove_socket(path, inode)


def _remove_socket(path: str, inode: int) -> None:
    """The file of a socket, unless another service has put its own there meanwhile."""
    with suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            os.unlink(path)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return False
    return True


class _Workers(Multiprocess):
    """Says when the service stops: a worker that stops alone is replaced."""

    def terminate_all(self) -> None:
        notify("STOPPING=1")
        super().terminate_all()


class _Server(uvicorn.Server):
    """Says where it serves, as soon as it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logs.announce(_address(self.config, self.servers[0].sockets[0]))
            notify("READY=1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        files = [
            (path, os.stat(path).st_ino) for listener in sockets or () if os.path.exists(path := listener.getsockname())
        ]
        await super().shutdown(sockets)
        for path, inode in files:  # here, because the signal that stops it ends the process behind this
            _remove_socket(path, inode)


def _address(config: uvicorn.Config, listening: Any) -> str:
    if listening.family == socket.AF_UNIX:
        return f"unix socket {listening.getsockname()}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.is_ssl else 'http'}://{host}:{listening.getsockname()[1]}"


def notify(what: str) -> None:
    """Tell systemd (Type=notify) how it stands: READY=1, STOPPING=1; nothing where nobody asked."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.sendto(what.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)


def make_app() -> FastAPI:
    """The application of a worker process."""
    return_memory_from(_LARGE_BYTES)
    settings = Settings(**json.loads(os.environ[_SETTINGS]))
    logs.configure(settings.log_level, settings.log_format)
    hosts = {*LOOPBACK_NAMES, *settings.allow_hosts, *([settings.host] if is_loopback(settings.host) else [])}
    if not is_loopback(settings.host) and not settings.allow_hosts:
        hosts = set()  # whoever has a token may call it as they can reach it
    limits = Limits(settings.body_bytes, settings.json_bytes, private_webhooks=settings.allow_private_webhooks)
    app = create_app(
        settings.store, namespace=settings.namespace, allow_hosts=hosts, root_path=settings.root_path, limits=limits
    )
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[Any]:
        _drain_on_signal(app.state.service, tells_systemd=settings.workers == 1)
        async with inner(app) as state:
            threading.Thread(target=_prepare, name="kedge-prepare", daemon=True).start()
            if settings.workers > 1:
                notify("READY=1")
            yield state

    app.router.lifespan_context = life
    return app


def _prepare() -> None:
    """What the first requests would wait for; and garbage is no longer looked for in what stays as long as the process.

    A full collection goes through all modules and templates: it would stop every request for 70 ms, again and again.
    """
    templates.prepare()
    gc.collect()
    gc.freeze()


def _drain_on_signal(service: Service, *, tells_systemd: bool) -> None:
    """Streams that would never end hear of the stop at once; then uvicorn goes on as it would have."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def stop(sig: int, frame: FrameType | None, before: Any = before) -> None:
            service.is_draining = True
            if tells_systemd:  # one of several workers may stop while the service goes on
                notify("STOPPING=1")
            if callable(before):
                before(sig, frame)

        signal.signal(number, stop)


def _allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system lets it; its workers get the same."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _check(settings: Settings) -> None:
    """Refuse before anything is bound: an open door needs a token."""
    if settings.root_path and not settings.root_path.startswith("/"):
        raise Validation(f"the path prefix {settings.root_path}", hint="it begins with /")
    if not is_loopback(settings.host) and not _has_token(settings):
        raise Validation(
            f"{settings.host} can be reached from elsewhere, and this store has no valid token",
            hint="make one first: kedge token create NAME --scope write",
        )
    if settings.tls_cert is not None:
        _check_certificate(settings.tls_cert, settings.tls_key)
    elif settings.tls_key is not None:
        raise Validation("--tls-key needs --tls-cert", hint="name the file of the certificate, too")
    if settings.unix_socket is not None:
        return
    try:
        addresses = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        for family, kind, number, _, address in addresses:
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise StorageError(
            f"{settings.host}:{settings.port} cannot be served: {error.strerror}",
            hint="is something else serving there? --port chooses another, --port 0 any that is free",
        ) from error


def _has_token(settings: Settings) -> bool:
    try:
        with CheckpointManager(settings.store, namespace=ACCESS, create=False) as manager:
            return any(token.is_valid for token in Tokens(manager).all())
    except NotFound:
        return False


def _make_store(settings: Settings) -> None:
    """The store opens, or says why not, before anybody is served."""
    CheckpointManager(settings.store, namespace=ACCESS).close()


def _check_certificate(certificate: str, key: str | None) -> None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: "")  # nobody is there to be asked for one
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise Validation(
            f"the certificate {certificate} cannot be used: {error}",
            hint="--tls-cert is a PEM file with the whole chain, --tls-key its key, without a password",
        ) from error
