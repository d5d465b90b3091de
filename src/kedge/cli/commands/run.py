"""`kedge run`: a pipeline from a file."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.output import emit
from kedge.cli.pairs import parse_json_pairs

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.pipeline import Pipeline

arg_option = click.option(
    "--arg",
    "args",
    metavar="NAME=JSON",
    multiple=True,
    help="Pass an argument to the pipeline; a bare word is text. Repeatable.",
)


@store_command("run", json_keys='{"run": …, "status": "completed", "result": what the pipeline returned}')
@click.argument("target", metavar="FILE.py:PIPELINE")
@click.option("--id", "key", metavar="KEY", help="The key of the run.  [default: from the name and the arguments]")
@arg_option
@click.pass_context
def run_command(ctx: click.Context, session: Session, target: str, key: str | None, args: tuple[str, ...]) -> None:
    """Run a function decorated with @kedge.pipeline, or resume it under the same key.

    The store is --store, else the one the decorator names, else $KEDGE_STORE or ./.kedge.

    SIGTERM and Ctrl-C pause it: it exits with 75 and prints the command to resume it on stderr.
    """
    from kedge.pipeline.inbox import parse_run_key

    session.export_key()
    with errors_as_python_shows_them(ctx):
        pipeline = load_pipeline(target)
    arguments = parse_json_pairs("--arg", args)
    pipeline.check_call((), arguments)
    key = pipeline.key_of(**arguments) if key is None else parse_run_key(key)
    with store_of(pipeline, session) as manager, errors_as_python_shows_them(ctx):
        result: object = pipeline.at(key, store=manager, progress=not session.as_json)(**arguments)
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
    if session.as_json:
        from kedge.codec.json_view import to_json_view

        emit({"run": key, "status": "completed", "result": to_json_view(result)})
    else:
        click.echo(f"{key} is completed")


@contextmanager
def errors_as_python_shows_them(ctx: click.Context) -> Iterator[None]:
    """Errors of the user's own code end the command with their traceback, without frames of Kedge's code."""
    from kedge.errors import CheckpointError

    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the code of others raises
        shown = traceback.TracebackException.from_exception(error)
        if not os.environ.get("KEDGE_DEBUG"):
            _leave_out_own_frames(shown)
        lines = shown.format() if shown.stack else shown.format_exception_only()
        click.echo("".join(lines), nl=False, err=True)
        ctx.exit(1)


def _leave_out_own_frames(shown: traceback.TracebackException) -> None:
    ours = (str(Path(__file__).parents[2]), "<frozen importlib")
    theirs = [frame for frame in shown.stack if not frame.filename.startswith(ours)]
    shown.stack = traceback.StackSummary.from_list(theirs)
    for before in (shown.__cause__, shown.__context__):
        if before is not None:
            _leave_out_own_frames(before)


def store_of(pipeline: Pipeline[..., object], session: Session) -> AbstractContextManager[CheckpointManager]:
    """The store that the pipeline would use when it is called in Python, unless --store says another."""
    from kedge.manager import CheckpointManager

    declared = pipeline.store
    if session.store is not None or declared is None:
        return session.open(create=True)
    if isinstance(declared, CheckpointManager):
        return nullcontext(declared)
    return session._replace(store=os.fspath(declared)).open(create=True)


def load_pipeline(target: str) -> Pipeline[..., object]:
    """The pipeline that FILE.py:NAME names."""
    from kedge.errors import NotFound, Validation
    from kedge.pipeline import Pipeline

    file, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise Validation(f"{target!r} does not name a pipeline", hint="use FILE.py:PIPELINE")
    pipeline = getattr(load_program(file), name, None)
    if not isinstance(pipeline, Pipeline):
        raise NotFound(f"{file} has no pipeline {name}", hint="decorate a function with @kedge.pipeline")
    return pipeline


def load_program(file: str) -> ModuleType:
    """A file as a module, imported under its own name, so that workers find it too."""
    from kedge.errors import NotFound, Validation

    path = Path(file).absolute()
    if not path.is_file():
        raise NotFound(f"there is no file {file}", hint="use a Python file, FILE.py")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) != str(path):
        raise Validation(f"{file} has the name of a module that is already imported", hint="rename the file")
    atexit.unregister(gc.freeze)  # files that it leaves open are written by the last look for garbage
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Validation(f"{file} is not a Python file", hint="use a Python file, FILE.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
