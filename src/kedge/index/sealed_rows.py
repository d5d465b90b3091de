"""Rows of an encrypted index: sealing and opening for `encrypted` (I10)."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from operator import attrgetter
from typing import NamedTuple

import ormsgpack

from kedge.crypto import DataKey, Vault
from kedge.errors import CheckpointError, Corrupted, LeaseHeld
from kedge.model import Checkpoint, CheckpointStatus, Event, Job, to_us
from kedge.ports import UNREADABLE, KeysChanged, NewCheckpoint, Provided, SavedRow, Unmet, digest_of
from kedge.ports.record import lasting

TOKEN = re.compile(r"~[A-Za-z0-9_-]{20,}")
_HIDDEN_STEP = "~"
_FIELDS = tuple(field.name for field in fields(NewCheckpoint))
_values = attrgetter(*_FIELDS)
# Events that the index writes itself; their details are public, or tokens already.
_OWN_ACTIONS = ("save", "delete", "pin", "unpin", "status", "lease", "release", "tag", "retention", "key", "reseal")


class Proof(NamedTuple):
    """The content of a row's envelope: its secrets, and the values it proves, which the index has as tokens."""

    step: str
    metadata_json: str
    tags: dict[str, str]
    key: str | None  # the idempotency key; next, the digest of its request
    request_digest: bytes
    revision: int  # how often its tags were changed: as many `tag` events follow its save


