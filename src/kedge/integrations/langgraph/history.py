"""Threads in the index: walking their histories, filtering, copying."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import get_checkpoint_id

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, to_datetime
from kedge.store import Store
from kedge.store.request import request_of

from . import names

PAGE = 64
_OWN = ("thread_id", "checkpoint_ns")  # ours, where a job's name does not tell them
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_PLAIN_CHARACTERS = 1024


def split_metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the index can hold and filter by, the rest)."""
    plain = {key: value for key, value in metadata.items() if _is_plain(key, value)}
    return plain, {key: value for key, value in metadata.items() if key not in plain}


def _is_plain(key: str, value: object) -> bool:
    if key in _OWN or _PLAIN_KEY.fullmatch(key) is None:
        return False
    if isinstance(value, str):
        return type(value) is str and len(value) <= _MOST_PLAIN_CHARACTERS and value.isprintable()
    if type(value) is float:
        return value - value == 0  # finite
    return value is None or type(value) is bool or (type(value) is int and abs(value) < 1 << 63)


def microseconds(text: str) -> int | None:
    """The time of a checkpoint as Kedge keeps it; None when it would not come back as the same text."""
    try:
        created_us = round(datetime.fromisoformat(text).timestamp() * 1_000_000)
        return created_us if to_datetime(created_us).isoformat() == text else None
    except (ValueError, TypeError, OverflowError):
        return None


def graph_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in _OWN}


def matches(metadata: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in metadata and metadata[key] == value for key, value in wanted.items())


def jobs(store: Store, prefix: str) -> Iterator[str]:
    after = ""
    while page := store.jobs(prefix, PAGE, after):
        yield from (job.name for job in page)
        after = page[-1].name


def jobs_of_thread(store: Store, thread_id: str) -> Iterator[str]:
    root = names.prefix_of(thread_id)
    if store.job(root) is not None:
        yield root
    yield from jobs(store, root + "@")


def newest(store: Store, job: str) -> int:
    """The sequence number of the newest checkpoint; 0 when there is none."""
    found = store.list(job, level=CheckpointLevel.STEP, limit=1)
    return found[0].seq if found else 0


def writes_of(store: Store, checkpoint: Checkpoint) -> list[Checkpoint]:
    """The rows of writes that belong to a checkpoint, in the order they came."""
    return store.list(checkpoint.job, level=CheckpointLevel.SUBSTEP, tags={"of": checkpoint.id.partition("@")[0]})


def walk(
    store: Store, job: str, checkpoint_id: str | None, wanted: Mapping[str, Any], before: RunnableConfig | None
) -> Iterator[Checkpoint]:
    """Checkpoints of a job, newest first. `wanted` is applied as far as the index can; the caller compares exactly."""
    limit_id = get_checkpoint_id(before) if before else None
    below: int | None = None
    if limit_id is not None:
        try:
            below = store.get(names.id_of(job, limit_id)).seq
        except NotFound:
            pass  # IDs grow with time, so they can be compared instead
    if checkpoint_id is not None:
        try:
            found = store.get(names.id_of(job, checkpoint_id))
        except NotFound:
            return
        if below is None or found.seq < below:
            yield found
        return
    bound = {key: value for key, value in wanted.items() if _is_plain(key, value)}
    is_compared = limit_id is not None and below is None
    while page := store.list(job, level=CheckpointLevel.STEP, metadata=bound or None, limit=PAGE, before=below):
        for checkpoint in reversed(page):
            if not is_compared or checkpoint.id.partition("@")[0] < str(limit_id):
                yield checkpoint
        below = page[0].seq


def names_of(checkpoint: Checkpoint) -> tuple[str, str]:
    """(thread, namespace) of a checkpoint."""
    known = names.names_of(checkpoint.job)
    return known or (str(checkpoint.metadata.get(_OWN[0], "")), str(checkpoint.metadata.get(_OWN[1], "")))


def copy_job(manager: CheckpointManager, job: str, target_thread: str) -> None:
    """Copy the job of one namespace to another thread, in order, writes included."""
    namespace = ""
    for source in manager.walk(job):
        try:
            stored = manager.store.read(source.id)
        except NotFound:
            continue  # deleted meanwhile
        source = stored[0]
        namespace = names_of(source)[1] if source.level is CheckpointLevel.STEP else namespace
        new_job = names.job_of(target_thread, namespace)
        metadata = {key: value for key, value in source.metadata.items() if key not in _OWN}
        if names.names_of(new_job) is None:
            metadata |= {_OWN[0]: target_thread, _OWN[1]: namespace}
        plain_id = source.id.partition("@")[0]
        parent = source.parent and names.id_of(new_job, source.parent.partition("@")[0])
        request = request_of(
            source,
            job=new_job,
            checkpoint_id=names.id_of(new_job, plain_id) if source.level is CheckpointLevel.STEP else None,
            parent=parent if parent and manager.exists(parent) else None,
            metadata_json=json.dumps(metadata, ensure_ascii=False, separators=(",", ":")),
            idempotency_key=f"copy:{source.id}",
        )
        manager.store.branch(stored, request, actor=manager.actor)
