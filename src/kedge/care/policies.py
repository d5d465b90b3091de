"""Retention policies: the rules, and how users write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from kedge.errors import Validation
from kedge.model import CheckpointLevel, parse_choice, parse_name, parse_tags

_MAX_COUNT = 1_000_000_000

_DURATION = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_UNITS_S = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}

PERIODS: Mapping[str, Callable[[datetime], Hashable]] = {
    "hourly": lambda at: (at.year, at.month, at.day, at.hour),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: at.isocalendar()[:2],
    "monthly": lambda at: (at.year, at.month),
}


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Rules for what to keep: a checkpoint stays if any rule keeps it. A policy that keeps nothing is refused.

    keep_last            the newest n of a job
    keep_last_per_level  the newest n of each named level: {"stage": 5, "step": 20}
    keep_within          those at most this much older than the newest: a timedelta, "7d", "36h", "1d12h"
    hourly … monthly     the newest of each of the last n hours, days, ISO weeks, months with checkpoints
    keep_tags            those with any of these tags: ["release", "env=prod"], {"release": None, "env": "prod"}
    min_per_level        a floor below all other rules: the newest n of each named level stay
    """

    keep_last: int | None = None
    keep_last_per_level: Mapping[CheckpointLevel, int] | Mapping[str, int] | None = None
    keep_within: timedelta | str | None = None
    hourly: int | None = None
    daily: int | None = None
    weekly: int | None = None
    monthly: int | None = None
    keep_tags: Mapping[str, str | None] | Sequence[str] = ()
    min_per_level: Mapping[CheckpointLevel, int] | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", *PERIODS):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        for name in ("keep_last_per_level", "min_per_level"):
            object.__setattr__(self, name, _parse_levels(name, getattr(self, name)))
        within = None if self.keep_within is None else parse_duration(self.keep_within)
        object.__setattr__(self, "keep_within", within)
        object.__setattr__(self, "keep_tags", _parse_keep_tags(self.keep_tags))
        if not any(getattr(self, field.name) for field in fields(self)):
            raise Validation("the policy keeps nothing", hint="give at least one rule, such as keep_last=10")

    def to_json(self) -> str:
        """Return the policy as JSON text: only the rules it has, durations as text."""
        rules = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.keep_within, timedelta):
            rules["keep_within"] = format_duration(self.keep_within)
        return json.dumps({name: rule for name, rule in rules.items() if rule}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RetentionPolicy:
        """Parse the text of `to_json`. Raises Validation for anything else, including unknown rules."""
        try:
            rules = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise Validation(
                f"the retention policy is not JSON: {error}", hint='write it like {"keep_last": 10}'
            ) from error
        if not isinstance(rules, dict):
            raise Validation("a retention policy is a JSON object", hint='write it like {"keep_last": 10}')
        known = [field.name for field in fields(cls)]
        if unknown := sorted(rules.keys() - set(known)):
            raise Validation(f"unknown retention rule {unknown[0]!r}", hint=f"use some of: {', '.join(known)}")
        return cls(**rules)


def _check_count(name: str, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_COUNT:
        raise Validation(
            f"{name} must be a whole number of at least 1 (got {count!r})", hint="correct it, or omit the rule"
        )
    return count


def _parse_levels(name: str, counts: object) -> dict[CheckpointLevel, int]:
    if counts is None:
        return {}
    if not isinstance(counts, Mapping):
        raise Validation(
            f"{name} must be a mapping (got {counts!r})", hint='map levels to numbers, such as {"stage": 5}'
        )
    return {
        parse_choice(CheckpointLevel, level): _check_count(f"{name}[{level!r}]", count)
        for level, count in counts.items()
    }


def _parse_keep_tags(tags: object) -> tuple[str, ...]:
    """Return tags as "name" (with any value) or "name=value"; tag names cannot contain "="."""
    if isinstance(tags, Mapping):
        tags = [name if value is None else f"{name}={value}" for name, value in tags.items()]
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(isinstance(tag, str) for tag in tags):
        raise Validation(f"keep_tags={tags!r}", hint='give names or names with values: ["release", "env=prod"]')
    for tag in tags:
        name, _, value = tag.partition("=")
        parse_tags({parse_name("tag", name): value})
    return tuple(dict.fromkeys(tags))


def parse_duration(duration: timedelta | str) -> timedelta:
    """Parse a timedelta of whole seconds, or numbers with units: "90m", "36h", "7d", "2w", "1d12h"."""
    if isinstance(duration, str):
        match = _DURATION.fullmatch(duration.strip())
        amounts = match.groups(default="0") if match else ()
        try:
            seconds = sum(int(n) * unit_s for n, unit_s in zip(amounts, _UNITS_S.values(), strict=False))
            parsed = timedelta(seconds=seconds)
        except (OverflowError, ValueError):
            parsed = timedelta()
    else:
        parsed = duration
    if not isinstance(parsed, timedelta) or parsed.microseconds or parsed <= timedelta():
        raise Validation(
            f"{str(duration)[:40]!r} is not a duration", hint="use whole seconds or more: 90m, 36h, 7d, 2w, 1d12h"
        )
    return parsed


def format_duration(duration: timedelta) -> str:
    """Return text for `parse_duration`, in the largest of d, h, m, s that needs no fraction."""
    seconds = duration.days * 86_400 + duration.seconds
    unit = next(unit for unit in "dhms" if seconds % _UNITS_S[unit] == 0)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def rules_of(policy: str | None) -> dict[str, str]:
    """Return the rules of a policy stored as JSON, as texts."""
    rules: dict[str, object] = json.loads(policy) if policy else {}
    return {name: _text(rule) for name, rule in rules.items()}


def _text(rule: object) -> str:
    if isinstance(rule, dict):
        return ", ".join(f"{level}={count}" for level, count in rule.items())
    return ", ".join(map(str, rule)) if isinstance(rule, list) else str(rule)


def policy_in_words(policy: str | None) -> str:
    """Return the rules of a policy stored as JSON in words: "keep last 5, daily 3"."""
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in rules_of(policy).items())
