"""`kedge events`: the append-only log of all changes, by every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, store_command
from kedge.cli.output import emit
from kedge.terminal.text import clip, exactly, safe, style, terminal_width

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.model import Event

_PAGE = 1000
_WAIT_S = 5.0


@store_command(
    "events",
    json_keys='{"events": [{id, at, actor, action, job, checkpoint, detail, chain}]}; with --follow, one event '
    "object per line.",
)
@click.option("--after", type=Number(0), metavar="N", help="Only events with a higher number.")
@click.option("--limit", type=Number(1), metavar="N", help="Show at most N.  [default: the newest 100]")
@click.option("--follow", "-f", is_flag=True, help="Keep waiting for new events, until Ctrl-C.")
def events_command(session: Session, after: int | None, limit: int | None, follow: bool) -> None:
    """Show who saved, deleted, tagged, pinned or cleaned up what, and when.

    With --after, show the events that follow that number, otherwise the newest ones.
    """
    with session.open() as manager:
        events = manager.events(limit=limit or 100, newest=True) if after is None else _after(manager, after, limit)
        if session.as_json and not follow:
            emit({"events": [event.to_json() for event in events]})
            return
        for event in events:
            _print(session, event)
        position = events[-1].id if events else after or 0
        while follow:
            for event in manager.events(position, _PAGE, wait_s=_WAIT_S):
                _print(session, event)
                position = event.id


def _after(manager: CheckpointManager, position: int, limit: int | None) -> list[Event]:
    events: list[Event] = []
    while limit is None or len(events) < limit:
        page = manager.events(position, _PAGE if limit is None else min(limit - len(events), _PAGE))
        if not page:
            break
        events += page
        position = page[-1].id
    return events


def _print(session: Session, event: Event) -> None:
    if session.as_json:
        emit(event.to_json(), indent=None)
        return
    what = " ".join(filter(None, (event.job, event.checkpoint and f"· {event.checkpoint}")))
    detail = "" if event.detail in ("", "{}") else event.detail
    line = f"{event.id:>6}  {exactly(event.at)[:-4]}  {event.action:<9}  "
    width = terminal_width()
    rest = safe(f"{what}  {detail}".strip())
    if width is None:
        click.echo(f"{line}{rest}  {safe(event.actor)}")
    else:
        click.echo(style(line, "dim") + clip(rest, max(width - len(line), 10)))
