"""`holdfast run`: a pipeline from a file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .pairs import parse_json_pairs
from .session import Session, emit, store_command

if TYPE_CHECKING:
    from holdfast.pipeline import Pipeline


@store_command("run", json_keys='{"run": …, "status": "completed", "result": what the pipeline returned}')
@click.argument("target", metavar="FILE.py:PIPELINE")
@click.option("--id", "key", metavar="KEY", help="The key of the run.  [default: made of the name and the arguments]")
@click.option("--arg", "args", metavar="NAME=JSON", multiple=True, help="An argument of the pipeline; repeatable.")
@click.pass_context
def run_command(ctx: click.Context, session: Session, target: str, key: str | None, args: tuple[str, ...]) -> None:
    """Run a function decorated with @holdfast.pipeline, or resume it under the same key.

    SIGTERM and Ctrl-C pause it: exit code 75, and the command to resume it on stderr.
    """
    from holdfast.errors import CheckpointError

    session.export_key()
    pipeline = load_pipeline(target)
    arguments = parse_json_pairs("--arg", args)
    with session.open(create=True) as manager:
        key = key or pipeline.key_of(**arguments)
        try:
            result = pipeline.at(key, store=manager, progress=not session.as_json)(**arguments)
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001 - the pipeline's own: shown as Python shows it
            traceback.print_exception(error)
            ctx.exit(1)
    if session.as_json:
        from holdfast.jsonview import to_json_view

        emit({"run": key, "status": "completed", "result": to_json_view(result)})
    else:
        click.echo(f"{key} is completed")


def load_pipeline(target: str) -> Pipeline[..., Any]:
    """The pipeline that FILE.py:NAME names. The file is imported under its own name, so that workers find it too."""
    from holdfast.errors import NotFound, Validation
    from holdfast.pipeline import Pipeline

    file, colon, name = target.rpartition(":")
    path = Path(file).absolute()
    if not colon or not name.isidentifier():
        raise Validation(f"{target!r} names no pipeline", hint="use FILE.py:PIPELINE")
    if not path.is_file():
        raise NotFound(f"there is no file {file}", hint="use FILE.py:PIPELINE")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Validation(f"{file} is no Python file", hint="use FILE.py:PIPELINE")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, Pipeline):
        raise NotFound(f"{file} has no pipeline {name}", hint="decorate a function with @holdfast.pipeline")
    return found
