"""`kedge sync`: brings a second store up to date with the first."""

from __future__ import annotations

from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.output import emit
from kedge.terminal.progress import progress

from .copy import (
    REPORT_KEYS,
    WRITTEN,
    Transfer,
    copy_store,
    parse_since,
    print_damaged,
    summary,
    transfer_options,
)

if TYPE_CHECKING:
    from kedge.care.copy import CopyReport


@store_command(
    "sync",
    note=WRITTEN,
    json_keys=f"{REPORT_KEYS}; with --follow, one such object per line and round. Exit code 6 as with copy.",
)
@click.argument("source", metavar="STORE")
@click.argument("target", metavar="STORE")
@click.option("--follow", "-f", is_flag=True, help="Keep copying changes as they happen, until Ctrl-C.")
@transfer_options
def sync_command(session: Session, follow: bool, **options: object) -> None:
    """Bring the second STORE up to date with the first, as copy does; with --follow, keep it up to date.

    The second store always holds a complete, verified beginning of each job's history, so it can take over at any
    moment. Without --delete, it keeps what is deleted from the first one.
    """
    transfer = Transfer(**options)  # type: ignore[arg-type]  # the parameters above, by their names
    if not follow:
        copy_store(session, transfer)
        return
    moment = parse_since(transfer.since)
    with transfer.open(session) as (source, target):
        place = target.place

        def tell(done: CopyReport) -> None:
            if session.as_json:
                emit(asdict(done), indent=None)
            elif done.copied or done.changed or done.deleted or done.damaged:
                click.echo(summary(done, place))
                print_damaged(done)

        with progress(f"copying to {place}", unit="bytes") as report:
            source.follow_to(
                target,
                stop=Event(),
                job=transfer.job,
                since=moment,
                mirror=transfer.mirror,
                changed=tell,
                progress=report,
            )
