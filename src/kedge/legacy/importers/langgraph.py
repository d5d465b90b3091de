"""LangGraph's own savers, SQLite and PostgreSQL, as threads of KedgeSaver: history, parents, and pending writes.

Their tables are read, never their code run: values are rebuilt from a strict list of types. A type outside of it comes
over as the plain data it was made of, and the report names it. Imported only where such tables are found: LangGraph is
optional.
"""

from __future__ import annotations

import json
import sqlite3
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from kedge.errors import CheckpointError, Validation, install_hint
from kedge.manager import CheckpointManager

from .common import Drafts, Finding, Options, Thread, Verdict, clean
from .databases import LANGGRAPH_POSTGRES, LANGGRAPH_SQLITE
from .writer import Report

try:
    from langgraph.checkpoint.serde.event_hooks import register_serde_event_listener
    from langgraph.checkpoint.serde.jsonplus import LC_REVIVER, JsonPlusSerializer
    from langgraph.checkpoint.serde.types import TASKS
    from langgraph.types import Send

    from kedge.integrations.langgraph import KedgeSaver, history, names
except ImportError as error:
    raise Validation("importing LangGraph checkpoints needs LangGraph", hint=install_hint("langgraph")) from error

_PAGE = 200
_WITH_SENDS = 4  # the version of checkpoints from which on the channel of tasks has what was sent
_NEEDED = frozenset({"id", "ts", "channel_values", "channel_versions"})


# Before 0.2.3 values were JSON, objects were envelopes {"lc": 2, "id": [module…, class], "method", "args", "kwargs"}.
# What an envelope may name, and what makes it of its arguments. `method` was one of each type, and never another.
_BUILDERS: dict[str, Callable[..., Any]] = {
    "builtins.bytearray": bytearray.fromhex,
    "builtins.bytes": bytes.fromhex,
    "builtins.frozenset": frozenset,
    "builtins.set": set,
    "collections.deque": deque,
    "datetime.date": date.fromisoformat,
    "datetime.datetime": datetime.fromisoformat,
    "datetime.time": time.fromisoformat,
    "datetime.timedelta": timedelta,
    "datetime.timezone": timezone,
    "decimal.Decimal": Decimal,
    "langgraph.constants.Send": Send,
    "langgraph.types.Send": Send,
    "pathlib.PosixPath": PurePosixPath,
    "pathlib.PurePosixPath": PurePosixPath,
    "uuid.UUID": UUID,
}


class Values:
    """Rebuilds values; says which types it did not build, for which plain data stands then."""

    def __init__(self, allow: tuple[str, ...]) -> None:
        allowed = [tuple(name.rpartition(".")[::2]) for name in allow]
        self._serde = JsonPlusSerializer(
            allowed_msgpack_modules=allowed or None, allowed_json_modules=[tuple(name.split(".")) for name in allow]
        )
        self._allowed = set(allow)
        self._blocked: dict[str, None] = {}
        self._stop = register_serde_event_listener(self._hear)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if "blocked" in event["kind"]:
            self._blocked[f"{event['module']}.{event['name']}"] = None

    def load(self, kind: str, data: bytes) -> Any:
        if kind == "json":
            return json.loads(data, object_hook=self._revive)
        return self._serde.loads_typed((kind, data))

    def _revive(self, value: dict[str, Any]) -> Any:
        if value.get("lc") != 2 or value.get("type") != "constructor" or not isinstance(value.get("id"), list):
            return LC_REVIVER(value)
        name = ".".join(map(str, value["id"]))
        args, fields = value.get("args") or [], value.get("kwargs") or {}
        if builder := _BUILDERS.get(name):
            return builder(*args, **fields)
        if name in self._allowed:
            return self._serde.loads_typed(("json", json.dumps(value, default=_refuse).encode()))
        self._blocked[name] = None
        return fields or (args[0] if len(args) == 1 else args)

    def blocked(self) -> tuple[str, ...]:
        """Types not built since this was last asked."""
        names, self._blocked = tuple(map(clean, self._blocked)), {}
        return names

    def close(self) -> None:
        self._stop()


def _refuse(value: object) -> Any:
    raise ValueError(f"an allowed type holds a {type(value).__name__}, of which only LangGraph's newer savers know")


def read_threads(db: sqlite3.Connection, shown: str, options: Options) -> Drafts:
    """The threads of a SqliteSaver; before 0.2 they had no namespaces, and other names for IDs."""
    own = {row["name"] for row in db.execute("PRAGMA table_info(checkpoints)")}
    of_writes = {row["name"] for row in db.execute("PRAGMA table_info(writes)")}
    is_old = "thread_ts" in own
    own_id = "thread_ts" if is_old else "checkpoint_id"
    names = "thread_ts AS checkpoint_id, parent_ts AS parent_checkpoint_id, '' AS checkpoint_ns, 'json' AS type"
    columns = f"thread_id, checkpoint, {'metadata' if 'metadata' in own else 'NULL AS metadata'}, {names}"
    with closing(Values(options.allow)) as values:
        order = "thread_id, thread_ts" if is_old else "thread_id, checkpoint_ns, checkpoint_id"
        for row in db.execute(f"SELECT {columns if is_old else '*'} FROM checkpoints ORDER BY {order}"):
            key = (row["thread_id"], row["checkpoint_ns"])

            def writes_of(checkpoint: str | None, key: tuple[str, str] = key) -> list[Any]:
                if not of_writes or checkpoint is None:
                    return []
                path = "task_path" if "task_path" in of_writes else "'' AS task_path"
                kind = "type" if "type" in of_writes else "'json' AS type"
                space = "checkpoint_ns" if "checkpoint_ns" in of_writes else "''"
                rows = db.execute(
                    f"SELECT task_id, {path}, idx, channel, {kind}, value AS blob FROM writes WHERE thread_id = ? "
                    f"AND {space} = ? AND {own_id} = ? ORDER BY task_id, idx < 0, idx",
                    (*key, checkpoint),
                )
                return [dict(write) for write in rows]

            yield from _one(LANGGRAPH_SQLITE, shown, dict(row), writes_of, values, _whole)


