"""Opening the store of a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from .blobs import group_files
from .chunks import INLINE_BYTES
from .errors import Conflict, NotAStore, NotFound, Validation, install_hint, storage_errors
from .ports import FORMAT_VERSION
from .store.local import LocalStore

if TYPE_CHECKING:
    from .crypto import Keyrings, MasterKey
    from .index.postgres.server import Server
    from .ports import Blobs, Index

FORMS = (
    'use a directory, "file:directory", "files:directory", "memory:", "http://host:7420" or '
    '"postgresql://…[?blobs=s3://bucket/prefix]"'
)
_IN_DATABASE_BYTES = 1 << 20
_OBJECT_STORES = {  # with the settings they need
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_ENDPOINT_URL for other servers",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential",
}


@dataclass(frozen=True, slots=True)
class Lock:
    """How a store is to be opened: the master key, and whether names are to be hidden (None: unchanged)."""

    master: MasterKey
    encrypt_names: bool | None = None


def find_lock(key: bytes | str | None, encrypt_names: bool | None) -> Lock | None:
    """Return the lock from the user's arguments or the environment; None for a plain store, which costs nothing.

    The key "none" requests a plain one, whatever the environment says.
    """
    if encrypt_names is not None and not isinstance(encrypt_names, bool):
        raise Validation(f"encrypt_names={encrypt_names!r}", hint="use True or False")
    if isinstance(key, str) and key == "none":
        return None
    for name in ("KEDGE_KEY", "KEDGE_KEY_FILE") if key is None else ():
        if os.environ.get(name, "set").strip() == "":  # otherwise data would silently not be encrypted
            raise Validation(f"${name} is empty", hint="set it to a key, or unset it; KEDGE_KEY=none: no encryption")
    if key is None and not os.environ.get("KEDGE_KEY") and not os.environ.get("KEDGE_KEY_FILE"):
        if encrypt_names:
            raise Validation("encrypt_names needs a key", hint="give key=, or make one: kedge key new")
        return None
    from .crypto import find_master

    master = find_master(key)
    return None if master is None else Lock(master, encrypt_names)


def open_store(url: str, namespace: str, *, create: bool, lock: Lock | None = None, actor: str = "") -> LocalStore:
    """Open the store of a URL: encrypted with a `lock`, plain without. Neither is taken for the other (I10).

    What an adapter or encryption needs is imported only when it is used.
    """
    if (directory := _kept_at(url)) is not None:
        from .care.memory_directory import MemoryDirectory

        return MemoryDirectory(open_store(directory, namespace, create=create, lock=lock, actor=actor))
    store = _open_plain(url, namespace, create=create)
    try:
        if lock is not None:
            store = unlock(store, lock, actor)
            keep_keyring(url, store)
        elif store.index.is_encrypted:
            raise _needs_key(store.index)
    except BaseException:
        store.close()
        raise
    return store


def _needs_key(index: Index) -> Validation:
    message = "this store is encrypted, and no key was given"
    if (keyring := index.keyring()) is not None:
        from .crypto import master_of

        message += f"; it needs the key {master_of(keyring)}"
    return Validation(message, hint="give it: key=, --key, $KEDGE_KEY or $KEDGE_KEY_FILE")


def unlock(store: LocalStore, lock: Lock, actor: str) -> LocalStore:
    """Return the store behind its keys. A namespace without keys gets them, unless the store has plain data."""
    from .crypto import Vault, key_id_of, new_keyring, seal_keyring
    from .index.encrypted import EncryptedIndex

    index = store.index
    where = index.store_id, index.namespace
    if index.keyring() is None:
        fresh = new_keyring(*where, hides_names=bool(lock.encrypt_names))
        who = fresh.name_key.token("actor", actor) if fresh.hides_names else actor
        text = seal_keyring(fresh, lock.master, index.store_id)
        index.set_keyring(text, key_id_of(text), replacing=None, actor=who)  # or another process was faster
    vault = Vault(lock.master, *where, index.keyring)
    if lock.encrypt_names is not None and lock.encrypt_names != vault.hides_names:
        is_so = "hidden" if vault.hides_names else "readable"
        raise Validation(
            f"names in namespace {index.namespace} are {is_so}, which cannot be changed later",
            hint="omit encrypt_names, or use another namespace",
        )
    return LocalStore(
        EncryptedIndex(index, vault),
        store.blobs,
        vault,
        inline_bytes=store.inline_bytes,
        has_backlog=store.backlog is not None,
    )


def find_keys(store: LocalStore, lock: Lock) -> Keyrings:
    """Return the index's keys for a rebuild, unless nothing was saved under them, as in a new index."""
    from .crypto import Keyrings

    keys = Keyrings(lock.master)
    if store.index.jobs(limit=1) and (text := store.index.keyring()) is not None:
        keys.add(store.index.store_id, store.index.namespace, text)
    return keys


