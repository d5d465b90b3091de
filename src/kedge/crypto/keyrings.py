"""Keyrings as they are gathered while an index is rebuilt: from what is left of it, beside it, and from packs."""

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
    """Keyrings by namespace. The first one found says which data key is the current one; later ones add older keys."""

    def __init__(self, master: MasterKey) -> None:
        self.master = master
        self.locked: Counter[str] = Counter()  # records that did not open, by the ID of the master key they want
        self._keyrings: dict[str, Keyring] = {}
        self._others: dict[str, str] = {}  # namespaces with keyrings of other master keys, and the IDs of those

    @property
    def count(self) -> int:
        """How many data keys are known."""
        return sum(len(keyring.secrets) for keyring in self._keyrings.values())

    @property
    def namespaces(self) -> Iterable[str]:
        return self._keyrings.keys()

    @property
    def closed(self) -> dict[str, str]:
        """Namespaces none of whose keyrings is under our master key, with the ID of the one they want."""
        return {name: master for name, master in self._others.items() if name not in self._keyrings}

    def add(self, store_id: str, namespace: str, text: str) -> None:
        """Take note of a keyring that the index of `store_id` had. One of another master key is of no use."""
        try:
            keyring = open_keyring(text, self.master, store_id, namespace)
        except Validation:
            self._others[namespace] = master_of(text)
            return
        except Corrupted:
            return
        previous = self._keyrings.setdefault(namespace, keyring)
        more = tuple(secret for secret in keyring.secrets if secret not in previous.secrets)
        self._keyrings[namespace] = replace(previous, secrets=previous.secrets + more)

    def refuse_wrong_master(self, keyrings: Iterable[str]) -> None:
        """Validation if none of the keyrings that a store has is under our master key: it is not empty, but locked."""
        wanted = set()
        for text in keyrings:
            with suppress(Corrupted):  # a damaged one says nothing; packs have others
                wanted.add(master_of(text))
        if wanted and self.master.id not in wanted:
            raise Validation(
                f"this store is encrypted under key {', '.join(sorted(wanted))}, and the one given is {self.master.id}",
                hint="give the right one: --key, $KEDGE_KEY or $KEDGE_KEY_FILE",
            )

    def keyring_for(self, store_id: str, namespace: str) -> str | None:
        """What the index of store `store_id` is to keep for a namespace; None if nothing was found."""
        keyring = self._keyrings.get(namespace)
        return None if keyring is None else seal_keyring(keyring, self.master, store_id)

    def shown_as(self, namespace: str, actor: str) -> str:
        """How an actor stands in the events of a namespace."""
        keyring = self._keyrings[namespace]
        return keyring.name_key.token("actor", actor) if keyring.hides_names else actor

    def unwrap_record(self, wrapped: bytes) -> bytes:
        """A record of a pack, under the keys known so far or those beside it; Corrupted for anything else."""
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
