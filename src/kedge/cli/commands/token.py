"""`kedge token`: who may use the service."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kedge.cli.session import Session, emit, pass_on, shared_options, store_command
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, safe, style

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kedge.server.tokens import Tokens

_FIELDS = "{id, name, scope, namespaces, created_at, expires_at, revoked_at, valid}"


@store_command("create", json_keys=f'{{"token": the text, shown only now, "about": {_FIELDS}}}')
@click.argument("name")
@click.option("--scope", type=click.Choice(["read", "write", "admin"]), required=True, help="What it is good for.")
@click.option("--for", "more", metavar="NAMESPACE", multiple=True, help="A further namespace; repeatable.")
@click.option("--expires", "expires_days", type=float, metavar="DAYS", help="Days it is valid.  [default: for ever]")
def create_command(session: Session, name: str, scope: str, more: tuple[str, ...], expires_days: float | None) -> None:
    """Make a token for --namespace, called NAME in the log of changes, and print it. It cannot be shown again."""
    with _tokens(session, create=True) as tokens:
        made, text = tokens.create(name, scope, (session.namespace, *more), expires_days=expires_days)
    if session.as_json:
        emit({"token": text, "about": made.to_json()})
        return
    click.echo(text)
    click.echo(style(f"{scope} in {', '.join(made.namespaces)}; keep it: it is not shown again", "dim"), err=True)


@store_command("list", json_keys=f'{{"tokens": [{_FIELDS}]}}')
def list_command(session: Session) -> None:
    """List all tokens, without their text."""
    with _tokens(session) as tokens:
        found = tokens.all()
    if session.as_json:
        emit({"tokens": [token.to_json() for token in found]})
    elif found:
        columns = (
            Column("ID", look="id", is_whole=True),
            Column("NAME", is_whole=True),
            Column("SCOPE"),
            Column("NAMESPACES", drop=2),
            Column("CREATED", drop=1),
            Column("STATE", looks={"valid": "good", "revoked": "bad", "expired": "warn"}),
        )
        states = ["valid" if t.is_valid else "revoked" if t.revoked_at else "expired" for t in found]
        rows = [
            (t.id, t.name, str(t.scope), ", ".join(t.namespaces), age(t.created_at), state)
            for t, state in zip(found, states, strict=True)
        ]
        print_table(columns, rows)
    else:
        click.echo("no tokens yet", err=True)


@store_command("revoke", json_keys=_FIELDS)
@click.argument("token", metavar="NAME|ID")
def revoke_command(session: Session, token: str) -> None:
    """Make a token useless, within a second, for every worker."""
    with _tokens(session) as tokens:
        revoked = tokens.revoke(token)
    if session.as_json:
        emit(revoked.to_json())
    else:
        click.echo(f"{safe(revoked.name)} is revoked")


@contextmanager
def _tokens(session: Session, *, create: bool = False) -> Iterator[Tokens]:
    from kedge.errors import Validation
    from kedge.manager import CheckpointManager
    from kedge.server.tokens import ACCESS, Tokens

    if session.url.startswith(("http://", "https://")):
        raise Validation(
            "tokens are not made, shown or revoked over HTTP", hint="run it with --store naming the store itself"
        )
    with CheckpointManager(session.store, namespace=ACCESS, create=create, key=session.key) as manager:
        yield Tokens(manager)


token_command = click.Group(
    "token",
    commands=[create_command, list_command, revoke_command],
    callback=pass_on,
    params=shared_options(),
    help="Make, list and revoke the tokens of the service.",
    epilog="JSON: kedge token COMMAND --help says what each one answers",
)