class SealedRows:
    """Seals rows under a vault's current data key, and opens them under the key they name."""

    def __init__(self, vault: Vault) -> None:
        self.vault = vault

    def seal(self, new: NewCheckpoint, proof: Proof | None = None) -> NewCheckpoint:
        """Return the record for the inner index, sealed under the current data key. `proof`: of an existing row."""
        key = self.vault.current
        if new.key_id and new.key_id != key.id.hex():
            raise KeysChanged  # its chunks are under another key
        manifest = key.seal("manifest", new.id.encode(), new.manifest)
        proof = proof or Proof(
            new.step, new.metadata_json, dict(new.tags), new.idempotency_key, bytes(new.request_digest), 0
        )
        has_key = new.idempotency_key is not None
        return _changed(
            new,
            job=self._hide("job", new.job),
            step=_HIDDEN_STEP if self.vault.hides_names else new.step,
            digest=digest_of(manifest),
            manifest=manifest,
            tags=self._seal_tags(new.tags) if new.tags else {},
            metadata_json=self._seal_row(key, new, new.job, new.created_us, proof),
            idempotency_key=self.vault.names.token("key", new.idempotency_key or "") if has_key else None,
            request_digest=self.vault.names.seal("request", new.request_digest) if has_key else b"",
            key_id=key.id.hex(),
            provided=None if new.provided is None else self._hide_provided(new.provided),
        )

    def _hide_provided(self, provided: Provided) -> Provided:
        if provided.marks is not None:
            raise Unmet  # other rows' tags are changed with their envelopes: `EncryptedIndex.update`
        takes, tag, names = provided.takes, provided.absent_tag, self.vault.names
        return replace(
            provided,
            absent_jobs=[self._hide("job", job) for job in provided.absent_jobs],
            absent_tag=tag and (names.token("tag", tag[0]), names.token(f"tag {tag[0]}", tag[1])),
            takes=takes and replace(takes, job=self._hide("job", takes.job), holder=self._hide("actor", takes.holder)),
        )

    def open_record(self, sealed: NewCheckpoint) -> NewCheckpoint:
        """Return what `seal` was given, from a row of the inner index. Raises Corrupted if it is not such a row.

        The envelope knows the idempotency key, whatever the table of keys says.
        """
        job = self._show("job", sealed.job)
        proof = self._open_row(sealed, job, sealed.created_us, sealed.metadata_json)
        manifest = self.open_manifest(sealed.id, sealed.manifest)
        return replace(
            sealed,
            job=job,
            step=proof.step,
            digest=digest_of(manifest),
            manifest=manifest,
            tags=proof.tags,
            metadata_json=proof.metadata_json,
            idempotency_key=proof.key,
            request_digest=proof.request_digest,
            key_id="",
        )

    def _seal_row(self, key: DataKey, row: Checkpoint | NewCheckpoint, job: str, created_us: int, proof: Proof) -> str:
        sealed = key.seal("row", _bound(row, job, created_us), ormsgpack.packb(list(proof)))
        return f'{{"sealed":"{base64.b64encode(sealed).decode()}"}}'

    def _open_row(self, row: Checkpoint | NewCheckpoint, job: str, created_us: int, metadata_json: str) -> Proof:
        """Return the content of a row's envelope. Raises Corrupted if it does not prove the row."""
        try:
            (name, sealed), *more = json.loads(metadata_json).items()
            if name != "sealed" or more:
                raise ValueError("other fields")
            envelope = base64.b64decode(sealed, validate=True)
        except (ValueError, TypeError, AttributeError, binascii.Error):
            raise _damaged(row.id, "it is not encrypted, but its namespace is") from None
        with _of(row.id, "row"):
            proof = Proof(*ormsgpack.unpackb(self.vault.open("row", _bound(row, job, created_us), envelope)))
        if row.step != (_HIDDEN_STEP if self.vault.hides_names else proof.step):
            raise _damaged(row.id, "its step was changed")
        if (row.tags or proof.tags) and row.tags != self._seal_tags(proof.tags):
            raise _damaged(row.id, "its tags were changed, or belong to another checkpoint")
        return proof

    def open_manifest(self, checkpoint_id: str, sealed: bytes) -> bytes:
        with _of(checkpoint_id, "manifest"):
            return self.vault.open("manifest", checkpoint_id.encode(), sealed)

    def _prove(self, sealed: Checkpoint) -> Checkpoint:
        """Return a checkpoint as it was saved. Raises Corrupted."""
        return self._proved(sealed)[0]

    def _proved(self, sealed: Checkpoint) -> tuple[Checkpoint, Proof]:
        job = self._show("job", sealed.job)
        proof = self._open_row(sealed, job, to_us(sealed.created_at), json.dumps(dict(sealed.metadata)))
        opened = replace(sealed, job=job, step=proof.step, tags=proof.tags, metadata=json.loads(proof.metadata_json))
        return opened, proof

    def _prove_keyed(self, key: str | None, sealed: Checkpoint, request_digest: bytes | None = None) -> Checkpoint:
        """The same for one found by an idempotency key. Raises Corrupted if it was not saved under that key."""
        checkpoint, proof = self._proved(sealed)
        if proof.key != key or request_digest not in (None, proof.request_digest):
            raise _damaged(sealed.id, f"idempotency key {key!r} belongs to another checkpoint")
        return checkpoint

    def _open(self, sealed: Checkpoint) -> Checkpoint:
        """The same for display: one marked as damaged may be shown without what does not decrypt."""
        try:
            return self._prove(sealed)
        except Corrupted:
            if sealed.status is not CheckpointStatus.CORRUPTED:
                raise
            return replace(sealed, job=TOKEN.sub(self._reveal, sealed.job), tags={}, metadata={})

    def _tagged(self, tags: Mapping[str, Sequence[str]], checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint found by its tags. Raises Corrupted if it lacks one of these values."""
        is_shown = checkpoint.status is CheckpointStatus.CORRUPTED  # without its tags
        if not is_shown and any(checkpoint.tags.get(name) not in values for name, values in tags.items()):
            raise _damaged(checkpoint.id, "it is found by tags of another checkpoint")
        return checkpoint

    def _shown_row(
        self, tags: Mapping[str, Sequence[str]], sealed: tuple[Checkpoint, bytes]
    ) -> tuple[Checkpoint, bytes]:
        """Return a row found by its tags; one marked as damaged may lack its manifest."""
        row = self._tagged(tags, self._open(sealed[0]))
        try:
            return row, self.open_manifest(row.id, sealed[1])
        except Corrupted:
            if row.status is not CheckpointStatus.CORRUPTED:
                raise
            return row, UNREADABLE

    def _seal_tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        names = self.vault.names
        return {names.token("tag", name): names.token(f"tag {name}", value) for name, value in tags.items()}

    def _seal_wanted(self, tags: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        names = self.vault.names
        return {names.token("tag", name): [names.token(f"tag {name}", v) for v in tags[name]] for name in tags}

    def _hide(self, kind: str, name: str) -> str:
        return self.vault.names.token(kind, name) if self.vault.hides_names else name

    def _show(self, kind: str, name: str) -> str:
        return self.vault.names.text(kind, name) if self.vault.hides_names else name

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Replace tokens in the inner index's errors, because users know names."""
        try:
            yield
        except CheckpointError as error:
            self._revealed(error)
            raise

    def _revealed(self, error: CheckpointError) -> CheckpointError:
        error.message = TOKEN.sub(self._reveal, error.message)
        error.hint = TOKEN.sub(self._reveal, error.hint)
        if isinstance(error, LeaseHeld):
            error.holder = TOKEN.sub(self._reveal, error.holder)
        return error

    def _reveal(self, token: re.Match[str]) -> str:
        for kind in ("job", "actor", "key"):
            try:
                return self.vault.names.text(kind, token[0])
            except Corrupted:
                continue
        return token[0]

    def _opened(self, sealed: tuple[Checkpoint, bytes]) -> tuple[Checkpoint, bytes]:
        return self._prove(sealed[0]), self.open_manifest(sealed[0].id, sealed[1])

    def _all_opened(self, rows: Iterable[SavedRow]) -> Iterator[SavedRow]:
        """Yield the rows that decrypt. Others are damaged, or were re-encrypted since, which has an event."""
        for sealed, digest in rows:
            with suppress(Corrupted):
                yield self.open_record(sealed), digest

    def _open_job(self, job: Job) -> Job:
        policy = None if job.retention is None else self._open_text("retention", job.retention)
        return replace(job, name=self._show("job", job.name), retention=policy)

    def _seal_text(self, kind: str, text: str) -> str:
        return json.dumps({"sealed": self.vault.names.token(kind, text)})

    def _open_text(self, kind: str, text: str) -> str:
        try:
            return self.vault.names.text(kind, json.loads(text)["sealed"])
        except (ValueError, TypeError, KeyError):
            raise Corrupted(
                f"a {kind} in the index is not encrypted, but its namespace is", hint="run kedge check"
            ) from None

    def _open_event(self, event: Event) -> Event:
        detail = event.detail
        if event.action == "tag":
            names = self.vault.names
            changed = {names.text("tag", name): value for name, value in json.loads(detail).items()}
            detail = json.dumps(
                {name: None if value is None else names.text(f"tag {name}", value) for name, value in changed.items()}
            )
        elif event.action == "retention":
            detail = "null" if detail == "null" else self._open_text("retention", detail)
        elif event.action not in _OWN_ACTIONS:
            detail = self._open_text("event", detail)
        job = None if event.job is None else self._show("job", event.job)
        try:
            actor = self._show("actor", event.actor)
        except Corrupted:
            if event.action != "key":
                raise
            actor = event.actor  # from keys that were replaced before anything was saved, in a rebuilt index
        return replace(event, actor=actor, job=job, detail=detail)


def envelope_of(row: Checkpoint) -> str:
    """Return the column with the envelope of a row, as `_seal_row` made it."""
    return f'{{"sealed":"{row.metadata.get("sealed")}"}}'


def _bound(row: Checkpoint | NewCheckpoint, job: str, created_us: int) -> bytes:
    return ormsgpack.packb(lasting(row, job, created_us))


def _changed(record: NewCheckpoint, **changes: object) -> NewCheckpoint:
    """`replace` in half the time: it would take as long as all the encryption."""
    return NewCheckpoint(**{**dict(zip(_FIELDS, _values(record), strict=True)), **changes})


@contextmanager
def _of(checkpoint_id: str, part: str) -> Iterator[None]:
    try:
        yield
    except Corrupted as error:
        what = f"the {part} of checkpoint {checkpoint_id} is damaged: {error.message}"
        raise Corrupted(what, hint=error.hint) from None


def _damaged(checkpoint_id: str, why: str) -> Corrupted:
    return Corrupted(
        f"the row of checkpoint {checkpoint_id} is damaged: {why}",
        hint="run kedge check; restore an earlier checkpoint or another copy of the store",
    )
