"""Filters by metadata: what they may ask, and the same answers as in SQL for an index that cannot ask its database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kedge.errors import Validation


def parse_filter(metadata: Mapping[str, object]) -> Iterator[tuple[list[str], object]]:
    """(names on the path, value) of {"a.b": value}."""
    for path, value in metadata.items():
        names = path.split(".")
        if not all(names):
            raise Validation(f"{path!r} is not a metadata path", hint='use names joined by dots, such as "model.name"')
        if value is not None and not isinstance(value, str | int | float):
            raise Validation(
                f"metadata can't be filtered by a {type(value).__name__}", hint="use text, numbers, booleans or None"
            )
        yield names, value


def matches(metadata: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Whether each path leads to a value of the same type, numbers being one type, that is equal."""
    return all(_is_at(metadata, path.split("."), value) for path, value in wanted.items())


def _is_at(found: object, path: list[str], wanted: object) -> bool:
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    if wanted is None or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, bool) or isinstance(found, str) != isinstance(wanted, str):
        return False
    return found == wanted
