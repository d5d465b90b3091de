"""Which store owns the packs under a prefix: `<prefix>/store` holds its ID.

To gc of another store, whose index does not name them, they would be garbage (I3). A put that only creates writes the
object once: of two stores at the same time, one is refused. An older prefix without this object goes to the first store
that asks, unless it has packs and that store's index names none.
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
    """Claim the packs for this store. Raises NotAStore if they are another's."""
    owner = _read(blobs)
    if owner is None:
        if next(blobs.packs(), None) is not None and not names_packs():
            raise _refusal(blobs, "are not those of this database, which is new")
        owner = _create(blobs, store_id)
    if owner != store_id:
        raise _refusal(blobs, "are those of another store")


def take_over(blobs: ObjectBlobs, store_id: str) -> None:
    """Claim another store's packs, because its index is lost and rebuilt in this store."""
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
                return _read(blobs)  # a faster store's; or ours, from an attempt with a lost answer
    except ReadOnly:
        pass  # a read-only user does no harm
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
        hint="give this database a prefix of its own; if the other database is lost, run kedge rebuild",
    )