def read_postgres(db: Any, shown: str, options: Options) -> Drafts:
    """The threads of a PostgresSaver; one that is shallow keeps the newest checkpoint of each, without a history."""
    columns = {
        (row["table_name"], row["column_name"])
        for row in db.execute(
            "SELECT table_name, column_name FROM information_schema.columns "
            "WHERE table_schema = ANY(current_schemas(false))"
        )
    }
    is_shallow = ("checkpoints", "checkpoint_id") not in columns
    path = "task_path" if ("checkpoint_writes", "task_path") in columns else "'' AS task_path"
    own_id = "checkpoint->>'id'" if is_shallow else "checkpoint_id"
    same_version = "" if is_shallow else "AND v.value = b.version "
    with closing(Values(options.allow)) as values:
        for names in db.execute("SELECT DISTINCT thread_id, checkpoint_ns FROM checkpoints ORDER BY 1, 2").fetchall():
            key = (names["thread_id"], names["checkpoint_ns"])

            def writes_of(checkpoint: str | None, key: tuple[str, str] = key) -> list[Any]:
                return db.execute(  # type: ignore[no-any-return]
                    f"SELECT task_id, {path}, idx, channel, type, blob FROM checkpoint_writes "
                    "WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s "
                    "ORDER BY task_id, idx < 0, idx",
                    (*key, checkpoint),
                ).fetchall()

            after = ""
            while page := db.execute(
                f"SELECT *, {own_id} AS checkpoint_id FROM checkpoints WHERE thread_id = %s AND checkpoint_ns = %s "
                f"AND {own_id} > %s ORDER BY {own_id} LIMIT {_PAGE}",
                (*key, after),
            ).fetchall():
                after = page[-1]["checkpoint_id"]
                for row in page:
                    row["blobs"] = db.execute(
                        "SELECT channel, type, blob FROM checkpoint_blobs b JOIN "
                        f"jsonb_each_text(%s::jsonb) v ON v.key = b.channel {same_version}"
                        "WHERE thread_id = %s AND checkpoint_ns = %s",
                        (json.dumps(row["checkpoint"].get("channel_versions") or {}), *key),
                    ).fetchall()
                    yield from _one(LANGGRAPH_POSTGRES, shown, row, writes_of, values, _from_blobs)


WritesOf = Callable[[str | None], Sequence[Any]]
Load = Callable[[Mapping[str, Any], Values], tuple[Any, Any]]


def _whole(row: Mapping[str, Any], values: Values) -> tuple[Any, Any]:
    metadata = row["metadata"]
    text = metadata if isinstance(metadata, bytes) else str(metadata or "{}").encode()
    return values.load(row["type"], row["checkpoint"]), values.load("json", text)


def _from_blobs(row: Mapping[str, Any], values: Values) -> tuple[Any, Any]:
    loaded = {b["channel"]: values.load(b["type"], b["blob"]) for b in row["blobs"] if b["type"] != "empty"}
    inline = row["checkpoint"].get("channel_values") or {}
    return {**row["checkpoint"], "channel_values": {**inline, **loaded}}, row["metadata"]


def _one(form: str, shown: str, row: Mapping[str, Any], writes_of: WritesOf, values: Values, load: Load) -> Drafts:
    where = clean(f"{shown}: {row['thread_id']} {row['checkpoint_id']}")
    parent = row.get("parent_checkpoint_id")
    try:
        checkpoint, metadata = load(row, values)
        if not isinstance(checkpoint, dict):
            raise ValueError("it is no checkpoint of LangGraph")
        checkpoint.setdefault("id", row["checkpoint_id"])
        if not checkpoint.keys() >= _NEEDED:
            raise ValueError("it is no checkpoint of LangGraph")
        _add_sends(checkpoint, writes_of(parent) if checkpoint.get("v", 1) < _WITH_SENDS else (), values)
        thread = Thread(form, where, row["thread_id"], row["checkpoint_ns"], checkpoint, metadata or {}, parent)
        for write in writes_of(row["checkpoint_id"]):
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


def _add_sends(checkpoint: dict[str, Any], writes_of_parent: Iterable[Any], values: Values) -> None:
    """Put what was sent to nodes and not yet taken where newer savers have it: in the channel of tasks."""
    sends = [values.load(w["type"], w["blob"]) for w in writes_of_parent if w["channel"] == TASKS]
    pending = checkpoint.pop("pending_sends", None) or []
    if len(pending) == 2 and all(isinstance(part, str) for part in pending):  # (type, base64)
        pending = values.load(pending[0], b64decode(pending[1]))
    if sends := [*pending, *sends]:
        versions = checkpoint["channel_versions"]
        checkpoint["channel_values"][TASKS] = sends
        versions[TASKS] = max(versions.values()) if versions else 1


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
        self._report.count(thread.form, job, thread.source, is_new=added)

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
