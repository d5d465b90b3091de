"""Text for people: made harmless, with sizes, ages, and widths as a terminal counts them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import TypedDict

import click

# Every start imports this module. So whatever --help does not need is imported or compiled on first use.

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
    """Return `text` in one of our looks; `click.echo` removes the colours if there is no terminal."""
    return click.style(text, **_LOOKS[look]) if look and text else text


def safe(text: str) -> str:
    """Return `text` as one line, with everything a terminal could act on escaped.

    Names, metadata and states may come from anyone; everything printed from them passes through here.
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
    """Return the columns that `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_cell(character) for character in text)


def _cell(character: str) -> int:
    import unicodedata

    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clip(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, with an ellipsis if it is cut."""
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
    """Yield `text` in lines of at most `width` columns, broken at spaces if possible."""
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
    """Yield a label and a harmless text in lines of at most `width` columns; later lines are indented to the text."""
    indent = width_of(label) + 1
    first, *more = (width and [*pieces(safe(text), width - indent)]) or [safe(text)]
    yield f"{style(label, look)} {first}"
    yield from (" " * indent + line for line in more)


def print_labelled(label: str, look: str, text: str) -> None:
    for line in labelled(label, look, text, terminal_width()):
        click.echo(line)


def size(count: int) -> str:
    """Format a number of bytes: 999 B, 1.5 KiB, 12 GiB."""
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
    """Format how long ago a moment was; a date if more than two months."""
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
    """Return the columns of the terminal on stdout; None if there is none, so that lines may have any length."""
    return columns() if sys.stdout.isatty() else None


def columns() -> int:
    """Return $COLUMNS, or the terminal's width, or 80, without importing shutil."""
    text = os.environ.get("COLUMNS", "")
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not count:
        try:
            count = os.get_terminal_size(1).columns
        except OSError:
            count = 80
    return max(40, count or 80)
