"""A port for a service that cannot choose one itself, because others have to know it before it starts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """None of those that connections get, for example to a service that is away: it could not come back."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
