"""What a doctor finds: one way to tell it, for `kedge doctor` and the checks of containers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from kedge.terminal.text import pad, pieces, safe, style, terminal_width

from .output import emit

if TYPE_CHECKING:
    from kedge.containers import doctor

    from .command import Session

_MARKS = {"ok": ("✓", "good"), "note": ("·", "dim"), "warn": ("!", "warn"), "bad": ("✗", "bad")}
_INDENT = 16

OLD_KEY_IN_USE = "an old data key is still in use: continue with kedge rekey --rewrite"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `status` is ok, note, warn or bad; `fix` says what to do, if anything."""

    subject: str
    status: str
    what: str
    fix: str = ""


def judge(subject: str, is_good: bool, what: str, fix: str, otherwise: str = "warn") -> Finding:
    """ok, or what to do about it."""
    return Finding(subject, "ok", what) if is_good else Finding(subject, otherwise, what, fix)


def answer_findings(
    session: Session, findings: Iterable[Finding | doctor.Finding], exit_code: int, **more: object
) -> None:
    """Print findings and what else the JSON document says; end with `exit_code` when one is bad."""
    findings = list(findings)
    is_ok = all(finding.status != "bad" for finding in findings)
    if session.as_json:
        emit({"ok": is_ok, **more, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            _print(finding)
    if not is_ok:
        click.get_current_context().exit(exit_code)


def _print(finding: Finding | doctor.Finding) -> None:
    mark, look = _MARKS[finding.status]
    room = (terminal_width() or 10_000) - _INDENT
    first, *more = pieces(safe(finding.what), room)
    click.echo(f"{style(mark, look)} {pad(finding.subject, _INDENT - 2)}{first}")
    if finding.fix:
        lines = list(pieces(safe(finding.fix), room - 2))
        more += [f"→ {lines[0]}", *(f"  {line}" for line in lines[1:])]
    for line in more:
        click.echo(" " * _INDENT + style(line, "dim"))
