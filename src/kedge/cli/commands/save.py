"""`kedge save`: JSON, files or a directory tree become a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.command import LEVELS, Session, store_command
from kedge.cli.names import JobName, Ref
from kedge.cli.pairs import parse_json_pairs, parse_pairs
from kedge.cli.placement import read_bytes
from kedge.errors import Validation
from kedge.terminal.progress import progress, watched
from kedge.terminal.text import size, style

if TYPE_CHECKING:
    from kedge.files import File, Tree


@store_command("save", json_keys="the checkpoint, as in list.")
@click.argument("job", type=JobName())
@click.argument("step")
@click.argument("file", required=False, type=click.Path(allow_dash=True))
@click.option("--file", "files", metavar="[NAME=]PATH", multiple=True, help="Store a file under its name; repeatable.")
@click.option("--tree", "trees", metavar="[NAME=]DIR", multiple=True, help="Store a directory tree; repeatable.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Exclude matching paths from trees; repeatable.")
@click.option("--level", type=LEVELS, default="step", show_default=True, help="The level of the checkpoint.")
@click.option("--parent", metavar="ID", type=Ref(), help="The checkpoint it was derived from.")
@click.option("--tag", "tags", metavar="K=V", multiple=True, help="Set a tag; repeatable.")
@click.option("--metadata", metavar="K=JSON", multiple=True, help="Set metadata; a bare word is text. Repeatable.")
@click.option("--pin", is_flag=True, help="Protect it from deletion.")
@click.option(
    "--idempotency-key", metavar="TEXT", help="Saving again with the same key saves nothing and prints the first ID."
)
def save_command(
    session: Session,
    job: str,
    step: str,
    file: str | None,
    files: tuple[str, ...],
    trees: tuple[str, ...],
    exclude: tuple[str, ...],
    parent: str | None,
    tags: tuple[str, ...],
    metadata: tuple[str, ...],
    **options: Any,
) -> None:
    """Save the JSON in FILE, or on stdin, or the tensors of a .safetensors file, as the next checkpoint of JOB.

    Prints the checkpoint's ID once it is durable: from then on it survives kill -9 and power loss. STEP may be any
    text.

    With --file and --tree, the state is an object that contains those files and trees, added to the object in FILE if
    there is one. Files that have not changed since the last checkpoint of JOB are not read again.
    """
    options["tags"] = parse_pairs("--tag", tags)
    options["metadata"] = parse_json_pairs("--metadata", metadata)
    state = _state(file, files, trees, exclude)
    with session.open(create=True) as manager:
        if parent is not None:
            options["parent"] = manager.find(parent).id
        with _watching(state):
            saved = manager.get(manager.save(job, step, state, **options))
    session.answer(saved.to_json(), saved.id)
    if sys.stderr.isatty() and not session.as_json:
        added = f"{size(saved.size_bytes)}, {size(saved.stored_bytes)} added to the store"
        click.echo(style(f"#{saved.seq} of {job}: {added}", "dim"), err=True)


def _state(file: str | None, files: tuple[str, ...], trees: tuple[str, ...], exclude: tuple[str, ...]) -> object:
    """The state the arguments describe."""
    from kedge.codec.json_view import from_json
    from kedge.files import File, Tree

    if file is not None and file.endswith(".safetensors") and not files and not trees:
        from kedge.integrations.safetensors import read_file

        return read_file(file)
    if not files and not trees:
        return from_json(_read(file))
    state = {} if file is None else from_json(_read(file))
    if not isinstance(state, dict):
        raise Validation("files can only be added to a JSON object", hint='wrap it: {"value": …}')
    for text in files:
        _add(state, text, File)
    for text in trees:
        _add(state, text, lambda path: Tree(path, exclude=exclude))
    return state


def _add(state: dict[str, object], text: str, make: Callable[[str], object]) -> None:
    """`NAME=PATH`, or a path whose last part is the name. What exists under the whole text wins."""
    name, equals, path = text.partition("=")
    if not equals or not name or os.path.lexists(text):
        name, path = Path(text).absolute().name, text
    if name in state:
        raise Validation(f"{name!r} is given twice", hint="give one another name: NAME=PATH")
    state[name] = make(path)


def _read(file: str | None) -> bytes:
    if file not in (None, "-"):
        if str(file)[:1] in '{["' and not os.path.lexists(str(file)):
            raise Validation(
                f"{str(file)[:80]} is not a file",
                hint="JSON comes from a file or stdin: echo '…' | kedge save JOB STEP",
            )
        return read_bytes(str(file))
    if file is None and sys.stdin.isatty():
        raise click.UsageError("give FILE, or JSON on stdin (FILE may be -), or --file or --tree")
    return sys.stdin.buffer.read()


@contextmanager
def _watching(state: object) -> Iterator[None]:
    """Progress of saving files, told by how much this process has read meanwhile."""
    from kedge.files import File, Tree

    values = state.values() if isinstance(state, dict) else ()
    files: list[File | Tree] = [value for value in values if isinstance(value, File | Tree)]
    with progress("saving", unit="bytes") as report:
        if report is None or not files:
            yield
            return
        total = sum(value.size_bytes for value in files)
        began = _bytes_read()
        with watched(report, lambda: (min(_bytes_read() - began, total), total)):
            yield


def _bytes_read() -> int:
    """Bytes this process has read so far; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
