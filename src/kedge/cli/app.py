"""`kedge`: the table of commands, and what happens when one fails.

`kedge --help` imports this module, what it imports here, and click; a command's module is imported when it is called.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

import click

from kedge.terminal.text import columns

from .command import remember, shared_options
from .failures import report_failure

SECTIONS = {
    "Save and restore": {
        "save": "Save JSON, files or a directory tree as a checkpoint.",
        "restore": "Restore a state to stdout, a file or a directory.",
        "export": "Write checkpoints as plain JSON, .npy and .bin files.",
        "import": "Import checkpoints from an older system.",
    },
    "Inspect": {
        "jobs": "List the jobs of the store.",
        "list": "List the checkpoints of a job.",
        "show": "Show a checkpoint and its state as a tree.",
        "diff": "Show what changed between two checkpoints.",
        "plot": "Draw numbers of a job's metadata over its checkpoints.",
        "stats": "Show statistics of the store or of a job.",
        "events": "Show the log of all changes.",
    },
    "Pipelines": {
        "run": "Run or resume a pipeline from a Python file.",
        "runs": "List, show, explain, resume, cancel and delete runs.",
        "worker": "Execute the runs in queues.",
        "queue": "List the runs in a queue, and retry dead ones.",
        "schedule": "Submit runs to a queue on a schedule.",
        "approve": "Approve or deny what a run is waiting for.",
        "llm": "Show what LLM calls cost; clear or export cached responses; serve the cache as a proxy.",
        "mcp": "Give an agent its own checkpoints: an MCP server.",
    },
    "Containers": {
        "container": "Checkpoint and restore containers.",
        "pod": "Checkpoint, hibernate and wake Kubernetes pods.",
        "preempt": "Checkpoint containers before the machine is taken away.",
        "process": "Checkpoint and restore processes without a container.",
    },
    "Change": {
        "tag": "Set or remove tags of a checkpoint.",
        "pin": "Protect a checkpoint from deletion.",
        "copy": "Copy a job to a new name, or checkpoints to another store.",
        "sync": "Bring a second store up to date with the first.",
        "delete": "Delete checkpoints.",
        "cleanup": "Delete old checkpoints according to a policy.",
    },
    "Service": {
        "serve": "Serve the store over HTTP, with a web page.",
        "token": "Create, list and revoke access tokens of the service.",  # nosec B105 # no password: a help text
    },
    "Maintenance": {
        "check": "Verify every checkpoint, and repair the index.",
        "rebuild": "Rebuild a lost index from the packs.",
        "migrate": "Create or upgrade the tables of a store.",
        "gc": "Free the space of deleted checkpoints.",
        "key": "Create a key for an encrypted store, or show its keys.",
        "rekey": "Change the keys of an encrypted store.",
        "audit": "Verify that the log of all changes is complete.",
        "doctor": "Test this machine and this store.",
    },
    "Start": {
        "demo": "Watch a job being killed and resumed.",
        "completion": "Print the completion script for a shell.",
    },
}


NAMES = [name for commands in SECTIONS.values() for name in commands]


class App(click.Group):
    """The whole program. Its commands are modules of `kedge.cli.commands`, each imported when it is called.

    The module of a command has its name (with an underscore behind a word of Python: `import_`) and defines
    `<name>_command`. Errors become messages and exit codes.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return NAMES

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NAMES:
            return None
        module = import_module(f"kedge.cli.commands.{cmd_name}{'_' if iskeyword(cmd_name) else ''}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # states the convention of these modules  # nosec B101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()), col_spacing=4)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from kedge.errors import did_you_mean

            near = did_you_mean(args[0], NAMES)
            raise click.UsageError(f"there is no command {args[0]!r}" + (near and f", {near}"), ctx) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`kedge help CMD…` is `kedge CMD… --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
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


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        click.echo(f"kedge {version('kedge')}")
        ctx.exit()


_VERSION = click.Option(
    ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)

cli = App(
    "kedge",
    callback=remember,
    params=[*shared_options(), _VERSION],
    help="Save the state of any job durably, and verify it when it is restored.\n\n"
    "These options can be given before or after the command.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="kedge help COMMAND explains a command. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 invalid input, "
    "4 not found, 5 conflict, 6 corrupted, 7 storage, 8 newer format, 9 out of time, 10 not allowed, 75 paused, "
    "130 interrupted, 141 nobody reads the output, 143 ended by SIGTERM.",
)


def main() -> NoReturn:
    atexit.register(gc.freeze)  # looking for garbage at the end takes a seventh of a short command; see load_program
    cli.main()
