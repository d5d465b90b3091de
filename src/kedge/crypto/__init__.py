"""Encryption at rest (I10): a master key, which never touches the store, wraps the keys of each namespace.

master key    32 bytes the user keeps: `masters`
keyring       what the index holds for a namespace: its keys, sealed under the master key: `keyrings`
data key      encrypts states and metadata; names chunks. `rekey --rewrite` makes a new one: `sealing`
name key      encrypts what must be found again by equality: tags, idempotency keys, names: `sealing`
vault         the open keyring of a namespace, as the store uses it: `vaults`
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
