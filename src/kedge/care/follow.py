"""A follower's position, stored in the log of its target so that the next follower continues there.

It is an event of the target with the number and the chain of the last followed event of the source. It is written when
everything up to there is durable in the target; later events are followed again, which changes nothing. It is valid
only for the same log. A source that was rebuilt, restored from a backup, or lost its events has another chain there, or
none, and is compared completely again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kedge.model import Event
from kedge.ports import Index
from kedge.store.local import local_store

from . import Progress
from .copy import FOLLOWED, Copying, CopyReport

ACTION = "sync"
MAX_LEFT_OUT = 1000  # with more damage, the next follower compares everything
NOTE_EVERY_S = 5.0  # limits what is followed again after a follower was killed
_NOTE_EVERY_EVENTS = 1000  # that do not concern the target
_WAIT_S = 0.5  # for the next event; also how late a follower notices `stop`
_LOOK_BACK = 20_000  # events of the target; after more writes to it, compare
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Scope:
    """What a follower copies."""

    job: str | None
    since_us: int | None
    mirror: bool

    def covers(self, other: Scope) -> bool:
        """Return whether following this scope includes everything in the other one."""
        return (
            self.job in (None, other.job)
            and (self.since_us is None or (other.since_us is not None and self.since_us <= other.since_us))
            and (self.mirror or not other.mirror)
        )


@dataclass(frozen=True, slots=True)
class Place:
    """The last followed event of the source, and what could not be read up to then."""

    event: int
    left_out: tuple[str, ...] = ()


def find_place(source: Index, target: Index, scope: Scope) -> Place | None:
    """Return the position of a follower with at least this scope.

    None if there is none, or the source is another one by now.
    """
    before: int | None = None
    for _ in range(_LOOK_BACK // _PAGE):
        page = target.events(limit=_PAGE, newest=True, before=before)
        for event in reversed(page):
            if event.action == ACTION and (parsed := _parse(event.detail, source, scope)) is not None:
                place, chain = parsed
                return place if _chain_at(source, place.event) == chain else None
        if len(page) < _PAGE:
            return None
        before = page[0].id
    return None


def note_place(source: Index, target: Index, scope: Scope, last: Event, left_out: Iterable[str], *, actor: str) -> None:
    """Note that the target has everything up to `last`, an event of the source, except what could not be read."""
    detail = {
        "source": source.store_id,
        "namespace": source.namespace,
        "event": last.id,
        "chain": last.chain,
        "job": scope.job,
        "since_us": scope.since_us,
        "mirror": scope.mirror,
        "left_out": list(left_out),
    }
    target.append_event(ACTION, actor=actor, detail=json.dumps(detail))


def _parse(detail: str, source: Index, scope: Scope) -> tuple[Place, str] | None:
    """Parse a position in `source` that suffices for `scope`, and its chain. Others write such events, too."""
    try:
        document = json.loads(detail)
        is_ours = (document["source"], document["namespace"]) == (source.store_id, source.namespace)
        if not is_ours or not Scope(document["job"], document["since_us"], document["mirror"]).covers(scope):
            return None
        return Place(int(document["event"]), tuple(map(str, document["left_out"]))), str(document["chain"])
    except (ValueError, TypeError, KeyError):
        return None


def _chain_at(source: Index, event: int) -> str | None:
    events = source.events(event - 1, 1)
    return events[0].chain if events and events[0].id == event else None


class Following:
    """A copy that continues with every change in the source."""

    def __init__(self, copying: Copying) -> None:
        self._copying = copying
        self._source = local_store(copying.source, "following a store").index
        self._target = local_store(copying.target, "following into a store").index
        self._scope = Scope(copying.job, copying.since_us, copying.mirror)
        self._left_out: dict[str, None] = {}
        self._last: Event | None = None  # of the source, up to which everything is done
        self._noted = 0  # its number when it was last noted, and the time
        self._noted_s = 0.0
        self._is_worth_noting = False

    def run(
        self, *, stop: threading.Event, changed: Callable[[CopyReport], None], progress: Progress | None = None
    ) -> None:
        """Follow until `stop` is set. Calls `changed` after each round."""
        changed(self._begin(progress))
        try:
            while not stop.is_set():
                events = self._source.events(self._last.id if self._last else 0, _PAGE)
                if events:
                    changed(self._round(events))
                else:
                    self._source.wait_for_event(self._last.id if self._last else 0, _WAIT_S)
                self._note(is_due=time.monotonic() - self._noted_s >= NOTE_EVERY_S)
        except KeyboardInterrupt:
            self._note(is_due=True)
            raise
        self._note(is_due=True)

    def _begin(self, progress: Progress | None) -> CopyReport:
        """Continue at the last follower's position, or compare everything."""
        place = find_place(self._source, self._target, self._scope)
        if place is None:
            newest = self._source.events(limit=1, newest=True)
            report = self._copying.copy(progress)
            self._last = newest[0] if newest else None
            self._is_worth_noting = True
        else:
            self._last = self._source.events(place.event - 1, 1)[0]
            self._noted = place.event
            report = self._copying.catch_up(place.left_out)
            self._is_worth_noting = set(report.damaged) != set(place.left_out)
        self._left_out = dict.fromkeys(report.damaged)
        self._note(is_due=True)
        return report

    def _round(self, events: Sequence[Event]) -> CopyReport:
        report = self._copying.replay(events)
        self._last = events[-1]
        self._left_out.update(dict.fromkeys(report.damaged))
        # Two stores that follow each other must not note each other's notes forever.
        is_long = self._last.id - self._noted >= _NOTE_EVERY_EVENTS
        self._is_worth_noting |= is_long or any(event.action in FOLLOWED for event in events)
        return report

    def _note(self, *, is_due: bool) -> None:
        if not (is_due and self._is_worth_noting) or self._last is None or len(self._left_out) > MAX_LEFT_OUT:
            return
        note_place(self._source, self._target, self._scope, self._last, self._left_out, actor=self._copying.actor)
        self._noted, self._noted_s, self._is_worth_noting = self._last.id, time.monotonic(), False
