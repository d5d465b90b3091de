"""Which checkpoints of a job are requested: parsed once, then passed to the index unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kedge.errors import Validation
from kedge.model import Checkpoint, CheckpointLevel, parse_limit, parse_tags

PATH_HINT = 'use names joined by dots, such as "model.name"'


def are_texts(values: object) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoints of a job that meet all these conditions, oldest first.

    `limit` chooses the newest of them, or with `after` the oldest above it.
    """

    level: CheckpointLevel | None = None
    tags: Mapping[str, Sequence[str]] = field(default_factory=dict)  # for each name the accepted values, at most 500
    metadata: Mapping[str, object] = field(default_factory=dict)  # JSON paths ("loss", "model.name") and their values
    limit: int | None = None
    before: int | None = None  # sequence numbers, both exclusive
    after: int | None = None
    is_intact: bool = False  # without those known to be damaged
    is_forward: bool = field(init=False, compare=False)  # whether `limit` counts from the oldest

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_forward", self.after is not None or self.limit is None)
        parse_limit(self.limit)
        for place in (self.before, self.after):
            if place is not None and type(place) is not int:
                raise Validation(
                    f"{place!r} is not a position in a history", hint="use a checkpoint ID or a sequence number"
                )
        if not isinstance(self.metadata, Mapping) or not are_texts(self.metadata):
            raise Validation(f"metadata={self.metadata!r}", hint='use paths and values: {"model.name": "small"}')
        for path, value in self.metadata.items():
            if not all(path.split(".")):
                raise Validation(f"{path!r} is not a metadata path", hint=PATH_HINT)
            if value is not None and not isinstance(value, str | int | float):
                raise Validation(
                    f"metadata can't be filtered by a {type(value).__name__}",
                    hint="use text, numbers, booleans or None",
                )

    def metadata_paths(self) -> Iterator[tuple[list[str], object]]:
        """Yield (names on the path, value) of each condition on metadata."""
        return ((path.split("."), value) for path, value in self.metadata.items())

    def matches(self, metadata: Mapping[str, object]) -> bool:
        """Return whether each path leads to an equal value of the same type; all numbers are one type."""
        return all(_is_at(metadata, names, value) for names, value in self.metadata_paths())


ALL = Selection()
NEWEST = Selection(limit=1)
NEWEST_INTACT = Selection(limit=1, is_intact=True)


def wanted_tags(tags: Mapping[str, str] | None) -> Mapping[str, Sequence[str]]:
    """Convert tags as users give them, with one value each, for a Selection."""
    return {name: (value,) for name, value in parse_tags(tags).items()}


def pages(
    read: Callable[[str, Selection], Sequence[Checkpoint]], job: str, size: int, wanted: Selection = ALL
) -> Iterator[Sequence[Checkpoint]]:
    """Yield pages of at most `size`, oldest first, including what is saved meanwhile."""
    while page := read(job, replace(wanted, after=wanted.after or 0, limit=size)):
        yield page
        wanted = replace(wanted, after=page[-1].seq)


def _is_at(value: object, path: Sequence[str], wanted: object) -> bool:
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    if wanted is None or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, bool) or isinstance(value, str) != isinstance(wanted, str):
        return False
    return value == wanted
