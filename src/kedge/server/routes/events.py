"""Changes as they happen, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from kedge.errors import Unavailable, Validation
from kedge.model import Event
from kedge.server import schemas
from kedge.server.auth import Access, Reads
from kedge.server.gate import GatedRoute

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["events"], responses=PROBLEMS, route_class=GatedRoute)

_LOOK_S = 0.5  # after so long a stream looks whether the service stops


class Place(NamedTuple):
    after: int  # which event to begin behind
    asked: int | None


async def _place(
    access: Reads,
    after: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1, description="Start after this event.")] = None,
    last_event_id: Annotated[str | None, Header(description="What a browser sends when it comes back.")] = None,
) -> AsyncIterator[Place]:
    """Where to begin: asked before the answer begins, so that a mistake is a 422. A place is held until it ends."""
    if last_event_id is not None:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 16):
            raise Validation("Last-Event-ID is not the number of an event", hint="leave it out to begin now")
        after = int(last_event_id)
    feeds = access.service.feeds
    if feeds.streams >= access.service.limits.streams:
        raise Unavailable("too many streams are open", hint="close some")
    feeds.streams += 1
    try:
        newest = await feeds.of(access.namespace).newest()
        yield Place(newest if after is None else min(after, newest), after)
    finally:
        feeds.streams -= 1


@router.get("/events", response_class=EventSourceResponse)
async def events(
    access: Reads,
    place: Annotated[Place, Depends(_place)],
    job: Annotated[schemas.Name | None, Query(description="Only those of this job.")] = None,
    named: Annotated[bool, Query(description="False: all come as `message`, for listeners who want each.")] = True,
) -> AsyncIterator[ServerSentEvent]:
    """Every change from now on, or from behind an event on; a stream that broke goes on with Last-Event-ID.

    The name of an event is what happened (save, delete, tag, …), its data is as in the audit log. A `reset` comes first
    if there was never an event as late as the one asked for: another store is there now, perhaps an older copy of the
    same one. What the listener knows is void, and the stream goes on with what comes.
    """
    if place.asked is not None and place.asked > place.after:
        void = {"id": place.after, "action": "reset", "job": None, "checkpoint": None, "detail": {"asked": place.asked}}
        yield ServerSentEvent(id=str(place.after), event="reset" if named else None, data=void)
    async for event in _follow(access, place.after, job):
        name = event.action if named else None
        yield ServerSentEvent(id=str(event.id), event=name, data=event.to_json())


async def _follow(access: Access, place: int, job: str | None) -> AsyncIterator[Event]:
    feed = access.service.feeds.of(access.namespace)
    while not access.service.is_draining:
        events = await feed.after(place, _LOOK_S)
        if not await access.holds():
            return
        for event in events:
            place = event.id
            if job is None or event.job == job:
                yield event
