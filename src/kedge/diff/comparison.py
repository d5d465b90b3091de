"""The comparison: a walk over both states."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.json_view import LONG_INT_BITS, written
from kedge.store.streams import SMALL_BUFFER_BYTES

from .arrays import Tally
from .changes import ArrayDelta, Change, ChangeKind, Diff
from .states import READ_BYTES, Content, StoredState
from .tables import differing_columns, named_columns
from .texts import is_long, text_delta
from .values import brief, shape_text, summary_of, type_name, weigh

_MATCHED_ITEMS = 1000  # longer lists are compared by position after their common beginning and end


class Comparison:
    def __init__(self, old: StoredState, new: StoredState, max_changes: int) -> None:
        self._old = old
        self._new = new
        self._max_changes = max_changes
        self._changes: list[Change] = []
        self._counts = dict.fromkeys(ChangeKind, 0)
        self._bytes_changed = 0
        self._shared_bytes = 0

    def result(self, old_id: str, new_id: str) -> Diff:
        counts = self._counts
        return Diff(
            tuple(self._changes),
            sum(counts.values()) - len(self._changes),
            counts[ChangeKind.ADDED],
            counts[ChangeKind.REMOVED],
            counts[ChangeKind.CHANGED] + counts[ChangeKind.TYPE_CHANGED],
            self._bytes_changed,
            self._shared_bytes,
            old_id,
            new_id,
        )

    def _report(self, change: Change) -> None:
        self._counts[change.kind] += 1
        if len(self._changes) < self._max_changes:
            self._changes.append(change)

    def _added(self, path: str, new: object) -> None:
        self._bytes_changed += weigh(new)
        self._report(Change(path, ChangeKind.ADDED, new=new))

    def _removed(self, path: str, old: object) -> None:
        self._bytes_changed += weigh(old)
        self._report(Change(path, ChangeKind.REMOVED, old=old))

    def compare(self, path: str, old: Any, new: Any) -> None:
        is_registered = isinstance(new, TypeSummary)
        if type_name(old) != type_name(new) or isinstance(old, TypeSummary) != is_registered:
            self._bytes_changed += weigh(old) + weigh(new)
            detail = f"{type_name(old)} → {type_name(new)}"
            self._report(Change(path, ChangeKind.TYPE_CHANGED, old, new, detail))
        elif isinstance(new, BufferSummary | bytes):
            self._compare_buffers(path, old, new)
        elif isinstance(new, dict):
            self._compare_dicts(path, old, new)
        elif isinstance(new, list | tuple | deque):
            self._compare_items(path, list(old), list(new))
        elif isinstance(new, set | frozenset):
            self._compare_sets(path, old, new)
        elif is_registered:
            self._compare_types(path, old, new)
        elif not self._is_same(old, new):
            text = text_delta(old, new) if isinstance(new, str) and is_long(old, new) else ""
            self._report(Change(path, ChangeKind.CHANGED, old, new, text))

    def _compare_dicts(self, path: str, old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
        olds = {self._key(self._old, key): (key, value) for key, value in old.items()}
        news = {self._key(self._new, key): (key, value) for key, value in new.items()}
        for identity, (key, value) in olds.items():
            if identity in news:
                self.compare(_join(path, key), value, news[identity][1])
            else:
                self._removed(_join(path, key), value)
        for identity, (key, value) in news.items():
            if identity not in olds:
                self._added(_join(path, key), value)

    def _compare_types(self, path: str, old: TypeSummary, new: TypeSummary) -> None:
        if old.version != new.version:
            detail = f"version {old.version} → {new.version}"
            self._report(Change(path, ChangeKind.CHANGED, old, new, detail))
        if set(old.fields) == set(new.fields) == {"value"}:
            self.compare(path, old.fields["value"], new.fields["value"])
            return
        before, after = named_columns(self._old, old), named_columns(self._new, new)
        if before is not None and after is not None:
            self._compare_dicts(path, {**old.fields, "data": before}, {**new.fields, "data": after})
        else:
            self._compare_dicts(path, old.fields, new.fields)

    def _compare_sets(self, path: str, old: AbstractSet[object], new: AbstractSet[object]) -> None:
        olds = {self._key(self._old, item): item for item in old}
        news = {self._key(self._new, item): item for item in new}
        for identity in sorted(olds.keys() - news.keys(), key=repr):
            self._removed(_join(path, brief(olds[identity])), olds[identity])
        for identity in sorted(news.keys() - olds.keys(), key=repr):
            self._added(_join(path, brief(news[identity])), news[identity])

    def _compare_items(self, path: str, old: list[object], new: list[object]) -> None:
        start, shorter = 0, min(len(old), len(new))
        while start < shorter and self._is_same(old[start], new[start]):
            self._shared_bytes += weigh(new[start])
            start += 1
        end = 0
        while end < shorter - start and self._is_same(old[-1 - end], new[-1 - end]):
            self._shared_bytes += weigh(new[-1 - end])
            end += 1
        for i1, i2, j1, j2 in self._edits(old[start : len(old) - end], new[start : len(new) - end]):
            paired = min(i2 - i1, j2 - j1)
            for n in range(paired):
                self.compare(_join(path, start + j1 + n), old[start + i1 + n], new[start + j1 + n])
            for i in range(start + i1 + paired, start + i2):
                self._removed(_join(path, i), old[i])
            for j in range(start + j1 + paired, start + j2):
                self._added(_join(path, j), new[j])

    def _edits(self, old: list[object], new: list[object]) -> Iterator[tuple[int, int, int, int]]:
        """Yield ranges of `old` and the ranges of `new` that replaced them."""
        if not old or not new or max(len(old), len(new)) > _MATCHED_ITEMS:
            yield 0, len(old), 0, len(new)
            return
        olds = [self._key(self._old, item) for item in old]
        news = [self._key(self._new, item) for item in new]
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, olds, news).get_opcodes():
            if tag == "equal":
                self._shared_bytes += sum(map(weigh, new[j1:j2]))
            else:
                yield i1, i2, j1, j2

    def _compare_buffers(self, path: str, old: BufferSummary | bytes, new: BufferSummary | bytes) -> None:
        was, now = summary_of(old), summary_of(new)
        before, after = self._old.contents(was), self._new.contents(now)
        is_same_form = _form(was) == _form(now)
        if is_same_form and [c.size_bytes for c in before] == [c.size_bytes for c in after]:
            tally = Tally(now)
            for a, b in zip(before, after, strict=True):
                tally.compare(a, b)
            self._shared_bytes += max(now.size_bytes - tally.bytes_changed, 0)
            self._bytes_changed += tally.bytes_changed
            if tally.bytes_changed:
                delta = replace(tally.delta(), note=differing_columns(self._old, was, self._new, now))
                self._report(Change(path, ChangeKind.CHANGED, old, new, delta))
            return
        columns = differing_columns(self._old, was, self._new, now)
        notes = [columns] if columns else []
        if was.dtype != now.dtype:
            notes.append(f"dtype {was.dtype} → {now.dtype}")
        if was.shape != now.shape:
            notes.append(f"shape {shape_text(was.shape)} → {shape_text(now.shape)}")
        if was.order != now.order:
            notes.append(f"element order {was.order} → {now.order}")
        shared = self._shared_chunks(was, now)
        self._shared_bytes += shared
        self._bytes_changed += max(was.size_bytes - shared, now.size_bytes - shared, 0)
        delta = ArrayDelta(math.prod(now.shape), None, max(now.size_bytes - shared, 0), None, ", ".join(notes))
        self._report(Change(path, ChangeKind.CHANGED, old, new, delta))

    def _shared_chunks(self, old: BufferSummary, new: BufferSummary) -> int:
        """Return how many bytes of `new` are in chunks that `old` has, too, at any place."""
        old_marks = {mark for mark, _ in _whole_chunks(self._old.contents(old))}
        return sum(size for mark, size in _whole_chunks(self._new.contents(new)) if mark in old_marks)

    def _is_same(self, old: object, new: object) -> bool:
        kind = type(new)
        if kind in _PLAIN:
            if type(old) is not kind or old != new:
                return bool(old != old and new != new)
            return kind is not float or old != 0 or repr(old) == repr(new)
        return self._key(self._old, old) == self._key(self._new, new)

    def _key(self, state: StoredState, value: Any) -> Hashable:
        """Return a key that equals only the key of an equal value: 1, True and 1.0 differ, NaN equals NaN."""
        kind = type(value)
        if kind is str or kind is int:
            return kind, value if kind is str or value.bit_length() <= LONG_INT_BITS else hex(value)
        if isinstance(value, BufferSummary | bytes):
            summary = summary_of(value)
            marks = tuple(_content_key(content) for content in state.contents(summary))
            return summary.kind, *_form(summary), marks
        if isinstance(value, TypeSummary):
            return value.name, value.version, self._key(state, dict(value.fields))
        if isinstance(value, dict):
            return kind, frozenset([(self._key(state, k), self._key(state, v)) for k, v in value.items()])
        if isinstance(value, list | tuple | deque):
            return kind, tuple([self._key(state, item) for item in value])
        if isinstance(value, set | frozenset):
            return kind, frozenset([self._key(state, item) for item in value])
        return kind, written(value)


_PLAIN = frozenset({type(None), bool, int, float, str})


def _form(summary: BufferSummary) -> tuple[object, ...]:
    return summary.dtype, summary.shape, summary.size_bytes, summary.order


def _whole_chunks(contents: Iterable[Content]) -> Iterator[tuple[Hashable, int]]:
    """Yield (digests, size) of the chunks that contain nothing else."""
    for content in contents:
        for piece in content.pieces():
            if piece.mark is not None and piece.stop - piece.start == piece.mark.size_bytes:
                yield (piece.mark.digest, piece.mark.size_bytes), piece.mark.size_bytes


def _content_key(content: Content) -> Hashable:
    """Return the chunks' digests of a large buffer, which shares none; otherwise a digest of the bytes."""
    marks = [piece.mark for piece in content.pieces()]
    if content.size_bytes >= SMALL_BUFFER_BYTES and None not in marks:
        return tuple(marks)
    digest = hashlib.sha256()
    for at in range(0, content.size_bytes, READ_BYTES):
        digest.update(content.read(at, min(at + READ_BYTES, content.size_bytes)))
    return digest.digest()


def _join(path: str, name: object) -> str:
    text = written(name, str)
    return f"{path}/{text}" if path else text
