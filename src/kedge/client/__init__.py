"""A service of Kedge, from Python.

    kedge.open("http://host:7420")      a CheckpointManager whose store is behind that service (store.py, care.py)
    Client, AsyncClient                    every call of the API, typed, with and without await (calls.py)

The token is the password of the URL (http://:kd_…@host) or $KEDGE_TOKEN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge.errors import missing_extra
from kedge.store import not_over_http

from .calls import Page

try:
    from .connection import AsyncClient, Client
except ModuleNotFoundError as error:
    raise missing_extra("kedge.client", "client", error) from error

if TYPE_CHECKING:
    from .care import HttpCare
    from .store import HttpStore

__all__ = ["AsyncClient", "Client", "Page", "open_service"]


def open_service(url: str, namespace: str, *, has_key: bool) -> tuple[HttpStore, HttpCare]:
    """Return the store behind a service, and its care. Without a namespace, the token's default."""
    from .care import HttpCare  # a plain client needs neither
    from .store import HttpStore

    if has_key:
        raise not_over_http("a key", "keys belong to where the store is: give it to kedge serve")
    store = HttpStore(Client(url, namespace=None if namespace == "default" else namespace))
    return store, HttpCare(store)
