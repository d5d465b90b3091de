"""Errors of commands: a message and a hint on stderr, and an exit code from the table in `kedge.errors`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import click

from kedge.terminal.text import columns, labelled

USAGE, INTERRUPTED = 2, 130

# What errors tell Python programmers, and how commands say it.
IN_OUR_WORDS = {
    "choose another destination, or pass overwrite=True": "choose another destination, or --force to replace it",
    "or pass overwrite=True to replace what has the same name": "or --force to replace what has the same name",
    "exclude it, or leave out all such files with skip_special=True": "leave it out with --exclude NAME",
    "exclude it, or accept that with allow_changing=True": "or leave it out with --exclude NAME",
    "use kedge.File for a single file": "use --file for a single file",
    "use kedge.Tree for a directory": "use --tree for a directory",
    "or delete pinned checkpoints too (even_pinned=True)": "or delete pinned checkpoints too (--even-pinned)",
    "put details into metadata=": "put details into --metadata",
    "larger data belongs into metadata=": "larger data belongs into --metadata",
    "convert it with str(), or put it into metadata=": "shorten it, or put it into --metadata",
    "for another 0 s": "for less than a second",
    "every_s": "--every",
    "jitter_s": "--jitter",
    "use another key=": "use another key (--id)",
    "key=, --key, $KEDGE_KEY": "--key, $KEDGE_KEY",
    "give key=, or make one": "give --key, or make one",
    "open it with create=True": "kedge migrate makes it, and so does the first save",
}


def report_failure(error: BaseException, *, as_json: bool) -> int:
    """Print what went wrong; return the exit code. With `as_json`: {"code", "message", "hint"} on stderr."""
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
            _print("error:", "bad", message)
            if hint:
                _print(" hint:", "warn", hint)
        if code == "unexpected" and os.environ.get("KEDGE_DEBUG"):
            import traceback

            traceback.print_exception(error, file=sys.stderr)
    except OSError:
        pass  # stderr is closed; the exit code still tells
    return exit_code


def _print(label: str, look: str, text: str) -> None:
    for line in labelled(label, look, text, columns() if sys.stderr.isatty() else None):
        click.echo(line, err=True)


def in_our_words(text: str) -> str:
    for theirs, ours in IN_OUR_WORDS.items():
        text = text.replace(theirs, ours)
    return text


def _near(option: str, others: Iterable[str]) -> list[str]:
    """Of the options that click takes for similar, the one that may be meant: its dashes are no likeness."""
    from kedge.errors import did_you_mean

    return [other for other in others if did_you_mean(option.strip("-"), [other.strip("-")])][:1]


def describe(error: BaseException) -> tuple[str, str, str, int]:
    """(code, message, hint, exit code) of anything that may end a command."""
    from kedge.errors import CheckpointError, storage_error

    if isinstance(error, CheckpointError):
        return error.code, in_our_words(error.message), in_our_words(error.hint), error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return "usage", "no command given", "see kedge --help", USAGE
    if isinstance(error, click.UsageError):
        if isinstance(error, click.NoSuchOption):
            near = _near(error.option_name, error.possibilities or ())
            error = click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)
        where = error.ctx.command_path if error.ctx else "kedge"
        return "usage", " ".join(error.format_message().split()), f"see {where} --help", USAGE
    if isinstance(error, click.ClickException):
        return "usage", error.format_message(), "", USAGE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted", "interrupted", "", INTERRUPTED
    if isinstance(error, OSError) and error.errno and error.filename is not None:
        return describe(storage_error("use", os.fsdecode(error.filename), error))
    if isinstance(error, MemoryError):
        return "memory", "not enough memory", "restore a part with --path, or use a machine with more memory", 1
    return (
        "unexpected",
        f"this should not have happened: {type(error).__name__}: {error}",
        "please report it with the output of the same command under KEDGE_DEBUG=1 and of kedge doctor",
        1,
    )
