"""Trees put together from values that were encoded before, so that what is unchanged need not be encoded again.

What that relies on, of the format (`kedge.codec`):

- A value has the same bytes wherever it stands, as long as the whole tree has at most PART_DEPTH levels.
- A list is its head, then its items. A dictionary whose keys are all text is its head, then key, value, key, value, …
- The head of a list is one byte, 0x90 + length, up to length 15; beyond, 0xDD and the length in four bytes, big-endian.
  That of a dictionary is 0x80 + length, or 0xDF and the length.
- A text stands in the tree as its UTF-8, a byte string as it is, unbroken.
"""

from __future__ import annotations

import struct

from . import decode, encode

MAX_FRAGMENT_BYTES = 1 << 20
_LEVELS = 3  # how deep a fragment may stand in its tree
_ONE_ITEM = b"\x91"
_DICT_HEADS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_LONG_HEAD = struct.Struct(">BI")


class NotAFragment(Exception):
    """The value has buffers beside its tree, or is too long or too deep: encode the whole state instead."""


def encode_fragment(value: object) -> bytes:
    """The bytes of `value` in a tree, at most three levels below its root; NotAFragment if it cannot stand there.

    Classes that are not registered are saved by name.
    """
    encoded = encode([[[value]]], out_of_band_bytes=MAX_FRAGMENT_BYTES, by_name=True)
    is_inside = encoded.tree.startswith(_ONE_ITEM * _LEVELS)  # a tree of more than PART_DEPTH levels begins otherwise
    if encoded.buffers or len(encoded.tree) > MAX_FRAGMENT_BYTES or not is_inside:
        raise NotAFragment
    return encoded.tree[_LEVELS:]


def decode_fragment(data: bytes) -> object:
    return decode(data, _no_buffer)


def _no_buffer(number: int) -> bytes:
    raise NotAFragment


def list_head(length: int) -> bytes:
    return bytes([0x90 | length]) if length < 16 else _LONG_HEAD.pack(0xDD, length)


def dict_head(length: int) -> bytes:
    return bytes([0x80 | length]) if length < 16 else _LONG_HEAD.pack(0xDF, length)


def is_plain_dict(fragment: bytes) -> bool:
    """Whether these are the bytes of a dictionary with nothing but text for keys."""
    return fragment[0] in _DICT_HEADS


def text_bytes(text: str | bytes) -> bytes:
    """How a text or a byte string stands in a fragment."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
