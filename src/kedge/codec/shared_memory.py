"""Memory that several values of a state share, such as tied weights: stored once, and shared again when loaded."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

_ALIGN_BYTES = 16  # the largest element: a group begins where every dtype may


@dataclass(slots=True)
class Group:
    """A range of bytes in which values overlap, and the number of its buffer once it has one."""

    start: int
    stop: int
    ordinal: int | None = None


class Shares:
    """Where the values of a state are in memory. The first pass over it finds the groups; a second one can use them.

    Values in the same memory that do not overlap need no group: a write to one does not change the other.
    """

    def __init__(self, groups: Mapping[Hashable, list[Group]] | None = None, owners: Iterable[object] = ()) -> None:
        self._groups = groups
        self._ranges: dict[Hashable, list[tuple[int, int]]] = {}
        # Alive until both passes have ended, or a temporary value could get the address of an earlier one.
        self._owners = list(owners)

    def see(self, place: Hashable, start: int, stop: int, owner: object) -> Group | None:
        """Note a value at bytes [start, stop) of `place`, which lives as long as `owner`. Return its group, if any."""
        if self._groups is None:
            self._owners.append(owner)
            self._ranges.setdefault(place, []).append((start, stop))
            return None
        groups = (group for group in self._groups.get(place, ()) if group.start <= start and stop <= group.stop)
        return next(groups, None)

    def found(self) -> Shares | None:
        """Return the groups for a second pass; None if nothing is shared."""
        groups = {place: _overlapping(ranges) for place, ranges in self._ranges.items() if len(ranges) > 1}
        groups = {place: members for place, members in groups.items() if members}
        return Shares(groups, self._owners) if groups else None


def _overlapping(ranges: list[tuple[int, int]]) -> list[Group]:
    groups: list[Group] = []
    counts: list[int] = []
    for start, stop in sorted(ranges):
        if groups and start < groups[-1].stop:
            groups[-1].stop = max(groups[-1].stop, stop)
            counts[-1] += 1
        else:
            groups.append(Group(start - start % _ALIGN_BYTES, stop))
            counts.append(1)
    return [group for group, count in zip(groups, counts, strict=True) if count > 1]
