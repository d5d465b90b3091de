"""Keyrings collected for a rebuild: from the remains of the index, from its copies, and from packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from kedge.errors import Corrupted, Validation

from .envelope import DataKey, key_in
from .keyring import Keyring, master_of, open_keyring, seal_keyring
from .master import MasterKey
from .vault import parse_wrapped


class Keyrings:
    """Keyrings by namespace. The first one added has the current data key; later ones add older keys."""

    def __init__(self, master: MasterKey) -> None:
        self.master = master
        self.locked: Counter[str] = Counter()  # records that did not open, by the ID of their master key
        self._keyrings: dict[str, Keyring] = {}
        self._other_masters: dict[str, str] = {}  # namespaces with keyrings of other master keys, and the IDs of those

    @property
    def count(self) -> int:
        """The number of known data keys."""
        return sum(len(keyring.secrets) for keyring in self._keyrings.values())

    @property
    def namespaces(self) -> Iterable[str]:
        return self._keyrings.keys()

    @property
    def closed(self) -> dict[str, str]:
        """Namespaces with no keyring under our master key, and the ID of theirs."""
        return {name: master for name, master in self._other_masters.items() if name not in self._keyrings}

    def add(self, store_id: str, namespace: str, text: str) -> None:
        """Add a keyring from the index of `store_id`. One under another master key cannot be used."""
        try:
            keyring = open_keyring(text, self.master, store_id, namespace)
        except Validation:
            self._other_masters[namespace] = master_of(text)
            return
        except Corrupted:
            return
        previous = self._keyrings.setdefault(namespace, keyring)
        more = tuple(secret for secret in keyring.secrets if secret not in previous.secrets)
        self._keyrings[namespace] = replace(previous, secrets=previous.secrets + more)

    def refuse_wrong_master(self, keyrings: Iterable[str]) -> None:
        """Raise Validation if none of a store's keyrings is under our master key: it is locked, not empty."""
        wanted = set()
        for text in keyrings:
            with suppress(Corrupted):  # packs have other copies of a damaged one
                wanted.add(master_of(text))
        if wanted and self.master.id not in wanted:
            raise Validation(
                f"this store is encrypted under key {', '.join(sorted(wanted))}, and the one given is {self.master.id}",
                hint="give the right one: --key, $KEDGE_KEY or $KEDGE_KEY_FILE",
            )

    def keyring_for(self, store_id: str, namespace: str) -> str | None:
        """Return the keyring for the index of store `store_id`; None if the namespace has none."""
        keyring = self._keyrings.get(namespace)
        return None if keyring is None else seal_keyring(keyring, self.master, store_id)

    def shown_as(self, namespace: str, actor: str) -> str:
        """Return an actor's name in the events of a namespace."""
        keyring = self._keyrings[namespace]
        return keyring.name_key.token("actor", actor) if keyring.hides_names else actor

    def unwrap_record(self, wrapped: bytes) -> bytes:
        """Open a pack's record with the known keys or the keyring in it. Raises Corrupted."""
        store_id, namespace, text, sealed = parse_wrapped(wrapped)
        if self._key_of(namespace, sealed) is None:
            self.add(store_id, namespace, text)
        key = self._key_of(namespace, sealed)
        if key is None:
            self.locked[master_of(text)] += 1
            raise Corrupted("the record is under a key that was not found", hint="give the key it was written with")
        return key.open("record", b"", sealed)

    def _key_of(self, namespace: str, sealed: bytes) -> DataKey | None:
        keyring = self._keyrings.get(namespace)
        return next((key for key in keyring.data_keys if key.id == key_in(sealed)), None) if keyring else None
