"""A store, tokens for it, and the application over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app
from kedge.server.tokens import ACCESS, Tokens
from tests.waiting import wait_for

BASE = "http://127.0.0.1:7420"


def client_of(app: Any, **headers: str) -> TestClient:
    """A caller on the same machine."""
    return TestClient(app, base_url=BASE, client=("127.0.0.1", 50000), headers=headers, raise_server_exceptions=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(place) as manager:
        yield manager


@pytest.fixture
def make_token(place: Path) -> Iterator[Callable[..., str]]:
    with kedge.open(place, namespace=ACCESS) as manager:
        tokens = Tokens(manager)

        def make(name: str, scope: str = "read", *namespaces: str, **more: Any) -> str:
            return tokens.create(name, scope, namespaces or ("default",), **more)[1]

        yield make


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[str]:
    """The application behind a real socket, in a thread; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive(), "the service does not start")
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(store: kedge.CheckpointManager) -> Iterator[TestClient]:
    with client_of(create_app(store)) as client:
        yield client
