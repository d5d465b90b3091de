"""A LangGraph checkpoint as what a Kedge checkpoint records, and back.

Its ID, time, parent and metadata become those of the Kedge checkpoint, where they come back as they were; what does
not stands in the head, beside the fields of the checkpoint itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from langgraph.checkpoint.base import Checkpoint as GraphCheckpoint
from langgraph.checkpoint.base import CheckpointTuple, PendingWrite

from kedge.model import Checkpoint, Lease, parse_step, to_datetime
from kedge.store.request import Request, metadata_as_json

from . import names
from .names import Address

OWN_METADATA = ("thread_id", "checkpoint_ns")  # ours, where a job's name does not tell them
_VALUES = "channel_values"
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_PLAIN_CHARACTERS = 1024


def describe(
    address: Address,
    checkpoint: GraphCheckpoint,
    metadata: Mapping[str, Any],
    *,
    is_parent_stored: bool,
    lease: Lease | None = None,
    idempotency_key: str | None = None,
) -> tuple[dict[str, Any], Request]:
    """The head of a checkpoint, whose parent `address` names, and what the save records beside it.

    Its names are made in `names`, and parse as they are.
    """
    job, parent = address.job, address.checkpoint_id
    checkpoint_id, created_us = names.id_of(job, checkpoint["id"]), _microseconds(checkpoint["ts"])
    parent_id = names.id_of(job, parent) if parent is not None and is_parent_stored else None
    head: dict[str, Any] = {k: v for k, v in checkpoint.items() if k not in (_VALUES, "id", "ts")}
    if names.plain_id(checkpoint_id) != checkpoint["id"]:
        head["id"] = checkpoint["id"]
    if created_us is None:
        head["ts"] = checkpoint["ts"]
    plain = filterable(metadata)
    if (rest := {key: _listed(value) for key, value in metadata.items() if key not in plain}) != _no_parents():
        head["metadata"] = rest
    if parent is not None and (parent_id is None or names.plain_id(parent_id) != parent):
        head["parent"] = parent
    step = f"{plain.get('source', 'checkpoint')} {plain.get('step', '')}".strip()
    return head, Request(
        job,
        parse_step(step),
        parent=parent_id,
        metadata_json=metadata_as_json(plain | own_metadata(address)),
        lease=lease,
        idempotency_key=idempotency_key,
        checkpoint_id=checkpoint_id,
        created_us=created_us,
    )


def tuple_of(
    saved: Checkpoint, address: Address, head: dict[str, Any], values: dict[str, Any], writes: list[PendingWrite]
) -> CheckpointTuple:
    """What `describe` was given, of a Kedge checkpoint and the head in its state, with its values and writes."""
    metadata: Any = {**graph_metadata(saved.metadata), **head.pop("metadata", _no_parents())}
    parent = head.pop("parent", saved.parent and names.plain_id(saved.parent))
    checkpoint: Any = {"id": names.plain_id(saved.id), "ts": saved.created_at.isoformat(), **head, _VALUES: values}
    return CheckpointTuple(
        config=address.config(checkpoint["id"]),
        checkpoint=checkpoint,
        metadata=metadata,
        parent_config=address.config(parent) if parent else None,
        pending_writes=writes,
    )


def _no_parents() -> dict[str, Any]:
    """What almost always is all that cannot be filtered by, and then is not stored."""
    return {"parents": {}}


def _listed(value: Any) -> Any:
    """Metadata as JSON has it, the form in which LangGraph's own savers give it: lists in the place of tuples."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def filterable(metadata: Mapping[str, object]) -> dict[str, object]:
    """The part of metadata that the index can hold and filter by."""
    return {key: value for key, value in metadata.items() if _is_plain(key, value)}


def _is_plain(key: str, value: object) -> bool:
    if key in OWN_METADATA or _PLAIN_KEY.fullmatch(key) is None:
        return False
    if isinstance(value, str):
        return type(value) is str and len(value) <= _MOST_PLAIN_CHARACTERS and value.isprintable()
    if type(value) is float:
        return value - value == 0  # finite
    return value is None or type(value) is bool or (type(value) is int and abs(value) < 1 << 63)


def _microseconds(text: str) -> int | None:
    """The time of a checkpoint as Kedge keeps it; None when it would not come back as the same text."""
    try:
        created_us = round(datetime.fromisoformat(text).timestamp() * 1_000_000)
        return created_us if to_datetime(created_us).isoformat() == text else None
    except (ValueError, TypeError, OverflowError):
        return None


def own_metadata(address: Address) -> dict[str, str]:
    """What the metadata must say of an address because the job's name does not."""
    is_told = names.names_of(address.job) is not None
    return {} if is_told else dict(zip(OWN_METADATA, (address.thread, address.namespace), strict=True))


def graph_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """LangGraph's part of the metadata of a Kedge checkpoint."""
    return {key: value for key, value in metadata.items() if key not in OWN_METADATA}


def address_of(saved: Checkpoint) -> Address:
    """The thread and the namespace of a Kedge checkpoint."""
    named = names.names_of(saved.job)
    return Address(*(named or (str(saved.metadata.get(name, "")) for name in OWN_METADATA)))
