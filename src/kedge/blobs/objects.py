"""Packs as objects of a store for many machines: S3, Google Cloud Storage, Azure, through obstore.

    <prefix>/packs/<32 hex>      a pack: created by one put, never changed
    <prefix>/writers/<16 hex>    a writer is active; its packs' names begin with this
    <prefix>/store               the ID of the store that owns the packs (see `owner`)
    <prefix>/clock               rewritten to read the store's time

A pack is at most one put of 16 MiB, several in progress: as fast as a multipart upload, and a crash leaves no partial
pack. Its writer draws its name at random. So a put that is repeated after a lost answer finds its own object: "already
exists" then means success.

No lock reaches writers on other machines. Two mechanisms replace it:

- A writer registers itself, renews that while it works, and removes it when it is released. `remove` skips packs of
  registered writers. A crashed writer's registration is valid for `grace_s`, by the store's own clock.
- A writer may sleep longer than that and wake up. So `remove` asks `is_garbage`, which for an index of many machines is
  `Index.condemn`: from then on the index refuses to name the pack, and the writer writes again (I3).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore import delete, get_range, head, put
from obstore import list as list_objects
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from kedge.errors import Corrupted, NotFound, ReadOnly, StorageError, Unavailable, Validation
from kedge.ports import Buffer

from .object_writer import ALIGN_BYTES, PUTS_AT_ONCE, WRITER_ID_LENGTH, ObjectWriter
from .owner import claim
from .pack_file import NAME, check_header, check_name
from .workers import Workers

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

GRACE_S = 3600.0  # how long a silent writer is considered alive

_HEADER_BYTES = 4096
_SCAN_BYTES = 4 << 20
_CLOCK_TRUSTED_S = 60.0


class ObjectBlobs:
    """`ports.Blobs` under a prefix of an object store, shared by any number of machines."""

    def __init__(self, store: ObjectStore, prefix: str = "", *, grace_s: float = GRACE_S) -> None:
        self.store = store
        self.root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.grace_s = grace_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._registered: dict[str, float] = {}  # our writers, and when they last registered (monotonic)
        self._dropped: deque[str] = deque()  # of those, discarded before their commit
        self._clock: tuple[float, float] | None = None  # (monotonic, the store's) at the same moment
        self._claim: Callable[[], None] | None = None  # done before anything is written or removed

    def claim(self, store_id: str, names_packs: Callable[[], bool]) -> None:
        """Refuse another store's prefix; `names_packs` tells whether this store's index knows any packs."""
        self._claim = partial(claim, self, store_id, names_packs)
        try:
            self._check_owner()
        except Unavailable:
            pass  # meanwhile the index can be read

    def writer(self, size_hint: int) -> ObjectWriter:
        self._check_process()
        self._check_owner()
        self._forget_dropped()
        return ObjectWriter(self)

    def seal(self) -> None:
        """Remove registrations of writers that died long ago. Every writer has its own packs anyway."""
        self._check_owner()
        with self.translated("list", "writers"):
            writers = [meta for page in list_objects(self.store, self.root + "writers/") for meta in page]
        now_s = self._now_s()
        for meta in writers:
            if now_s - meta["last_modified"].timestamp() > 2 * self.grace_s:
                self._delete(meta["path"])

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        if target.nbytes == 0:
            return
        target = target.cast("B")
        path = self._path(pack)
        try:
            with self.translated("read", path):
                data = get_range(self.store, path, start=offset, length=len(target))
        except NotFound:
            self._check_answers(path)
            raise NotFound(
                f"pack {pack} is missing", hint="run kedge check; restore the object if there is a copy of it"
            ) from None
        except Unavailable:
            self._check_length(pack, offset, len(target))  # a range beyond the end has no error of its own
            raise
        if len(data) != len(target):
            self._check_length(pack, offset, len(target))
            raise Unavailable(f"{path}: the response was cut off after {len(data)} bytes", hint="try again")
        target[:] = memoryview(data)

    def packs(self) -> Iterator[tuple[str, int]]:
        try:
            with self.translated("list", "packs"):
                for page in list_objects(self.store, self.root + "packs/"):
                    for meta in page:
                        name = meta["path"].rpartition("/")[2]
                        if NAME.fullmatch(name):
                            yield name, meta["size"]
        except NotFound as error:
            raise _away(f"{self.root}packs/", error) from error

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        """Delete a pack. True means that the store accepted the deletion; several callers may get True."""
        path = self._path(pack)
        self._check_owner()
        self._forget_dropped()
        if self._size(path) is None or self._is_writing(pack[:WRITER_ID_LENGTH]) or not is_garbage():
            return False
        self._delete(path)
        return True

    def file_of(self, pack: str) -> str | None:
        return None

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        """Yield every possible beginning of an append. Reads the whole pack; holds 4 MiB."""
        size = self._size(self._path(pack))
        if size is None:
            raise NotFound(f"pack {pack} is missing")
        for start in range(0, size, _SCAN_BYTES):
            window = bytearray(min(_SCAN_BYTES + len(magic), size - start))
            self.read_into(pack, start, memoryview(window))
            if start == 0:
                check_header(bytes(window[:_HEADER_BYTES]))
            at = window.find(magic)
            while 0 <= at < _SCAN_BYTES:
                if at % ALIGN_BYTES == 0:
                    yield start + at
                at = window.find(magic, at + 1)

    def close(self) -> None:
        """Remove registrations that writers left. Nothing else stays open."""
        if self._pid != os.getpid():
            return
        with self._lock:
            workers, self._workers = self._workers, None
            ours = list(self._registered)
        if workers is not None:
            workers.shutdown(wait=True)
        for writer_id in ours:
            self.unregister(writer_id)

    # What writers use

    def submit(self, action: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._workers is None:
                self._workers = Workers(2 * PUTS_AT_ONCE, "kedge-put", keep=2 * PUTS_AT_ONCE)
            return self._workers.submit(action)

    def create(self, pack: str, data: Buffer) -> None:
        """Put a whole pack. If it exists, an earlier attempt succeeded, because nobody else generates its name."""
        path = self._path(pack)
        with self.translated("write", path):
            try:
                put(self.store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if self._size(path) != len(data):
                    raise StorageError(f"{path} was written by somebody else", hint="save again") from None

    def register(self, writer_id: str) -> None:
        """Register a writer as active, or renew that."""
        with self._lock:
            self._registered[writer_id] = time.monotonic()
        path = self._registration(writer_id)
        with self.translated("write", path):
            put(self.store, path, b"", use_multipart=False)

    def is_due(self, writer_id: str) -> bool:
        return time.monotonic() - self._registered.get(writer_id, 0.0) > self.grace_s / 4

    def unregister(self, writer_id: str) -> None:
        if writer_id in self._registered:
            self._delete(self._registration(writer_id))
            self._registered.pop(writer_id, None)

    def drop(self, writer_id: str) -> None:
        """Note a writer to unregister; called from a destructor, which must not use the network."""
        self._dropped.append(writer_id)

    def discard(self, packs: list[str]) -> None:
        """Delete packs of an aborted writer: no index will ever name them."""
        for pack in packs:
            self._delete(self._path(pack))

    # Internal

    def _check_owner(self) -> None:
        if self._claim is not None:
            self._claim()
            self._claim = None

    def _forget_dropped(self) -> None:
        while self._dropped:
            self.unregister(self._dropped[0])
            self._dropped.popleft()

    def _is_writing(self, writer_id: str) -> bool:
        path = self._registration(writer_id)
        try:
            with self.translated("look at", path):
                said_at = head(self.store, path)["last_modified"]
        except NotFound:
            return False
        return self._now_s() - said_at.timestamp() < self.grace_s or writer_id in self._registered

    def _now_s(self) -> float:
        """Return the store's time, which objects' times refer to: our clock may be wrong (I4)."""
        if self._clock is None or time.monotonic() - self._clock[0] > _CLOCK_TRUSTED_S:
            path = self.root + "clock"
            with self.translated("write", path):
                put(self.store, path, b"", use_multipart=False)
                self._clock = time.monotonic(), head(self.store, path)["last_modified"].timestamp()
        return self._clock[1] + time.monotonic() - self._clock[0]

    def _size(self, path: str) -> int | None:
        try:
            with self.translated("look at", path):
                return head(self.store, path)["size"]
        except NotFound:
            return None

    def _check_length(self, pack: str, offset: int, size_bytes: int) -> None:
        size = self._size(self._path(pack))
        if size is not None and offset + size_bytes > size:
            raise Corrupted(
                f"pack {pack} ends at byte {size}, inside the {size_bytes} bytes at {offset}",
                hint="it was damaged after it was written: run kedge check",
            )

    def _check_answers(self, path: str) -> None:
        """Raise StorageError if the bucket is away: a read then reports only a missing object, but a listing tells."""
        try:
            with self.translated("list", path):
                for _ in list_objects(self.store, path):
                    break
        except NotFound as error:
            raise _away(path, error) from error

    def _delete(self, path: str) -> None:
        try:
            with self.translated("remove", path):
                delete(self.store, path)
        except NotFound:
            pass  # some stores report that

    def _registration(self, writer_id: str) -> str:
        return f"{self.root}writers/{writer_id}"

    def _path(self, pack: str) -> str:
        return f"{self.root}packs/{check_name(pack)}"

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StorageError(
                "an object store cannot be used in a forked process", hint="start processes with spawn, not fork"
            )

    @contextmanager
    def translated(self, action: str, path: str) -> Iterator[None]:
        """Convert obstore's errors to ours. One that is not known to be final may be retried."""
        self._check_process()
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{path} is missing") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            hint = "check the credentials and what they allow: objects are read, listed, written and deleted"
            raise ReadOnly(f"cannot {action} {path}: {_short(error)}", hint=hint) from error
        except BaseError as error:
            hint = "check that the store can be reached, then run it again"
            raise Unavailable(f"cannot {action} {path}: {_short(error)}", hint=hint) from error


