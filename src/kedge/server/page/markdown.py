"""The words of a message as their writer meant them: fenced code, `code`, **bold**, headings. All else is text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_FENCE = re.compile(r"\s*```[^`]*")  # what follows in the line names a language, if the block begins here
_MARKED = re.compile(r"`([^`\n]+)`|\*\*(?=\S)([^*\n]+)(?<=\S)\*\*")
_HEADING = re.compile(r"#{1,6} +(\S.*)")


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    look: Literal["", "code", "bold"] = ""


@dataclass(frozen=True, slots=True)
class Block:
    spans: Sequence[Span]
    is_code: bool = False


def blocks(text: str) -> list[Block]:
    """Prose and code in turn; a fence that is not closed reaches to the end, as in a message that is cut."""
    read: list[Block] = []
    lines: list[str] = []
    is_code = False
    for line in [*text.split("\n"), "```"]:
        if _FENCE.fullmatch(line) is None or (is_code and line.strip(" \t\r`")):
            lines.append(line)
            continue
        content = "\n".join(lines).strip("\n")
        if is_code:
            read.append(Block([Span(content)], is_code=True))
        elif content:
            read.append(Block(_spans(content)))
        lines, is_code = [], not is_code
    return read


def _spans(prose: str) -> list[Span]:
    spans: list[Span] = []
    for number, line in enumerate(prose.split("\n")):
        heading = _HEADING.fullmatch(line)
        spans += [Span("\n")] if number else []
        spans += [Span(heading[1], "bold")] if heading else _marked(line)
    return spans


def _marked(line: str) -> Iterator[Span]:
    at = 0
    for mark in _MARKED.finditer(line):
        if mark.start() > at:
            yield Span(line[at : mark.start()])
        yield Span(mark[1], "code") if mark[1] else Span(mark[2], "bold")
        at = mark.end()
    if at < len(line):
        yield Span(line[at:])
