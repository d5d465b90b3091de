"""The wire format of protocol buffers, without a schema: enough to read what other programs wrote, and to write some.

A message is a sequence of fields: a number, and a whole number, eight or four bytes, or bytes that may be a message
themselves. `Message` looks fields up by number. Everything is bounded by the bytes given: a length that leads beyond
them is an error, nothing is allocated on the word of a length alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

MAX_FIELDS = 1_000_000

Value = int | memoryview
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5


class NotAMessage(ValueError):
    """The bytes are no message. Whoever reads a file says which."""


def varint(data: memoryview, position: int) -> tuple[int, int]:
    """A whole number of at most 64 bits at `position`, and where it ends."""
    value = shift = 0
    while shift < 70:
        try:
            byte = data[position]
        except IndexError:
            raise NotAMessage("a number is cut off") from None
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
    raise NotAMessage("a number of more than ten bytes")


def fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field, in order."""
    position, end = 0, len(data)
    while position < end:
        key = data[position]  # most are of one byte, and there are many
        if key < 0x80:
            position += 1
        else:
            key, position = varint(data, position)
        number, kind = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise NotAMessage(f"a field numbered {number}")
        if kind == VARINT:
            value, position = varint(data, position)
            yield number, value
            continue
        length = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(kind)
        if kind == BYTES:
            length, position = varint(data, position)
        if length is None:
            raise NotAMessage(f"a field of kind {kind}")
        if length > end - position:
            raise NotAMessage("a field is cut off")
        piece = data[position : position + length]
        position += length
        yield number, piece if kind == BYTES else int.from_bytes(piece, "little")


class Message:
    """The fields of a message by number. Asking for one as something that it is not is NotAMessage."""

    __slots__ = ("_values",)

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._values: dict[int, list[Value]] = {}
        for count, (number, value) in enumerate(fields(memoryview(data))):
            if count >= MAX_FIELDS:
                raise NotAMessage("too many fields")
            if number in self._values:
                self._values[number].append(value)
            else:
                self._values[number] = [value]

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def count(self, field: int) -> int:
        """How often it is there."""
        return len(self._values.get(field, ()))

    def number(self, field: int, default: int = 0) -> int:
        value = self._values.get(field, [default])[-1]
        if not isinstance(value, int):
            raise NotAMessage(f"field {field} is no number")
        return value

    def numbers(self, field: int) -> list[int]:
        """A repeated number, packed or not."""
        numbers: list[int] = []
        for value in self._values.get(field, ()):
            if isinstance(value, int):
                numbers.append(value)
                continue
            position = 0
            while position < len(value):
                number, position = varint(value, position)
                numbers.append(number)
        return numbers

    def bytes(self, field: int) -> bytes:
        value = self._values.get(field, [memoryview(b"")])[-1]
        if isinstance(value, int):
            raise NotAMessage(f"field {field} is a number")
        return bytes(value)

    def text(self, field: int) -> str:
        return self.bytes(field).decode("utf-8", "backslashreplace")

    def message(self, field: int) -> Message:
        """The message in a field; an empty one if it is not there."""
        return Message(self.bytes(field))

    def messages(self, field: int) -> Iterator[Message]:
        for value in self._values.get(field, ()):
            if isinstance(value, int):
                raise NotAMessage(f"field {field} is a number")
            yield Message(value)


def encode(items: Iterable[tuple[int, int | bytes | str]]) -> bytes:
    """A message of these fields: whole numbers, text, bytes (also of messages)."""
    parts = []
    for number, value in items:
        if isinstance(value, int):
            parts.append(_varint_bytes(number << 3 | VARINT) + _varint_bytes(value & (1 << 64) - 1))
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(_varint_bytes(number << 3 | BYTES) + _varint_bytes(len(data)) + data)
    return b"".join(parts)


def _varint_bytes(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def u32(data: memoryview, position: int) -> int:
    """A little-endian word; NotAMessage when it is cut off."""
    try:
        word: int = struct.unpack_from("<I", data, position)[0]
    except struct.error:
        raise NotAMessage("cut off") from None
    return word
