"""Text for people: what users stored made harmless, sizes, ages, and widths as a terminal counts them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import TypedDict

import click

# This module is part of every start: what is not needed for --help is imported or compiled on first use.

# What a terminal may act on or hide: controls (C0, DEL, C1), formatting and bidi marks, separators, surrogates.
_UNSAFE = (
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\uffff"
    "\U000e0000-\U000e0fff]"
)


class _Look(TypedDict, total=False):
    fg: str
    bold: bool
    dim: bool


_LOOKS: Mapping[str, _Look] = {
    "head": {"bold": True},
    "id": {"fg": "cyan"},
    "name": {"bold": True},
    "dim": {"dim": True},
    "good": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "bad": {"fg": "red", "bold": True},
    "value": {"fg": "green"},
    "type": {"fg": "magenta"},
}


def style(text: str, look: str) -> str:
    """`text` in one of our few looks; `click.echo` takes the colours out again where no terminal is."""
    return click.style(text, **_LOOKS[look]) if look and text else text


def safe(text: str) -> str:
    """`text` with everything a terminal could act on written out: one line, no control characters.

    Names, metadata and states come from anyone; whatever of them is printed goes through here.
    """
    return replace_unsafe(_escape, text)


def replace_unsafe(replacement: Callable[[re.Match[str]], str], text: str) -> str:
    return _unsafe().sub(replacement, text)


@cache
def _unsafe() -> re.Pattern[str]:
    return re.compile(_UNSAFE)


def _escape(unsafe: re.Match[str]) -> str:
    code = ord(unsafe[0])
    return _NAMED.get(unsafe[0]) or (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def width_of(text: str) -> int:
    """Columns `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_cell(character) for character in text)


def _cell(character: str) -> int:
    import unicodedata

    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clip(text: str, width: int) -> str:
    """`text` in at most `width` columns, an ellipsis for what is left out."""
    if width_of(text) <= width:
        return text
    shown: list[str] = []
    room = width - 1
    for character in text:
        room -= _cell(character)
        if room < 0:
            break
        shown.append(character)
    return "".join(shown).rstrip() + "…"


def pad(text: str, width: int, align: str = "<") -> str:
    fill = " " * max(0, width - width_of(text))
    return fill + text if align == ">" else text + fill


def pieces(text: str, width: int) -> Iterator[str]:
    """`text` in lines of at most `width` columns, broken at spaces where there are any."""
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if width_of(joined) <= width:
            line = joined
            continue
        if line:
            yield line
        while width_of(word) > width:
            cut = len(clip(word, width + 1)) - 1 or 1
            yield word[:cut]
            word = word[cut:]
        line = word
    if line:
        yield line


def labelled(label: str, look: str, text: str, width: int | None) -> Iterator[str]:
    """A label and a text made harmless, in lines of at most `width` columns that go on below the text's beginning."""
    indent = width_of(label) + 1
    first, *more = (width and [*pieces(safe(text), width - indent)]) or [safe(text)]
    yield f"{style(label, look)} {first}"
    yield from (" " * indent + line for line in more)


def print_labelled(label: str, look: str, text: str) -> None:
    for line in labelled(label, look, text, terminal_width()):
        click.echo(line)


def size(count: int) -> str:
    """A number of bytes: 999 B, 1.5 KiB, 12 GiB."""
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        amount /= 1024
        if amount < 9.95:
            return f"{amount:.1f} {unit}"
        if amount < 1023.5:
            return f"{amount:.0f} {unit}"
    return f"{amount:,.0f} PiB"


def count_of(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def age(moment: datetime, now: datetime | None = None) -> str:
    """How long ago; a date for what is older than two months."""
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if seconds < -1:
        return "in the future"
    for limit, unit_s, unit in ((1, 1, ""), (60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // unit_s)} {unit} ago" if unit else "now"
    if seconds < 60 * 86400:
        return f"{int(seconds // 86400)} days ago"
    return f"{moment:%Y-%m-%d}"


def exactly(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None where there is none, and lines may be as long as they are."""
    return columns() if sys.stdout.isatty() else None


def columns() -> int:
    """$COLUMNS, else what the terminal says, else 80; shutil's function without shutil's imports."""
    text = os.environ.get("COLUMNS", "")
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not count:
        try:
            count = os.get_terminal_size(1).columns
        except OSError:
            count = 80
    return max(40, count or 80)
