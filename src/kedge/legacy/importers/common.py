"""What all importers share: drafts of checkpoints, findings, names, times, and bounded JSON.

An importer is a generator of drafts and findings. Planning consumes it and counts; importing consumes it and writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

import ormsgpack

from kedge.errors import InvalidName
from kedge.model import MAX_STEP_CHARACTERS, CheckpointLevel, CheckpointStatus, parse_name

Document = dict[str, Any]
Progress = Callable[[int, int], None]  # (done, total)

MAX_JSON_BYTES = 256 << 20
MAX_JSON_VALUES = 4_000_000  # so that a file of nothing but brackets cannot fill the memory
MAX_TEXT_CHARACTERS = 500  # of what an old file may put into metadata and reports
SALVAGED = ":salvaged"  # ends the name of a job beside the real one: what is in it is no state to resume from
SAVED_HERE = "saved_here"  # in the legacy metadata of what programs saved through the old names: no import adds to it
MOST_PATHS = 100  # placeholders named for one checkpoint

_UNSAFE = re.compile(r"[^A-Za-z0-9._:@+-]+")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},:]|[^][{},:"\s]+|"', re.DOTALL)
_PLACEHOLDER = re.compile(r"<[^<>]{1,200}? object(?: at 0x[0-9a-fA-F]+)?>")


class Verdict(StrEnum):
    """What a report says of something that did not come over as it was."""

    SKIPPED = "skipped"
    LOSSY = "lossy"
    CORRUPTED = "corrupted"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what, where, why; `paths` are places inside the state, or what was salvaged."""

    verdict: Verdict
    source: str
    reason: str
    paths: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
    """A checkpoint as it will be saved. `key` says when two drafts are the same one: importing again adds nothing."""

    form: str
    source: str
    job: str
    step: str
    state: object
    key: str
    id: str | None = None
    created_us: int | None = None
    level: CheckpointLevel = CheckpointLevel.STEP
    parent: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)
    schema_version: str = "1.0"
    found_by: str | None = None  # an idempotency key by which others look for it; its job is then shared with them
    status: CheckpointStatus = CheckpointStatus.CREATED


@dataclass(slots=True)
class Thread:
    """A checkpoint of a LangGraph thread, with the writes of the tasks that ran from it.

    `writes` maps a task to its path and its [(channel, value)].
    """

    form: str
    source: str
    thread: str
    namespace: str
    checkpoint: Document
    metadata: Document
    parent: str | None
    writes: dict[str, tuple[str, list[tuple[str, Any]]]] = field(default_factory=dict)


Drafts = Iterator[Draft | Thread | Finding]


@dataclass(frozen=True, slots=True)
class Options:
    """How to import. `files` is where a database's file paths are looked up; nothing outside it is read."""

    form: str = "auto"
    job_prefix: str = ""
    allow: tuple[str, ...] = ()
    files: str = "."
    is_watching: bool = False  # the old system is at work: a file that is cut may just be written


@dataclass(frozen=True, slots=True)
class Fragment:
    """What the beginning of a cut document still says. `open_at`: the path of the innermost value that the cut is in;
    that value and those around it are incomplete, all others are whole.
    """

    value: Any = None
    open_at: tuple[str | int, ...] = ()


class Unreadable(Exception):
    """A file that cannot be used; the message says why."""

    def __init__(self, reason: str, salvaged: Fragment | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.salvaged = salvaged or Fragment()


# Names


def name_of(text: object, *, most: int = 128, prefix: str = "") -> str:
    """A job name or ID for any text: the text itself where the grammar allows it, else a slug and a hash."""
    plain = text if isinstance(text, str) else str(text)
    whole = prefix + plain
    try:
        if len(whole) <= most:
            return parse_name("name", whole)
    except InvalidName:
        pass
    slug = _UNSAFE.sub("-", plain[:most]).strip("-._:@+") or "x"
    return f"{(prefix + slug)[: most - 14]}++{digest(plain)[:12]}"


def step_of(text: object, default: str = "step") -> str:
    """A step name for any text."""
    return clean(text, MAX_STEP_CHARACTERS) or default


def clean(text: object, most: int = MAX_TEXT_CHARACTERS) -> str:
    """Text that UTF-8 can hold, not longer than `most`."""
    shown = text if isinstance(text, str) else "" if text is None else str(text)
    return shown[:most].encode("utf-8", "backslashreplace").decode()[:most]


def legacy(form: str, **facts: object) -> dict[str, object]:
    """The metadata by which an imported checkpoint says what it was; long texts are clipped, the state has them."""
    return {"format": form, **{name: _plain(value) for name, value in facts.items() if value is not None}}


def _plain(value: object) -> object:
    if isinstance(value, bool | int) or value is None:
        return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)[:MAX_TEXT_CHARACTERS]
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:MOST_PATHS]]
    return clean(value)


