"""`kedge container`: the table of its commands. A command's module is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

from kedge.cli.session import pass_on, shared_options

COMMANDS = {
    "checkpoint": ("container_checkpoint", "Freeze a container into the store."),
    "restore": ("container_restore", "Bring a container back."),
    "list": ("container_checkpoint", "List what is kept of containers."),
    "inspect": ("container_archives", "Show what is in a checkpoint, or in an archive of any engine."),
    "export": ("container_archives", "Write a checkpoint as an archive of podman, CRI-O, containerd, or an image."),
    "import": ("container_archives", "Save an archive of another engine as a checkpoint."),
    "preflight": ("container_inspect", "Say whether a container can be frozen, and thawed elsewhere."),
    "doctor": ("container_inspect", "Say what this machine can do, and how to add the rest."),
    "logs": ("container_inspect", "Show the log of an attempt, and what it means."),
}


class ContainerCommands(click.Group):
    """Commands by name, loaded when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"kedge.cli.commands.{COMMANDS[cmd_name][0]}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # states the convention of these modules
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()], col_spacing=4)


def _remember(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    """Freeze a running container, its processes and its files of one moment, and bring it back, here or elsewhere.

    Needs root, runc (alone or below containerd, Docker or podman) and CRIU: kedge container doctor tells what is
    missing. Where /etc/kedge/runc.env says where this machine's engines keep containers, that store is the default.
    """
    from kedge.containers.runtime import settings

    settings.adopt_store()
    pass_on(store, namespace, store_key, as_json)


container_command = ContainerCommands(
    "container",
    callback=_remember,
    params=shared_options(),
    help=_remember.__doc__,
    epilog="JSON: kedge container COMMAND --help says what each one answers",
)
