"""The items of a run's maps: a cell for each in its place, and the page of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from kedge.errors import Corrupted, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX
from kedge.pipeline.history import find_run
from kedge.pipeline.items import FailedItem, FoundItem, MapItems, find_item, places_in, retry_items

from . import states
from .charts import cells
from .memory import memory_of
from .resumption import can_requeue, can_resume, start_again
from .templates import Number, PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_CELLS = 1500
_FAILURES = 20
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Grid:
    """The items of a map as cells."""

    name: str
    done: int
    failed: int
    total: int
    per_cell: int
    cells: Markup
    failures: Sequence[FailedItem]  # the first


def grid_of(items: MapItems) -> Grid:
    failed = list(items.failed.values())
    numbers = [item.number for item in failed if item.number is not None]
    places = [place for record in items.records for place in places_in(record)]
    ends = [first + count for first, count in places] + [number + 1 for number in numbers]
    total = max(items.total or 0, items.done + len(failed), *ends, 0)
    per_cell = max(1, -(-total // _CELLS))
    label = f"{items.done:,} of {total:,} done, {len(failed):,} failed"
    drawn = cells(_looks(places, numbers, total, per_cell), label)
    return Grid(items.path, items.done, len(failed), total, per_cell, drawn, failed[:_FAILURES])


def _looks(places: Sequence[tuple[int, int]], failed: Sequence[int], total: int, per_cell: int) -> list[str]:
    """What became of the items that each cell stands for."""
    done = [0] * -(-total // per_cell)
    for first, count in places:
        for cell in range(first // per_cell, -(-(first + count) // per_cell)):
            done[cell] += min(first + count, (cell + 1) * per_cell) - max(first, cell * per_cell)
    sizes = [min(per_cell, total - cell * per_cell) for cell in range(len(done))]
    looks = ["done" if n >= size else "some" if n else "pending" for n, size in zip(done, sizes, strict=True)]
    for number in failed:
        looks[number // per_cell] = "failed"
    return looks


@router.get("/runs/{key}/item")
async def item(
    request: Request,
    access: Reader,
    key: str,
    map: Annotated[str, Query(max_length=2000)],
    item: Annotated[str, Query(max_length=2000)] = "",
    number: Number | None = None,
    count: Number = 1,
) -> Response:
    """One item of a map, by its key or as #place; of the items from `number` on, one that failed if there is one."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        run, items = find_run(store, key), _map(memory_of(request).runs.records(store, key).maps, key, map)
        entry = _find(store, items, item.strip(), number, count)
        level, problem = None, ""
        if entry.record is not None:
            try:
                state = memory_of(request).outlines.open(store, entry.record.id)
                level = states.level_at(state, f"results/{entry.index}")
            except Corrupted as error:
                problem = str(error)
        return {
            "run": run,
            "map": map,
            "item": entry,
            "c": entry.record,
            "level": level,
            "problem": problem,
            "attempts": list(reversed(entry.failures))[:_ATTEMPTS],
            "can_retry": entry.status == "failed" and can_resume(run, has_failed_items=True),
            "can_requeue": entry.status == "failed" and can_requeue(run, has_failed_items=True),
            "name": f"{map}/{entry.key}",
        }

    return await answer(request, access, "item.html", facts)


def _map(maps: Sequence[MapItems], key: str, path: str) -> MapItems:
    for items in maps:
        if items.path == path:
            return items
    raise NotFound(f"run {key} has no map {path}", hint="the page of the run shows its maps")


def _find(store: CheckpointManager, items: MapItems, text: str, number: int | None, count: int) -> FoundItem:
    if number is None and text.startswith("#") and text[1:].isdecimal() and text.isascii():
        number = int(text[1:19])
    if number is None:
        if not text:
            raise Validation("no item was named", hint="give its key, or #0 for the first")
        return find_item(store, items, key=text)
    failed = [f.number for f in items.failed.values() if f.number is not None and number <= f.number < number + count]
    return find_item(store, items, number=min(failed, default=number))


@router.post("/runs/{key}/retry")
async def retry(request: Request, access: Writer, key: str, item: Annotated[str, Form(max_length=4096)]) -> Response:
    """Have the runner try one failed item again; the others stay as they are."""
    messages = await access.ask(lambda store: retry_items(store, key, [item]))
    try:
        await start_again(access, key)
    except BaseException:  # it was not started: the next one to resume it means all items
        await access.ask(lambda store: [store.delete(key + INBOX_SUFFIX, message) for message in messages])
        raise
    return see(request, f"/runs/{quote(key, safe='')}", f"{item} was tried again.")
