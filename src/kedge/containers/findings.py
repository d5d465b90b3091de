"""What a check finds: one way to say it, for `kedge doctor` and the checks of containers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `status` is ok, note, warn or bad; `fix` says what to do, if anything."""

    subject: str
    status: str
    what: str
    fix: str = ""
