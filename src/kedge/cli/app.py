"""`kedge`: the table of commands, and what happens when one fails.

This module is all that `kedge --help` imports besides click; a command's module is imported when it is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from kedge.terminal.text import columns

from .failures import report_failure
from .session import shared_options

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Save and bring back": {
        "save": ("save", "Save JSON, files or a directory tree as a checkpoint."),
        "restore": ("restore", "Bring a state back: to stdout, files or a directory."),
        "export": ("export", "Write checkpoints as plain JSON, .npy and .bin files."),
        "import": ("import_", "Bring checkpoints of an older system into the store."),
    },
    "Look": {
        "jobs": ("find", "List the jobs of the store."),
        "list": ("find", "List the checkpoints of a job."),
        "show": ("show", "Show a checkpoint and its state as a tree."),
        "diff": ("diff", "Show what changed between two checkpoints."),
        "stats": ("care", "Show numbers of the store or of a job."),
        "events": ("events", "Show the log of all changes."),
    },
    "Pipelines": {
        "run": ("run", "Run a pipeline of a Python file, or resume it."),
        "runs": ("runs", "List, show, explain, resume and cancel runs."),
        "approve": ("approve", "Approve or deny what a run waits for."),
        "llm": ("llm", "Show what calls of models cost; forget or export them."),
    },
    "Containers": {
        "container": ("container", "Freeze containers and bring them back."),
        "pod": ("pod", "Keep pods of Kubernetes, let them sleep, wake them."),
        "preempt": ("preempt", "Keep all opted-in containers when the machine must go."),
        "process": ("process", "Run commands that survive being stopped; freeze processes."),
    },
    "Change": {
        "tag": ("change", "Set or remove tags of a checkpoint."),
        "pin": ("change", "Keep a checkpoint from every cleanup."),
        "copy": ("copy", "Copy a job to a new name, or a store to another."),
        "sync": ("copy", "Keep a second store behind a first."),
        "delete": ("change", "Delete checkpoints."),
        "cleanup": ("cleanup", "Delete old checkpoints by a policy."),
    },
    "Service": {
        "serve": ("serve", "Serve the store over HTTP, with a page for people."),
        "token": ("token", "Make, list and revoke tokens of the service."),
    },
    "Care": {
        "check": ("care", "Verify what is stored, and repair the index."),
        "rebuild": ("care", "Rebuild a lost index from the packs."),
        "migrate": ("care", "Make or upgrade the tables of a store."),
        "gc": ("care", "Give back the space of deleted checkpoints."),
        "key": ("key", "Make a key for an encrypted store, or show which."),
        "rekey": ("key", "Change the keys of an encrypted store."),
        "audit": ("audit", "Prove that the log of all changes is whole."),
        "doctor": ("doctor", "Say what this machine and store can do."),
    },
    "Start": {
        "demo": ("demo", "Watch a job being killed and resumed."),
        "completion": ("completion", "Print the completion script of a shell."),
    },
}

MODULES = {name: module for section in SECTIONS.values() for name, (module, _) in section.items()}


class Commands(click.Group):
    """Loads commands when they are called, prints them in sections, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        command = getattr(import_module(f"kedge.cli.commands.{MODULES[cmd_name]}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # states the convention of these modules  # nosec B101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()], col_spacing=4)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], MODULES, n=1, cutoff=0.5)
            what = f"there is no command {args[0]!r}" + (f", did you mean {near[0]}?" if near else "")
            raise click.UsageError(what, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader (`| head`) has seen enough. What is still buffered has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(141)
        return result

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run, report, exit. Exit codes: 0; 2 for wrong usage; those of `kedge.errors`; 130 for Ctrl-C."""
        arguments = list(sys.argv[1:] if args is None else args)
        _ready_streams()
        extra["terminal_width"] = min(columns(), 100) - 2
        if os.environ.get("NO_COLOR"):
            extra["color"] = False
        extra.pop("standalone_mode", None)
        try:
            code = super().main(arguments, "kedge", standalone_mode=False, **extra)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last one to catch anything
            code = report_failure(error, as_json=_wants_json(arguments))
        sys.exit(code if isinstance(code, int) else 0)


def _ready_streams() -> None:
    """Closed streams lead nowhere, so that no file of the store gets their descriptors; no character is an error."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _wants_json(arguments: Sequence[str]) -> bool:
    """Known even when the arguments cannot be parsed."""
    words = list(arguments)
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"kedge {version('kedge')}")
        ctx.exit()


def _remember(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    """Checkpoints of any job: saved durably, verified when loaded.

    The options below may stand before or after the command.
    """
    click.get_current_context().obj = {
        "store": store,
        "namespace": namespace,
        "store_key": store_key,
        "as_json": as_json,
    }


cli = Commands(
    "kedge",
    callback=_remember,
    params=[
        *shared_options(),
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
        ),
    ],
    help=_remember.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="kedge COMMAND --help explains a command. Exit codes: 0 done, 2 wrong usage, 3 invalid input, "
    "4 not found, 5 conflict, 6 corrupted, 7 storage, 8 newer format, 9 out of time, 75 paused, 130 interrupted, "
    "1 anything else.",
)


def main() -> NoReturn:
    cli.main()