def digest(content: bytes | str) -> str:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()


def digest_of_document(document: object) -> str:
    try:
        return digest(ormsgpack.packb(document, option=ormsgpack.OPT_SORT_KEYS))
    except TypeError:  # numbers of any size, halves of characters, keys that are no text
        return digest(json.dumps(document, sort_keys=True, separators=(",", ":"), default=repr))


# Times


def microseconds(value: object) -> int | None:
    """Microseconds since the epoch of an epoch number or ISO text; without a zone it is local time. None: no time."""
    try:
        if isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            at_us = round(value * 1_000_000)
        elif isinstance(value, datetime):
            at_us = round(value.timestamp() * 1_000_000)
        elif isinstance(value, str):
            at_us = round(datetime.fromisoformat(value.strip()).timestamp() * 1_000_000)
        else:
            return None
    except (ValueError, OverflowError, OSError):
        return None
    return at_us if 0 <= at_us < 253_402_300_800_000_000 else None  # year 1970 to 9999


# JSON


def parse_json(data: bytes) -> Any:
    """The document; Unreadable with what could be salvaged when it is cut off, too deep or too large."""
    if len(data) > MAX_JSON_BYTES:
        raise Unreadable(f"{len(data):,} bytes of JSON; at most {MAX_JSON_BYTES:,} are read")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_JSON_VALUES:
        raise Unreadable(f"about {values:,} JSON values; at most {MAX_JSON_VALUES:,} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 at byte {error.start}", salvage(data[: error.start].decode())) from None
    try:
        return json.loads(text)
    except RecursionError:
        raise Unreadable("nested too deep") from None
    except json.JSONDecodeError as error:
        if not text.strip():
            raise Unreadable("empty") from None
        raise Unreadable(f"JSON ends or breaks at character {error.pos:,} of {len(text):,}", salvage(text)) from None
    except ValueError as error:  # a number with thousands of digits
        raise Unreadable(f"not readable as JSON: {clean(error)}") from None


def salvage(text: str) -> Fragment:
    """The value that the beginning of a broken JSON text still spells: what is complete, with open ends closed.

    A member whose value is missing, or is cut, is left out.
    """
    try:
        return Fragment(json.loads(text))
    except json.JSONDecodeError as error:
        valid = text[: error.pos]
    except (ValueError, RecursionError):
        return Fragment()
    end, is_key = 0, False
    closers: list[str] = []  # up to `end`, the text and `closers` are a whole value
    places: list[str | int] = []  # of each open value: the member that was read last
    for token in _TOKEN.finditer(valid):
        sign = token[0]
        if sign == '"':
            break  # a text that is cut
        if sign in ("{", "["):
            closers.append("}" if sign == "{" else "]")
            places.append("" if sign == "{" else 0)
            is_key = sign == "{"
        elif sign in ("}", "]"):
            closers.pop()
            places.pop()
        elif sign in (",", ":"):
            is_key = sign == "," and closers[-1] == "}"
            if sign == "," and not is_key:
                places[-1] = int(places[-1]) + 1
            continue
        elif is_key:
            places[-1] = json.loads(sign)
            continue
        elif sign[0] != '"' and token.end() == len(valid):
            break  # 12 may have been 123
        end = token.end()
    try:
        return Fragment(json.loads(text[:end] + "".join(reversed(closers))), tuple(places[:-1]))
    except (ValueError, RecursionError):
        return Fragment()


def placeholders(value: object, path: str = "") -> Iterator[str]:
    """Paths of texts such as "<Dataset object>": all that an older system kept of a value it could not write."""
    if isinstance(value, str):
        if _PLACEHOLDER.fullmatch(value):
            yield path or "state"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from placeholders(item, f"{path}.{clean(key, 100)}" if path else clean(key, 100))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from placeholders(item, f"{path}[{number}]")


def small_json(value: object) -> object:
    """The value where it fits into metadata as it is, else None."""
    try:
        fits = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode()) <= 32 << 10
    except (TypeError, ValueError, RecursionError):
        return None
    return value if fits else None


def texts(value: object) -> list[str]:
    """The texts of a list; [] for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []
