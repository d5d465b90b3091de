"""`k=v` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """`name=value` words as a mapping; a name given twice is refused, because one of both would be lost."""
    from kedge.errors import Validation

    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Validation(f"{option} {text!r} is not name=value", hint=f"write {option} name=value")
        if name in pairs:
            raise Validation(f"{option} {name} is given twice", hint="give each name once")
        pairs[name] = value
    return pairs


def parse_json_pairs(option: str, texts: Iterable[str]) -> dict[str, object]:
    """`name=json` words; a value that does not look like JSON is the text it is, so that quotes may be left out."""
    return {name: parse_json(f"{option} {name}", text) for name, text in parse_pairs(option, texts).items()}


def parse_json(what: str, text: str) -> object:
    from kedge.errors import Validation

    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if text[:1] in '{["':
            raise Validation(f"{what} is not JSON: {error}", hint="quote it for the shell: '[1, 2]'") from None
        return text
