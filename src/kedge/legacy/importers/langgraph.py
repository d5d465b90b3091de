"""LangGraph's own savers, SQLite and PostgreSQL, as threads of KedgeSaver: history, parents, and pending writes.

Their tables are read, never their code run: values are rebuilt from a strict list of types. A type outside of it comes
over as the plain data it was made of, and the report names it. Imported only where such tables are found: LangGraph is
optional.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from kedge.errors import CheckpointError, Validation, install_hint
from kedge.manager import CheckpointManager

from .common import Finding, Found, Options, Thread, Verdict, clean, parse_json
from .databases import LANGGRAPH_POSTGRES, LANGGRAPH_SQLITE
from .writer import Report

try:
    from langgraph.checkpoint.serde.event_hooks import register_serde_event_listener
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

    from kedge.integrations.langgraph import KedgeSaver, history, names
except ImportError as error:
    raise Validation("this needs LangGraph", hint=install_hint("langgraph")) from error

_PAGE = 200
_NEEDED = frozenset({"id", "ts", "channel_values", "channel_versions"})


class Values:
    """Rebuilds values with LangGraph's serializer, strict; says which types it would not build."""

    def __init__(self, options: Options) -> None:
        allowed = [tuple(name.rpartition(".")[::2]) for name in options.allow]
        self._serde = JsonPlusSerializer(allowed_msgpack_modules=allowed or None)
        self._blocked: dict[str, None] = {}
        self._stop = register_serde_event_listener(self._hear)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if "blocked" in event["kind"]:
            self._blocked[f"{event['module']}.{event['name']}"] = None

    def load(self, kind: str, data: bytes) -> Any:
        return self._serde.loads_typed((kind, data))

    def blocked(self) -> tuple[str, ...]:
        """Types not built since this was last asked."""
        names, self._blocked = tuple(map(clean, self._blocked)), {}
        return names

    def close(self) -> None:
        self._stop()


def read_threads(db: sqlite3.Connection, shown: str, options: Options) -> Found:
    """The threads of a SqliteSaver."""
    with closing(Values(options)) as values:
        has_path = any(row["name"] == "task_path" for row in db.execute("PRAGMA table_info(writes)"))
        path = "task_path" if has_path else "''"
        order = "thread_id, checkpoint_ns, checkpoint_id"
        for row in db.execute(f"SELECT * FROM checkpoints ORDER BY {order}"):
            writes = db.execute(
                f"SELECT task_id, {path} AS task_path, idx, channel, type, value AS blob FROM writes "
                "WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? ORDER BY task_id, idx < 0, idx",
                (row["thread_id"], row["checkpoint_ns"], row["checkpoint_id"]),
            )
            yield from _one(LANGGRAPH_SQLITE, shown, dict(row), [dict(w) for w in writes], values, _whole)


def read_postgres(db: Any, shown: str, options: Options) -> Found:
    """The threads of a PostgresSaver."""
    with closing(Values(options)) as values:
        threads = db.execute("SELECT DISTINCT thread_id, checkpoint_ns FROM checkpoints ORDER BY 1, 2").fetchall()
        for names in threads:
            key = (names["thread_id"], names["checkpoint_ns"])
            after = ""
            while page := db.execute(
                "SELECT * FROM checkpoints WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id > %s "
                f"ORDER BY checkpoint_id LIMIT {_PAGE}",
                (*key, after),
            ).fetchall():
                after = page[-1]["checkpoint_id"]
                for row in page:
                    row["blobs"] = db.execute(
                        "SELECT channel, type, blob FROM checkpoint_blobs b JOIN "
                        "jsonb_each_text(%s::jsonb) v ON v.key = b.channel AND v.value = b.version "
                        "WHERE thread_id = %s AND checkpoint_ns = %s",
                        (json.dumps(row["checkpoint"].get("channel_versions") or {}), *key),
                    ).fetchall()
                    writes = db.execute(
                        "SELECT task_id, task_path, idx, channel, type, blob FROM checkpoint_writes "
                        "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s "
                        "ORDER BY task_id, idx < 0, idx",
                        (*key, row["checkpoint_id"]),
                    ).fetchall()
                    yield from _one(LANGGRAPH_POSTGRES, shown, row, writes, values, _from_blobs)


