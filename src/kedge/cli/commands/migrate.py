"""`kedge migrate`: creates or upgrades the tables of a store."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.errors import Validation
from kedge.terminal.text import safe


@store_command("migrate", json_keys='{"store": …, "from": format before, 0 when there was none, "to": format now}')
@click.option("--shared-group", metavar="GROUP", help="Share a new store with the members of this group.")
def migrate_command(session: Session, shared_group: str | None) -> None:
    """Create the store's tables, or upgrade them to this version of Kedge. Opening a store does the same.

    An upgrade is one transaction; other processes wait. A store written by a newer Kedge is refused. Use this for
    databases in which ordinary users may not create tables: run it once as a user who may.

    Only the user who creates a store can read its files. With --shared-group, a new store is shared by a group: its
    members can read and write all of it.
    """
    from kedge.urls import migrate, share_with, without_secrets

    if session.url.startswith(("http://", "https://")):
        raise Validation(
            "a service upgrades its own store when it starts",
            hint="upgrade Kedge where the service runs and restart it, or give --store the store itself",
        )
    if shared_group is not None:
        share_with(session.url, shared_group)
    before, after = migrate(session.url)
    place = without_secrets(session.url)
    text = f" has format {after} already" if before == after else f": format {before or 'none'} → {after}"
    session.answer({"store": place, "from": before, "to": after}, f"{safe(place)}{text}")
