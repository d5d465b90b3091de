"""A directory of old checkpoints: every file is looked at, and its content says what it is. Formats may be mixed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import artemis, databases, geo_core, geo_stages, geo_tiles, jobs
from .common import (
    SALVAGED,
    Document,
    Draft,
    Drafts,
    Finding,
    Fragment,
    Options,
    Unreadable,
    Verdict,
    clean,
    digest_of_document,
    legacy,
    name_of,
    parse_json,
    step_of,
)
from .folder import SNIFF_BYTES, Entry, Listing, check_root, list_folder, read_file, read_head, read_json, walk
from .old_pickles import MAX_PICKLE_BYTES, Pickles

PLAIN = "json-dir"
SQLITE_MAGIC = b"SQLite format 3\0"
HELD_BYTES = 32 << 20  # documents of one folder that are kept in memory; those beyond are read again
SMALL_BYTES = 64 << 10
SETTLED_S = 5.0  # a file that was not changed for so long is not being written

_SORTS: dict[str, Callable[[Any], int]] = {
    artemis.FORM: artemis.time_of,
    jobs.FORM: jobs.time_of,
    geo_stages.FORM: geo_stages.time_of,
    PLAIN: lambda document: 0,
}


@dataclass(slots=True)
class Paper:
    """A JSON file that was recognised."""

    entry: Entry
    form: str
    order: int
    document: Any  # None: to be read again
    cut: Fragment | None = None

    def read(self) -> Any:
        return self.document if self.document is not None else read_json(self.entry)


@dataclass(slots=True)
class Sorted:
    """What one folder holds."""

    papers: list[Paper] = field(default_factory=list)
    pickles: list[tuple[Document, str, str]] = field(default_factory=list)
    held_bytes: int = 0


def read_source(source: str, options: Options) -> Drafts:
    """All drafts and findings of a directory or a file."""
    root = check_root(source)
    with Pickles(options.allow) as pickles:
        if os.path.isfile(root):
            yield from _read_single(root, options, pickles)
            return
        for listing in walk(root):
            yield from listing.findings
            yield from _read_folder(listing, options, pickles)


def _read_single(path: str, options: Options, pickles: Pickles) -> Drafts:
    whole = list_folder(os.path.dirname(path), "")
    name = os.path.basename(path)
    if name in whole.files:
        alone = Listing(whole.path, "", {name: whole.files[name]}, (), ())
        yield from _read_folder(alone, options, pickles)


def _read_folder(listing: Listing, options: Options, pickles: Pickles) -> Drafts:
    registry, problem = geo_core.read_registry(listing)
    if problem is not None:
        yield problem
    owned = geo_core.owned_folders(listing, registry)
    if options.form in ("auto", geo_core.CORE, geo_core.MEMORY):
        for draft in geo_core.drafts(listing, registry, owned, options, pickles):
            if isinstance(draft, Finding) or options.form in ("auto", draft.form):
                yield draft
    # The folders of these checkpoints hold nothing else: the walk passes them over.
    listing.folders = tuple(name for name in listing.folders if name not in owned)
    folder = Sorted()
    for entry in listing.files.values():
        if entry.name in (geo_core.REGISTRY, geo_core.METADATA) and (registry or problem or _is_core(entry)):
            continue
        if entry.name.endswith(("-wal", "-shm")) and entry.name[:-4] in listing.files:
            continue  # read with their database
        yield from _sort(entry, folder, options, pickles)
    stages: list[tuple[Document, str]] = []
    for paper in sorted(folder.papers, key=lambda p: p.order):
        try:
            document = paper.read()
        except Unreadable as error:
            yield Finding(Verdict.SKIPPED, paper.entry.shown, f"it changed meanwhile: {error.reason}")
            continue
        if paper.form == geo_stages.FORM:
            stages.append((document, paper.entry.shown))
        else:
            yield from _drafts_of(paper, document, listing, options)
    cut = frozenset(paper.entry.shown for paper in folder.papers if paper.cut is not None)
    yield from geo_stages.drafts(stages, listing.path, options, cut)
    yield from geo_tiles.drafts(folder.pickles, options)


def _is_core(entry: Entry) -> bool:
    try:
        document = read_json(entry)
    except Unreadable:
        return False
    return geo_core.is_metadata(document) or geo_core.is_registry(document)


def _drafts_of(paper: Paper, document: Any, listing: Listing, options: Options) -> Drafts:
    entry = paper.entry
    if paper.form == artemis.FORM:
        yield from artemis.drafts(document, entry.name, entry.shown, options, paper.cut)
    elif paper.form == jobs.FORM:
        yield from jobs.drafts(document, entry.shown, options, paper.cut)
    else:
        draft = plain_draft(document, entry, os.path.basename(listing.path), options)
        if paper.cut is not None:
            draft.job = name_of(draft.job, most=118) + SALVAGED
            why = f"the file is cut off; what is left is in job {draft.job}"
            yield Finding(Verdict.CORRUPTED, entry.shown, why)
        yield draft


def _sort(entry: Entry, folder: Sorted, options: Options, pickles: Pickles) -> Drafts:
    """Put one file where it belongs, or say why it belongs nowhere."""
    try:
        data = read_file(entry) if entry.size_bytes <= SMALL_BYTES else b""
        head = data[:SNIFF_BYTES] or read_head(entry)
        if head.startswith(SQLITE_MAGIC):
            yield from databases.read_sqlite(entry, options)
        elif _is_pickle(entry, head):
            yield from _sort_pickle(entry, folder, options, pickles)
        elif head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            yield from _sort_json(entry, data or read_file(entry), folder, options)
        elif not head and entry.name.endswith(".json"):
            yield Finding(Verdict.CORRUPTED, entry.shown, "empty")
        else:
            yield Finding(Verdict.SKIPPED, entry.shown, "no checkpoint of a known format")
    except Unreadable as problem:
        yield Finding(Verdict.CORRUPTED, entry.shown, problem.reason)


def _is_pickle(entry: Entry, head: bytes) -> bool:
    is_marked = len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5
    return is_marked or head[:2] == b"\x1f\x8b" or geo_core.is_pickle_name(entry.name)


def _sort_pickle(entry: Entry, folder: Sorted, options: Options, pickles: Pickles) -> Drafts:
    if options.form not in ("auto", geo_tiles.FORM):
        return
    unpickled = pickles.read(read_file(entry, MAX_PICKLE_BYTES))
    if geo_tiles.kind_of(unpickled.value) is None:
        yield Finding(Verdict.SKIPPED, entry.shown, "a pickle, but no checkpoint of tiles or chunks")
        return
    if (finding := unpickled.finding(entry.shown)) is not None:
        yield finding
    folder.pickles.append((unpickled.value, entry.name, entry.shown))


def _sort_json(entry: Entry, data: bytes, folder: Sorted, options: Options) -> Drafts:
    cut: Fragment | None = None
    try:
        document = parse_json(data)
    except Unreadable as problem:
        cut = problem.salvaged
        document = cut.value
        if options.is_watching and time.time() - os.path.getmtime(entry.path) < SETTLED_S:
            yield Finding(Verdict.SKIPPED, entry.shown, "it may still be written to; the next round decides")
            return
        if not document or (options.form != PLAIN and form_of(document, "auto") is None):
            yield Finding(Verdict.CORRUPTED, entry.shown, f"{problem.reason}; nothing of it can be used")
            return
    form = form_of(document, options.form)
    if form is None:
        if options.form == "auto" and not geo_tiles.is_sidecar(document):
            what = "JSON, but no checkpoint of a known format; --from json-dir takes any"
            yield Finding(Verdict.SKIPPED, entry.shown, what)
        return
    is_held = cut is not None or folder.held_bytes + len(data) <= HELD_BYTES
    folder.held_bytes += len(data) if is_held else 0
    order = _SORTS[form](document)
    folder.papers.append(Paper(entry, form, order, document if is_held else None, cut))


def form_of(document: object, chosen: str) -> str | None:
    """The format of a JSON document, if it is the one wanted."""
    if chosen == PLAIN:
        return PLAIN
    if jobs.kind_of(document) is not None:
        form = jobs.FORM
    elif artemis.kind_of(document) is not None:
        form = artemis.FORM
    elif geo_stages.kind_of(document) is not None:
        form = geo_stages.FORM
    else:
        return None
    return form if chosen in ("auto", form) else None


def plain_draft(document: Any, entry: Entry, folder: str, options: Options) -> Draft:
    """Any JSON file as a checkpoint: the folder is the job, the name of the file the step."""
    return Draft(
        PLAIN,
        entry.shown,
        name_of(os.path.dirname(entry.shown).replace("/", ":") or folder or "json", prefix=options.job_prefix),
        step_of(entry.name.removesuffix(".json")),
        document,
        key=f"{clean(entry.name, 100)}:{digest_of_document(document)}",
        metadata={"legacy": legacy(PLAIN, file=entry.shown)},
    )
