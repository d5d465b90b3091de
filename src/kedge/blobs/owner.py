"""Whose the packs under a prefix of an object store are: `<prefix>/store` holds the ID of their store.

To gc of another store, whose index does not name them, they would be garbage (I3). The object is written once, by a put
that only creates: of two stores that come at the same time, one is refused. A prefix from before there was such an
object is taken by whoever comes first, unless it holds packs and the index of who comes names none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from obstore import get, put
from obstore.exceptions import AlreadyExistsError

from kedge.errors import NotAStore, NotFound, ReadOnly

if TYPE_CHECKING:
    from .objects import ObjectBlobs


def claim(blobs: ObjectBlobs, store_id: str, names_packs: Callable[[], bool]) -> None:
    """Make the packs those of this store, or NotAStore if they are another's."""
    owner = _read(blobs)
    if owner is None:
        if next(blobs.packs(), None) is not None and not names_packs():
            raise _refusal(blobs, "are not those of this database, which is new")
        owner = _create(blobs, store_id)
    if owner != store_id:
        raise _refusal(blobs, "are those of another store")


def take_over(blobs: ObjectBlobs, store_id: str) -> None:
    """Make the packs those of this store, whosever they were: their index is lost, and made anew in this one."""
    path = _path(blobs)
    with blobs.translated("write", path):
        put(blobs.store, path, store_id.encode(), use_multipart=False)


def _create(blobs: ObjectBlobs, store_id: str) -> str | None:
    path = _path(blobs)
    try:
        with blobs.translated("write", path):
            try:
                put(blobs.store, path, store_id.encode(), mode="create", use_multipart=False)
            except AlreadyExistsError:
                return _read(blobs)  # somebody was faster; or we were, and the answer to an earlier try was lost
    except ReadOnly:
        pass  # who may only read does no harm
    return store_id


def _read(blobs: ObjectBlobs) -> str | None:
    path = _path(blobs)
    try:
        with blobs.translated("read", path):
            return bytes(get(blobs.store, path).bytes()).decode("ascii", "replace")
    except NotFound:
        return None


def _path(blobs: ObjectBlobs) -> str:
    return f"{blobs.root}store"


def _refusal(blobs: ObjectBlobs, why: str) -> NotAStore:
    return NotAStore(
        f"the packs under {blobs.root or 'this bucket'} {why}",
        hint="give this database a prefix of its own; if theirs is lost, kedge rebuild makes them this one's",
    )
