"""The open keyring of one namespace, as the store uses it."""

from __future__ import annotations

from collections.abc import Callable

import ormsgpack

from kedge.errors import Corrupted, Validation
from kedge.ports import Buffer

from .envelope import DataKey, NameKey, key_in
from .keyring import Keyring, open_keyring
from .master import MasterKey


def parse_wrapped(wrapped: bytes) -> tuple[str, str, str, bytes]:
    """Return (store ID, namespace, keyring, envelope) from `wrap_record`. Raises Corrupted for anything else."""
    try:
        store_id, namespace, keyring, sealed = ormsgpack.unpackb(wrapped)
        if not all(isinstance(text, str) for text in (store_id, namespace, keyring)) or not isinstance(sealed, bytes):
            raise ValueError("fields of another type")
    except (ValueError, TypeError):
        raise Corrupted("the record is not encrypted, but its namespace is", hint="run kedge check") from None
    return store_id, namespace, keyring, sealed


class Vault:
    """Seals with the current data key, opens with the key an envelope names. Thread-safe; survives fork.

    Another process may change the keys at any time. An unknown key, or a commit refused for an old one, makes the vault
    read the keyring again. An immutable `DataKey` in use stays valid.
    """

    def __init__(self, master: MasterKey, store_id: str, namespace: str, read: Callable[[], str | None]) -> None:
        self.master = master
        self._store_id = store_id
        self._namespace = namespace
        self._read = read
        self.refresh()

    def refresh(self) -> None:
        """Read the keyring again. If its master key was changed, the known keys stay."""
        text = self._read()
        if text is None:
            raise Corrupted("the keyring of this namespace is gone", hint="restore the index from a copy")
        try:
            keyring = open_keyring(text, self.master, self._store_id, self._namespace)
        except Validation:
            if not hasattr(self, "keyring"):
                raise
            raise Validation(
                "the master key of this store was changed", hint="open the store again with the new key"
            ) from None
        self.keyring: Keyring = keyring
        self.names: NameKey = keyring.name_key
        self.keys: tuple[DataKey, ...] = keyring.data_keys
        self._sealed_keyring = text

    def use(self, master: MasterKey) -> None:
        """Use another master key for the keyring from now on."""
        self.master = master
        self.refresh()

    @property
    def description(self) -> dict[str, object]:
        """What may be shown of the keys."""
        return {
            "cipher": "AES-256-GCM",
            "master_key": self.master.id,
            "data_key": self.current.id.hex(),
            "old_data_keys": [key.id.hex() for key in self.keys[1:]],
            "encrypts_names": self.hides_names,
        }

    @property
    def current(self) -> DataKey:
        return self.keys[0]

    @property
    def hides_names(self) -> bool:
        return self.keyring.hides_names

    def key_of(self, sealed: Buffer) -> DataKey:
        """Return the data key of an envelope. Raises Corrupted if it is none of ours."""
        key_id = key_in(sealed)
        for is_fresh in (False, True):
            for key in self.keys:
                if key.id == key_id:
                    return key
            if not is_fresh:
                self.refresh()
        raise Corrupted(
            f"it was sealed under key {key_id.hex()}, which this namespace does not have",
            hint="run kedge check: it was changed, or belongs to another place",
        )

    def open(self, kind: str, identity: bytes, sealed: Buffer) -> bytes:
        return self.key_of(sealed).open(kind, identity, sealed)

    def wrap_record(self, key: DataKey, record: bytes) -> bytes:
        """Return a record for a pack, with the keyring: a rebuild needs only packs and the master key."""
        fields = [self._store_id, self._namespace, self._sealed_keyring, key.seal("record", b"", record)]
        return ormsgpack.packb(fields)

    def unwrap_record(self, wrapped: bytes) -> bytes:
        """Open a record of this namespace. Raises Corrupted."""
        _, namespace, _, sealed = parse_wrapped(wrapped)
        if namespace != self._namespace:
            raise Corrupted("the record belongs to another namespace", hint="run kedge check")
        return self.open("record", b"", sealed)

    def chunk_ids(self, digest: bytes) -> tuple[bytes, ...]:
        """Return every name a chunk with this content may have, the current key's first."""
        return tuple(key.chunk_id(digest) for key in self.keys)
