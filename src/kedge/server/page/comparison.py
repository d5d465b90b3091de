"""Differences of two checkpoints: short values beside each other, long texts in two columns.

Instead of the second one, the newest of a job can be taken: then the page follows that job as it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kedge.codec import BufferSummary
from kedge.diff import Change, ChangeKind, TextDelta
from kedge.diff import diff as compared
from kedge.diff.values import weigh
from kedge.errors import NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.store.local import local_store
from kedge.terminal.text import size
from kedge.terminal.tree import describe

from . import states
from .memory import memory_of
from .templates import PageRoute, Reader, answer, linked

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SIGNS = {ChangeKind.ADDED: "+", ChangeKind.REMOVED: "−"}
_LONG = 400
_CHANGES = 100  # at once
_SEARCHED = 100_000  # changes, for a part of their paths
_SUGGESTED = 50  # jobs whose newest can be chosen from a list; any other is typed


@router.get("/compare")
async def compare(
    request: Request,
    access: Reader,
    id: Annotated[Sequence[str], Query(min_length=1, max_length=100)],
    live: Annotated[str, Query(max_length=128)] = "",
    keep: str = "",
    only: Annotated[str, Query(max_length=400)] = "",
    start: Annotated[int, Query(ge=0, le=_SEARCHED)] = 0,
    tag: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Two checkpoints, the older first unless `keep` is given; or one and the newest of a job (`live`).

    `only` is a part of the paths that are wanted; `start` is how many changes come before those that are shown. `tag`
    says nothing here: the form of a history, whose boxes choose what is compared or tagged, sends it with both.
    """

    def facts(store: CheckpointManager) -> dict[str, Any]:
        chosen = [store.get(checkpoint_id) for checkpoint_id in id[:2]]
        if len(id) > 2 or (live and len(id) > 1):
            raise Validation("two checkpoints can be compared", hint="choose two in the history of a job")
        followed = live or (chosen[0].job if len(chosen) == 1 else "")
        old, new = (chosen[0], _newest(store, followed)) if followed else chosen
        if not keep and not followed and old.job == new.job and old.seq > new.seq:
            old, new = new, old
        most = _SEARCHED if only else start + _CHANGES
        local = local_store(store.store, "comparing")
        diff = compared(local, local.catalogue.read(old.id), local.catalogue.read(new.id), max_changes=most)
        wanted = _wanted(diff.changes, only)
        return {
            "old": old,
            "new": new,
            "diff": diff,
            "changes": list(map(_shown, wanted[start : start + _CHANGES])),
            "start": start,
            "count": len(wanted) if only else len(wanted) + diff.left_out,
            "unsearched": diff.left_out if only else 0,
            "part": lambda first: linked(request, {"start": first or None}),
            "facts": [
                *changed_facts("metadata", old.metadata, new.metadata),
                *changed_facts("tag", old.tags, new.tags),
            ],
            "only": only,
            "ids": id,
            "keep": keep,
            "live": followed,
            "jobs": [job.name for job in store.jobs(limit=_SUGGESTED)],
        }

    return await answer(request, access, "compare.html", facts)


def _wanted(changes: Iterable[Change], only: str) -> list[Change]:
    return [change for change in changes if only.lower() in change.path.lower()]


def changed_facts(kind: str, old: Mapping[str, object], new: Mapping[str, object]) -> list[tuple[str, str, str, str]]:
    """What differs in the metadata or tags of two checkpoints: (kind, name, before, now)."""
    names = [name for name in {**old, **new} if name not in old or name not in new or old[name] != new[name]]
    return [(kind, name, *(_fact(side, name) for side in (old, new))) for name in names]  # type: ignore[misc]


def _fact(facts: Mapping[str, object], name: str) -> str:
    if name not in facts:
        return ""
    value = facts[name]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return _brief_text(text) or "(empty)"


@router.get("/compare/difference.png")
async def difference(
    request: Request,
    access: Reader,
    old: Annotated[str, Query(max_length=200)],
    new: Annotated[str, Query(max_length=200)],
    path: Annotated[str, Query(max_length=4096)],
) -> Response:
    def draw(store: CheckpointManager) -> bytes:
        outlines = memory_of(request).outlines
        return states.difference_at(outlines.open(store, old), outlines.open(store, new), path)

    return Response(await access.ask(draw), media_type="image/png")


def _newest(store: CheckpointManager, job: str) -> Checkpoint:
    checkpoints = store.list(job, limit=1)
    if not checkpoints:
        raise NotFound(f"job {job} has no checkpoint to compare with", hint="the list of jobs shows all")
    return checkpoints[0]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    look: str = ""  # minus, plus, hunk


@dataclass(frozen=True, slots=True)
class ShownChange:
    path: str
    kind: str
    sign: str
    old: str
    new: str
    note: str
    sizes: str
    lines: Sequence[tuple[Cell, Cell]]
    has_old_picture: bool = False
    has_new_picture: bool = False
    has_difference: bool = False


def _shown(change: Change) -> ShownChange:
    has_old, has_new = change.kind is not ChangeKind.ADDED, change.kind is not ChangeKind.REMOVED
    weights = [weigh(side) for side, is_there in ((change.old, has_old), (change.new, has_new)) if is_there]
    is_text = isinstance(change.detail, TextDelta)
    return ShownChange(
        change.path,
        str(change.kind),
        _SIGNS.get(change.kind, "~"),
        _brief(change.old) if has_old else "",
        _brief(change.new) if has_new else "",
        "" if is_text else str(change.detail),
        " → ".join(dict.fromkeys(map(size, weights))) if any(weights) else "",
        side_by_side(change.detail) if isinstance(change.detail, TextDelta) else (),
        _is_picture(change.old),
        _is_picture(change.new),
        _is_picture(change.old) and _is_picture(change.new) and _shape(change.old) == _shape(change.new),
    )


def _is_picture(value: object) -> bool:
    return isinstance(value, BufferSummary) and value.kind in ("ndarray", "tensor") and states.is_image(value)


def _shape(value: object) -> tuple[int, ...]:
    return value.shape if isinstance(value, BufferSummary) else ()


def _brief(value: object) -> str:
    return _brief_text(describe(value)[0])


def _brief_text(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def side_by_side(delta: TextDelta) -> list[tuple[Cell, Cell]]:
    """A unified diff in two columns: removed and added lines that belong together share a row."""
    rows: list[tuple[Cell, Cell]] = []
    minus: list[str] = []
    plus: list[str] = []

    def flush() -> None:
        for n in range(max(len(minus), len(plus))):
            left = Cell(minus[n], "minus") if n < len(minus) else Cell("")
            right = Cell(plus[n], "plus") if n < len(plus) else Cell("")
            rows.append((left, right))
        minus.clear()
        plus.clear()

    for line in delta.lines:
        mark, text = line[:1], line[1:]
        if mark == "-":
            minus.append(text)
        elif mark == "+":
            plus.append(text)
        else:
            flush()
            cell = Cell(line, "hunk") if mark == "@" else Cell(text)
            rows.append((cell, cell))
    flush()
    if delta.lines_left_out:
        more = Cell(f"… {delta.lines_left_out:,} more lines", "hunk")
        rows.append((more, more))
    return rows
