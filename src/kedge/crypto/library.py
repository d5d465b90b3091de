"""The parts of `cryptography` in use, imported when a store is opened with a key."""

from __future__ import annotations

from kedge.errors import Validation, install_hint

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

    _is_new_enough = hasattr(AESGCM, "encrypt_into")
except ModuleNotFoundError:
    _is_new_enough = False

if not _is_new_enough:
    raise Validation("encryption needs the package cryptography, version 50 or newer", hint=install_hint("encryption"))

__all__ = ["AESGCM", "AESSIV", "InvalidTag"]
