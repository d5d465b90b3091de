"""Old checkpoints in databases: artemis in SQLite, geo (d) in PostgreSQL. LangGraph's are in `langgraph`."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from kedge.errors import NotFound, Unavailable, Validation, install_hint
from kedge.model import mapping_of

from . import artemis, geo_core
from .common import (
    Document,
    Drafts,
    Finding,
    Options,
    Unreadable,
    Verdict,
    clean,
    microseconds,
    name_of,
    parse_json,
)
from .folder import Entry, is_plain_name, list_folder
from .old_pickles import Pickles

GEO_DB = "geo-db"
LANGGRAPH_SQLITE, LANGGRAPH_POSTGRES = "langgraph-sqlite", "langgraph-postgres"


@contextmanager
def open_sqlite(path: str) -> Iterator[sqlite3.Connection]:
    """A SQLite file for reading only. Where it has a log of changes, a copy is read: opening it would write to it."""
    _check_size(path)
    with tempfile.TemporaryDirectory(prefix="kedge-import-") as folder:
        is_live = os.path.exists(path + "-wal") and os.path.getsize(path + "-wal") > 0
        place = os.path.join(folder, "copy.db") if is_live else path
        if is_live:
            shutil.copyfile(path, place)
            shutil.copyfile(path + "-wal", place + "-wal")
        quoted = place.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        mode = "mode=rw" if is_live else "mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(f"file:{quoted}?{mode}", uri=True)) as db:
                db.row_factory = sqlite3.Row
                db.execute("PRAGMA trusted_schema=OFF")
                yield db
        except sqlite3.DatabaseError as error:
            raise Unreadable(f"SQLite: {clean(error)}") from error


def _check_size(path: str) -> None:
    """Refuse a file that is shorter than its header says: SQLite would answer with the rows that are left."""
    with open(path, "rb") as file:
        header = file.read(100)
    page_bytes = int.from_bytes(header[16:18], "big")
    expected = (65536 if page_bytes == 1 else page_bytes) * int.from_bytes(header[28:32], "big")
    if len(header) < 100 or os.path.getsize(path) < expected:
        raise Unreadable(f"SQLite: the file is cut off: {os.path.getsize(path):,} of {expected:,} bytes")


def read_sqlite(entry: Entry, options: Options) -> Drafts:
    """What a SQLite file holds, if it is known."""
    with open_sqlite(entry.path) as db:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "pipeline_states" in tables and options.form in ("auto", artemis.FORM):
            yield from _artemis(db, tables, entry.shown, options)
        elif options.form in ("auto", LANGGRAPH_SQLITE) and _has_threads(db):
            from .langgraph import read_threads

            yield from read_threads(db, entry.shown, options)
        elif options.form == "auto":
            yield Finding(Verdict.SKIPPED, entry.shown, "a SQLite database, but none of a known format")


def _has_threads(db: sqlite3.Connection) -> bool:
    """Whether LangGraph wrote it: its first savers had no table of writes."""
    columns = {row["name"] for row in db.execute("PRAGMA table_info(checkpoints)")}
    return "thread_id" in columns and bool({"thread_ts", "checkpoint_id"} & columns)


_JSON_COLUMNS = {"stages_completed", "stage_results", "developer_results", "metrics", "result"}


def _artemis(db: sqlite3.Connection, tables: set[str], shown: str, options: Options) -> Drafts:
    """Each card: the attempts at its stages, then its state; either may be there without the other."""
    states = {row["card_id"]: row for row in db.execute("SELECT * FROM pipeline_states ORDER BY card_id")}
    attempts: dict[object, list[sqlite3.Row]] = {}
    if "stage_checkpoints" in tables:
        for row in db.execute("SELECT * FROM stage_checkpoints"):
            attempts.setdefault(row["card_id"], []).append(row)
    for card in dict.fromkeys((*states, *attempts)):
        where = clean(f"{shown}: {card}")
        try:
            stages = [_document(row) for row in attempts.get(card, ())]
            state = _document(states[card]) if card in states else None
        except Unreadable as problem:
            yield Finding(Verdict.CORRUPTED, where, problem.reason)
            continue
        if stages:
            of_stages = artemis.drafts(stages, "", where, options)
            # What the card's own state says of the run comes below.
            yield from (d for d in of_stages if state is None or getattr(d, "tags", {}).get("kind") != "run")
        if state is not None:
            yield from artemis.drafts({"stage_results": {}} | state, "", where, options)


def _document(row: sqlite3.Row) -> Document:
    """A row with its JSON columns parsed; the others are text, whatever that looks like."""
    document: Document = {}
    for name in row.keys():  # noqa: SIM118 - a Row is no mapping
        value = row[name]
        if name in _JSON_COLUMNS and isinstance(value, str):
            value = parse_json(value.encode("utf-8", "surrogatepass"))
        document[name] = value
    return document


# The table of geo


@contextmanager
def open_postgres(url: str) -> Iterator[Any]:
    """A read-only, consistent view of a database."""
    try:
        import psycopg
    except ModuleNotFoundError as error:
        raise NotFound("importing from PostgreSQL needs psycopg", hint=install_hint("postgres")) from error
    try:
        with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as db:
            db.read_only = True
            db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            yield db
    except psycopg.OperationalError as error:
        raise Unavailable(
            f"the database does not answer: {clean(error)}", hint="check the URL and the server"
        ) from error
    except psycopg.Error as error:
        raise Validation(
            f"the database refused a query: {clean(error)}", hint="are its tables those of the format?"
        ) from error


def postgres_tables(db: Any) -> set[str]:
    query = (
        "SELECT table_name FROM information_schema.tables "
        "WHERE table_schema = ANY(current_schemas(false)) AND table_type = 'BASE TABLE'"
    )
    return {row["table_name"] for row in db.execute(query)}


def read_geo_db(db: Any, options: Options) -> Drafts:
    """The rows of pipeline_checkpoints, parents first; their payload is below `options.files`."""
    query = (
        "SELECT checkpoint_id, level, parent_id, processor_name, data_summary, file_path, compression_type, status, "
        "validation_checksum, created_at FROM pipeline_checkpoints ORDER BY created_at, checkpoint_id"
    )
    rows = list(db.execute(query))
    with Pickles(options.allow) as pickles:
        for row, parent in geo_core.parents_first(rows):
            where = clean(f"pipeline_checkpoints: {row['checkpoint_id']}")
            if row["parent_id"] and parent is None:
                why = (
                    f"its parent {clean(row['parent_id'], 100)} is one of its own descendants, or gone; it has none now"
                )
                yield Finding(Verdict.LOSSY, where, why)
            yield from _geo_row(row, parent, where, options, pickles)


def _geo_row(row: Mapping[str, Any], parent: str | None, where: str, options: Options, pickles: Pickles) -> Drafts:
    about: Document = {
        "checkpoint_id": row["checkpoint_id"],
        "level": row["level"],
        "status": row["status"],
        "data_files": [],
        "metadata": mapping_of(row["data_summary"]),
        "validation_checksum": row["validation_checksum"],
        "timestamp": row["created_at"].timestamp(),
    }
    folder = _inside(options.files, row["file_path"])
    if folder is None:
        yield Finding(
            Verdict.SKIPPED,
            where,
            f"its file_path {clean(row['file_path'], 100)} is not below {options.files} (--files)",
        )
        return
    inside = list_folder(folder, os.path.relpath(folder, options.files))
    for entry in geo_core.checkpoint(
        str(row["checkpoint_id"]), about, inside, options, pickles,
        job=row["processor_name"], parent=None if parent is None else name_of(parent),
        created_us=microseconds(row["created_at"]),
    ):  # fmt: skip
        if isinstance(entry, Finding):
            yield entry
        else:
            entry.form = GEO_DB
            entry.source = where
            yield entry


def _inside(root: str, path: str) -> str | None:
    """The folder that a row names, found below `root` by the end of its path; None when it is nowhere there.

    No part of it may be a link or lead upwards: a row must not make us read what it likes.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not all(map(is_plain_name, parts)):
        return None
    for start in range(len(parts)):
        place = os.path.join(root, *parts[start:])
        real = os.path.realpath(place)
        if os.path.isdir(place) and real == os.path.join(os.path.realpath(root), *parts[start:]):
            return real
    return None
