"""`kedge token`: access tokens of the service."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, command_group, store_command
from kedge.terminal.tables import Column
from kedge.terminal.text import age, safe, style

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kedge.server.tokens import Token, Tokens

_FIELDS = "{id, name, scope, namespaces, created_at, expires_at, revoked_at, valid}"


def _state(token: Token) -> str:
    return "valid" if token.is_valid else "revoked" if token.revoked_at else "expired"


_COLUMNS: tuple[Column[Token], ...] = (
    Column("ID", lambda token: token.id, look="id", is_whole=True),
    Column("NAME", lambda token: token.name, is_whole=True),
    Column("SCOPE", lambda token: str(token.scope)),
    Column("NAMESPACES", lambda token: ", ".join(token.namespaces), drop=2),
    Column("CREATED", lambda token: age(token.created_at), drop=1),
    Column("EXPIRES", lambda token: f"{token.expires_at:%Y-%m-%d %H:%M} UTC" if token.expires_at else "never"),
    Column("STATE", _state, looks={"valid": "good", "revoked": "bad", "expired": "warn"}),
)


@store_command("create", json_keys=f'{{"token": the text, shown only now, "about": {_FIELDS}}}')
@click.argument("name")
@click.option("--scope", type=click.Choice(["read", "write", "admin"]), required=True, help="What the token allows.")
@click.option(
    "--for", "more", metavar="NAMESPACE", multiple=True, help="A further namespace it is valid for; repeatable."
)
@click.option(
    "--expires", "expires_days", type=float, metavar="DAYS", help="How many days it is valid.  [default: forever]"
)
def create_command(session: Session, name: str, scope: str, more: tuple[str, ...], expires_days: float | None) -> None:
    """Create a token and print it. It cannot be shown again.

    It is valid for --namespace. In the log of changes, NAME is the actor.
    """
    with _tokens(session, create=True) as tokens:
        token, text = tokens.create(name, scope, (session.namespace, *more), expires_days=expires_days)
    session.answer({"token": text, "about": token.to_json()}, text)
    if not session.as_json:
        note = f"scope {scope} in {', '.join(token.namespaces)}. Save the token now: it is not shown again."
        click.echo(style(note, "dim"), err=True)


@store_command("list", json_keys=f'{{"tokens": [{_FIELDS}]}}')
def list_command(session: Session) -> None:
    """List all tokens, without their text."""
    with _tokens(session) as tokens:
        session.answer_list("tokens", tokens.all(), _COLUMNS, lambda token: token.to_json(), empty="no tokens yet")


@store_command("revoke", json_keys=_FIELDS)
@click.argument("token", metavar="NAME|ID")
def revoke_command(session: Session, token: str) -> None:
    """Revoke a token. Every worker refuses it within a second."""
    with _tokens(session) as tokens:
        revoked = tokens.revoke(token)
    session.answer(revoked.to_json(), f"{safe(revoked.name)} is revoked")


@contextmanager
def _tokens(session: Session, *, create: bool = False) -> Iterator[Tokens]:
    from kedge.errors import Validation
    from kedge.manager import CheckpointManager
    from kedge.server.tokens import ACCESS, Tokens

    if session.url.startswith(("http://", "https://")):
        raise Validation("tokens cannot be managed over HTTP", hint="give --store the store itself")
    with CheckpointManager(session.store, namespace=ACCESS, create=create, key=session.key) as manager:
        yield Tokens(manager)


token_command = command_group(
    "token",
    [create_command, list_command, revoke_command],
    text="Create, list and revoke the access tokens of the service.",
)
