"""`kedge restore`: a state, or a part of it, on stdout, in a file, or as a directory."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import JobName, Ref, refuse_other_job
from kedge.cli.output import emit, to_json, write_all
from kedge.cli.placement import is_stream, place_file, refuse_other
from kedge.codec import BufferSummary
from kedge.codec.json_view import to_json_view
from kedge.diff.npy import npy_header
from kedge.diff.outline import StoredState, files_in, inside, open_state, split_at_tree, with_content
from kedge.errors import Validation
from kedge.files import File, FilesSummary, Tree
from kedge.terminal.progress import progress
from kedge.terminal.text import safe, size, style, with_article

MAX_INLINE_BYTES = 64 << 20  # of arrays that may go into one JSON document
_IN_PARTS = "restore a part with --path and --to; kedge export writes all to a directory; kedge show lists them"
_SUFFIXES = {".json": "json", ".npy": "npy", ".bin": "raw", ".raw": "raw"}


@store_command(
    "restore",
    json_keys='{"checkpoint": as in list, "path", "state"}; with --to, {"checkpoint", "path", "to", "format", '
    '"bytes"}.',
)
@click.argument("job", type=JobName())
@click.argument("ref", metavar="[ID]", required=False, type=Ref())
@click.option("--to", metavar="FILE|DIR|-", help="Where to write it.  [default: -, which is stdout]")
@click.option("--path", metavar="A/B", help="Only this part of the state.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "raw", "npy"]),
    help="JSON, raw bytes, or an array as .npy.  [default: what fits, and for arrays the name of FILE]",
)
@click.option(
    "--force", is_flag=True, help="Replace the file at the destination; in a directory, files of the same name."
)
def restore_command(
    session: Session, job: str, ref: str | None, to: str | None, path: str | None, form: str | None, force: bool
) -> None:
    """Restore the newest state of JOB, or the state ID, and verify it.

    A state is written as JSON, byte strings and files as they are, arrays as .npy, file trees as a directory. The
    output is written completely or not at all. Values that JSON cannot express become {"$type": …}. If the state holds
    just one file or tree, that is what is restored.
    """
    target = None if to in (None, "-", "/dev/stdout") else Path(str(to))
    with session.open() as manager:
        checkpoint = manager.find(ref or job)
        if ref is not None:
            refuse_other_job(checkpoint, job)
        state = open_state(manager.store, checkpoint.id)
        if session.as_json and target is None:
            view = _view(state, inside(state.outline, path or ""))
            emit({"checkpoint": checkpoint.to_json(), "path": path or "", "state": view})
            return
        if path is None and form is None:
            path = _only_files(state.outline, target)
        part, place, rest = split_at_tree(state.outline, path or "")
        chosen = form or _fitting(part, rest, "" if target is None else target.suffix.lower())
        if isinstance(part, FilesSummary) and chosen in ("raw", "tree"):
            size_bytes = _restore_files(state.files_at(place), rest, target, force=force)
        else:
            write = _writer(state, inside(state.outline, path or ""), chosen)
            size_bytes = _put(write, target, force=force, is_text=chosen == "json")
    if target is None:
        return
    if session.as_json:
        where = {"path": path or "", "to": str(target), "format": chosen, "bytes": size_bytes}
        emit({"checkpoint": checkpoint.to_json(), **where})
    else:
        done = f"{style(checkpoint.id, 'id')} → {safe(str(target))}  ({chosen}, {size(size_bytes)})"
        click.echo(done, err=True)


def _only_files(outline: object, target: Path | None) -> str | None:
    """Where the one file or tree of a state is, if that is what can be restored: JSON has no words for it.

    Other values of the state are left out only where a place for files is given, and then that is said.
    """
    paths = [path for path, _ in islice(files_in(outline), 2)]
    is_alone = isinstance(outline, FilesSummary) or (isinstance(outline, dict) and len(outline) == 1)
    if len(paths) != 1 or not (is_alone or (target is not None and target.suffix.lower() != ".json")):
        return None
    if not is_alone:
        note = f"only the files at {safe(paths[0])}; use --format json or --path for the rest"
        click.echo(style(note, "dim"), err=True)
    return paths[0]


def _fitting(part: object, rest: str, suffix: str) -> str:
    """The format a part is restored in when none is asked for; `suffix` is that of the file it goes to."""
    if isinstance(part, FilesSummary):
        return "tree" if part.kind == "Tree" and not rest else "raw"
    if isinstance(part, bytes) or getattr(part, "kind", "") in ("bytes", "bytearray"):
        return "raw"
    if isinstance(part, BufferSummary) and part.kind != "numpy scalar":
        return _SUFFIXES.get(suffix) or ("npy" if npy_header(part) else "raw")
    return "npy" if suffix == ".npy" else "json"  # which is refused


def _restore_files(files: Tree | File, rest: str, target: Path | None, *, force: bool) -> int:
    """Restore a tree to a directory, or a file to a file or stdout. Return the size."""
    if isinstance(files, Tree) and not rest:
        if target is None:
            raise Validation("a tree of files needs a directory", hint="give --to DIR, or --path to one of its files")
        refuse_other(target, stat.S_ISDIR, "a directory")
    elif isinstance(files, File) and target is not None and not is_stream(target):
        refuse_other(target, stat.S_ISREG, "a regular file")
    else:
        pieces = files.stream(rest) if isinstance(files, Tree) else files.stream()
        return _put(lambda out: out.writelines(pieces), target, force=force, is_text=False)
    with progress("restoring", unit="bytes") as report:
        files.write_to(target, overwrite=force, progress=report)
    return files.size_bytes


def _view(state: StoredState, part: object) -> object:
    return to_json_view(part, fields_of=with_content(state, MAX_INLINE_BYTES, hint=_IN_PARTS))


def _writer(state: StoredState, part: object, form: str) -> Callable[[BinaryIO], object]:
    """What writes the part; everything that may fail for another reason than the disk has been done before."""
    if form == "json":
        view = _view(state, part)
        return lambda file: write_all(file, to_json(view).encode() + b"\n")
    if isinstance(part, bytes) and form == "raw":
        return lambda file: write_all(file, part)
    if not isinstance(part, BufferSummary):
        raise Validation(
            f"{with_article(type(part).__name__)} cannot be restored as {form}",
            hint="name an array or a byte string with --path, or use --format json",
        )
    header = npy_header(part) if form == "npy" else b""
    if header is None:
        raise Validation(
            f"{with_article(part.kind)} of {part.dtype} has no form in .npy files", hint="use --format raw"
        )
    data = state.bytes_of(part)

    def write(file: BinaryIO) -> None:
        write_all(file, header)
        write_all(file, data)

    return write


def _put(write: Callable[[BinaryIO], object], target: Path | None, *, force: bool, is_text: bool) -> int:
    if target is not None:
        return place_file(target, write, force=force)
    if not is_text and sys.stdout.isatty():
        raise Validation("this is binary data, and stdout is a terminal", hint="give --to FILE, or --format json")
    sys.stdout.flush()
    write(sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return 0
