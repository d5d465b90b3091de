"""`kedge events`: the append-only log of all changes, by every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kedge.cli.session import Number, Session, emit, store_command
from kedge.terminal.text import clip, exactly, safe, style, terminal_width

if TYPE_CHECKING:
    from kedge.model import Event

_PAGE = 1000
_WAIT_S = 5.0


@store_command(
    "events",
    json_keys='{"events": [{id, at, actor, action, job, checkpoint, detail, chain}]}; with --follow, one event '
    "object per line.",
)
@click.option("--after", type=Number(0), metavar="N", help="Only events with a higher number.")
@click.option("--limit", type=Number(1), metavar="N", help="At most so many.  [default: the newest 100]")
@click.option("--follow", "-f", is_flag=True, help="Wait for new ones, until Ctrl-C.")
def events_command(session: Session, after: int | None, limit: int | None, follow: bool) -> None:
    """Show who saved, deleted, tagged, pinned or cleaned up what, and when.

    With --after, the events that follow that number; without, the newest ones.
    """
    with session.open() as manager:
        shown: list[Event] = [] if after is not None else manager.events(limit=limit or 100, newest=True)
        position = shown[-1].id if shown else after or 0
        while after is not None and (limit is None or len(shown) < limit):
            page = manager.events(position, _PAGE if limit is None else min(limit - len(shown), _PAGE))
            if not page:
                break
            shown += page
            position = page[-1].id
        if session.as_json and not follow:
            emit({"events": [event.to_json() for event in shown]})
            return
        for event in shown:
            _print(session, event)
        while follow:
            for event in manager.events(position, _PAGE, wait_s=_WAIT_S):
                _print(session, event)
                position = event.id


def _print(session: Session, event: Event) -> None:
    if session.as_json:
        emit(event.to_json(), indent=None)
        return
    what = " ".join(filter(None, (event.job, event.checkpoint and f"· {event.checkpoint}")))
    detail = "" if event.detail in ("", "{}") else event.detail
    line = f"{event.id:>6}  {exactly(event.at)[:-4]}  {event.action:<9}  "
    width = terminal_width()
    rest = safe(f"{what}  {detail}".strip())
    who = safe(event.actor)
    if width is None:
        click.echo(f"{line}{rest}  {who}")
        return
    click.echo(style(line, "dim") + clip(rest, max(width - len(line), 10)))
