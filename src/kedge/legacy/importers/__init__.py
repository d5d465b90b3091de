"""Checkpoints of older systems, brought into a store (docs/coming-from.md).

    from kedge.legacy.importers import bring, look

    plan = look("old/checkpoints")                   nothing is changed
    report = bring("old/checkpoints", store)         again: nothing new; interrupted: continues

The source is only read. What it holds is recognised by its content. IDs, times and relations stay; a run continues with
`kedge.run` under its old key.
"""

from __future__ import annotations

from kedge.errors import Validation
from kedge.manager import CheckpointManager

from . import databases
from .common import Draft, Drafts, Finding, Options, Progress, Unreadable, Verdict
from .directory import read_source
from .folder import check_root
from .writer import Outcome, Report, Writer

FORMATS = (
    "auto", "artemis", "jobs", "geo-core", "geo-stages", "geo-tiles", "geo-db", "geo-memory", "langgraph-sqlite",
    "langgraph-postgres", "json-dir",
)  # fmt: skip

__all__ = ["FORMATS", "Draft", "Finding", "Options", "Outcome", "Report", "Verdict", "bring", "look"]


def look(source: str, options: Options | None = None, *, progress: Progress | None = None) -> Report:
    """What an import would bring, and what it would lose and why. Reads the source, changes nothing."""
    report = Report()
    for done, entry in enumerate(_everything(source, options or Options())):
        if isinstance(entry, Finding):
            report.find(entry)
        else:
            job = entry.job if isinstance(entry, Draft) else f"{entry.thread}@{entry.namespace}"
            report.count(entry.form, job, entry.source)
        if progress:
            progress(done + 1, 0)
    return report


def bring(
    source: str,
    store: CheckpointManager,
    options: Options | None = None,
    *,
    expected: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Import everything that is not there yet. `expected` is the number of checkpoints, for the progress."""
    report = Report()
    writer = Writer(store, report)
    threads = None
    for done, entry in enumerate(_everything(source, options or Options())):
        if isinstance(entry, Finding):
            report.find(entry)
        elif isinstance(entry, Draft):
            writer.add(entry)
        else:
            if threads is None:
                from .langgraph import Threads

                threads = Threads(store, report)
            threads.add(entry)
        if progress:
            progress(done + 1, expected)
    writer.flush()
    return report


def _everything(source: str, options: Options) -> Drafts:
    if options.form not in FORMATS:
        raise Validation(f"unknown format: {options.form!r}", hint=f"use one of: {', '.join(FORMATS)}")
    if source.startswith(("postgresql://", "postgres://")):
        yield from _postgres(source, options)
        return
    try:
        yield from read_source(check_root(source), options)
    except Unreadable as problem:
        yield Finding(Verdict.CORRUPTED, source, problem.reason)


def _postgres(url: str, options: Options) -> Drafts:
    with databases.open_postgres(url) as db:
        tables = databases.postgres_tables(db)
        is_geo = "pipeline_checkpoints" in tables and options.form in ("auto", databases.GEO_DB)
        is_graph = {"checkpoints", "checkpoint_blobs"} <= tables and options.form in (
            "auto",
            databases.LANGGRAPH_POSTGRES,
        )
        if not is_geo and not is_graph:
            raise Validation("the database has no table of a known format", hint="pipeline_checkpoints, or LangGraph's")
        if is_geo:
            yield from databases.read_geo_db(db, options)
        if is_graph:
            from .langgraph import read_postgres

            yield from read_postgres(db, "checkpoints", options)
