"""From a URL to a store."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import Validation
from .store import Store


def open_store(url: str, namespace: str, *, create: bool) -> Store:
    """The store behind a URL. What an adapter needs is imported only when its URL is used."""
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        from .blobs.memory import MemoryBlobs
        from .index.sqlite import SqliteIndex

        return Store(SqliteIndex(None, namespace=namespace), MemoryBlobs())
    if colon and scheme != "file" and not os.path.exists(url) and scheme.isalnum() and len(scheme) > 1:
        raise Validation(f"no store speaks {scheme}:", hint='use a directory, "file:directory" or "memory:"')
    path = rest if colon and scheme == "file" else url
    if not path or "\0" in path:
        raise Validation(f"{url!r} names no directory", hint='use a directory, "file:directory" or "memory:"')
    from .embedded import open_embedded

    return Store(*open_embedded(Path(path), namespace=namespace, create=create))
