"""The log of changes as it grows, for any number of listeners: one look at the store serves them all."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kedge.model import Event

if TYPE_CHECKING:
    from .service import Service

_POLL_S = 0.25
_PAGE = 500
_KEPT = 2000


class Feed:
    """The events of one namespace. Looks while somebody listens, and no longer."""

    def __init__(self, service: Service, namespace: str) -> None:
        self._service = service
        self._namespace = namespace
        self._recent: deque[Event] = deque(maxlen=_KEPT)
        self._first: int | None = None  # from this event on, `_recent` has them all
        self._news = asyncio.Event()  # for the next ones; no lock, which a listener that is cancelled could keep
        self._listeners = 0
        self._looking: asyncio.Task[None] | None = None

    async def newest(self) -> int:
        """The number of the newest event; 0 when there is none."""
        events = await self._read(0, limit=1, newest=True)
        return events[-1].id if events else 0

    async def after(self, number: int, wait_s: float) -> list[Event]:
        """Events above `number`, in order; [] when none came within `wait_s`."""
        if self._first is None or number + 1 < self._first:
            behind = await self._read(number, limit=_PAGE)
            if behind:
                return behind
        self._listeners += 1
        try:
            if self._looking is None or self._looking.done():
                self._first = number + 1
                self._recent.clear()
                self._looking = asyncio.create_task(self._look(number))
            async with asyncio.timeout(wait_s):
                while not self._recent or self._recent[-1].id <= number:
                    await self._news.wait()
        except TimeoutError:
            return []
        finally:
            self._listeners -= 1
        return [event for event in self._recent if event.id > number]

    async def _look(self, start: int) -> None:
        position = start
        while self._listeners or position == start:
            events = await self._read(position, limit=_PAGE)
            if events:
                position = events[-1].id
                self._recent.extend(events)
                if len(self._recent) == _KEPT:
                    self._first = self._recent[0].id
                self._news.set()
                self._news = asyncio.Event()
            if len(events) < _PAGE:
                await asyncio.sleep(_POLL_S)
            if not self._listeners:
                return

    async def _read(self, after: int, *, limit: int, newest: bool = False) -> list[Event]:
        manager = self._service.manager
        return await self._service.in_thread(lambda: manager(self._namespace).events(after, limit, newest=newest))


class Feeds:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._feeds: dict[str, Feed] = {}
        self.streams = 0

    def of(self, namespace: str) -> Feed:
        return self._feeds.setdefault(namespace, Feed(self._service, namespace))
