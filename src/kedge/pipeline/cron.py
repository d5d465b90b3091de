"""When a schedule is due: the moments that a cron expression, or an interval, means.

minute hour day-of-month month day-of-week, each `*`, a number, a name (`jan`, `mon`), a range `1-5`, a list `1,15`, and
any of them with a step `*/10`. As in cron, a day matches by either day field if both are restricted. Sunday is 0 or 7.

Times are those of a time zone. A time that a change of clocks skips is due that much later; one that comes twice is
due the first time, or both times if the expression is for every hour.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

from kedge.errors import Validation

_MONTHS = {
    "jan": 1, "feb": 2, "mar": 3, "apr": 4, "may": 5, "jun": 6,
    "jul": 7, "aug": 8, "sep": 9, "oct": 10, "nov": 11, "dec": 12,
}  # fmt: skip
_DAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("weekday", 0, 7, _DAYS),
)
_SHORTHANDS = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@weekly": "0 0 * * 0", "@monthly": "0 0 1 * *"}
_HOURS_OF_A_DAY = 24
_HORIZON_DAYS = 366 * 9  # the 29th of February comes at least once in eight years


def now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)


class Ticks(Protocol):
    """The moments at which something is due."""

    def after(self, moment: datetime) -> datetime | None:
        """The first one behind `moment`, in UTC; None: never again."""
        ...


@dataclass(frozen=True, slots=True)
class Interval:
    """Every so many seconds, counted from 1970, so that all machines mean the same moments."""

    every_s: float

    def after(self, moment: datetime) -> datetime:
        count = int(moment.timestamp() // self.every_s) + 1
        while (tick := datetime.fromtimestamp(count * self.every_s, UTC)) <= moment:  # by what is lost in rounding
            count += 1
        return tick


@dataclass(frozen=True, slots=True)
class Cron:
    """A parsed expression."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    is_any_day: bool  # the field is "*": only the other one counts
    is_any_weekday: bool
    zone: ZoneInfo

    def after(self, moment: datetime) -> datetime | None:
        local = moment.astimezone(self.zone)
        for offset in range(-1, _HORIZON_DAYS):  # from the day before: skipped times are due later
            day = local.date() + timedelta(days=offset)
            if self._matches(day):
                for tick in self._moments(day):
                    if tick > moment:
                        return tick
        return None

    def _matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        if self.is_any_day or self.is_any_weekday:
            return in_month and in_week
        return in_month or in_week

    def _moments(self, day: date) -> Iterable[datetime]:
        midnight = datetime(day.year, day.month, day.day, tzinfo=self.zone)
        times = (midnight.replace(hour=hour, minute=minute) for hour in self.hours for minute in self.minutes)
        if midnight.utcoffset() == (midnight + timedelta(days=1)).utcoffset():
            return (local.astimezone(UTC) for local in times)
        # The clocks change. What they skip may be due behind what follows it.
        is_for_each_hour = len(self.hours) == _HOURS_OF_A_DAY
        moments: set[datetime] = set()
        for local in times:
            first, second = (local.replace(fold=fold).astimezone(UTC) for fold in (0, 1))
            moments.add(first)
            if is_for_each_hour and second > first:  # it comes twice; of a skipped time, `second` is too early
                moments.add(second)
        return sorted(moments)


def parse_cron(text: str, zone: str) -> Cron:
    fields = _SHORTHANDS.get(text.strip(), text).lower().split()
    if len(fields) != len(_FIELDS):
        raise _wrong(text, f"it has {len(fields)} fields, not 5")
    minutes, hours, days, months, weekdays = (
        _parse_field(text, field, *rule) for field, rule in zip(fields, _FIELDS, strict=True)
    )
    cron = Cron(
        tuple(sorted(minutes)), tuple(sorted(hours)), frozenset(days), frozenset(months),
        frozenset(day % 7 for day in weekdays), fields[2] == "*", fields[4] == "*", parse_zone(zone),
    )  # fmt: skip
    if cron.after(now()) is None:
        raise _wrong(text, "no day matches")
    return cron


def parse_zone(zone: str) -> ZoneInfo:
    try:
        return ZoneInfo(zone)
    except (KeyError, ValueError, OSError) as error:  # OSError: a directory of the database
        raise Validation(
            f"there is no time zone {zone!r}", hint='use a name such as "Europe/Berlin" or "UTC"'
        ) from error


def _parse_field(text: str, field: str, name: str, least: int, most: int, names: dict[str, int]) -> set[int]:
    values: set[int] = set()
    for part in field.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            low, high = least, most - (name == "weekday")
        else:
            low = _number(text, first, name, names)
            high = _number(text, last, name, names) if dash else (most if slash else low)
        width = _number(text, step, name, {}) if slash else 1
        if not (least <= low <= high <= most) or width < 1:
            raise _wrong(text, f"{part!r} is not a {name} from {least} to {most}")
        values.update(range(low, high + 1, width))
    return values


def _number(text: str, value: str, name: str, names: dict[str, int]) -> int:
    if value in names:
        return names[value]
    if not (value.isascii() and value.isdigit() and len(value) < 5):
        raise _wrong(text, f"{value!r} is not a {name}")
    return int(value)


def _wrong(text: str, why: str) -> Validation:
    return Validation(
        f"cron expression {text!r}: {why}", hint='use minute hour day month weekday, such as "0 3 * * 1-5"'
    )
