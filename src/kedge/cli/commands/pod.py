"""`kedge pod`: the table of its commands. A command's module is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

from kedge.cli.session import pass_on, shared_options

COMMANDS = {
    "list": "List the containers of the pods of this node, and what sleeps.",
    "checkpoint": "Keep what runs in a pod; it runs on.",
    "hibernate": "Keep what runs in a pod, end it, and hold it back until it is woken.",
    "wake": "Let what hibernates come back at its next start.",
    "guard": "Renew the claims of what lives on this node, for as long as this runs.",
}


class PodCommands(click.Group):
    """Commands by name, loaded when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module("kedge.cli.commands.pods"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # states the convention of these modules
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()), col_spacing=4)


def _remember(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    """Pods of Kubernetes, on their node: keep them, let them sleep, wake them.

    Pods are found through the engine's socket (CRI). What opted in is kept in the store of its engine, unless --store
    says another one. Needs root.
    """
    pass_on(store, namespace, store_key, as_json)


pod_command = PodCommands(
    "pod",
    callback=_remember,
    params=shared_options(),
    help=_remember.__doc__,
    epilog="JSON: kedge pod COMMAND --help says what each one answers",
)
