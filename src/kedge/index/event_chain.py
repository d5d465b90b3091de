"""The chain through the log of changes, so that an entry that was altered or removed shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import ormsgpack

from kedge.model import EventChain

from .rows import Row


def chain_of(chain: bytes, *entry: object) -> bytes:
    """The chain value of an event behind one with `chain`."""
    return hashlib.sha256(chain + ormsgpack.packb(entry)).digest()


def prove_chain(entries: Iterable[Row]) -> EventChain:
    """How far (id, at_us, ns_no, actor, action, job, checkpoint, detail, chain) of events follow from each other."""
    chain, expected = bytes(32), 1
    for number, *entry, stored in entries:
        following = chain_of(chain, number, *entry)
        if number != expected or following != stored:
            return EventChain(expected - 1, chain.hex(), expected)
        chain, expected = following, expected + 1
    return EventChain(expected - 1, chain.hex())
