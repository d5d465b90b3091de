"""Prints findings: those of `kedge doctor` and of containers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kedge.containers.findings import Finding as Finding
from kedge.terminal.text import pad, pieces, safe, style, terminal_width

from .output import emit

if TYPE_CHECKING:
    from .command import Session

_MARKS = {"ok": ("✓", "good"), "note": ("·", "dim"), "warn": ("!", "warn"), "bad": ("✗", "bad")}
_INDENT = 16

OLD_KEY_IN_USE = "an old data key is still in use: continue with kedge rekey --rewrite"


def judge(subject: str, is_good: bool, what: str, fix: str, otherwise: str = "warn") -> Finding:
    """A finding that is ok, or has `otherwise` as its status and says what to do."""
    return Finding(subject, "ok", what) if is_good else Finding(subject, otherwise, what, fix)


def answer_findings(session: Session, findings: Iterable[Finding], exit_code: int, **more: object) -> None:
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


def _print(finding: Finding) -> None:
    mark, look = _MARKS[finding.status]
    room = (terminal_width() or 10_000) - _INDENT
    first, *more = pieces(safe(finding.what), room)
    click.echo(f"{style(mark, look)} {pad(finding.subject, _INDENT - 2)}{first}")
    if finding.fix:
        lines = list(pieces(safe(finding.fix), room - 2))
        more += [f"→ {lines[0]}", *(f"  {line}" for line in lines[1:])]
    for line in more:
        click.echo(" " * _INDENT + style(line, "dim"))
