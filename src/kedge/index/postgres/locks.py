"""What a transaction locks at its beginning, so that what it sees then stays so until it has committed: `sql/002.sql`.

Locks of the namespace are numbers of the server's own, those of jobs and checkpoints come from their names: a job that
must stay absent has one, too. Two names with one number only wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from .server import STORE, Array, Connection

MOST_LOCKS = 64  # as many as the server has room for with each connection; for more, the namespace is locked
ALONE = (None, None)


class Lock(NamedTuple):
    """Of something that is changed; or, shared, that must stay."""

    key: int
    is_shared: bool = False


def of_job(ns_no: int, job: str) -> Lock:
    return Lock(_key(f"{ns_no} {job}"))


def of_checkpoint(checkpoint_id: str, *, is_shared: bool = False) -> Lock:
    return Lock(_key(checkpoint_id), is_shared)


def _key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def ascending(locks: Iterable[Lock]) -> tuple[Array | None, Array | None]:
    """The last parameters of `lock_1`: each lock once."""
    wanted: dict[int, bool] = {}
    for key, is_shared in locks:
        wanted[key] = wanted.get(key, True) and is_shared
    if len(wanted) > MOST_LOCKS:
        return ALONE
    keys = sorted(wanted)
    return Array("bigint", keys), Array("boolean", [wanted[key] for key in keys])


def lock_store(db: Connection, *, is_changing: bool) -> None:
    """Until the transaction ends nobody makes the store an encrypted one; if this does, no plain save begins a job."""
    db.execute(f"SELECT pg_advisory_xact_lock{'' if is_changing else '_shared'}({STORE}, 0)")
