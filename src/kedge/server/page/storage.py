"""The store as a whole: what grew, how much sharing saves, what gc would free; and the log of changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kedge.manager import CheckpointManager
from kedge.model import Event, Job
from kedge.server.tasks import Report
from kedge.terminal.text import count_of, exactly, size

from .charts import stacked_bars
from .growth import MOST_JOBS, SPANS, Grown
from .memory import memory_of
from .templates import Administrator, Number, PageRoute, Reader, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_COLOURS = 5  # jobs with a colour of their own in the chart
_LISTED = 20
_EVENTS = 100
_LOOKED_AT = 10_000  # events, for those that are wanted
_ACTIONS = ("-save", "save", "delete", "tag", "pin", "unpin", "status", "retention", "lease", "release", "gc")
_QUICK = 20_000  # checkpoints of a store whose garbage is counted without being asked
_SETTLES_S = 60.0  # after a gc: so long the garbage that is left is counted again

_BARS = {"hour": "a minute", "day": "half an hour", "week": "four hours", "month": "a day", "year": "a week"}


@router.get("/storage")
async def storage(
    request: Request, access: Reader, span: Literal["", "hour", "day", "week", "month", "year"] = ""
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        numbers = store.stats()
        jobs = store.jobs(limit=MOST_JOBS)
        grown = memory_of(request).of(access.namespace).growth.look(store, jobs, span)
        coloured = [name for name, count in grown.added.most_common(_COLOURS) if count]
        return {
            "numbers": _numbers(numbers, _on_disk(store)),
            "grown": grown,
            "spans": SPANS,
            "coloured": coloured,
            "has_others": len(+grown.added) > len(coloured),
            "chart": _chart(grown, coloured),
            "bar": _BARS[grown.span],
            "rows": _rows(jobs, grown),
            "is_cut": len(jobs) == MOST_JOBS,
            "is_quick": numbers["checkpoints"] <= _QUICK,
            "tasks": access.service.tasks.all(access.namespace)[:5],
        }

    return await answer(request, access, "storage.html", facts)


def _chart(grown: Grown, coloured: list[str]) -> object:
    columns = []
    for n, bar in enumerate(grown.bars):
        at = grown.begin + timedelta(seconds=n * grown.bar_s)
        parts = [bar[name] for name in coloured]
        others = sum(bar.values()) - sum(parts)
        title = f"{exactly(at)[:16]}: {size(sum(bar.values()))}"
        columns.append((title, [*parts, *[0] * (_COLOURS - len(parts)), others]))
    return stacked_bars(columns, f"bytes added in the last {grown.span}", size)


def _rows(jobs: list[Job], grown: Grown) -> list[dict[str, Any]]:
    """Those that grew most first, then the largest."""
    chosen = sorted(jobs, key=lambda job: (-grown.added[job.name], -job.stored_bytes))[:_LISTED]
    return [
        {
            "name": job.name,
            "added": grown.added[job.name],
            "saves": grown.saves[job.name],
            "stored_bytes": job.stored_bytes,
            "size_bytes": job.size_bytes,
            "ratio": f"{max(0.0, 1 - job.stored_bytes / job.size_bytes):.0%}" if job.size_bytes else "",
        }
        for job in chosen
    ]


def _on_disk(store: CheckpointManager) -> int | None:
    """What a directory takes of its disk, garbage, index and reserves included, whatever namespace they are of."""
    place = store.url.removeprefix("files:").removeprefix("file:").partition("?")[0]
    if not os.path.isdir(place):
        return None
    sizes = 0
    for folder, _, files in os.walk(place):
        for name in files:
            try:
                sizes += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # gc is at work
    return sizes


def _numbers(numbers: Any, on_disk: int | None) -> list[tuple[str, str, str]]:
    saved, held = numbers["size_bytes"], numbers["stored_bytes"]
    unpacked = held - numbers["chunk_bytes"] + numbers["plain_bytes"]  # each piece once, before it was compressed
    return [
        ("Checkpoints", f"{numbers['checkpoints']:,}", f"in {count_of(numbers['jobs'], 'job')}"),
        ("States saved", size(saved), "as the jobs see them"),
        (
            "Stored",
            size(held),
            f"{count_of(numbers['packs'], 'pack')}, and the index" if numbers["packs"] else "in the index",
        ),
        *([("On disk", size(on_disk), "with garbage, index and all namespaces")] if on_disk is not None else []),
        ("Deduplication", _ratio(saved, unpacked), "what was there already"),
        (
            "Compression",
            _ratio(unpacked, held),
            f"in all {_ratio(saved, held)} smaller" if held else "nothing is stored yet",
        ),
    ]


def _ratio(whole: int, part: int) -> str:
    return f"{max(1.0, whole / part):.1f} ×" if part > 0 else "–"


@router.get("/storage/garbage")
async def garbage(request: Request, access: Reader) -> Response:
    """What gc would free, counted as gc would count it; nothing is changed.

    Counted beside a gc, a pack that is being written looks like garbage: what is found then is asked for again.
    """

    def facts(store: CheckpointManager) -> dict[str, object]:
        newest = [task for task in access.service.tasks.all(access.namespace) if task["kind"] == "gc"][:1]
        return {"found": store.gc(dry_run=True), "is_settling": any(map(_is_recent, newest))}

    return await answer(request, access, "garbage.html", facts)


def _is_recent(task: Mapping[str, object]) -> bool:
    """Whether a task is at work, or its last records may still be on their way to the disk."""
    ended = task["ended_at"]
    if not isinstance(ended, str):
        return True
    return (datetime.now(UTC) - datetime.fromisoformat(ended)).total_seconds() < _SETTLES_S


@router.get("/storage/tasks")
async def background(request: Request, access: Reader) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        return {"tasks": access.service.tasks.all(access.namespace)[:5]}

    return await answer(request, access, "tasks.html", facts)


@router.post("/storage/{kind}")
async def care(request: Request, access: Administrator, kind: Literal["verify", "gc"]) -> Response:
    def work(store: CheckpointManager, report: Report) -> dict[str, Any]:
        return tasks.collect_garbage(store, report) if kind == "gc" else asdict(store.verify(progress=report))

    tasks = access.service.tasks
    await access.ask(lambda store: tasks.start(kind, store, work))
    what = "Garbage collection" if kind == "gc" else "Verification"
    return see(request, "/storage", f"{what} has started. This page shows its progress.")


@router.get("/activity")
async def activity(
    request: Request,
    access: Reader,
    before: Number | None = None,
    action: Annotated[str, Query(max_length=40)] = "",
    actor: Annotated[str, Query(max_length=200)] = "",
    job: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """The log of changes, newest first: all of it, or what was done so, by whom and to what the address says."""

    def is_wanted(event: Event) -> bool:
        is_action = event.action != action[1:] if action.startswith("-") else action in ("", event.action)
        return is_action and actor.lower() in event.actor.lower() and job.lower() in (event.job or "").lower()

    def facts(store: CheckpointManager) -> dict[str, Any]:
        events, older = _wanted_events(store, before, is_wanted)
        wanted = {"action": action, "actor": actor, "job": job}
        query = urlencode({name: value for name, value in wanted.items() if value})
        return {
            "events": events,
            "older": older,
            "is_newest": before is None,
            **wanted,
            "query": query,
            "actions": _ACTIONS,
        }

    return await answer(request, access, "activity.html", facts)


def _wanted_events(
    store: CheckpointManager, before: int | None, is_wanted: Callable[[Event], bool]
) -> tuple[list[Event], int | None]:
    """The newest of those events, and where to go on; at most `_LOOKED_AT` are looked at (I6)."""
    events: list[Event] = []
    for _ in range(_LOOKED_AT // _EVENTS):
        page = store.events(limit=_EVENTS, newest=True, before=before)[::-1]
        for event in page:
            before = event.id
            if is_wanted(event):
                events.append(event)
                if len(events) == _EVENTS:
                    break
        if len(page) < _EVENTS or before == 1:
            return events, before if len(events) == _EVENTS and before != 1 else None
        if len(events) == _EVENTS:
            break
    return events, before
