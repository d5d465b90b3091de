"""`kedge mcp`: checkpoints for an agent, by the Model Context Protocol."""

from __future__ import annotations

import sys

import click

from kedge.cli.command import Session, store_command
from kedge.version import __version__


@store_command("mcp", json_keys="nothing: it speaks JSON-RPC on stdin and stdout.")
@click.option(
    "--prefix",
    default="agent:",
    show_default=True,
    metavar="TEXT",
    help="Begin the names of the agent's jobs with this.",
)
@click.option(
    "--scope",
    type=click.Choice(["read", "write"]),
    default="write",
    show_default=True,
    help="Let the agent only look, or save and fork too.",
)
def mcp_command(session: Session, prefix: str, scope: str) -> None:
    """Give an agent its own checkpoints: an MCP server on stdin and stdout.

    Its tools are save, list, show, diff, restore and fork. They reach only jobs of one namespace that begin with the
    prefix, which the agent does not see. The server ends when stdin does.
    """
    from kedge.integrations.mcp.protocol import serve
    from kedge.integrations.mcp.tools import Checkpoints

    with session.open(create=scope == "write") as manager:
        serve(
            Checkpoints(manager, prefix, is_read_only=scope == "read"), __version__, sys.stdin.buffer, sys.stdout.buffer
        )
