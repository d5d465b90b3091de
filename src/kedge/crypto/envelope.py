"""Sealing and opening bytes, and naming what is sealed.

An envelope is the form of sealed bytes (docs/format.md):

    0xE1 [1]   ID of the data key [8]   salt [12]   nonce [12]   AES-256-GCM: ciphertext, tag [16]

Salt and nonce are 24 random bytes, new for each envelope. The AES key is HMAC-SHA-256(data key, what it is bound to ‖
salt). Two envelopes share key and nonce only if they are bound to the same thing and their 192 random bits are equal.
For n envelopes under one data key that chance is below n² / 2^193, so 2^64 of them stay below 2^-64. Random 96-bit
nonces under one key alone would allow 2^32, which a busy store writes in days.

Each envelope is bound to store, namespace, kind and ID, as associated data and in the key: moved elsewhere, it does not
open (I10). AES-GCM does not bind the key itself; the key's ID in the envelope and the sealed keyring do that.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import struct

from kedge.errors import Corrupted
from kedge.ports import ENVELOPE, Buffer

from .library import AESGCM, AESSIV, InvalidTag

KEY_ID_BYTES = 8
_HEAD = struct.Struct(f"<B{KEY_ID_BYTES}s12s12s")
_TAG_BYTES = 16
OVERHEAD_BYTES = _HEAD.size + _TAG_BYTES


def is_envelope(data: Buffer) -> bool:
    return len(data) >= OVERHEAD_BYTES and data[0] == ENVELOPE


def key_in(sealed: Buffer) -> bytes:
    """Return the ID of the data key that an envelope names. Raises Corrupted if it is not an envelope."""
    if not is_envelope(sealed):
        raise Corrupted("it is not encrypted, but its namespace is", hint="run kedge check: somebody changed it")
    return bytes(sealed[1 : 1 + KEY_ID_BYTES])


def bound(*parts: bytes) -> bytes:
    """Join parts unambiguously: no other parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class DataKey:
    """One data key of a namespace. Immutable, so that a save uses the same one from its first chunk to its commit."""

    overhead_bytes = OVERHEAD_BYTES

    def __init__(self, secret: bytes, store_id: str, namespace: str) -> None:
        self._secret = secret
        self.id = hmac.digest(secret, b"kedge data key id", "sha256")[:KEY_ID_BYTES]
        self._place = bound(store_id.encode(), namespace.encode())
        self._kinds: dict[str, bytes] = {}  # for each kind, the beginning of what an envelope is bound to
        self._naming = hmac.digest(secret, b"kedge chunk names", "sha256")

    def chunk_id(self, digest: bytes) -> bytes:
        """Return the name of a chunk with this content digest. Without the key, equal content cannot be recognised."""
        return hmac.digest(self._naming, digest, "sha256")

    def seal(self, kind: str, identity: bytes, data: Buffer) -> bytes:
        """Return an envelope of `data`, bound to `kind` and `identity`."""
        place, random = self._bound_to(kind, identity), os.urandom(24)
        cipher = self._cipher(place, random[:12])
        return b"\xe1" + self.id + random + cipher.encrypt(random[12:], data, place)

    def seal_into(self, kind: str, identity: bytes, data: Buffer, sealed: memoryview) -> None:
        """The same in existing memory, for large ones."""
        place, random = self._bound_to(kind, identity), os.urandom(24)
        _HEAD.pack_into(sealed, 0, ENVELOPE, self.id, random[:12], random[12:])
        self._cipher(place, random[:12]).encrypt_into(random[12:], data, place, sealed[_HEAD.size :])

    def open(self, kind: str, identity: bytes, sealed: Buffer) -> bytes:
        plain = bytearray(max(0, len(sealed) - OVERHEAD_BYTES))
        self.open_into(kind, identity, sealed, memoryview(plain))
        return bytes(plain)

    def open_into(self, kind: str, identity: bytes, sealed: Buffer, target: memoryview) -> None:
        """Decrypt into `target`, which has the right length. Raises Corrupted; `target` is then meaningless."""
        if key_in(sealed) != self.id or len(target) != len(sealed) - OVERHEAD_BYTES:
            raise Corrupted("its envelope is damaged", hint="run kedge check")
        _, _, salt, nonce = _HEAD.unpack_from(sealed)
        place = self._bound_to(kind, identity)
        try:
            self._cipher(place, salt).decrypt_into(nonce, memoryview(sealed)[_HEAD.size :], place, target)
        except InvalidTag:
            raise Corrupted(
                "it does not decrypt: it was changed, or belongs to another place",
                hint="run kedge check; restore an earlier checkpoint or another copy of the store",
            ) from None

    def _bound_to(self, kind: str, identity: bytes) -> bytes:
        begin = self._kinds.get(kind)
        if begin is None:
            begin = self._kinds[kind] = self._place + bound(kind.encode())
        return begin + len(identity).to_bytes(4, "little") + identity

    def _cipher(self, place: bytes, salt: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._secret, place + salt, "sha256"))


class NameKey:
    """Encrypts text that the index must find again: the same text gives the same token (AES-256-SIV, RFC 5297).

    A reader of the index learns only that two tokens are equal, and how long the text is.
    """

    def __init__(self, secret: bytes, store_id: str, namespace: str) -> None:
        self._secret = hmac.digest(secret, b"kedge names", "sha512")
        self._place = bound(store_id.encode(), namespace.encode())

    def token(self, kind: str, text: str) -> str:
        """Return `~` and base64, so that tokens are recognised in other text."""
        return "~" + base64.urlsafe_b64encode(self.seal(kind, text.encode())).decode().rstrip("=")

    def text(self, kind: str, token: str) -> str:
        try:
            if token[:1] != "~":
                raise ValueError("not a token")
            padding = "=" * (-(len(token) - 1) % 4)
            return self.open(kind, base64.b64decode(token[1:] + padding, altchars=b"-_", validate=True)).decode()
        except (ValueError, binascii.Error):  # a UnicodeDecodeError is a ValueError
            raise Corrupted(
                f"a {kind} is not encrypted, but its namespace is", hint="run kedge check: somebody changed it"
            ) from None

    def seal(self, kind: str, data: bytes) -> bytes:
        return AESSIV(self._secret).encrypt(b"\0" + data, [self._place, kind.encode()])  # no empty input

    def open(self, kind: str, sealed: bytes) -> bytes:
        try:
            return AESSIV(self._secret).decrypt(sealed, [self._place, kind.encode()])[1:]
        except (InvalidTag, ValueError):
            raise Corrupted(
                f"a {kind} does not decrypt: it was changed, or belongs to another place", hint="run kedge check"
            ) from None