Load = Callable[[Mapping[str, Any], Values], tuple[Any, Any]]


def _whole(row: Mapping[str, Any], values: Values) -> tuple[Any, Any]:
    metadata = row["metadata"]
    text = metadata if isinstance(metadata, bytes) else str(metadata or "{}").encode()
    return values.load(row["type"], row["checkpoint"]), parse_json(text)


def _from_blobs(row: Mapping[str, Any], values: Values) -> tuple[Any, Any]:
    loaded = {b["channel"]: values.load(b["type"], b["blob"]) for b in row["blobs"] if b["type"] != "empty"}
    inline = row["checkpoint"].get("channel_values") or {}
    return {**row["checkpoint"], "channel_values": {**inline, **loaded}}, row["metadata"]


def _one(form: str, shown: str, row: Mapping[str, Any], writes: list[Any], values: Values, load: Load) -> Found:
    where = clean(f"{shown}: {row['thread_id']} {row['checkpoint_id']}")
    try:
        checkpoint, metadata = load(row, values)
        if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _NEEDED:
            raise ValueError("it is no checkpoint of LangGraph")
        thread = Thread(
            form, where, row["thread_id"], row["checkpoint_ns"], checkpoint, metadata or {}, row["parent_checkpoint_id"]
        )
        for write in writes:
            task = thread.writes.setdefault(write["task_id"], (write["task_path"] or "", []))
            task[1].append((write["channel"], values.load(write["type"], write["blob"])))
    except Exception as error:  # noqa: BLE001 - whatever damaged bytes lead to in the serializer
        yield Finding(Verdict.CORRUPTED, where, f"cannot be read: {type(error).__name__}: {clean(error)}")
        return
    if blocked := values.blocked():
        how = " ".join(f"--allow {name}" for name in blocked)
        why = f"{', '.join(blocked)}: not rebuilt, plain data stands for it; register it with kedge and use {how}"
        yield Finding(Verdict.LOSSY, where, why, blocked)
    yield thread


class Threads:
    """Writes checkpoints of threads through a KedgeSaver, each at most once."""

    def __init__(self, manager: CheckpointManager, report: Report) -> None:
        self._manager = manager
        self._report = report
        self._saver = KedgeSaver(manager)
        self._newest: dict[str, str | None] = {}  # the newest checkpoint of a job when we came to it

    def add(self, thread: Thread) -> None:
        job = names.job_of(thread.thread, thread.namespace)
        own_id = names.id_of(job, thread.checkpoint["id"])
        if job not in self._newest:
            newest = self._manager.list(job, level="step", limit=1)
            self._newest[job] = newest[0].id if newest else None
        self._report.jobs.add(job)
        try:
            if self._manager.exists(own_id):
                if own_id == self._newest[job]:
                    self._newest[job] = None  # the source knows it: what comes now is newer
                added = self._add_writes(thread, own_id)
            elif self._newest[job] is not None:
                why = "the thread was continued in the store since, and is not added to"
                self._report.find(Finding(Verdict.SKIPPED, thread.source, why))
                return
            else:
                checkpoint: Any = thread.checkpoint
                metadata: Any = thread.metadata
                self._saver.put(_config(thread, thread.parent), checkpoint, metadata, checkpoint["channel_versions"])
                self._add_writes(thread, own_id)
                added = True
        except CheckpointError as error:
            self._report.find(Finding(Verdict.SKIPPED, thread.source, clean(error)))
            return
        if added:
            self._report.count(thread.form, job)
        else:
            self._report.present += 1

    def _add_writes(self, thread: Thread, own_id: str) -> bool:
        if not thread.writes:
            return False
        known: set[str] = set()
        for row in history.writes_of(self._manager, self._manager.get(own_id)):
            state: Any = self._manager.load(row.id)
            known.add(state["task"]["id"])
        new = [task for task in thread.writes if task not in known]
        for task in new:
            path, writes = thread.writes[task]
            self._saver.put_writes(_config(thread, thread.checkpoint["id"]), writes, task, path)
        return bool(new)


def _config(thread: Thread, checkpoint_id: str | None) -> Any:
    chosen = {"thread_id": thread.thread, "checkpoint_ns": thread.namespace}
    return {"configurable": chosen | ({} if checkpoint_id is None else {"checkpoint_id": checkpoint_id})}