def open_found(url: str, namespace: str, lock: Lock | None, keys: Keyrings | None, *, actor: str) -> LocalStore:
    """Open a namespace for a rebuild, under keys from its packs unless it uses others."""
    if lock is None or keys is None:
        return open_store(url, namespace, create=False)
    from .crypto import key_id_of

    with closing(_open_plain(url, namespace, create=False)) as plain:
        present, keyring = plain.index.keyring(), keys.keyring_for(plain.index.store_id, namespace)
        if keyring is not None and not plain.index.jobs(limit=1):
            plain.index.set_keyring(
                keyring, key_id_of(keyring), replacing=present, actor=keys.shown_as(namespace, actor)
            )
    return open_store(url, namespace, create=False, lock=lock, actor=actor)


def keep_keyring(url: str, store: LocalStore) -> None:
    """Copy the keyring beside the index of a store in a directory: without it, a lost index is lost data."""
    index, path = store.at_rest().index, directory_of(url)
    if path is None:
        return
    from .index.files.shown_files import INSIDE
    from .store.directory import keep_copy, keep_keyring

    copied = None
    # Repeat until nobody changed it during the copy: a late copy would hide the current key (I10).
    while (keyring := index.keyring()) is not None and keyring != copied:
        if url.startswith("files:"):
            keep_copy(path / INSIDE, index.namespace, keyring)
        else:
            keep_keyring(path, index.namespace, keyring)
        copied = keyring


def reachable(url: str) -> str:
    """Return the URL of an open store in a form that other processes understand in any directory."""
    scheme, colon, path = url.partition(":")
    if "://" in url or url == "memory:":
        return url
    from .store.directory import absolute

    if colon and scheme in ("file", "files", "memory"):
        return f"{scheme}:{absolute(Path(path))}"
    return str(absolute(Path(url)))


def directory_of(url: str) -> Path | None:
    """Return the directory of a store, or of its copy; None if it is behind a server or only in memory."""
    if url == "memory:" or "://" in url:
        return None
    from .store.directory import absolute

    scheme, colon, path = url.partition(":")
    return absolute(Path(path if colon and scheme in ("file", "files", "memory") else url))


def share_with(url: str, group: str) -> None:
    """Share the directory of a new store with a group. Safe to repeat after an interruption."""
    path = directory_of(url)
    if path is None:
        raise Validation(
            f"{url} is not a directory", hint="the server's own users and rights decide who shares its stores"
        )
    try:
        with storage_errors("share", path):
            if path.exists() and any(path.iterdir()) and not group_files.is_shared_with(path, group):
                hint = "chgrp and chmod it, with what is in it, or make a new store"
                raise Conflict(f"{path} exists already", hint=hint)
            group_files.share_with(path, group)
    except LookupError as error:
        raise Validation(f"there is no group {group!r}", hint="getent group lists the groups") from error


def _kept_at(url: str) -> str | None:
    """Return the URL of the directory for a store in memory."""
    path = url.removeprefix("memory:")
    return f"file:{path}" if path and path != url else None


def _open_plain(url: str, namespace: str, *, create: bool) -> LocalStore:
    scheme, colon, rest = url.partition(":")
    if "?blob" in url and not is_postgresql(url):
        raise Validation(
            f"{url!r}: only an index in PostgreSQL keeps its bytes elsewhere", hint="use postgresql://…?blobs=…"
        )
    if url == "memory:":
        from .blobs.memory import MemoryBlobs
        from .index.sqlite.index import SqliteIndex

        return LocalStore(SqliteIndex(None, namespace=namespace), MemoryBlobs())
    if is_postgresql(url):
        return _open_postgresql(url, namespace, create=create)
    if scheme in ("s3", "gs", "az") and rest.startswith("//"):
        raise Validation(
            f"{scheme}:{rest} has no index: an object store alone cannot be a store",
            hint=f"add a database: postgresql://…?blobs={scheme}:{rest}",
        )
    if scheme == "files" and rest and "\0" not in rest:
        from .store.readable_files import open_files

        return open_files(Path(rest), namespace=namespace, create=create)
    if colon and scheme not in ("file", "files") and not os.path.exists(url) and scheme.isalnum() and len(scheme) > 1:
        raise Validation(f"unsupported store URL scheme: {scheme}", hint=FORMS)
    path = rest if colon and scheme in ("file", "files") else url
    if not path or "\0" in path:
        raise Validation(f"{url!r} names no directory", hint=FORMS)
    from .store.directory import open_embedded

    return LocalStore(*open_embedded(Path(path), namespace=namespace, create=create), has_backlog=True)


