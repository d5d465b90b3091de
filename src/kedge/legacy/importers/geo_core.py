"""geo (a) and (e): a folder for each checkpoint, with a pickle for each key of its state, and a registry of them.

The registry decides about status. Nothing it says becomes a path: a checkpoint's files are those in the folder of its
ID, and the old checksum is made of just these. Checkpoints of processors, form (e), become those of a
CheckpointableProcess, which continues from them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge.model import CheckpointLevel, CheckpointStatus, list_of, mapping_of, number_of

from .common import (
    SALVAGED,
    Document,
    Draft,
    Drafts,
    Finding,
    Options,
    Unreadable,
    Verdict,
    clean,
    digest,
    legacy,
    microseconds,
    name_of,
    small_json,
    step_of,
    texts,
)
from .folder import Listing, is_plain_name, list_folder, read_file, read_json
from .old_pickles import MAX_PICKLE_BYTES, Pickles

CORE, MEMORY = "geo-core", "geo-memory"
REGISTRY, METADATA = "registry.json", "metadata.json"
UNREADABLE = "unreadable"  # why nothing else is known of a checkpoint

LEVELS = {
    "pipeline": CheckpointLevel.PIPELINE,
    "phase": CheckpointLevel.STAGE,
    "stage": CheckpointLevel.STAGE,
    "step": CheckpointLevel.STEP,
    "substep": CheckpointLevel.SUBSTEP,
}
_SUFFIX = re.compile(r"\.(?:pkl|pickle)(?:\.gz)?$")
_ID_TAIL = re.compile(r"_\d{6,}$")


def is_pickle_name(name: str) -> bool:
    return _SUFFIX.search(name) is not None


def is_metadata(document: object) -> bool:
    return isinstance(document, dict) and {"checkpoint_id", "level", "data_files"} <= document.keys()


def is_registry(document: object) -> bool:
    return isinstance(document, dict) and bool(document) and all(map(is_metadata, document.values()))


def owned_folders(listing: Listing, registry: Mapping[str, Document]) -> dict[str, Document]:
    """The folders of checkpoints in a folder, each with what is known of it; the registry's word comes first."""
    known: dict[str, Document] = {}
    for name in listing.folders:
        if name in registry:
            known[name] = registry[name]
            continue
        if not os.path.lexists(os.path.join(listing.path, name, METADATA)):
            continue
        inside = list_folder(os.path.join(listing.path, name), os.path.join(listing.shown, name))
        if METADATA in inside.files:
            try:
                document = read_json(inside.files[METADATA])
            except Unreadable as problem:
                known[name] = {"checkpoint_id": name, UNREADABLE: f"{METADATA}: {problem.reason}"}
                continue
            if is_metadata(document):
                known[name] = document
    return known


def read_registry(listing: Listing) -> tuple[dict[str, Document], Finding | None]:
    """The registry of a folder; an unreadable one costs what only it knew, the status of checkpoints."""
    if REGISTRY not in listing.files:
        return {}, None
    entry = listing.files[REGISTRY]
    try:
        document = read_json(entry)
    except Unreadable as problem:
        salvaged = mapping_of(problem.salvaged.value)
        left = {n: about for n, about in salvaged.items() if is_metadata(about) and n not in problem.salvaged.open_at}
        why = f"{problem.reason}; checkpoints are found by their folders instead"
        return left, Finding(Verdict.CORRUPTED, entry.shown, why, tuple(map(clean, left)))
    return (document if is_registry(document) else {}), None


