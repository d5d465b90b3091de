"""What a log of CRIU means: the line at which it gave up, why, and what to do about it.

CRIU reports a failure as one line among thousands, and the runtime above it only as "criu failed: type NOTIFY errno 0".
`explain` finds that line, and the words for it in causes.toml. The first error that the table knows is the answer:
CRIU goes on complaining after the real cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MAX_LOG_BYTES = 64 << 20
_LOOKED_AT = 1024  # characters of a line that are matched; CRIU's own lines are no longer
MAX_ERRORS = 200


@dataclass(frozen=True, slots=True)
class Cause:
    """Why CRIU failed. `code` is stable and for programs; "unknown" is an error that the table has no words for."""

    code: str
    cause: str
    fix: str
    line: str  # of the log, as it is

    def __str__(self) -> str:
        return f"{self.cause}. {self.fix}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the table."""

    code: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    fix: str


_FAILED = re.compile(r"(?:[Dd]umping|Restoring) FAILED")
# Printed as errors, though nothing came of them, or they tell nothing.
_HARMLESS = re.compile(
    r"This is not fatal|Can't setup RLIMIT_NOFILE for self|cgroupns not supported|Couldn't find ip6?tables version|"
    + _FAILED.pattern
)
_IS_ERROR = re.compile(r"\bError \([^)]{1,200}:\d+\):")


@cache
def entries() -> tuple[Entry, ...]:
    """The table, parsed when it is first needed: nobody pays for it while all goes well."""
    import tomllib

    table = tomllib.loads(Path(__file__).with_name("causes.toml").read_text())
    return tuple(
        Entry(code, tuple(map(re.compile, row["lines"])), row["cause"], row["fix"]) for code, row in table.items()
    )


def explain(text: str) -> Cause | None:
    """Why CRIU failed, from its log or from what the runtime said of it; None when no line tells of an error.

    Lines of level error count; where there are none, any line that the table knows.
    """
    errors: list[str] = []
    others: list[str] = []
    for line in text[:MAX_LOG_BYTES].splitlines():
        line = line[:_LOOKED_AT].strip()
        if _IS_ERROR.search(line):
            errors.append(line)
        elif len(others) < MAX_ERRORS:
            others.append(line)
        if len(errors) >= MAX_ERRORS:
            break
    telling = [line for line in errors if not _HARMLESS.search(line)]
    for line in telling or others:
        for entry in entries():
            for pattern in entry.patterns:
                if match := pattern.search(line):
                    return _cause(entry, match, line)
    if telling:
        said = telling[0].partition("): ")[2] or telling[0]
        return Cause("unknown", f"CRIU stopped with: {said}", "kedge container logs shows the whole log", telling[0])
    return None


def gave_up(text: str) -> bool:
    """Whether CRIU itself says in its log that it failed: one that was killed did not get to that."""
    errors = (line[:_LOOKED_AT] for line in text[:MAX_LOG_BYTES].splitlines() if _IS_ERROR.search(line[:_LOOKED_AT]))
    return any(_FAILED.search(line) or not _HARMLESS.search(line) for line in errors)


def _cause(entry: Entry, match: re.Match[str], line: str) -> Cause:
    captured = {"what": "", "more": "", **{name: text or "" for name, text in match.groupdict().items()}}
    return Cause(entry.code, entry.cause.format(**captured).replace(" ()", "").strip(), entry.fix, line)
