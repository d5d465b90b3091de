"""Downloads that nobody reads to their end take no memory, whether or not Python collects its cycles."""

from __future__ import annotations

import gc
import socket
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

import kedge
from kedge.server import create_app
from tests.server.conftest import listening
from tests.waiting import wait_for

ABORTS = 16
MOST_BYTES = 5 << 20


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.parametrize("form", ["json", "npz", "safetensors", "npy", "raw"])
def test_what_is_abandoned_is_freed_at_once(store: kedge.CheckpointManager, form: str, traced: None) -> None:
    saved = store.save("j", "s", {"w": np.random.default_rng(1).integers(0, 99, 16 << 20, "u1")})
    address = f"/api/v1/checkpoints/{saved}/download?format={form}{'&path=w' if form in ('npy', 'raw') else ''}"
    with listening(create_app(store)) as url:
        host, _, port = url.removeprefix("http://").partition(":")

        def abort() -> None:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")

        abort()  # what a first one leaves, such as what was read of the state, is kept for the next
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(ABORTS):
            abort()
        wait_for(lambda: tracemalloc.get_traced_memory()[0] < before + MOST_BYTES, "abandoned downloads stay in memory")