def drafts(
    listing: Listing,
    registry: Mapping[str, Document],
    folders: Mapping[str, Document],
    options: Options,
    pickles: Pickles,
) -> Drafts:
    for name in registry:
        where = clean(f"{os.path.join(listing.shown, REGISTRY)}: {name}")
        if not is_plain_name(name):
            yield Finding(Verdict.SKIPPED, where, "its ID is a path; nothing outside is read")
        elif name not in listing.folders:
            yield Finding(Verdict.CORRUPTED, where, "its folder is gone; nothing is left of it")
    rows = [{"parent_id": None, **about, "checkpoint_id": name} for name, about in folders.items()]
    rows.sort(key=lambda row: microseconds(row.get("timestamp")) or 0)
    roots: dict[str, str] = {}
    for about, parent in parents_first(rows):
        name = about["checkpoint_id"]
        roots[name] = roots.get(parent or "") or str(
            about["parent_id"] or _experiment(name, mapping_of(about.get("metadata")))
        )
        inside = list_folder(os.path.join(listing.path, name), os.path.join(listing.shown, name))
        yield from inside.findings
        yield from checkpoint(
            name,
            folders[name],
            inside,
            options,
            pickles,
            job=roots[name],
            parent=None if parent is None else name_of(parent),
        )


def parents_first(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Rows with their parents, a parent before its children; of a circle the first row loses its parent."""
    by_id = {row["checkpoint_id"]: row for row in rows}
    given: set[str] = set()
    for row in rows:
        line: list[Mapping[str, Any]] = []
        current: Mapping[str, Any] | None = row
        passed: set[str] = set()
        while current is not None and (own_id := current["checkpoint_id"]) not in given and own_id not in passed:
            line.append(current)
            passed.add(own_id)
            current = by_id.get(current["parent_id"])
        for ancestor in reversed(line):
            given.add(ancestor["checkpoint_id"])
            parent = ancestor["parent_id"]
            yield ancestor, parent if parent in given and parent != ancestor["checkpoint_id"] else None


def checkpoint(name: str, about: Document, inside: Listing, options: Options, pickles: Pickles, **extra: Any) -> Drafts:
    """One checkpoint: its files, verified by the old rule. `extra`: fields that a database knows better."""
    shown = clean(inside.shown or name)
    status = about.get("status")
    if status == "deleted":
        yield Finding(Verdict.SKIPPED, shown, "it was deleted")
        return
    problems = list(_file_problems(about, inside))
    problems += [clean(about[UNREADABLE])] if UNREADABLE in about else []
    problems += ["the old system had marked it as corrupted"] if status == "corrupted" else []
    listed = _listed(about, inside)
    unlisted = tuple(clean(file) for file in inside.files if listed and file not in listed | {METADATA})
    if unlisted:
        yield Finding(
            Verdict.SKIPPED, shown, "its metadata does not list these files; an earlier save left them", unlisted
        )
    unknown: list[Finding] = []
    state, checksum = _read_files(inside, listed, pickles, problems, unknown)
    yield from unknown
    problems += [
        f"its {kind} does not fit its files"
        for kind in ("checksum", "validation_checksum")
        if about.get(kind) and about[kind] != checksum
    ]
    if not state:
        yield Finding(Verdict.CORRUPTED, shown, "; ".join(problems) or "it has no data", ())
        return
    draft = _draft(name, about, state, shown, options, checksum, extra)
    if about.get("metadata") and small_json(about["metadata"]) is None:
        yield Finding(Verdict.LOSSY, shown, "its metadata is too large to be kept", ("metadata",))
    if problems:
        draft.job += SALVAGED
        draft.id, draft.parent = None, None
        why = f"{'; '.join(map(clean, problems))}; what is left is in job {draft.job}"
        yield Finding(Verdict.CORRUPTED, shown, why, tuple(map(clean, state)))
    yield draft


def _read_files(
    inside: Listing, listed: set[str], pickles: Pickles, problems: list[str], unknown: list[Finding]
) -> tuple[dict[str, Any], str]:
    """The state in the listed files, and the checksum over all of them.

    `problems` gets what is wrong with any, `unknown` a finding for each that holds objects of unknown classes.
    """
    state: dict[str, Any] = {}
    checksum = hashlib.sha256()
    for entry in sorted(inside.files.values(), key=lambda e: e.path):
        if entry.name == METADATA:
            continue
        try:
            data = read_file(entry, MAX_PICKLE_BYTES)
            checksum.update(os.fsencode(entry.name) + data)
            if is_pickle_name(entry.name) and (not listed or entry.name in listed):
                unpickled = pickles.read(data)
                state[_SUFFIX.sub("", entry.name)] = unpickled.value
                if (finding := unpickled.finding(entry.shown)) is not None:
                    unknown.append(finding)
        except Unreadable as problem:
            problems.append(f"{entry.name}: {problem.reason}")
    return state, checksum.hexdigest()


def _listed(about: Document, inside: Listing) -> set[str]:
    """The names of the files that make up a checkpoint; none when nothing says so, and then all of them do."""
    files = about.get("data_files")
    if not files and METADATA in inside.files:
        try:
            files = mapping_of(read_json(inside.files[METADATA])).get("data_files")
        except Unreadable:
            files = None
    return {path.rpartition("/")[2] for path in texts(files)}


def _file_problems(about: Document, inside: Listing) -> Iterator[str]:
    files = about.get("data_files")
    for path in list_of(files):
        folder, _, base = str(path).rpartition("/")
        if folder.rpartition("/")[2] not in ("", about.get("checkpoint_id")) or ".." in folder.split("/"):
            yield f"{clean(path, 100)} is outside its folder and was not read"
        elif base not in inside.files:
            yield f"{clean(base, 100)} is missing"


def _draft(
    name: str, about: Document, state: Document, shown: str, options: Options, content: str, extra: Mapping[str, Any]
) -> Draft:
    old_id = str(about.get("checkpoint_id") or name)
    details = mapping_of(about.get("metadata"))
    processor = details.get("processor")
    is_process = processor is not None and "processor_state" in state
    owner = processor if is_process else extra["job"]
    done = _items_done(state) if is_process else 0
    draft = Draft(
        MEMORY if is_process else CORE,
        shown,
        name_of(owner, most=118, prefix=options.job_prefix),
        step_of(details.get("phase") or processor or _ID_TAIL.sub("", old_id)),
        {"state": state, "progress": {"items_done": done, "items_total": None}} if is_process else state,
        key=digest(f"{old_id}\0{content}\0{about.get('timestamp')}"),
        id=name_of(old_id),
        created_us=extra.get("created_us") or microseconds(about.get("timestamp")),
        level=LEVELS.get(str(about.get("level")), CheckpointLevel.STEP),
        parent=extra.get("parent"),
        tags={"failed": "error"} if old_id.startswith("error_") else {},
        metadata={
            "legacy": legacy(
                MEMORY if is_process else CORE, id=old_id, level=about.get("level"), experiment=about.get("parent_id"),
                status=about.get("status"), checksum=about.get("checksum"),
            ) | {"metadata": small_json(details)}
        },
        status=CheckpointStatus.ARCHIVED if about.get("status") == "archived" else CheckpointStatus.CREATED,
    )  # fmt: skip
    if is_process:
        draft.metadata |= {"kind": "process", "class": clean(processor), "items_done": done, "items_total": None}
    return draft


def _items_done(state: Document) -> int:
    """What was really done: the counter of the old processors was often behind."""
    lists = [state.get(name) for name in ("processed_items", "failed_items")]
    if any(isinstance(items, list | tuple | set) for items in lists):
        return sum(len(items) for items in lists if isinstance(items, list | tuple | set))
    counted = mapping_of(state.get("processor_state")).get("items_processed")
    return number_of(counted)


def _experiment(old_id: str, details: Document) -> str:
    """The experiment in an ID: <experiment>_<phase>_<epoch>, shutdown_<experiment>_<epoch>, error_<name>_<epoch>."""
    left = _ID_TAIL.sub("", old_id)
    for word in ("shutdown_", "error_"):
        if left.startswith(word):
            return left.removeprefix(word) or left
    phase = details.get("phase")
    return left.removesuffix(f"_{phase}") if isinstance(phase, str) else left.rpartition("_")[0] or left
