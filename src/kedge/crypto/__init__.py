"""Encryption at rest (I10): a master key, which is never stored, wraps the keys of each namespace.

master key    32 bytes that the user keeps: `master`
keyring       the keys of a namespace in the index, sealed under the master key: `keyring`
data key      encrypts states and metadata; names chunks. `rekey --rewrite` makes a new one: `envelope`
name key      encrypts what must be found by equality: tags, idempotency keys, names: `envelope`
vault         the open keyring of a namespace, as the store uses it: `vault`
"""

from __future__ import annotations

from .envelope import DataKey, NameKey
from .keyring import Keyring, key_id_of, master_of, new_keyring, open_keyring, seal_keyring
from .keyrings import Keyrings
from .master import MasterKey, find_master, new_master_text, parse_master
from .vault import Vault, parse_wrapped

__all__ = [
    "DataKey",
    "Keyrings",
    "Keyring",
    "MasterKey",
    "NameKey",
    "Vault",
    "find_master",
    "key_id_of",
    "master_of",
    "new_keyring",
    "new_master_text",
    "open_keyring",
    "parse_master",
    "parse_wrapped",
    "seal_keyring",
]
