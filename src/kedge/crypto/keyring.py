"""The keyring of a namespace: its keys in the index, sealed under the master key.

    {"kedge keyring": 1, "master": ID of the master key, "key": ID of the current data key,
     "names": whether names are hidden, "bound_to": the ID of the store that all envelopes are bound to,
     "sealed": base64 of an envelope with the keys}

A change of the master key seals the same keys again and touches nothing else. The plain fields are repeated inside, so
that nobody can change them.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import os
from dataclasses import dataclass, field, replace

from kedge.errors import Conflict, Corrupted, UnsupportedFormat, Validation

from .envelope import DataKey, NameKey
from .master import KEY_BYTES, MasterKey

VERSION = 1
MAX_KEYRING_CHARACTERS = 64 * 1024
_MAX_KEYS = 64


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys of a namespace. The first data key is the current one; others stay until nothing needs them."""

    secrets: tuple[bytes, ...] = field(repr=False)
    name_secret: bytes = field(repr=False)
    store_id: str  # all envelopes are bound to it: the first store's, even after its index was rebuilt
    namespace: str
    hides_names: bool = False

    @property
    def data_keys(self) -> tuple[DataKey, ...]:
        return tuple(DataKey(secret, self.store_id, self.namespace) for secret in self.secrets)

    @property
    def name_key(self) -> NameKey:
        return NameKey(self.name_secret, self.store_id, self.namespace)

    def with_new_key(self) -> Keyring:
        """Return the keyring with a new current data key."""
        if len(self.secrets) >= _MAX_KEYS:
            raise Conflict("this namespace has too many keys", hint="let kedge rekey --rewrite finish first")
        return replace(self, secrets=(os.urandom(KEY_BYTES), *self.secrets))

    def with_current_only(self) -> Keyring:
        return replace(self, secrets=self.secrets[:1])


def new_keyring(store_id: str, namespace: str, *, hides_names: bool) -> Keyring:
    return Keyring((os.urandom(KEY_BYTES),), os.urandom(KEY_BYTES), store_id, namespace, hides_names)


def seal_keyring(keyring: Keyring, master: MasterKey, store_id: str) -> str:
    """Return the keyring for the index of store `store_id`."""
    namespace = keyring.namespace
    outside = {
        "kedge keyring": VERSION,
        "master": master.id,
        "key": keyring.data_keys[0].id.hex(),
        "names": keyring.hides_names,
        "bound_to": keyring.store_id,
    }
    inside = json.dumps(
        {**outside, "keys": [secret.hex() for secret in keyring.secrets], "name_key": keyring.name_secret.hex()}
    )
    sealed = _wrapping(master, store_id, namespace).seal("keyring", b"", inside.encode())
    return json.dumps({**outside, "sealed": base64.b64encode(sealed).decode()})


def open_keyring(text: str, master: MasterKey, store_id: str, namespace: str) -> Keyring:
    """Return the keys. Raises Validation for a wrong master key, Corrupted for a damaged or altered keyring."""
    outside = _parse(text)
    if outside["master"] != master.id:
        raise Validation(
            f"namespace {namespace} is encrypted under key {outside['master']}, and the one given is {master.id}",
            hint="give the right key: key=, --key, $KEDGE_KEY or $KEDGE_KEY_FILE",
        )
    try:
        sealed = base64.b64decode(str(outside.pop("sealed")), validate=True)
        inside = json.loads(_wrapping(master, store_id, namespace).open("keyring", b"", sealed))
        secrets = tuple(bytes.fromhex(secret) for secret in inside.pop("keys"))
        name_secret = bytes.fromhex(inside.pop("name_key"))
        if inside != outside or not 1 <= len(secrets) <= _MAX_KEYS or {*map(len, secrets), len(name_secret)} != {32}:
            raise ValueError("its parts contradict each other")
    except Corrupted as error:
        raise _damaged(namespace, error.message) from None
    except (ValueError, TypeError, KeyError, AttributeError, binascii.Error) as error:
        raise _damaged(namespace, str(error)) from None
    return Keyring(secrets, name_secret, str(outside["bound_to"]), namespace, bool(outside["names"]))


def key_id_of(text: str) -> str:
    """Return the ID of the current data key, which is in the clear."""
    return str(_parse(text)["key"])


def master_of(text: str) -> str:
    """Return the ID of the master key it is sealed under."""
    return str(_parse(text)["master"])


def _parse(text: str) -> dict[str, object]:
    try:
        document = json.loads(text) if len(text) <= MAX_KEYRING_CHARACTERS else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _damaged("", "it is not a JSON object")
    version = document.get("kedge keyring")
    if isinstance(version, int) and version > VERSION:
        raise UnsupportedFormat(
            f"the keys of this store have version {version}, this Kedge knows up to {VERSION}",
            hint="upgrade Kedge: install it from a newer clone (pip install .)",
        )
    kinds = {"kedge keyring": int, "master": str, "key": str, "names": bool, "bound_to": str, "sealed": str}
    if document.keys() != kinds.keys() or not all(isinstance(document[name], kind) for name, kind in kinds.items()):
        raise _damaged("", "its fields are wrong")
    return document


def _damaged(namespace: str, why: str) -> Corrupted:
    of = f" of namespace {namespace}" if namespace else ""
    return Corrupted(f"the keyring{of} is damaged: {why}", hint="restore the index from a copy, or run kedge check")


def _wrapping(master: MasterKey, store_id: str, namespace: str) -> DataKey:
    return DataKey(hmac.digest(master.secret, b"kedge key wrapping", "sha256"), store_id, namespace)
