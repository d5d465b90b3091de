"""JSON on stdout: whole documents, and documents whose lists are written piece by piece."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import BinaryIO

from kedge.terminal.text import replace_unsafe


def emit(document: object, *, indent: int | None = 2) -> None:
    """One JSON document on stdout, harmless on a terminal."""
    sys.stdout.flush()
    write_all(sys.stdout.buffer, to_json(document, indent=indent).encode() + b"\n")
    sys.stdout.buffer.flush()


def emit_lists(head: Mapping[str, object], lists: Mapping[str, Iterable[object]]) -> None:
    """`emit` of a document whose last members are lists, each written while it is read."""
    sys.stdout.flush()
    for piece in pieces_of(head, lists, to_json):
        write_all(sys.stdout.buffer, piece.encode())
    sys.stdout.buffer.flush()


def pieces_of(
    head: Mapping[str, object], lists: Mapping[str, Iterable[object]], to_text: Callable[[object], str]
) -> Iterator[str]:
    """The text of a document whose last members are lists, piece by piece; `to_text` indents by two."""
    yield to_text(head).removesuffix("\n}")
    for name, items in lists.items():
        yield f',\n  "{name}": ['
        comma, end = "\n", "]"
        for item in items:
            yield comma + textwrap.indent(to_text(item), "    ")
            comma, end = ",\n", "\n  ]"
        yield end
    yield "\n}\n"


def write_all(out: BinaryIO, data: bytes | memoryview) -> None:
    """Write every byte. Where Python runs unbuffered, stdout is a raw file, which may take only a part at once."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[out.write(rest[: 16 << 20]) :]


def to_json(document: object, *, indent: int | None = 2) -> str:
    is_utf8 = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    text = json.dumps(document, indent=indent, ensure_ascii=not is_utf8, allow_nan=False)
    return replace_unsafe(_json_escape, text) if is_utf8 or "\x7f" in text else text


def _json_escape(unsafe: re.Match[str]) -> str:
    """A character as JSON writes it; line breaks are those json.dumps itself puts between the values."""
    if unsafe[0] == "\n":
        return "\n"
    units = unsafe[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))
