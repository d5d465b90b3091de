"""For a replay without an answer: the most similar recorded request, and the differences."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kedge.errors import ReplayMiss

from .cache import Cache
from .keys import Request

COMPARED = 200  # newest answers that are compared
SHOWN = 5
_SHOWN_CHARACTERS = 60


def describe_nearest(cache: Cache, request: Request) -> ReplayMiss:
    """Return the error for a request that was never recorded."""
    asked = dict(_leaves(request.document()))
    best: tuple[float, list[str], str] | None = None
    for entry, document, _ in cache.load(cache.newest(COMPARED)):
        recorded = dict(_leaves(document))
        names = asked.keys() | recorded.keys()
        different = sorted(name for name in names if asked.get(name, ...) != recorded.get(name, ...))
        likeness = 1 - len(different) / max(len(names), 1)
        if best is None or likeness > best[0]:
            lines = [_difference(name, recorded.get(name, ...), asked.get(name, ...)) for name in different[:SHOWN]]
            if len(different) > SHOWN:
                lines.append(f"and {len(different) - SHOWN} more")
            best = likeness, lines, entry.id
    what = f"no answer of {request.model} is recorded for this request"
    if best is None:
        return ReplayMiss(what, hint='nothing is recorded in this store yet: run once with mode="record"')
    text = "; ".join(best[1]) or "nothing but how it is written"
    return ReplayMiss(
        f"{what}; the nearest one is {best[2]}, which differs: {text}", hint='run once with mode="record"'
    )


def _difference(name: str, recorded: object, asked: object) -> str:
    if recorded is ...:
        return f"{name} {_clipped(asked)} is new"
    if asked is ...:
        return f"{name} {_clipped(recorded)} is gone"
    return f"{name} was {_clipped(recorded)}, is {_clipped(asked)}"


def _clipped(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield values by path: body.messages[0].content."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value
