"""What a failure looks like: a message and a hint on stderr, and an exit code from the table in `holdfast.errors`."""

from __future__ import annotations

import os
import sys

import click

from .text import safe, style

USAGE, INTERRUPTED = 2, 130


def report_failure(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong and answer the exit code. With `as_json`: {"code", "message", "hint"} on stderr."""
    code, message, hint, exit_code = describe(error)
    try:
        if as_json:
            import json

            click.echo(json.dumps({"code": code, "message": message, "hint": hint}), err=True)
        elif isinstance(error, click.exceptions.NoArgsIsHelpError):
            click.echo(error.format_message(), err=True)
        elif code == "interrupted":
            click.echo("interrupted", err=True)
        else:
            click.echo(style("error:", "bad") + " " + safe(message), err=True)
            if hint:
                click.echo(style(" hint:", "warn") + " " + safe(hint), err=True)
        if code == "unexpected" and os.environ.get("HOLDFAST_DEBUG"):
            import traceback

            traceback.print_exception(error, file=sys.stderr)
    except OSError:
        pass  # stderr is closed; the exit code still tells
    return exit_code


def describe(error: BaseException) -> tuple[str, str, str, int]:
    """(code, message, hint, exit code) of anything that may end a command."""
    from holdfast.errors import CheckpointError, storage_error

    if isinstance(error, CheckpointError):
        return error.code, error.message, error.hint, error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return "usage", "no command given", "see holdfast --help", USAGE
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "holdfast"
        return "usage", error.format_message(), f"see {where} --help", USAGE
    if isinstance(error, click.ClickException):
        return "usage", error.format_message(), "", USAGE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted", "interrupted", "", INTERRUPTED
    if isinstance(error, OSError) and error.errno and error.filename is not None:
        found = storage_error("use", os.fsdecode(error.filename), error)
        return found.code, found.message, found.hint, found.exit_code
    if isinstance(error, MemoryError):
        return "memory", "not enough memory", "restore a part with --path, or use a larger machine", 1
    return (
        "unexpected",
        f"this should not have happened: {type(error).__name__}: {error}",
        "please report it with the output of the same command under HOLDFAST_DEBUG=1 and of holdfast doctor",
        1,
    )