def _away(path: str, error: NotFound) -> StorageError:
    return StorageError(
        f"cannot list {path}: the bucket does not answer as one ({error.message})",
        hint="check the name of the bucket, the region and the endpoint",
    )


def _short(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip()


def connect(url: str) -> ObjectBlobs:
    """Return the blobs at s3://bucket/prefix, gs://… or az://…; credentials come from each cloud's usual places.

    obstore itself retries nothing: `RetryingBlobs` does, which knows what may be repeated.
    """
    parts = urlsplit(url)
    options: ClientConfig = {"timeout": "60s", "connect_timeout": "10s"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    if parts.scheme == "s3" and endpoint.startswith("http://"):
        options["allow_http"] = True  # such an endpoint was chosen deliberately
    # Not every server checks the signature's digest against the data; all check a checksum.
    checks: Any = {"checksum_algorithm": "SHA256"} if parts.scheme == "s3" else {}
    try:
        store = from_url(
            f"{parts.scheme}://{parts.netloc}", client_options=options, retry_config={"max_retries": 0}, **checks
        )
    except (BaseError, ValueError) as error:
        raise Validation(
            f"{url} cannot be used: {_short(error)}", hint="use s3://bucket/prefix, gs://… or az://…"
        ) from (error)
    return ObjectBlobs(store, parts.path)
