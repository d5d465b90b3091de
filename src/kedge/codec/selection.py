"""Loading a part (`only`), and loading into memory the caller already has (`into`)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kedge.chunks import DeviceMemory
from kedge.errors import NotFound, Validation

from .decoder import Unpacker, name_of
from .encoder import key_segment
from .kinds import PART_DEPTH, Leaf, Problem, Raw, Shape, Tag, key_name, kind_of, layouts
from .plain import distinct
from .refusals import qualified

_DROPPED = object()

_FIT = "give a target of that form, or load without into="


class Branches:
    """The branches of a raw tree whose '/'-joined paths match some glob patterns."""

    def __init__(self, patterns: Sequence[str], unpacker: Unpacker) -> None:
        if isinstance(patterns, str):
            patterns = [patterns]
        self._regexes = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in patterns}
        self._beginnings = {pattern: re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in patterns}
        self._matched: set[str] = set()
        self._unpacker = unpacker

    def prune(self, raw: Raw) -> Raw:
        """Return `raw` without unmatched branches. Raises NotFound for a pattern without a match."""
        pruned = self._prune(raw, "", 0)
        # A pattern below a branch that another pattern selected completely has not been tried yet.
        for pattern in self._regexes.keys() - self._matched:
            if not self._any_below(raw, "", 0, [pattern]):
                raise NotFound(
                    f"nothing in the state matches {pattern!r}",
                    hint="see the paths with kedge show; patterns are like model/layer3/*",
                )
        return pruned

    def _matches(self, path: str, patterns: Iterable[str]) -> bool:
        matching = {pattern for pattern in patterns if self._regexes[pattern].match(path)}
        self._matched |= matching
        return bool(matching)

    def _may_match_below(self, path: str, patterns: Iterable[str]) -> bool:
        """Return whether a longer path can match; otherwise a branch need not be walked, however many items it has."""
        below = f"{path}/"
        return any(
            (start := self._beginnings[pattern]).startswith(below) or below.startswith(start) for pattern in patterns
        )

    def _prune(self, raw: Raw, path: str, depth: int) -> Raw:
        if self._matches(path, self._regexes):
            return raw
        if path and not self._may_match_below(path, self._regexes):
            return _DROPPED
        if type(raw) is dict:
            pruned = {key: self._prune(item, _join(path, key), depth + 1) for key, item in raw.items()}
            return {key: item for key, item in pruned.items() if item is not _DROPPED} or _DROPPED
        if type(raw) is tuple and raw[0] in layouts and layouts[raw[0]][0] is Shape.PAIRS:
            return self._prune_pairs(raw, path, depth)
        return raw if self._any_below(raw, path, depth, self._regexes) else _DROPPED

    def _prune_pairs(self, raw: tuple[int, Any], path: str, depth: int) -> Raw:
        head, children = self._unpacker.open(raw, depth)
        pairs: list[Raw] = []
        for key, child in zip(children[::2], children[1::2], strict=True):
            name = key_name(self._unpacker.lift(key, depth + 1))
            item = self._prune(child, _join(path, name), depth + 1)
            if item is not _DROPPED:
                pairs += key, item
        return (raw[0], [*head, *pairs]) if pairs else _DROPPED

    def _any_below(self, raw: Raw, path: str, depth: int, patterns: Iterable[str]) -> bool:
        if path and self._matches(path, patterns):
            return True
        if type(raw) not in (dict, list, tuple) or (path and not self._may_match_below(path, patterns)):
            return False
        children = self._unpacker.children_of(raw, depth)
        return any(self._any_below(child, _join(path, name), depth + 1, patterns) for name, child in children)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


class Placement:
    """Lifts a tree into the arrays of a state of the same form, or of a part of it."""

    def __init__(self, unpacker: Unpacker, targets: dict[int, memoryview | DeviceMemory] | None = None) -> None:
        """Prepare to lift. With `targets`, only collect the memory for each buffer, without fetching or writing."""
        self._unpacker = unpacker
        self._targets = targets

    def lift(self, raw: Raw, own: Any, depth: int) -> object:
        kind = kind_of(own)
        if isinstance(kind, Leaf) and kind.target is not None:
            return self._place(raw, own, kind, depth)
        if not _has_target(own):
            return self._unpacker.lift(raw, depth)
        if type(raw) is dict and isinstance(own, dict):
            return self._lift_dict(raw, own, depth)
        if type(raw) is list and isinstance(own, list):
            return self._lift_items(raw, own, depth)
        if type(raw) is tuple and raw[0] in layouts:
            shape = layouts[raw[0]][0]
            if shape is Shape.ITEMS and isinstance(own, list | tuple):
                head, children = self._unpacker.open(raw, depth)
                return self._unpacker.build(raw[0], head, self._lift_items(children, own, depth), depth)
            if (shape is Shape.PAIRS and isinstance(own, dict)) or raw[0] == Tag.FIELDS:
                return self._lift_pairs(raw, own, depth)
        raise Problem(f"the target is a {qualified(type(own))}, what was saved is not", _FIT, Validation)

    def _place(self, raw: Raw, own: Any, kind: Leaf, depth: int) -> Any:
        if type(raw) is not tuple or raw[0] != kind.tag:
            saved = name_of(raw[0]) if type(raw) is tuple else type(raw).__name__
            raise Problem(f"the target is a {qualified(type(own))}, what was saved is a {saved}", _FIT, Validation)
        placement = self._unpacker.call(kind.tag, kind.target, raw[1], depth, own)
        if placement is None:
            if self._targets is None and kind.fill is not None:
                kind.fill(own, self._unpacker.lift(raw, depth))
            return own
        reference, view = placement
        if self._targets is not None:
            if type(reference) is int:
                self._targets[reference] = view
            return None
        if not isinstance(view, memoryview):
            if type(reference) is bytes:
                view.take(self._unpacker.bytes_of(reference, view.size_bytes))  # a copy: torch warns of read-only ones
            elif not isinstance(self._unpacker.ask(reference), DeviceMemory):  # otherwise it is already there
                view.take(self._unpacker.fetch(reference, view.size_bytes))
            return own
        source = self._unpacker.bytes_of(reference, view.nbytes)
        if not _is_same_memory(source, view):
            view[:] = source.cast("B") if source.format != "B" or source.ndim != 1 else source
        return own

    def _lift_dict(self, raw: dict[str, Raw], own: dict[Any, object], depth: int) -> object:
        _check_keys(raw, own)
        for key, item in raw.items():
            try:
                raw[key] = self.lift(item, own.get(key), depth + 1)
            except Problem as problem:
                problem.under(key_segment(key))
                raise
        return raw

    def _lift_items(self, raw: list[Raw], own: Sequence[Any], depth: int) -> list[object]:
        if len(raw) != len(own):
            raise Problem(f"the target has {len(own)} items, what was saved has {len(raw)}", "", Validation)
        for index, item in enumerate(raw):
            try:
                raw[index] = self.lift(item, own[index], depth + 1)
            except Problem as problem:
                problem.under(f"[{index}]")
                raise
        return raw

    def _lift_pairs(self, raw: tuple[int, Any], own: Any, depth: int) -> object:
        is_attributes = layouts[raw[0]][0] is Shape.FIELDS
        head, children = self._unpacker.open(raw, depth)
        keys = [self._unpacker.lift_key(key, depth, is_attributes) for key in children[::2]]
        if not is_attributes:
            _check_keys(distinct([(key, None) for key in keys]), own)
        pairs = []
        for key, child in zip(keys, children[1::2], strict=True):
            try:
                mine = getattr(own, key, None) if is_attributes else own.get(key)
                pairs.append((key, self.lift(child, mine, depth + 1)))
            except Problem as problem:
                problem.under(f".{key}" if is_attributes else key_segment(key))
                raise
        return self._unpacker.build(raw[0], head, pairs, depth)


def _check_keys(saved: Any, own: dict[object, object]) -> None:
    for key, item in own.items():
        if key not in saved and _has_target(item):
            raise Problem("the target has it, what was saved does not", "", Validation).under(key_segment(key))


def _has_target(own: object, depth: int = 0) -> bool:
    """Return whether the caller's value has memory to load into."""
    kind = kind_of(own)
    if isinstance(kind, Leaf):
        return kind.target is not None
    if depth > PART_DEPTH or (kind is None and not isinstance(own, dict | list | tuple)):
        return False
    children: Iterable[Any]
    if isinstance(own, dict):
        children = own.values()
    elif isinstance(own, list | tuple):
        children = own
    elif kind is not None and kind.tag == Tag.FIELDS:
        children = (child for _, child in kind.take(own)[1])
    else:
        return False
    return any(_has_target(child, depth + 1) for child in children)


def _is_same_memory(a: memoryview, b: memoryview) -> bool:
    if a.readonly or b.readonly or a.nbytes != b.nbytes or not a.nbytes:
        return False
    from kedge.blobs.libc import address_of  # start time

    return address_of(a) == address_of(b)
