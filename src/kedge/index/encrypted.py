"""An index whose rows are sealed (I10): a wrapper around any other index, which sees no secrets.

    manifest                 an envelope bound to the checkpoint's ID
    metadata, step           an envelope bound to the immutable part of the row, so that listing proves the row
    tags, idempotency keys   tokens: the index can still find them by equality
    job, actor, holder       tokens, too, if names are hidden; otherwise plain
    details of events        sealed, except what the index itself writes there

Sizes, counts, times, levels, statuses, pins, parents and IDs stay readable. Unsealed data is refused. A filter by
metadata opens all rows of a job; if names are hidden, listing jobs opens all their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ormsgpack

from kedge.crypto import Vault
from kedge.errors import CheckpointError, Corrupted, NotFound, Validation
from kedge.model import Checkpoint, CheckpointStatus, Job, Lease, to_us
from kedge.ports import (
    ALL,
    KEYS,
    UNREADABLE,
    CheckpointIds,
    Checkpoints,
    Events,
    Index,
    Jobs,
    KeysChanged,
    NewCheckpoint,
    NewEnvelope,
    Outcomes,
    Problems,
    References,
    RowChanged,
    SavedRow,
    Seen,
    Selection,
    Unrecorded,
    Update,
)

from .group_commit import one_by_one
from .sealed_rows import TOKEN, Proof, SealedRows, envelope_of
from .tampering import row_problems

_PAGE = 256
_S = TypeVar("_S")
_T = TypeVar("_T")
_Row = tuple[Checkpoint, bytes]  # with its manifest


class _OfInner:
    """A method that says no secret, and is the inner index's own."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, index: EncryptedIndex | None, _: type) -> Any:
        return self if index is None else getattr(index.inner, self._name)


