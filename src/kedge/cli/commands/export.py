"""`kedge export`: checkpoints as plain files that explain themselves and need no Kedge to be read."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import Ref, job_named
from kedge.cli.output import emit, pieces_of
from kedge.cli.placement import added_to_directory, place_file, placed_directory
from kedge.codec import BufferSummary
from kedge.codec.json_view import to_json_view
from kedge.diff.npy import npy_header
from kedge.diff.outline import StoredState, files_in, open_state, with_content
from kedge.errors import NotFound, Validation
from kedge.files import FilesSummary, Tree
from kedge.store.reference import REFERENCE_HELP
from kedge.terminal.progress import Report, progress
from kedge.terminal.text import count_of, safe, size, style

from .restore import MAX_INLINE_BYTES

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.model import Checkpoint, Job

FORMAT = "kedge-export-1"
README = """\
Checkpoints exported by Kedge. Nothing but a JSON reader is needed to use them.

checkpoints.json   all checkpoints of this export, oldest first: id, job, seq, step, level, created_at, tags, …
NNNNNN/state.json  the state of the checkpoint with sequence number NNNNNN
NNNNNN/N.npy       its arrays: numpy.load("N.npy")
NNNNNN/N.arrow     its tables of polars and pyarrow (Arrow IPC)
NNNNNN/N.bin       other byte strings, and files
NNNNNN/N           trees of files

In state.json, what JSON cannot express is an object with a "$type", for example:
  {"$type": "ndarray", "dtype": "<f4", "shape": [2, 3], "size_bytes": 24, "file": "0.npy"}
  {"$type": "bytes", "size_bytes": 3, "base64": "YWJj"}           short ones; long ones have a "file"
  {"$type": "tuple", "items": [...]}                              set, frozenset, deque alike
  {"$type": "dict", "items": [[key, value], ...]}                 keys that are not text
  {"$type": "float", "value": "nan"}                              inf, datetime, Decimal, UUID, paths alike
  {"$type": "myapp.Model", "version": 2, "fields": {...}}         types of an application or a library

