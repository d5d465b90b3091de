"""Trees assembled from encoded values, so that unchanged ones need not be encoded again, and taken apart likewise.

This relies on these properties of the format (`kedge.codec`):

- A value has the same bytes in any place, as long as the whole tree has at most PART_DEPTH levels.
- A list is its head, then its items. A dictionary with only text keys is its head, then key, value, key, value, …
- The head of a list is one byte, 0x90 + length, up to length 15; beyond, 0xDD and the length in four bytes, big-endian.
  That of a dictionary is 0x80 + length, or 0xDF and the length.
- Text is in the tree as unbroken UTF-8, a byte string as it is.
"""

from __future__ import annotations

import struct

import ormsgpack

from . import decode, encode

MAX_FRAGMENT_BYTES = 1 << 20
_SHORT_TEXT = MAX_FRAGMENT_BYTES // 8  # characters, of four bytes at most
_LEVELS = 3  # how deep a fragment may be in its tree
_ONE_ITEM = b"\x91"
_DICTS = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))
_LONG_HEAD = struct.Struct(">BI")
# By the first byte of a value of fixed length: that length, and the number of values in a short list or dictionary.
_FIXED = (
    dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), (1, 0))
    | {0xA0 + n: (1 + n, 0) for n in range(32)}
    | {0xCC + n: (1 + (1 << n), 0) for n in range(4)}
    | {0xD0 + n: (1 + (1 << n), 0) for n in range(4)}
    | {0xD4 + n: (2 + (1 << n), 0) for n in range(5)}
    | {0xCA: (5, 0), 0xCB: (9, 0)}
    | {0x90 + n: (1, n) for n in range(16)}
    | {0x80 + n: (1, 2 * n) for n in range(16)}
)
# For the others: bytes of the count, additional bytes of the content, and values per counted item.
_COUNTED = {
    0xC4: (1, 0, 0), 0xC5: (2, 0, 0), 0xC6: (4, 0, 0), 0xD9: (1, 0, 0), 0xDA: (2, 0, 0), 0xDB: (4, 0, 0),
    0xC7: (1, 1, 0), 0xC8: (2, 1, 0), 0xC9: (4, 1, 0), 0xDC: (2, 0, 1), 0xDD: (4, 0, 1),
    0xDE: (2, 0, 2), 0xDF: (4, 0, 2),
}  # fmt: skip
_LISTS = frozenset(bytes([first]) for first in (*range(0x90, 0xA0), 0xDC, 0xDD))


class NotAFragment(Exception):
    """The value has buffers, or is too long or too deep: encode the whole state instead."""


def encode_fragment(value: object) -> bytes:
    """Return the bytes of `value` in a tree, at most three levels below its root.

    Raises NotAFragment if they do not fit there. Unregistered classes are saved by name.
    """
    if type(value) is str and len(value) < _SHORT_TEXT:  # as the codec writes it, in a fifth of the time
        try:
            return ormsgpack.packb(value)
        except ormsgpack.MsgpackEncodeError:
            pass  # no text: the codec knows what to do
    encoded = encode([[[value]]], out_of_band_bytes=MAX_FRAGMENT_BYTES, by_name=True)
    is_inside = encoded.tree.startswith(_ONE_ITEM * _LEVELS)  # a tree of more than PART_DEPTH levels begins differently
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
    """Return whether these are the bytes of a dictionary with only text keys."""
    return fragment[:1] in _DICTS


def text_bytes(text: str | bytes) -> bytes:
    """Return the bytes of a text or byte string in a fragment."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def open_fields(fragment: bytes, at: int = 0) -> tuple[int, int]:
    """Return the number of fields of the dictionary at `at`, and where the first name begins.

    Names and values alternate. Raises NotAFragment for any other value, including a dictionary with other keys than
    text.
    """
    if not is_plain_dict(fragment[at : at + 1]):
        raise NotAFragment
    at, count = _head(fragment, at)
    return count // 2, at


def items_at(fragment: bytes, at: int = 0) -> tuple[list[bytes] | None, int]:
    """Return the item fragments of the list at `at`, and where it ends; (None, at) for any other value."""
    if fragment[at : at + 1] not in _LISTS:
        return None, at
    at, count = _head(fragment, at)
    items: list[bytes] = []
    for _ in range(count):
        item, at = value_at(fragment, at)
        items.append(item)
    return items, at


def value_at(fragment: bytes, at: int) -> tuple[bytes, int]:
    """Return the fragment that begins at `at`, and where it ends."""
    start, left = at, 1
    while left:
        at, more = _head(fragment, at)
        left += more - 1
    if at > len(fragment):
        raise NotAFragment
    return fragment[start:at], at


def _head(data: bytes, at: int) -> tuple[int, int]:
    """Return where the content of the value at `at` begins, and how many values it has; or where it ends, and 0."""
    first = data[at] if at < len(data) else -1
    if (fixed := _FIXED.get(first)) is not None:
        return at + fixed[0], fixed[1]
    if (counted := _COUNTED.get(first)) is None:
        raise NotAFragment
    width, more, values = counted
    at += 1 + width
    count = int.from_bytes(data[at - width : at], "big")
    return (at, values * count) if values else (at + more + count, 0)
