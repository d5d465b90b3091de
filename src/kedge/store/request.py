"""The options of a save: parsed once, before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from kedge.codec import CODEC
from kedge.errors import NotFound, Validation
from kedge.model import (
    Checkpoint,
    CheckpointId,
    CheckpointLevel,
    Document,
    Lease,
    is_utf8,
    parse_choice,
    parse_name,
    parse_step,
    parse_tags,
)
from kedge.ports import NewCheckpoint, Provided, Then, digest_of

from . import knows

if TYPE_CHECKING:
    from . import Store

MAX_METADATA_BYTES = 64 * 1024

_ONLY_STR = frozenset({str})
_to_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


@dataclass(slots=True)
class Request:
    """The parsed options of a save. Never mutated (see `NewCheckpoint`)."""

    job: str
    step: str
    level: CheckpointLevel = CheckpointLevel.STEP
    parent: CheckpointId | None = None
    tags: dict[str, str] | None = None
    metadata_json: str = "{}"
    is_pinned: bool = False
    schema_version: str = "1.0"
    lease: Lease | None = None
    idempotency_key: str | None = None
    takes_key_from: CheckpointId | None = None  # the checkpoint that has the key until this is saved
    checkpoint_id: CheckpointId | None = None  # given by copies and imports; otherwise generated
    created_us: int | None = None
    then: Then | None = None  # further changes of the save; over HTTP the client makes them afterwards
    provided: Provided | None = None  # conditions of the save; over HTTP they are never met

    @property
    def lease_token(self) -> int | None:
        """The token of the lease. Tokens count the leases of one job: that of another job could pass for it (I5)."""
        return None if self.lease is None else parse_lease(self.lease, self.job).token

    def record(
        self, checkpoint_id: CheckpointId, created_us: int, size_bytes: int, packed: bytes, *, content: bytes
    ) -> NewCheckpoint:
        """Return the index record of the save, without its chunks.

        The idempotency key stands for `content`: bytes that do not depend on the compressor's version.
        """
        key = self.idempotency_key
        return NewCheckpoint(
            id=checkpoint_id,
            job=self.job,
            step=self.step,
            level=self.level,
            created_us=created_us,
            size_bytes=size_bytes,
            stored_bytes=len(packed),
            digest=digest_of(packed),
            codec=CODEC,
            schema_version=self.schema_version,
            manifest=packed,
            parent=self.parent,
            tags=self.tags or {},
            is_pinned=self.is_pinned,
            metadata_json=self.metadata_json,
            lease_token=self.lease_token,
            idempotency_key=key,
            takes_key_from=self.takes_key_from,
            then=self.then,
            provided=self.provided,
            request_digest=digest_of(f"{self.level}\0{self.step}\0".encode() + content) if key else b"",
        )

    def to_json(self) -> Document:
        """Return the head of a save over HTTP, without its job."""
        return {
            "step": self.step,
            "level": str(self.level),
            "parent": self.parent,
            "tags": self.tags or {},
            "metadata": json.loads(self.metadata_json),
            "pin": self.is_pinned,
            "schema_version": self.schema_version,
            "lease": self.lease_token,
            "idempotency_key": self.idempotency_key,
            "takes_key_from": self.takes_key_from,
            "id": self.checkpoint_id,
            "created_us": self.created_us,
        }


def request_of(record: NewCheckpoint) -> Request:
    """Return the request that would save this record unchanged."""
    same = {field.name: getattr(record, field.name) for field in fields(Request) if hasattr(record, field.name)}
    return Request(**same | {"tags": dict(record.tags), "checkpoint_id": record.id})


def request_again(checkpoint: Checkpoint, **changes: Any) -> Request:
    """Return the request that would save this checkpoint again with a new ID and these `changes`."""
    return replace(request_of(NewCheckpoint.of(checkpoint, b"")), **{"checkpoint_id": None, **changes})


def branch_listed(
    store: Store,
    source_id: CheckpointId,
    parent: CheckpointId | None,
    describe: Callable[[Checkpoint, CheckpointId | None], Request],
    *,
    actor: str,
) -> Checkpoint | None:
    """`Store.branch` of a listed checkpoint. `describe` takes it and its parent, if that still exists.

    Returns None if it was deleted after it was listed.
    """
    while True:
        if parent is not None and not knows(store.catalogue, parent):
            parent = None  # deleted: the ancestors begin here
        try:
            source = store.catalogue.read(source_id)
            return store.branch(source, describe(source[0], parent), actor=actor)
        except NotFound:
            if not knows(store.catalogue, source_id):
                return None
            if parent is None or knows(store.catalogue, parent):
                raise


def parse_request(
    job_id: str,
    step_name: str,
    level: CheckpointLevel | str = CheckpointLevel.STEP,
    parent: str | None = None,
    tags: Mapping[str, str] | None = None,
    metadata: Mapping[str, object] | None = None,
    pin: bool = False,
    lease: Lease | None = None,
    idempotency_key: str | None = None,
    schema_version: str = "1.0",
) -> Request:
    """Parse the arguments of a save; raises before anything is changed."""
    if lease is not None:
        parse_lease(lease, job_id)  # `Request` does so too, but only once the state is encoded
    if idempotency_key is not None and not _is_short_text(idempotency_key, 256):
        raise Validation("an idempotency key has 1 to 256 characters", hint="use a short stable string, such as a UUID")
    if not _is_short_text(schema_version, 64):
        raise Validation("a schema version has 1 to 64 characters", hint='use something like "2.1"')
    if not isinstance(pin, bool):
        raise Validation(f"pin={pin!r}", hint="use True or False")
    return Request(
        job=parse_name("job", job_id),
        step=parse_step(step_name),
        level=parse_choice(CheckpointLevel, level),
        parent=None if parent is None else CheckpointId(parse_name("checkpoint ID", parent)),
        tags=parse_tags(tags),
        metadata_json=metadata_as_json(metadata),
        is_pinned=pin,
        schema_version=schema_version,
        lease=lease,
        idempotency_key=idempotency_key,
    )


def parse_lease(lease: Lease, job: str | None = None) -> Lease:
    """Return `lease` if it is one, and is for `job`."""
    if not isinstance(lease, Lease):
        raise Validation(f"lease={lease!r}", hint="give what `with manager.lease(job) as lease` gives")
    if job is not None and lease.job != job:
        raise Validation(f"the lease is for job {lease.job}, not {job}", hint="take a lease of the job you write")
    return lease


def _is_short_text(value: object, most: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= most and is_utf8(value)


def metadata_as_json(metadata: Mapping[str, object] | None) -> str:
    """Return metadata as JSON. Raises Validation if a save cannot store it."""
    if not metadata:
        return "{}"
    try:
        text = _to_json(dict(metadata))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise Validation(f"metadata is not plain JSON: {error}", hint="put it into the state instead") from error
    if not _ONLY_STR.issuperset(map(type, metadata)) and not all(isinstance(key, str) for key in metadata):
        raise Validation("metadata has a key that is not text", hint="use text keys")
    if size > MAX_METADATA_BYTES:
        raise Validation(
            f"metadata takes {size:,} bytes, at most {MAX_METADATA_BYTES:,} fit", hint="put it into the state instead"
        )
    return text