A state without such objects comes back with:   kedge save JOB STEP NNNNNN/state.json
"""

AS_DIRECTORY = "export it to a directory: kedge export JOB DIR, with --format dir if the name of DIR has a suffix"

Parts = Iterable[bytes | memoryview]


class Sink:
    """Where an export goes, a directory or a zip file: names and contents of files."""

    def __init__(self, target: Path | zipfile.ZipFile) -> None:
        self._target = target
        self.files = self.size_bytes = 0

    def add(self, name: str, parts: Parts) -> None:
        with self._open(name) as file:
            for part in parts:
                self.size_bytes += file.write(part)
        self.files += 1

    def _open(self, name: str) -> IO[bytes]:
        if isinstance(self._target, zipfile.ZipFile):
            return self._target.open(name, "w", force_zip64=True)
        (self._target / name).parent.mkdir(exist_ok=True)
        return open(self._target / name, "xb")

    def add_tree(self, name: str, tree: Tree, report: Report | None) -> None:
        if isinstance(self._target, zipfile.ZipFile):
            raise Validation("trees of files cannot be exported to a zip file", hint=AS_DIRECTORY)
        (self._target / name).parent.mkdir(exist_ok=True)
        tree.write_to(self._target / name, progress=report)
        self.files += sum(entry.kind != "directory" for entry in tree.entries)
        self.size_bytes += tree.size_bytes


@store_command(
    "export",
    note=f"JOB|ID is: {REFERENCE_HELP} A JOB alone means all of its checkpoints.",
    json_keys='{"to", "format", "checkpoints": [IDs], "files", "bytes"}',
)
@click.argument("ref", metavar="JOB|ID", type=Ref())
@click.argument("dest", type=click.Path())
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "zip", "dir", "safetensors", "jobs", "artemis"]),
    help="One JSON file, a zip file, a directory, a safetensors file, or a directory as the jobs system or artemis "
    "wrote it.  "
    "[default: by the name of DEST]",
)
@click.option("--force", is_flag=True, help="Replace what is at DEST; for jobs and artemis, files of the same names.")
def export_command(session: Session, ref: str, dest: str, form: str | None, force: bool) -> None:
    """Write all checkpoints of JOB, or the one ID, to DEST as plain JSON, with arrays as .npy files beside it.

    DEST is written whole or not at all; the layouts of jobs and artemis may go into a directory with other exports.
    The format json puts arrays into the document, as base64; safetensors takes one checkpoint, the newest of JOB.
    """
    target = Path(dest)
    chosen = form or {".json": "json", ".zip": "zip", ".safetensors": "safetensors"}.get(target.suffix.lower(), "dir")
    with session.open() as manager, progress("exporting", unit="bytes") as report:
        checkpoints = _chosen(manager, ref)
        states = States(manager, checkpoints)
        if chosen == "json":
            files, size_bytes = 1, place_file(target, partial(_write_document, states), force=force)
        elif chosen == "safetensors":
            checkpoints = deque(checkpoints, 1)
            files, size_bytes = 1, _to_safetensors(manager, checkpoints, target, force)
        elif chosen == "zip":
            files, size_bytes = _to_zip(states, target, force, report)
        elif chosen in ("jobs", "artemis"):
            files, size_bytes = _to_old_layout(manager, checkpoints, target, force, chosen)
        else:
            with placed_directory(target, force=force) as draft:
                sink = Sink(draft)
                _write_all(states, sink, report)
            files, size_bytes = sink.files, sink.size_bytes
        ids = states.ids or [c.id for c in checkpoints]
    if session.as_json:
        emit({"to": dest, "format": chosen, "checkpoints": ids, "files": files, "bytes": size_bytes})
    else:
        what = f"{count_of(len(ids), 'checkpoint')} → {style(safe(dest), 'name')}"
        click.echo(f"{what}  ({chosen}, {count_of(files, 'file')}, {size(size_bytes)})", err=True)


def _to_safetensors(manager: CheckpointManager, checkpoints: Iterable[Checkpoint], target: Path, force: bool) -> int:
    from kedge.integrations.safetensors import write_file

    for checkpoint in checkpoints:
        return place_file(target, partial(write_file, manager, checkpoint.id), force=force)
    raise Validation("there is no checkpoint to export", hint="kedge jobs shows which jobs exist")


def _to_old_layout(
    manager: CheckpointManager, checkpoints: Iterable[Checkpoint], target: Path, force: bool, form: str
) -> tuple[int, int]:
    """What JSON cannot express is written as everywhere here: an object with a "$type"."""
    from kedge.legacy.importers.export import artemis_files, jobs_files

    view = partial(_whole_view, manager)
    if form == "jobs":
        documents = jobs_files(checkpoints, view)
    else:
        jobs = dict.fromkeys(checkpoint.job for checkpoint in checkpoints)
        documents = (file for job in jobs for file in artemis_files(manager, job, view))
    with added_to_directory(target, force=force) as draft:
        sink = Sink(draft)
        for name, document in documents:
            sink.add(name, [json.dumps(document, indent=2).encode()])
    return sink.files, sink.size_bytes


class JobHistory:
    """The checkpoints of a job that can be loaded, up to the newest there is now; read anew by each loop over them."""

    def __init__(self, manager: CheckpointManager, job: Job) -> None:
        self._manager = manager
        self._job = job

    def __iter__(self) -> Iterator[Checkpoint]:
        history = self._manager.walk(self._job.name, before=self._job.last_seq + 1)
        return (checkpoint for checkpoint in history if checkpoint.status != "corrupted")


class States:
    """The states of chosen checkpoints; those of a job that are deleted meanwhile are left out."""

    def __init__(self, manager: CheckpointManager, checkpoints: Iterable[Checkpoint]) -> None:
        self._manager = manager
        self._checkpoints = checkpoints
        self.ids: list[str] = []  # of those given

    @property
    def size_bytes(self) -> int:
        return sum(checkpoint.size_bytes for checkpoint in self._checkpoints)

    def __iter__(self) -> Iterator[tuple[Checkpoint, StoredState]]:
        for checkpoint in self._checkpoints:
            try:
                state = open_state(self._manager.store, checkpoint.id)
            except NotFound:
                if not isinstance(self._checkpoints, JobHistory):
                    raise
                continue
            self.ids.append(checkpoint.id)
            yield checkpoint, state


def _chosen(manager: CheckpointManager, ref: str) -> Iterable[Checkpoint]:
    """All checkpoints of a job that can be loaded, or the one that is named."""
    if not {"~", "#"} & set(ref) and not manager.exists(ref) and (job := job_named(manager, ref)):
        return JobHistory(manager, job)
    return [manager.find(ref)]


def _write_document(states: States, file: BinaryIO) -> None:
    documents = ({**checkpoint.to_json(), "state": _inline(state)} for checkpoint, state in states)
    file.writelines(piece.encode() for piece in pieces_of({"format": FORMAT}, {"checkpoints": documents}, _to_text))


def _whole_view(manager: CheckpointManager, checkpoint: Checkpoint) -> object:
    """A state as one JSON document, arrays included."""
    return _inline(open_state(manager.store, checkpoint.id))


def _inline(state: StoredState) -> object:
    return to_json_view(state.outline, fields_of=with_content(state, MAX_INLINE_BYTES, hint=AS_DIRECTORY))


def _to_text(document: object) -> str:
    return json.dumps(document, indent=2)


def _write_all(states: States, sink: Sink, report: Report | None) -> None:
    sink.add("README.txt", [README.encode()])
    with tempfile.TemporaryFile() as listing:  # a file of a zip is written at once, and that of the list at the end
        written = _write_each(states, sink, report)
        listing.writelines(p.encode() for p in pieces_of({"format": FORMAT}, {"checkpoints": written}, _to_text))
        listing.seek(0)
        sink.add("checkpoints.json", iter(lambda: listing.read(1 << 20), b""))


def _write_each(states: States, sink: Sink, report: Report | None) -> Iterator[Mapping[str, object]]:
    """Write the states; gives what the list says of each."""
    total, done = states.size_bytes, 0
    inside = None if report is None else lambda part, _: report(done + part, total)  # of a tree under way
    for checkpoint, state in states:
        folder = f"{checkpoint.seq:06}"
        view = to_json_view(state.outline, fields_of=_as_files(state, folder, sink, inside))
        sink.add(f"{folder}/state.json", [json.dumps(view, indent=2).encode(), b"\n"])
        done += checkpoint.size_bytes
        if report:
            report(done, total)
        yield checkpoint.to_json()


def _as_files(
    state: StoredState, folder: str, sink: Sink, report: Report | None
) -> Callable[[BufferSummary], Mapping[str, object]]:
    """Writes each array, byte string, file and tree; nothing a user typed becomes part of its name."""
    count = 0
    paths = {id(summary): path for path, summary in files_in(state.outline)}

    def as_file(summary: BufferSummary) -> Mapping[str, object]:
        nonlocal count
        name = str(count)
        count += 1
        if isinstance(summary, FilesSummary):
            files = state.files_at(paths[id(summary)])
            if isinstance(files, Tree):
                sink.add_tree(f"{folder}/{name}", files, report)
                return {"file": name}
            name += ".bin"
            sink.add(f"{folder}/{name}", files.stream())
            return {"name": files.entry.path, "file": name}
        header = npy_header(summary)
        is_table = summary.kind.startswith(("polars.", "pyarrow."))
        name += ".npy" if header else ".arrow" if is_table else ".bin"
        sink.add(f"{folder}/{name}", [header or b"", state.bytes_of(summary)])
        return {"file": name}

    return as_file


def _to_zip(states: States, target: Path, force: bool, report: Report | None) -> tuple[int, int]:
    files = 0

    def write(out: BinaryIO) -> None:
        nonlocal files
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            sink = Sink(archive)
            _write_all(states, sink, report)
            files = sink.files

    size_bytes = place_file(target, write, force=force)
    return files, size_bytes
