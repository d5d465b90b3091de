"""An index whose rows are sealed (I10): a wrapper around any other, which sees nothing it could tell.

    manifest                 an envelope bound to the checkpoint's ID
    metadata, step           an envelope bound to all of the row that never changes, so that listing proves the row
    tags, idempotency keys   tokens: the index still finds them by equality
    job, actor, holder       tokens too, where names are hidden; else as they are
    details of events        sealed, except what the index itself writes there

Sizes, counts, times, levels, statuses, pins, parents and IDs stay readable. What is not sealed as it should be is
refused.
Filters by metadata open the rows of a job one after the other; where names are hidden, listing jobs opens them all.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import ormsgpack

from holdfast.crypto import Vault
from holdfast.errors import CheckpointError, Corrupted, LeaseHeld, Validation
from holdfast.model import Checkpoint, CheckpointLevel, CheckpointStatus, Event, Job, Lease, to_us
from holdfast.ports import (
    UNREADABLE,
    CheckpointIds,
    Checkpoints,
    Chunk,
    EventChain,
    Events,
    Index,
    Jobs,
    KeysChanged,
    NewCheckpoint,
    Outcomes,
    PackUse,
    Problems,
    References,
)

from .filtering import check_filter, matches
from .groupcommit import one_by_one

_PAGE = 256
_TOKEN = re.compile(r"~[A-Za-z0-9_-]{20,}")
_HIDDEN_STEP = "~"
# Events the index writes by itself: what is in them is no secret, or a token already.
_OWN_ACTIONS = ("save", "delete", "pin", "unpin", "status", "lease", "release", "tag", "retention", "key", "reseal")


class EncryptedIndex:
    """`ports.Index` around another one, for a namespace that has a keyring."""

    def __init__(self, inner: Index, vault: Vault) -> None:
        self.inner = inner
        self.vault = vault
        self.store_id = inner.store_id
        self.namespace = inner.namespace
        self.is_encrypted = True
        self.row_bytes = inner.row_bytes

    # Sealing and opening rows

    def seal(self, new: NewCheckpoint) -> NewCheckpoint:
        """The record as the inner index gets it, under the current data key."""
        key = self.vault.current
        if new.key_id and new.key_id != key.id.hex():
            raise KeysChanged  # its chunks are under another one
        manifest = key.seal("manifest", new.id.encode(), new.manifest)
        bound = _bound(
            new.id, new.job, new.level, new.parent, new.created_us, new.size_bytes, new.codec, new.schema_version
        )
        row = base64.b64encode(key.seal("row", bound, ormsgpack.packb([new.step, new.metadata_json]))).decode()
        has_key = new.idempotency_key is not None
        return NewCheckpoint(  # not by replace(), which takes as long as all the encrypting
            id=new.id,
            job=self._hide("job", new.job),
            step=_HIDDEN_STEP if self.vault.hides_names else new.step,
            level=new.level,
            created_us=new.created_us,
            size_bytes=new.size_bytes,
            stored_bytes=new.stored_bytes,
            digest=hashlib.sha256(manifest).digest(),
            codec=new.codec,
            schema_version=new.schema_version,
            manifest=manifest,
            parent=new.parent,
            tags=self._seal_tags(new.tags) if new.tags else {},
            is_pinned=new.is_pinned,
            metadata_json=f'{{"sealed":"{row}"}}',
            has_chunks=new.has_chunks,
            new_chunks=new.new_chunks,
            reused_chunks=new.reused_chunks,
            lease_token=new.lease_token,
            idempotency_key=self.vault.names.token("key", new.idempotency_key or "") if has_key else None,
            request_digest=self.vault.names.seal("request", new.request_digest) if has_key else b"",
            seq=new.seq,
            status=new.status,
            key_id=key.id.hex(),
        )

    def open_record(self, sealed: NewCheckpoint) -> NewCheckpoint:
        """What `seal` got, from a row as the inner index has it; Corrupted when it is not such a row."""
        names = self.vault.names
        step, metadata_json = self._open_row(
            sealed.id, job := self._show("job", sealed.job), sealed.step, sealed.level, sealed.parent,
            sealed.created_us, sealed.size_bytes, sealed.codec, sealed.schema_version, sealed.metadata_json,
        )  # fmt: skip
        manifest = self.open_manifest(sealed.id, sealed.manifest)
        has_key = sealed.idempotency_key is not None
        return replace(
            sealed,
            job=job,
            step=step,
            digest=hashlib.sha256(manifest).digest(),
            manifest=manifest,
            tags=self._open_tags(sealed.tags),
            metadata_json=metadata_json,
            idempotency_key=names.text("key", sealed.idempotency_key or "") if has_key else None,
            request_digest=names.open("request", sealed.request_digest) if has_key else b"",
            key_id="",
        )

    def _open_row(
        self,
        checkpoint_id: str,
        job: str,
        step: str,
        level: CheckpointLevel,
        parent: str | None,
        created_us: int,
        size_bytes: int,
        codec: str,
        schema_version: str,
        metadata_json: str,
    ) -> tuple[str, str]:
        """Step and metadata, which prove the rest of the row."""
        try:
            (name, sealed), *more = json.loads(metadata_json).items()
            if name != "sealed" or more:
                raise ValueError("other fields")
            envelope = base64.b64decode(sealed, validate=True)
        except (ValueError, TypeError, AttributeError, binascii.Error):
            raise _damaged(checkpoint_id, "it is not encrypted, and this namespace is") from None
        bound = _bound(checkpoint_id, job, level, parent, created_us, size_bytes, codec, schema_version)
        with _of(checkpoint_id, "row"):
            found: list[str] = ormsgpack.unpackb(self.vault.open("row", bound, envelope))
        if step != (_HIDDEN_STEP if self.vault.hides_names else found[0]):
            raise _damaged(checkpoint_id, "its step was changed")
        return found[0], found[1]

    def open_manifest(self, checkpoint_id: str, sealed: bytes) -> bytes:
        with _of(checkpoint_id, "manifest"):
            return self.vault.open("manifest", checkpoint_id.encode(), sealed)

    def _prove(self, found: Checkpoint) -> Checkpoint:
        """A checkpoint as it was saved, or Corrupted."""
        job = self._show("job", found.job)
        created_us = to_us(found.created_at)
        step, metadata_json = self._open_row(
            found.id, job, found.step, found.level, found.parent, created_us,
            found.size_bytes, found.codec, found.schema_version, json.dumps(dict(found.metadata)),
        )  # fmt: skip
        return replace(found, job=job, step=step, tags=self._open_tags(found.tags), metadata=json.loads(metadata_json))

    def _open(self, found: Checkpoint) -> Checkpoint:
        """The same for showing: one that is marked as damaged may be seen, without what does not open."""
        try:
            return self._prove(found)
        except Corrupted:
            if found.status is not CheckpointStatus.CORRUPTED:
                raise
            return replace(found, job=_TOKEN.sub(self._reveal, found.job), tags={}, metadata={})

    def _seal_tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        names = self.vault.names
        return {names.token("tag", name): names.token(f"tag {name}", value) for name, value in tags.items()}

    def _open_tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        names = self.vault.names
        plain = {names.text("tag", name): value for name, value in tags.items()}
        return {name: names.text(f"tag {name}", value) for name, value in plain.items()}

    def _hide(self, kind: str, name: str) -> str:
        return self.vault.names.token(kind, name) if self.vault.hides_names else name

    def _show(self, kind: str, name: str) -> str:
        return self.vault.names.text(kind, name) if self.vault.hides_names else name

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Errors of the inner index speak of tokens; users know names."""
        try:
            yield
        except CheckpointError as error:
            self._revealed(error)
            raise

    def _revealed(self, error: CheckpointError) -> CheckpointError:
        error.message = _TOKEN.sub(self._reveal, error.message)
        error.hint = _TOKEN.sub(self._reveal, error.hint)
        if isinstance(error, LeaseHeld):
            error.holder = _TOKEN.sub(self._reveal, error.holder)
        return error

    def _reveal(self, token: re.Match[str]) -> str:
        for kind in ("job", "actor", "key"):
            try:
                return self.vault.names.text(kind, token[0])
            except Corrupted:
                continue
        return token[0]

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        with self._readable():
            try:
                saved = self._commit(records, actor)
            except KeysChanged:
                if any(record.key_id for record in records):
                    raise  # with chunks under the old key: who wrote them does it again
                self.vault.refresh()
                saved = self._commit(records, actor)
        return [self._answer(new, found) for new, found in zip(records, saved, strict=True)]

    def _answer(self, new: NewCheckpoint, found: Checkpoint) -> Checkpoint:
        """What was saved, or, under an idempotency key, the first one."""
        return _saved(new, found) if found.id == new.id else self._open(found)

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        outcomes: Outcomes = []
        sealed: list[tuple[NewCheckpoint, str]] = []
        for record, actor in saves:
            try:
                sealed.append((self._sealed(record), self._hide("actor", actor)))
            except CheckpointError:
                return one_by_one(self, saves)  # so that each hears of its own mistake
        for save, outcome in zip(saves, self.inner.commit_each(sealed), strict=True):
            if isinstance(outcome, KeysChanged):
                outcomes += one_by_one(self, [save])
            elif isinstance(outcome, CheckpointError):
                outcomes.append(self._revealed(outcome))
            else:
                outcomes.append(outcome if isinstance(outcome, BaseException) else self._answer(save[0], outcome))
        return outcomes

    def _commit(self, records: Sequence[NewCheckpoint], actor: str) -> Checkpoints:
        return self.inner.commit([self._sealed(record) for record in records], actor=self._hide("actor", actor))

    def _sealed(self, record: NewCheckpoint) -> NewCheckpoint:
        try:
            return self.seal(record)
        except (UnicodeEncodeError, ormsgpack.MsgpackEncodeError) as error:
            raise Validation(
                f"the index cannot hold this value: {error}", hint="use valid Unicode and 64-bit integers"
            ) from error

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._open(self.inner.get(checkpoint_id))

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        return self._opened(self.inner.read(checkpoint_id))

    def _opened(self, found: tuple[Checkpoint, bytes]) -> tuple[Checkpoint, bytes]:
        return self._prove(found[0]), self.open_manifest(found[0].id, found[1])

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
        found = self.inner.latest(self._hide("job", job), level)
        return None if found is None else self._opened(found)

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        tokens = {self.vault.names.token("key", key): key for key in keys}
        found = self.inner.find(self._hide("job", job), list(tokens))
        return {tokens[token]: self._opened(both) for token, both in found.items()}

    def find_next(self, job: str, after: int, limit: int) -> dict[str, tuple[Checkpoint, bytes]]:
        found = self.inner.find_next(self._hide("job", job), after, limit)
        return {self.vault.names.text("key", token): self._opened(both) for token, both in found.items()}

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        names = self.vault.names
        return {
            checkpoint_id: (names.text("key", token), names.open("request", digest))
            for checkpoint_id, (token, digest) in self.inner.keys_of(checkpoint_ids).items()
        }

    def list(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Checkpoints:
        name, tokens = self._hide("job", job), self._seal_tags(tags) if tags else None
        if not metadata:
            rows = self.inner.list(name, level=level, tags=tokens, limit=limit, before=before, after=after)
            return [self._open(row) for row in rows]
        check_filter(metadata)
        found: Checkpoints = []
        is_forward = after is not None or limit is None
        while limit is None or len(found) < limit:
            if is_forward:
                page = self.inner.list(name, level=level, tags=tokens, limit=_PAGE, before=before, after=after or 0)
                after = page[-1].seq if page else after
            else:
                page = self.inner.list(name, level=level, tags=tokens, limit=_PAGE, before=before)[::-1]
                before = page[-1].seq if page else before
            found += [row for row in map(self._open, page) if matches(row.metadata, metadata)]
            if len(page) < _PAGE:
                break
        found = found[:limit]
        return found if is_forward else found[::-1]

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self.inner.delete(checkpoint_ids, even_pinned=even_pinned, actor=self._hide("actor", actor))

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        names = self.vault.names
        tokens = {
            names.token("tag", name): None if value is None else names.token(f"tag {name}", value)
            for name, value in (tags or {}).items()
        }
        who = self._hide("actor", actor)
        return self._open(
            self.inner.update(checkpoint_id, actor=who, is_pinned=is_pinned, tags=tokens or None, status=status)
        )

    def mark(self, checkpoint_ids: Sequence[str], status: CheckpointStatus, *, actor: str) -> None:
        self.inner.mark(checkpoint_ids, status, actor=self._hide("actor", actor))

    # Jobs

    def job(self, name: str) -> Job | None:
        found = self.inner.job(self._hide("job", name))
        return None if found is None else self._open_job(found)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        if not self.vault.hides_names:
            return [self._open_job(found) for found in self.inner.jobs(prefix, limit, after)]
        every = sorted((self._open_job(found) for found in self.inner.jobs()), key=lambda job: job.name)
        return [job for job in every if job.name > after and job.name.startswith(prefix)][:limit]

    def _open_job(self, job: Job) -> Job:
        policy = None if job.retention is None else self._open_text("retention", job.retention)
        return replace(job, name=self._show("job", job.name), retention=policy)

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        sealed = None if policy_json is None else self._seal_text("retention", policy_json)
        self.inner.set_retention(self._hide("job", job), sealed, actor=self._hide("actor", actor))

    def _seal_text(self, kind: str, text: str) -> str:
        return json.dumps({"sealed": self.vault.names.token(kind, text)})

    def _open_text(self, kind: str, text: str) -> str:
        try:
            return self.vault.names.text(kind, json.loads(text)["sealed"])
        except (ValueError, TypeError, KeyError):
            raise Corrupted(
                f"a {kind} in the index is not encrypted as this namespace demands", hint="run holdfast check"
            ) from None

    # Leases, events

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        with self._readable():
            lease = self.inner.acquire_lease(self._hide("job", job), self._hide("actor", holder), ttl_s)
        return replace(lease, job=job, holder=holder)

    def renew_lease(self, lease: Lease) -> None:
        with self._readable():
            self.inner.renew_lease(self._hidden(lease))

    def release_lease(self, lease: Lease) -> None:
        self.inner.release_lease(self._hidden(lease))

    def _hidden(self, lease: Lease) -> Lease:
        return replace(lease, job=self._hide("job", lease.job), holder=self._hide("actor", lease.holder))

    def append_event(self, action: str, *, actor: str, job: str | None = None, detail: str = "{}") -> None:
        hidden = None if job is None else self._hide("job", job)
        sealed = self._seal_text("event", detail)
        self.inner.append_event(action, actor=self._hide("actor", actor), job=hidden, detail=sealed)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        return [self._open_event(event) for event in self.inner.events(after, limit, newest=newest, before=before)]

    def audit(self, until: int | None = None) -> EventChain:
        return self.inner.audit(until)

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        return self.inner.wait_for_event(after, timeout_s)

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
            actor = event.actor  # of keys that gave way to others before anything was saved: the index was rebuilt
        return replace(event, actor=actor, job=job, detail=detail)

    # Chunks, packs, care

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        return self.inner.locate(digests)

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        for row, checkpoint, sealed in self.inner.manifests(after, with_chunks=with_chunks):
            try:
                opened = self._opened((checkpoint, sealed))
            except Corrupted:
                opened = checkpoint, UNREADABLE
            yield row, *opened

    def sweep(self, references: References) -> tuple[int, int]:
        # A manifest that does not open stops it: what it names is unknown, and must not be deleted.
        return self.inner.sweep(lambda identity, sealed: references(identity, self.open_manifest(identity, sealed)))

    def packs(self) -> Sequence[PackUse]:
        return self.inner.packs()

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        return self.inner.chunks_of(pack)

    def is_pack_used(self, pack: str) -> bool:
        return self.inner.is_pack_used(pack)

    def condemn(self, pack: str) -> bool:
        return self.inner.condemn(pack)

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> None:
        self.inner.mark_damaged(chunks, is_damaged)

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str) -> int:
        return self.inner.relocate(chunks, from_pack=from_pack)

    def totals(self) -> Mapping[str, int]:
        return self.inner.totals()

    def integrity_problems(self) -> Problems:
        return [_TOKEN.sub(self._reveal, problem) for problem in self.inner.integrity_problems()]

    # Keys

    def keyring(self) -> str | None:
        return self.inner.keyring()

    def set_keyring(self, keyring: str, key_id: str, *, replacing: str | None, actor: str) -> bool:
        return self.inner.set_keyring(keyring, key_id, replacing=replacing, actor=self._hide("actor", actor))

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str) -> bool:
        return self.inner.reseal(self.seal(record), replacing=replacing, actor=self._hide("actor", actor))

    def scrub(self) -> None:
        self.inner.scrub()

    def every_row(self) -> Iterator[tuple[Checkpoint, bytes | None, bytes, bool]]:
        """(checkpoint, manifest, digest, whether it is under the current data key); None for what does not open."""
        for _, checkpoint, sealed in self.inner.manifests(with_chunks=False):
            digest = bytes.fromhex(checkpoint.digest)
            try:
                found, manifest = self._opened((checkpoint, sealed))
            except Corrupted:
                yield checkpoint, None, digest, False
            else:
                yield found, manifest, digest, self.vault.key_of(sealed).id == self.vault.current.id

    def close(self) -> None:
        self.inner.close()


def _saved(new: NewCheckpoint, found: Checkpoint) -> Checkpoint:
    """What the inner index says of a save, with what was given to it."""
    return Checkpoint(
        found.id, new.job, found.seq, new.step, found.level, found.parent, found.created_at, found.status,
        found.size_bytes, found.stored_bytes, found.digest, found.codec, found.schema_version, new.tags,
        found.is_pinned, json.loads(new.metadata_json) if new.metadata_json != "{}" else {},
    )  # fmt: skip


def _bound(*fields: object) -> bytes:
    """What a row is bound to, in one form for saving and reading."""
    return ormsgpack.packb([str(field) if isinstance(field, str) else field for field in fields])


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
        hint="run holdfast check; restore an earlier checkpoint or another copy of the store",
    )
