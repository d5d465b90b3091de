"""New keys for a namespace: another master key for the same data keys, or a new data key for everything (I10).

A change of the master key replaces the keyring, one row of the index. Rewriting, for a leaked key:

    1. A new data key becomes the current one, in one transaction. Every later save uses it: one that began with the
       old key is refused at its commit (KeysChanged) and done again.
    2. Each checkpoint that still needs an old key is rewritten: its chunks under their new names, then, in one
       transaction, its row. After a kill, the next call continues with the rest.
    3. When none is left, chunk rows that only old keys name are deleted, the index erases the previous content of its
       rows, and the keyring drops the old keys. The next gc frees the bytes.

Only one change runs at a time, under a lease (`changing`) whose token every write of the change carries. A change that
was suspended until another one began is refused before it deletes anything. A keyring is replaced only if it is still
the one the change began with.

The name key stays: tags, idempotency keys, hidden names and details of events keep their tokens (docs/encryption.md).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from kedge.blobs.shelter import sheltered
from kedge.crypto import Keyring, MasterKey, key_id_of, open_keyring, seal_keyring
from kedge.errors import Conflict, Corrupted, LeaseHeld, Validation
from kedge.index.encrypted import EncryptedIndex
from kedge.model import Checkpoint, Lease
from kedge.ports import KEYS, ChunksGone, KeysChanged, NewCheckpoint
from kedge.store import knows
from kedge.store import lease as leases
from kedge.store.adoption import under_current_key
from kedge.store.local import LocalStore

from . import Progress

_MAX_ATTEMPTS = 8
_LEASE_S = 30.0

_counting = threading.Lock()
_under_way: Counter[tuple[str, str]] = Counter()  # changes that this process has begun, by store and namespace


@dataclass(frozen=True, slots=True)
class RekeyReport:
    """The result of a change of keys."""

    master: str  # ID of the current master key
    key: str  # ID of the current data key
    is_rewritten: bool
    checkpoints: int  # rewritten by this call
    unreadable: tuple[str, ...] = ()  # IDs that could not be rewritten: the old key stays until they are deleted


@contextmanager
def changing(store: LocalStore) -> Iterator[Lease]:
    """Hold the right to change the keys of a namespace. Raises LeaseHeld while another change has it.

    Takes over from a change whose process has certainly ended, and from one of this process that failed just when it
    had taken the lease.
    """
    index = _sealed_index(store)
    place = index.store_id, index.namespace
    with ExitStack() as stack:
        _count(place, 1)
        stack.callback(_count, place, -1)
        try:
            lease = stack.enter_context(leases.hold(index, KEYS, ttl_s=_LEASE_S))
        except LeaseHeld as held:
            is_left = held.holder == leases.default_holder() and _under_way[place] == 1
            if not is_left and not leases.is_holder_gone(held.holder):
                raise
            index.release_lease(Lease(KEYS, held.token, held.holder, _LEASE_S))
            lease = stack.enter_context(leases.hold(index, KEYS, ttl_s=_LEASE_S))
        yield lease


@sheltered
def _count(place: tuple[str, str], change: int) -> None:
    with _counting:
        _under_way[place] += change


def change_master(store: LocalStore, old: MasterKey, new: MasterKey, lease: Lease, *, actor: str) -> RekeyReport:
    """Seal the keyring under another master key. Processes with the store open continue with their keys."""
    index = _sealed_index(store)
    present = _present(index)
    try:
        keyring = open_keyring(present, old, index.store_id, index.namespace)
    except Validation:
        open_keyring(present, new, index.store_id, index.namespace)  # an earlier change failed after this point
        text = present
    else:
        text = _replace_keyring(index, present, keyring, new, lease, actor)
    index.vault.use(new)
    return RekeyReport(new.id, key_id_of(text), False, 0)


def rewrite(
    store: LocalStore,
    master: MasterKey,
    lease: Lease,
    *,
    actor: str,
    progress: Progress | None = None,
) -> RekeyReport:
    """Rewrite every checkpoint of the namespace under a new data key; resumes an interrupted rewrite."""
    index = _sealed_index(store)
    present = _present(index)
    keyring = open_keyring(present, master, index.store_id, index.namespace)
    if len(keyring.secrets) == 1:
        keyring = keyring.with_new_key()
        present = _replace_keyring(index, present, keyring, master, lease, actor)
    index.vault.refresh()
    store.blobs.seal()  # so that the next gc can remove packs of the old keys completely
    done, unreadable = _rewrite_all(store, index, lease, actor, progress)
    if not unreadable:
        key = keyring.data_keys[0]  # while we have the lease, every row is and will be under this key
        index.sweep(lambda _, manifest: map(key.chunk_id, store.contents(manifest)), lease_token=lease.token)
        index.scrub()
        _replace_keyring(index, present, keyring.with_current_only(), master, lease, actor)
        index.vault.refresh()
    return RekeyReport(master.id, keyring.data_keys[0].id.hex(), True, done, tuple(unreadable))


def _rewrite_all(
    store: LocalStore, index: EncryptedIndex, lease: Lease, actor: str, progress: Progress | None
) -> tuple[int, list[str]]:
    """Return how many checkpoints were rewritten, and the IDs of those that could not be."""
    total = index.totals()["checkpoints"]
    done = 0
    unreadable: list[str] = []
    for seen, (checkpoint, packed, digest, is_current) in enumerate(index.every_row(), 1):
        if packed is None:
            unreadable.append(checkpoint.id)
        elif not (is_current and _has_current_chunks(store, packed)):
            if _rewrite_one(store, checkpoint, packed, digest, lease, actor):
                done += 1
            else:
                unreadable.append(checkpoint.id)
        if progress:
            progress(seen, max(total, seen))
    return done, unreadable


def _has_current_chunks(store: LocalStore, packed: bytes) -> bool:
    """Check that chunks have current names: after a copy or a rebuild, a current row may name old ones."""
    assert store.key is not None
    current = {store.key.chunk_id(digest) for digest in store.contents(packed)}
    return current == set(store.chunks(packed))


@sheltered
def _rewrite_one(
    store: LocalStore, checkpoint: Checkpoint, packed: bytes, digest: bytes, lease: Lease, actor: str
) -> bool:
    """Rewrite a checkpoint. Return False if one of its chunks is unreadable; a deleted one needs nothing."""
    record = replace(NewCheckpoint.of(checkpoint, packed), lease_token=lease.token)
    for _ in range(_MAX_ATTEMPTS):
        try:
            with under_current_key(store, record) as current:
                store.index.reseal(current, replacing=digest, actor=actor)
        except ChunksGone:
            if not knows(store.index, checkpoint.id):
                return True
        except KeysChanged:
            store.refresh_keys()
        except Corrupted:
            return not knows(store.index, checkpoint.id)
        else:
            return True
    return False


def _present(index: EncryptedIndex) -> str:
    text = index.keyring()
    if text is None:
        raise Corrupted("the keyring of this namespace is gone", hint="restore the index from a copy")
    return text


def _replace_keyring(
    index: EncryptedIndex, present: str, keyring: Keyring, master: MasterKey, lease: Lease, actor: str
) -> str:
    """Replace the keyring if it is still `present` (I10); return the new one as text."""
    text = seal_keyring(keyring, master, index.store_id)
    if not index.set_keyring(text, key_id_of(text), replacing=present, actor=actor, lease_token=lease.token):
        raise Conflict(
            f"the keys of namespace {index.namespace} were changed by another process",
            hint="nothing was lost: run it again",
        )
    return text


def _sealed_index(store: LocalStore) -> EncryptedIndex:
    if not isinstance(store.index, EncryptedIndex):
        raise Validation(
            "this store is not encrypted", hint="create a new store with a key, and copy the data: kedge copy"
        )
    return store.index
