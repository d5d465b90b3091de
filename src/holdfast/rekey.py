"""New keys for a namespace: another master key around the same data keys, or a new data key for everything (I10).

Changing the master key replaces the keyring, one row of the index. Rewriting, for a key that has leaked:

    1. a new data key becomes the current one, in one transaction. Every save from now on uses it: one that began with
       the old key is refused at its commit (KeysChanged) and done again
    2. each checkpoint that still needs an old key is written anew: its chunks under their new names, then, in one
       transaction, its row. Killed at any moment, the next call goes on with those that are left
    3. when none is left, rows of chunks that only the old keys name are deleted, the index is freed of what rows were
       before, and the keyring loses those keys. The bytes go with the next gc

The name key stays: tags, idempotency keys, hidden names and details of events keep their tokens (docs/encryption.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from .crypto import Keyring, MasterKey, key_id_of, open_keyring, seal_keyring
from .errors import Conflict, Corrupted, Validation
from .index.encrypted import EncryptedIndex
from .model import Checkpoint, to_us
from .ports import ChunksGone, KeysChanged, NewCheckpoint
from .store import Store

_MAX_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class RekeyReport:
    """What changing keys came to."""

    master: str  # ID of the master key now
    key: str  # ID of the data key now
    is_rewritten: bool
    checkpoints: int  # written anew by this call
    unreadable: tuple[str, ...] = ()  # IDs that could not be: the old key stays until they are deleted


def change_master(store: Store, old: MasterKey, new: MasterKey, *, actor: str) -> RekeyReport:
    """Seal the keyring under another master key. Processes that have the store open go on with what they have."""
    text = _replace_keyring(store, old, new, lambda keyring: keyring, actor)
    _sealed_index(store).vault.use(new)
    return RekeyReport(new.id, key_id_of(text), False, 0)


def rewrite(
    store: Store, master: MasterKey, *, actor: str, progress: Callable[[int, int], None] | None = None
) -> RekeyReport:
    """Write every checkpoint of the namespace anew under a new data key; resumes one that was interrupted."""
    index = _sealed_index(store)
    vault = index.vault
    vault.refresh()
    if len(vault.keys) == 1:
        _replace_keyring(store, master, master, Keyring.with_new_key, actor)
        vault.refresh()
    total = store.index.totals()["checkpoints"]
    done, unreadable = 0, []
    for seen, (checkpoint, packed, digest, is_current) in enumerate(index.every_row(), 1):
        if packed is None:
            unreadable.append(checkpoint.id)
        elif not (is_current and _has_current_chunks(store, packed)):
            if _rewrite_one(store, checkpoint, packed, digest, actor):
                done += 1
            else:
                unreadable.append(checkpoint.id)
        if progress:
            progress(seen, max(total, seen))
    if not unreadable:
        key = vault.current  # under which every row is by now, and every later one: nobody names a chunk otherwise
        store.index.sweep(lambda _, manifest: map(key.chunk_id, store.contents(manifest)))
        store.index.scrub()
        _replace_keyring(store, master, master, Keyring.with_current_only, actor)
        vault.refresh()
    return RekeyReport(master.id, vault.current.id.hex(), True, done, tuple(unreadable))


def _has_current_chunks(store: Store, packed: bytes) -> bool:
    """Looked at for each checkpoint: a copy, or a rebuilt index, may name chunks of an old key under a new one."""
    assert store.key is not None
    current = {store.key.chunk_id(digest) for digest in store.contents(packed)}
    return current == set(store.chunks(packed))


def _rewrite_one(store: Store, checkpoint: Checkpoint, packed: bytes, digest: bytes, actor: str) -> bool:
    """False if a chunk of it cannot be read. A checkpoint that was deleted meanwhile needs nothing."""
    record = _record(checkpoint, packed)
    for _ in range(_MAX_ATTEMPTS):
        try:
            with store.under_current_key(record) as current:
                store.index.reseal(current, replacing=digest, actor=actor)
        except ChunksGone:
            if not store.knows(checkpoint.id):
                return True
        except KeysChanged:
            store.refresh_keys()
        except Corrupted:
            return not store.knows(checkpoint.id)
        else:
            return True
    return False


def _record(checkpoint: Checkpoint, packed: bytes) -> NewCheckpoint:
    return NewCheckpoint(
        id=checkpoint.id,
        job=checkpoint.job,
        step=checkpoint.step,
        level=checkpoint.level,
        created_us=to_us(checkpoint.created_at),
        size_bytes=checkpoint.size_bytes,
        stored_bytes=len(packed),
        digest=b"",
        codec=checkpoint.codec,
        schema_version=checkpoint.schema_version,
        manifest=packed,
        parent=checkpoint.parent,
        metadata_json=json.dumps(dict(checkpoint.metadata), ensure_ascii=False, separators=(",", ":")),
    )


def _replace_keyring(
    store: Store, old: MasterKey, new: MasterKey, change: Callable[[Keyring], Keyring], actor: str
) -> str:
    """Change the keyring, whatever others do to it at the same time; answers what the index has now."""
    index = _sealed_index(store)
    for _ in range(_MAX_ATTEMPTS):
        present = index.keyring()
        assert present is not None
        keyring = change(open_keyring(present, old, index.store_id, index.namespace))
        text = seal_keyring(keyring, new, index.store_id)
        if index.set_keyring(text, key_id_of(text), replacing=present, actor=actor):
            return text
    raise Conflict("somebody else keeps changing the keys of this namespace", hint="run it again when they are done")


def _sealed_index(store: Store) -> EncryptedIndex:
    if not isinstance(store.index, EncryptedIndex):
        raise Validation("this store is not encrypted", hint="make a new one with a key, and save there what you need")
    return store.index
