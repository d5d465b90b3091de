"""Running the application: uvicorn with our limits, one process or several, and a stop that loses nothing.

On SIGTERM a worker takes no new connection, ends its event streams, answers what it has begun, then closes the store.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.supervisors import Multiprocess

from kedge.blobs.libc import return_memory_from
from kedge.errors import StorageError, Validation
from kedge.manager import CheckpointManager

from . import logs, metrics
from .app import create_app
from .auth import is_loopback
from .limits import LOOPBACK_NAMES
from .protocol import BoundedHttp
from .service import Service
from .tokens import ACCESS, Tokens

_LARGE_BYTES = 256 << 10  # chunks of states, of which many come and go at once
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


def serve(settings: Settings) -> None:
    """Serve until a signal comes."""
    _check(settings)
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
        forwarded_allow_ips=settings.proxies,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=settings.drain_s,
        lifespan="on",
        timeout_worker_healthcheck=60,  # a worker that is still starting, on a busy machine, is not a dead one
        http=BoundedHttp,
        ws="none",
    )
    logs.configure(settings.log_level)
    if settings.workers == 1:
        server = _Server(config)
        server.run()
        if not server.started:
            raise StorageError(f"{settings.host}:{settings.port} cannot be served", hint="the log above says why")
        return
    listening = config.bind_socket()
    listening.listen(config.backlog)  # who comes before the first worker waits for it
    logs.announce(_address(config, listening))
    with tempfile.TemporaryDirectory(prefix="kedge-metrics-") as shared:
        os.environ[metrics.SHARED] = shared
        Multiprocess(config, sockets=[listening]).run()


class _Server(uvicorn.Server):
    """Says where it serves, as soon as it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logs.announce(_address(self.config, self.servers[0].sockets[0]))
            notify_ready()


def _address(config: uvicorn.Config, listening: Any) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listening.getsockname()[1]}"


def notify_ready() -> None:
    """Tell systemd (Type=notify) that requests are answered from now on; nothing where nobody asked."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.sendto(b"READY=1", address.replace("@", "\0", 1) if address.startswith("@") else address)


def make_app() -> FastAPI:
    """The application of a worker process."""
    return_memory_from(_LARGE_BYTES)
    told = Settings(**json.loads(os.environ[_SETTINGS]))
    logs.configure(told.log_level)
    hosts = {*LOOPBACK_NAMES, *told.allow_hosts, *([told.host] if is_loopback(told.host) else [])}
    if not is_loopback(told.host) and not told.allow_hosts:
        hosts = set()  # whoever has a token may call it as they can reach it
    app = create_app(told.store, namespace=told.namespace, allow_hosts=hosts, root_path=told.root_path)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[Any]:
        _drain_on_signal(app.state.service)
        async with inner(app) as state:
            if told.workers > 1:
                notify_ready()
            yield state

    app.router.lifespan_context = life
    return app


def _drain_on_signal(service: Service) -> None:
    """Streams that would never end hear of the stop at once; then uvicorn goes on as it would have."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)

        def stop(sig: int, frame: FrameType | None, before: Any = before) -> None:
            service.is_draining = True
            if callable(before):
                before(sig, frame)

        signal.signal(number, stop)


def _check(settings: Settings) -> None:
    """Refuse before anything is bound: an open door needs a token, and a store that opens."""
    if settings.root_path and not settings.root_path.startswith("/"):
        raise Validation(f"the path prefix {settings.root_path}", hint="it begins with /")
    with CheckpointManager(settings.store, namespace=ACCESS) as manager:
        if not is_loopback(settings.host) and not any(token.is_valid for token in Tokens(manager).all()):
            raise Validation(
                f"{settings.host} can be reached from elsewhere, and this store has no valid token",
                hint="make one first: kedge token create NAME --scope write --namespace default",
            )
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        for family, kind, number, _, address in found:
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise StorageError(
            f"{settings.host}:{settings.port} cannot be served: {error.strerror}",
            hint="is something else serving there? --port chooses another, --port 0 any that is free",
        ) from error