class EncryptedIndex(SealedRows):
    """`ports.Index` around another one, for a namespace with a keyring."""

    locate = _OfInner()
    packs = _OfInner()
    chunks_of = _OfInner()
    condemn = _OfInner()
    mark_damaged = _OfInner()
    relocate = _OfInner()
    set_recorded = _OfInner()
    refuse_older = _OfInner()
    accept = _OfInner()
    closed_namespaces = _OfInner()
    make_room = _OfInner()
    totals = _OfInner()
    scrub = _OfInner()
    close = _OfInner()
    audit = _OfInner()
    wait_for_event = _OfInner()

    def __init__(self, inner: Index, vault: Vault) -> None:
        super().__init__(vault)
        self.inner = inner
        self.store_id = inner.store_id
        self.namespace = inner.namespace
        self.is_encrypted = True
        self.row_bytes = inner.row_bytes
        self.written_by = inner.written_by

    def _confirmed(self, look: Callable[[], _S], open_: Callable[[_S], _T], seen: _S | None = None) -> _T:
        """Return what the inner index has, decrypted. If that fails, read it once more (I2).

        Meanwhile a change of keys may have replaced the envelope and deleted its key.
        """
        seen = look() if seen is None else seen
        while True:
            try:
                return open_(seen)
            except Corrupted:
                now = look()
                if now == seen:
                    raise
                seen = now

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        with self._readable():
            try:
                saved = self._commit(records, actor)
            except KeysChanged:
                if any(record.key_id for record in records):
                    raise  # its chunks are under the old key: the caller writes them again
                self.vault.refresh()
                saved = self._commit(records, actor)
        return [self._answer(new, row) for new, row in zip(records, saved, strict=True)]

    def _answer(self, new: NewCheckpoint, saved: Checkpoint) -> Checkpoint:
        """Return what was saved, or the first checkpoint under its idempotency key."""
        if saved.id == new.id:
            return new.saved(saved.seq, saved.digest)
        look = partial(self.inner.get, saved.id)
        return self._confirmed(look, lambda row: self._prove_keyed(new.idempotency_key, row, new.request_digest), saved)

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        outcomes: Outcomes = []
        sealed: list[tuple[NewCheckpoint, str]] = []
        for record, actor in saves:
            try:
                sealed.append((self._sealed(record), self._hide("actor", actor)))
            except CheckpointError:
                return one_by_one(self, saves)  # each then gets its own error
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

    def _sealed(self, record: NewCheckpoint, proof: Proof | None = None) -> NewCheckpoint:
        try:
            return self.seal(record, proof)
        except (UnicodeEncodeError, ormsgpack.MsgpackEncodeError) as error:
            raise Validation(
                f"the index cannot hold this value: {error}", hint="use valid Unicode and 64-bit integers"
            ) from error

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._confirmed(partial(self.inner.get, checkpoint_id), self._open)

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        return self._confirmed(partial(self.inner.read, checkpoint_id), self._opened)

    @property
    def in_place(self) -> frozenset[str]:
        """As in the inner index, because decrypting may take a lock."""
        return frozenset({"changed_jobs"} & getattr(self.inner, "in_place", frozenset()))

    def changed_jobs(self, after: int, limit: int) -> Sequence[tuple[int, str | None]] | None:
        changed = self.inner.changed_jobs(after, limit)
        if not changed or not self.vault.hides_names:
            return changed
        return [(number, self.vault.names.text("job", job) if job else job) for number, job in changed]

    def find(self, job: str, keys: Sequence[str] | range) -> dict[str, _Row]:
        names = self.vault.names
        wanted = keys if isinstance(keys, range) else list({names.token("key", key): None for key in keys})
        look = partial(self.inner.find, self._hide("job", job), wanted)

        def opened(sealed: dict[str, _Row]) -> dict[str, _Row]:
            keys = {names.text("key", token): row for token, row in sealed.items()}
            return {key: self._keyed(key, row) for key, row in keys.items()}

        return self._confirmed(look, opened)

    def _keyed(self, key: str, row: _Row) -> _Row:
        return self._prove_keyed(key, row[0]), self.open_manifest(row[0].id, row[1])

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        names = self.vault.names
        keys: dict[str, tuple[str, bytes]] = {}
        for checkpoint_id, (token, digest) in self.inner.keys_of(checkpoint_ids).items():
            key, request_digest = names.text("key", token), names.open("request", digest)
            prove = partial(self._prove_keyed, key, request_digest=request_digest)
            with suppress(NotFound):  # deleted meanwhile
                self._confirmed(partial(self.inner.get, checkpoint_id), prove)
                keys[checkpoint_id] = key, request_digest
        return keys

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        def page(selection: Selection) -> Checkpoints:
            look = partial(self.inner.list, self._hide("job", job), selection)
            return self._confirmed(look, lambda rows: [self._tagged(wanted.tags, self._open(row)) for row in rows])

        return _select(page, lambda row: row, self._sealed_selection(wanted), wanted)

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[_Row]:
        def page(selection: Selection) -> Sequence[_Row]:
            look = partial(self.inner.list_stored, self._hide("job", job), selection)
            return self._confirmed(look, lambda rows: [self._shown_row(wanted.tags, row) for row in rows])

        return _select(page, lambda row: row[0], self._sealed_selection(wanted), wanted)

    def newest(self, jobs: Sequence[str], tag: tuple[str, str] | None = None) -> dict[str, Checkpoint]:
        tags = {} if tag is None else {tag[0]: [tag[1]]}
        token = next(((name, values[0]) for name, values in self._seal_wanted(tags).items()), None)
        look = partial(self.inner.newest, [self._hide("job", job) for job in jobs], token)

        def opened(sealed: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
            rows = (self._tagged(tags, self._open(row)) for row in sealed.values())
            return {row.job: row for row in rows}

        return self._confirmed(look, opened)

    def _sealed_selection(self, wanted: Selection) -> Selection:
        """Return the conditions that the inner index can check."""
        return replace(wanted, tags=self._seal_wanted(wanted.tags), metadata={})

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self.inner.delete(checkpoint_ids, even_pinned=even_pinned, actor=self._hide("actor", actor))

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        assert update.envelope is None  # it is created here
        tags = update.tags or {}
        names, who = self.vault.names, self._hide("actor", actor)
        tokens = {
            names.token("tag", name): None if value is None else names.token(f"tag {name}", value)
            for name, value in tags.items()
        }
        sealed = replace(update, tags=tokens or None)
        while True:
            try:
                row, opened, proof = self._look(checkpoint_id)  # a process changes nothing that it may not read
                tagged = {name: value for name, value in {**proof.tags, **tags}.items() if value is not None}
                envelope = self._with_tags(row, opened, proof, tagged) if tags else None
                changed = self.inner.update(checkpoint_id, replace(sealed, envelope=envelope), actor=who)
            except (RowChanged, KeysChanged):  # meanwhile the tags or the keys were changed
                self.vault.refresh()
                continue
            try:
                return self._confirmed(partial(self.inner.get, checkpoint_id), self._open, changed)
            except Validation:  # the keys were changed after the update: return what was read before
                return replace(opened, is_pinned=changed.is_pinned, status=changed.status, tags=tagged)

    def _with_tags(self, row: Checkpoint, opened: Checkpoint, proof: Proof, tags: dict[str, str]) -> NewEnvelope:
        """Return the envelope that proves a row's new tags, to replace the one for the old tags."""
        key = self.vault.current
        proof = proof._replace(tags=tags, revision=proof.revision + 1)
        text = self._seal_row(key, row, opened.job, to_us(row.created_at), proof)
        return NewEnvelope(text, replacing=envelope_of(row), key_id=key.id.hex())

    def _look(self, checkpoint_id: str) -> tuple[Checkpoint, Checkpoint, Proof]:
        """Return (inner row, opened row, proof). Raises Corrupted."""
        return self._confirmed(partial(self.inner.get, checkpoint_id), lambda row: (row, *self._proved(row)))

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        return self.inner.mark(seen, status, actor=self._hide("actor", actor))  # by digest, which is the envelope's

    # Jobs

    def job(self, name: str) -> Job | None:
        sealed = self.inner.job(self._hide("job", name))
        return None if sealed is None else self._open_job(sealed)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        if not self.vault.hides_names:
            return [self._open_job(sealed) for sealed in self.inner.jobs(prefix, limit, after)]
        every = sorted((self._open_job(sealed) for sealed in self.inner.jobs()), key=lambda job: job.name)
        return [job for job in every if job.name > after and job.name.startswith(prefix)][:limit]

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        sealed = None if policy_json is None else self._seal_text("retention", policy_json)
        self.inner.set_retention(self._hide("job", job), sealed, actor=self._hide("actor", actor))

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        self.inner.reserve_numbers(self._hide("job", job), last_seq)

    # Leases, events

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        with self._readable():
            lease = self.inner.acquire_lease(self._leased(job), self._hide("actor", holder), ttl_s)
        return replace(lease, job=job, holder=holder)

    def renew_lease(self, lease: Lease) -> None:
        with self._readable():
            self.inner.renew_lease(self._hidden(lease))

    def release_lease(self, lease: Lease) -> None:
        self.inner.release_lease(self._hidden(lease))

    def _hidden(self, lease: Lease) -> Lease:
        return replace(lease, job=self._leased(lease.job), holder=self._hide("actor", lease.holder))

    def _leased(self, job: str) -> str:
        return KEYS if job == KEYS else self._hide("job", job)

    def append_event(
        self, action: str, *, actor: str, job: str | None = None, checkpoints: Sequence[str] = (), detail: str = "{}"
    ) -> None:
        hidden = None if job is None else self._hide("job", job)
        sealed, who = self._seal_text("event", detail), self._hide("actor", actor)
        self.inner.append_event(action, actor=who, job=hidden, checkpoints=checkpoints, detail=sealed)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        return [self._open_event(event) for event in self.inner.events(after, limit, newest=newest, before=before)]

    # Chunks, packs, care

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        for row, (checkpoint, _), opened in self._walk(after, with_chunks):
            yield row, *(opened or (checkpoint, UNREADABLE))

    def _walk(self, after: int, with_chunks: bool) -> Iterator[tuple[int, _Row, _Row | None]]:
        """Yield (row, inner row, opened row); None for one that does not decrypt."""
        for row, checkpoint, sealed in self.inner.manifests(after, with_chunks=with_chunks):
            look = partial(self.inner.read, checkpoint.id)
            pair: tuple[_Row, _Row | None] = (checkpoint, sealed), None
            try:
                pair = self._confirmed(look, lambda seen: (seen, self._opened(seen)), pair[0])
            except NotFound:
                continue  # deleted meanwhile
            except Corrupted:
                pass  # reported by other checks
            yield row, *pair

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        def opened(checkpoint_id: str, sealed: bytes) -> Iterable[bytes]:
            # A manifest that does not decrypt stops the sweep: what it names is unknown and must not be deleted (I3).
            try:
                return references(checkpoint_id, self._manifest(checkpoint_id, sealed))
            except NotFound:
                return ()  # deleted meanwhile

        return self.inner.sweep(opened, lease_token=lease_token)

    def _manifest(self, checkpoint_id: str, sealed: bytes) -> bytes:
        look = partial(self.inner.read, checkpoint_id)
        return self._confirmed(lambda: look()[1], partial(self.open_manifest, checkpoint_id), sealed)

    def unrecorded(self, limit: int) -> Unrecorded:
        sealed = self.inner.unrecorded(limit)
        return replace(sealed, rows=list(self._all_opened(sealed.rows)))

    def recorded_in(self, pack: str) -> Sequence[SavedRow]:
        return list(self._all_opened(self.inner.recorded_in(pack)))

    def integrity_problems(self) -> Problems:
        problems = [TOKEN.sub(self._reveal, problem) for problem in self.inner.integrity_problems()]
        return problems + list(row_problems(self.inner, self._proved, self.vault.names))

    # Keys

    def keyring(self) -> str | None:
        return self.inner.keyring()

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        who = self._hide("actor", actor)
        return self.inner.set_keyring(keyring, key_id, replacing=replacing, actor=who, lease_token=lease_token)

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str, envelope: str | None = None) -> bool:
        assert envelope is None  # it is read here
        who = self._hide("actor", actor)
        while True:
            try:
                row, opened, proof = self._look(record.id)
                proof = proof._replace(step=record.step, metadata_json=record.metadata_json)
                sealed = self._sealed(replace(record, tags=opened.tags, idempotency_key=None), proof)
                return self.inner.reseal(sealed, replacing=replacing, actor=who, envelope=envelope_of(row))
            except RowChanged:
                continue  # its tags were changed meanwhile
            except NotFound:
                return False

    def every_row(self) -> Iterator[tuple[Checkpoint, bytes | None, bytes, bool]]:
        """Yield (checkpoint, manifest, digest, whether the data key is current); None for one that does not decrypt."""
        for _, (checkpoint, sealed), opened in self._walk(0, with_chunks=False):
            digest = bytes.fromhex(checkpoint.digest)
            if opened is None:
                yield checkpoint, None, digest, False
            else:
                yield *opened, digest, self.vault.key_of(sealed).id == self.vault.current.id


def _select(
    page: Callable[[Selection], Sequence[_T]],
    checkpoint_of: Callable[[_T], Checkpoint],
    sealed: Selection,
    wanted: Selection,
) -> list[_T]:
    """Return the matching rows from pages of `sealed` ones, because metadata can be compared only when decrypted."""
    if not wanted.metadata:
        return list(page(sealed))
    chosen: list[_T] = []
    while wanted.limit is None or len(chosen) < wanted.limit:
        if wanted.is_forward:
            rows = page(replace(sealed, limit=_PAGE, after=sealed.after or 0))
            sealed = replace(sealed, after=checkpoint_of(rows[-1]).seq if rows else sealed.after)
        else:
            rows = page(replace(sealed, limit=_PAGE))[::-1]
            sealed = replace(sealed, before=checkpoint_of(rows[-1]).seq if rows else sealed.before)
        chosen += [row for row in rows if wanted.matches(checkpoint_of(row).metadata)]
        if len(rows) < _PAGE:
            break
    chosen = chosen[: wanted.limit]
    return chosen if wanted.is_forward else chosen[::-1]