def _open_postgresql(url: str, namespace: str, *, create: bool) -> LocalStore:
    """Open a store with its index in PostgreSQL, and its bytes there, too, or where `blobs=` says."""
    server = open_server(url)
    from .index.postgres.index import PostgresIndex

    where = blobs_of(url)
    blobs = _open_blobs(server, where)
    server.migrate(create=create)
    index = PostgresIndex(server, namespace=namespace)
    try:
        if where is not None and where.startswith("file:"):
            refuse_missing_packs(where, index, blobs)
        elif where is not None:
            blobs = _own(blobs, index)
    except BaseException:
        index.close()
        raise
    # If the bytes are rows, too, index rows are as good, and need no separate sync.
    inline_bytes = _IN_DATABASE_BYTES if where is None else INLINE_BYTES
    return LocalStore(index, blobs, inline_bytes=inline_bytes, has_backlog=where is not None)


def refuse_missing_packs(where: str, index: Index, blobs: Blobs) -> None:
    """Refuse another machine's directory with the same path: what is saved there would be lost to all others."""
    if next(iter(blobs.packs()), None) is None and (used := index.packs()):
        blobs.close()
        raise NotAStore(
            f"blobs={where} holds none of the {len(used):,} packs of this store",
            hint="open it on the machine that has them, or restore them; for many machines use blobs=s3://bucket/prefix",
        )


def _own(blobs: Blobs, index: Index) -> Blobs:
    """Claim the packs of an object store, which must belong to this index."""
    from .blobs.objects import ObjectBlobs
    from .blobs.retries import RetryingBlobs

    assert isinstance(blobs, ObjectBlobs)  # nosec B101 # of every URL but file:
    blobs.claim(index.store_id, lambda: bool(index.packs()))
    return RetryingBlobs(blobs)


def take_over(url: str) -> None:
    """Claim an object store's packs for the given database, before its index is rebuilt from them."""
    where = blobs_of(url) if is_postgresql(url) else None
    if where is None or where.startswith("file:"):
        return
    server = open_server(url)
    from .index.postgres.index import PostgresIndex

    blobs = _open_blobs(server, where)
    server.migrate()
    with closing(PostgresIndex(server, namespace="default")) as index:
        from .blobs.backoff import Backoff
        from .blobs.objects import ObjectBlobs
        from .blobs.owner import take_over

        assert isinstance(blobs, ObjectBlobs)  # nosec B101 # of every URL but file:
        Backoff().run(lambda: take_over(blobs, index.store_id))


def blobs_of(url: str) -> str | None:
    """Return where the bytes of a store in PostgreSQL are, if not in the database."""
    written = dict(_split_options(url)[1]).get("blobs")
    return None if written is None else unquote(written.partition("=")[2])


def blobs_directory(where: str) -> Path:
    """Return the directory of `blobs=file:/…`. It is absolute, so that it is the same for all users of the store."""
    path = Path(where.removeprefix("file:"))
    if not path.is_absolute() or "\0" in where:
        raise Validation(f"blobs={where} is not an absolute path", hint="use blobs=file:/path/to/a/directory")
    return path


def migrate(url: str) -> tuple[int, int]:
    """Create or upgrade the store of a URL; return its format before (0: there was none) and now."""
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
    """Return the database of a store, without a connection yet."""
    place, options = _split_options(url)
    options = [(name, text) for name, text in options if name != "blobs"]
    from difflib import get_close_matches  # not for every start

    for name, _ in options:
        if get_close_matches(name.lower(), ["blobs"], cutoff=0.75):
            raise Validation(f"unknown option {name!r} in the store URL", hint="did you mean blobs=?")
    with needing("psycopg", extra="postgres"):
        from .index.postgres.server import Server
    return Server("?".join([place, "&".join(text for _, text in options)]) if options else place)


def _split_options(url: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a URL without its options, and each option: its name and its text.

    libpq's options keep their text: `urllib` would lose the slashes of a URL without a host, and writes spaces as +,
    which means + to libpq.
    """
    place, _, query = url.partition("?")
    return place, [(unquote(text.partition("=")[0]), text) for text in query.split("&") if text]


def _open_blobs(server: Server, url: str | None) -> Blobs:
    if url is None:
        from .blobs.postgres import PostgresBlobs

        return PostgresBlobs(server)
    if url.startswith("file:"):
        from .store.directory import open_packs

        return open_packs(blobs_directory(url))
    parts = urlsplit(url)
    if parts.scheme not in _OBJECT_STORES or not parts.netloc or parts.query:
        raise Validation(
            f"blobs={url} is not a valid place for the bytes of a store",
            hint="use s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:/directory",
        )
    with needing("obstore", extra="object"):
        from .blobs.objects import connect

    try:
        return connect(url)
    except Validation as error:
        raise Validation(error.message, hint=_OBJECT_STORES[parts.scheme]) from error


@contextmanager
def needing(module: str, *, extra: str) -> Iterator[None]:
    """Raise Validation if an import of this extra fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise Validation(f"this store needs {module}", hint=install_hint(extra)) from error


def without_secrets(url: str) -> str:
    return re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1…", re.sub(r"//[^@/]*@", "//", url))


def default_url() -> str:
    """Return the default store."""
    return os.environ.get("KEDGE_STORE") or ".kedge"
