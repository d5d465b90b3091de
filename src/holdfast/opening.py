"""From a URL to a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from .errors import NotFound, Validation
from .ports import FORMAT_VERSION
from .store import Store

if TYPE_CHECKING:
    from .ports import Blobs
    from .postgresql import Server

_FORMS = (
    'use a directory, "file:directory", "files:directory", "memory:" or "postgresql://…[?blobs=s3://bucket/prefix]"'
)


def open_store(url: str, namespace: str, *, create: bool) -> Store:
    """The store behind a URL. What an adapter needs is imported only when its URL is used."""
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        from .blobs.memory import MemoryBlobs
        from .index.sqlite import SqliteIndex

        return Store(SqliteIndex(None, namespace=namespace), MemoryBlobs())
    if is_postgresql(url):
        return _open_postgresql(url, namespace, create=create)
    if scheme in ("s3", "gs", "az") and rest.startswith("//"):
        raise Validation(
            f"{scheme}: alone keeps no index", hint=f"add a database: postgresql://…?blobs={scheme}:{rest}"
        )
    if scheme in ("files", "memory") and rest and "\0" not in rest:
        from .readable import KeptMemory, open_files

        if scheme == "files":
            return open_files(Path(rest), namespace=namespace, create=create)
        return KeptMemory(Path(rest), namespace)
    if colon and scheme != "file" and not os.path.exists(url) and scheme.isalnum() and len(scheme) > 1:
        raise Validation(f"no store speaks {scheme}:", hint=_FORMS)
    path = rest if colon and scheme == "file" else url
    if not path or "\0" in path:
        raise Validation(f"{url!r} names no directory", hint=_FORMS)
    from .embedded import open_embedded

    return Store(*open_embedded(Path(path), namespace=namespace, create=create))


def _open_postgresql(url: str, namespace: str, *, create: bool) -> Store:
    """The index in PostgreSQL; the bytes there too, or where `blobs=` says."""
    server = open_server(url)
    from .index.postgres import PostgresIndex

    blobs = _open_blobs(server, dict(parse_qsl(urlsplit(url).query)).get("blobs"))
    server.migrate(create=create)
    return Store(PostgresIndex(server, namespace=namespace), blobs)


def migrate(url: str) -> tuple[int, int]:
    """Make or upgrade the store behind a URL; answers its format before (0: there was none) and now."""
    if is_postgresql(url):
        server = open_server(url)
        try:
            return server.migrate()
        finally:
            server.close()
    is_new = False
    try:
        open_store(url, "default", create=False).close()
    except NotFound:
        is_new = True
        open_store(url, "default", create=True).close()
    return 0 if is_new else FORMAT_VERSION, FORMAT_VERSION


def is_postgresql(url: str) -> bool:
    return url.startswith(("postgresql://", "postgres://"))


def open_server(url: str) -> Server:
    """The database of a store; nothing is asked of it yet."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    options.pop("blobs", None)
    with needing("psycopg", extra="postgres"):
        from .postgresql import Server
    return Server(urlunsplit(parts._replace(query=urlencode(options))))


def _open_blobs(server: Server, url: str | None) -> Blobs:
    if url is None:
        from .blobs.postgres import PostgresBlobs

        return PostgresBlobs(server)
    if urlsplit(url).scheme not in ("s3", "gs", "az"):
        raise Validation(f"blobs={url} is no object store", hint="use s3://bucket/prefix, gs://… or az://…")
    with needing("obstore", extra="object"):
        from .blobs.objects import connect
    from .blobs.retrying import RetryingBlobs

    return RetryingBlobs(connect(url))


@contextmanager
def needing(module: str, *, extra: str) -> Iterator[None]:
    """Imports that an extra brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise Validation(f"this store needs {module}", hint=f"pip install 'holdfast[{extra}]'") from error
