"""The hash chain of the event log, which shows altered and removed entries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import ormsgpack

from kedge.model import EventChain

from .rows import Row


def chain_of(chain: bytes, *entry: object) -> bytes:
    """Return the chain value of an event that follows one with `chain`."""
    return hashlib.sha256(chain + ormsgpack.packb(entry)).digest()


def prove_chain(entries: Iterable[Row]) -> EventChain:
    """Verify how far events follow from each other.

    They come as (id, at_us, ns_no, actor, action, job, checkpoint, detail, chain).
    """
    chain, expected = bytes(32), 1
    for number, *entry, stored in entries:
        following = chain_of(chain, number, *entry)
        if number != expected or following != stored:
            return EventChain(expected - 1, chain.hex(), expected)
        chain, expected = following, expected + 1
    return EventChain(expected - 1, chain.hex())
