"""A service of Kedge, from Python.

    kedge.open("http://host:7420")      a CheckpointManager whose store is behind that service (remote.py)
    Client, AsyncClient                    every call of the API, typed, with and without await (calls.py)

The token is the password of the URL (http://:kd_…@host) or $KEDGE_TOKEN.
"""

from __future__ import annotations

from .calls import Page
from .connection import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "Page"]
