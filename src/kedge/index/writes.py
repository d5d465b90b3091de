"""The operations inside write transactions, in statements that SQLite and PostgreSQL share.

Each operation runs in an open transaction and checks before it changes: a refused one has changed nothing, so it does
not affect others in its group commit. Only a commit of several records needs a savepoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kedge.errors import Conflict, IdempotencyConflict, LeaseHeld, LeaseLost, NotFound, Validation
from kedge.model import MAX_TAGS, Checkpoint, CheckpointId, CheckpointStatus, now_us
from kedge.ports import (
    Chunk,
    ChunksGone,
    IdTaken,
    KeysChanged,
    NewCheckpoint,
    Provided,
    RecordPlace,
    RowChanged,
    Seen,
    Then,
    Unmet,
    Update,
)
from kedge.ports.record import SEQ_BITS, CheckpointRow, checkpoint_of, columns_of

from .reads import missing
from .rows import CHECKPOINT, Row
from .transactions import JobRow, LeaseRow, SqlTransaction, held, lost

Packs = Mapping[str, int | None]  # numbers by name; None for "", which is the index itself

_OF_JOB = 'main.checkpoint c JOIN main.job j ON j.no = c."row" >> 32'
_IS_HERE = f"SELECT 1 FROM {_OF_JOB} WHERE c.id = ? AND ns_no = ?"
_INSERT = f"INSERT INTO main.checkpoint VALUES ({', '.join('?' * (len(CheckpointRow._fields) + 2))})"


class SqlWrites(SqlTransaction):
    """The write operations of one namespace."""

    _key_id: str | None = None  # of the current data key; "" if there is none; None until it is known

    # Implemented by each database

    def _insert_row(self, row: Row) -> None:
        self._do(_INSERT, *row)

    def _taken(self, new: NewCheckpoint, job: JobRow | None) -> Checkpoint | None:
        """Return what this save became earlier, before any change. Raises IdTaken, unless inserting the row will."""
        raise NotImplementedError

    def _lock_packs(self, chunks: Sequence[Chunk]) -> Packs:
        """Lock the packs of new chunks before anything is changed. Raises ChunksGone if one is condemned (I3)."""
        raise NotImplementedError

    def _pack_numbers(self, places: Iterable[Chunk | RecordPlace]) -> Packs:
        """Return the numbers of packs to be named. Raises ChunksGone if one is condemned (I3)."""
        raise NotImplementedError

    def _insert_chunks(self, chunks: Sequence[Chunk], packs: Packs) -> None:
        raise NotImplementedError

    def _sound(self, digests: Sequence[bytes]) -> set[bytes]:
        """Return those of these chunks that exist and are not damaged."""
        raise NotImplementedError

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
        raise NotImplementedError

    def _standing(self, seen: Sequence[Seen]) -> list[Seen]:
        """Return the checkpoints that, with their problems, still are as they were seen."""
        raise NotImplementedError

    def _is_encrypted(self, *, is_changing: bool = False) -> bool:
        """Return whether the store is encrypted; that cannot change until the transaction ends."""
        raise NotImplementedError

    def _mark_encrypted(self) -> None:
        raise NotImplementedError

    def _remember(self, job: str, row: JobRow) -> None:
        """Note what a save has changed about its job."""

    # Saves

    def _insert(self, new: NewCheckpoint, actor: str) -> Checkpoint:
        job = self._job(new.job)
        if job and new.idempotency_key is not None and (first := self._first_of(job.no, new)):
            return first  # even if the caller has lost the lease since: it was saved under that lease
        if (landed := self._taken(new, job)) is not None:
            return landed
        try:
            if (provided := new.provided) is not None:
                self._check_provided(new, provided, job)
            takes = provided is not None and provided.takes is not None  # its job is new, and gets its lease with it
            ends_lease = not takes and self._check_lease(new, job.lease if job else None)
        except (LeaseHeld, LeaseLost, Unmet):
            if (landed := self.landed(new)) is None:
                raise
            return landed  # the lease has ended since, by its own `then` or another caller
        if new.key_id or job is None or not job.last_seq:
            self._check_key(new)
        self._check_references(new)
        packs = self._lock_packs(new.new_chunks) if new.new_chunks else {}
        if provided is not None:
            job = self._provide(new, provided, actor)
        seq = new.seq or (job.last_seq + 1 if job else 1)
        if job is None:
            sizes = {"size": new.size_bytes, "stored": new.stored_bytes}
            job_no = self._new_job(new.job, new.created_us, last_seq=seq, checkpoints=1, **sizes)
        else:
            job_no = job.no
            if new.seq:
                self._check_place(new, job_no << SEQ_BITS | seq)
        row = job_no << SEQ_BITS | seq
        self._insert_row((row, *columns_of(new)))
        if job is not None:
            self._count(job, new, seq, ends_lease)
        else:
            self._remember(new.job, JobRow(job_no, seq, None))
        if new.new_chunks:
            self._insert_chunks(new.new_chunks, packs)
        if new.tags:
            self._insert_tags(job_no, row, new.tags)
        if new.idempotency_key is not None:
            self._do(  # the key is free, or taken from its holder: `_first_of` has checked
                "INSERT INTO main.idempotency VALUES (?, ?, ?, ?) ON CONFLICT (job_no, key) "
                'DO UPDATE SET "row" = excluded."row", request_digest = excluded.request_digest',
                job_no, new.idempotency_key, row, new.request_digest,
            )  # fmt: skip
        self.event("save", actor, new.job, new.id)
        if new.then is not None:
            self._finish(new, new.then, actor)
        return new.saved(seq, new.digest.hex())

    def _check_provided(self, new: NewCheckpoint, provided: Provided, job: JobRow | None) -> None:
        absent = [*provided.absent_jobs, *([new.job] if provided.takes else [])]
        if any(self._job(name) is not None for name in absent):
            raise Unmet
        has_tag = "SELECT 1 FROM main.tag WHERE job_no = ? AND name = ? AND value = ?"
        if job is not None and provided.absent_tag is not None and self._one(has_tag, job.no, *provided.absent_tag):
            raise Unmet
        if (marks := provided.marks) is not None:
            pair = self._find(marks.checkpoint_id)
            tags = json.loads(pair[0].tags or "{}") if pair else {}
            if pair is None or not marks.seen.items() <= tags.items() or len({**tags, **marks.tags}) > MAX_TAGS:
                raise Unmet

    def _provide(self, new: NewCheckpoint, provided: Provided, actor: str) -> JobRow | None:
        """Apply the changes of a save whose conditions are met. Return its job."""
        if (marks := provided.marks) is not None:
            self.update(marks.checkpoint_id, Update(tags=marks.tags), actor)
        if (takes := provided.takes) is not None:
            self.acquire_lease(new.job, takes.holder, takes.ttl_s)
        return self._job(new.job)

    def _finish(self, new: NewCheckpoint, then: Then, actor: str) -> None:
        """Apply the further changes of a save; none of them is refused."""
        if then.delete:
            self.delete(then.delete, True, actor)
        if then.releases_lease and new.lease_token is not None:
            self.end_lease(new.job, new.lease_token)

    def landed(self, new: NewCheckpoint) -> Checkpoint | None:
        """Return what this same save became in a commit whose answer was lost. Raises IdTaken for another one."""
        row = self._one(f"SELECT {CHECKPOINT}, j.name, ns_no FROM {_OF_JOB} WHERE c.id = ?", new.id)
        if row is None:
            return None
        *columns, name, ns_no = row
        twin = CheckpointRow._make(columns)
        if (name, ns_no, twin.created_us, twin.digest) != (new.job, self._ns, new.created_us, new.digest):
            raise IdTaken
        return checkpoint_of(name, columns)

    def _count(self, job: JobRow, new: NewCheckpoint, seq: int, ends_lease: bool) -> None:
        last_seq = max(job.last_seq, seq)
        self._do(
            "UPDATE main.job SET last_seq = ?, checkpoints = checkpoints + 1, size_bytes = size_bytes + ?, "
            "stored_bytes = stored_bytes + ?, updated_us = ? WHERE no = ?",
            last_seq, new.size_bytes, new.stored_bytes, new.created_us, job.no,
        )  # fmt: skip
        lease = job.lease
        if ends_lease and lease is not None:
            self._do("UPDATE main.lease SET is_live = ? WHERE job_no = ?", False, job.no)
            lease = lease._replace(is_live=False)
        self._remember(new.job, JobRow(job.no, last_seq, lease))

    def _job(self, name: str) -> JobRow | None:
        row = self._one(
            f"SELECT no, last_seq, {self._LEASE} FROM main.job LEFT JOIN main.lease ON job_no = no "
            "WHERE ns_no = ? AND name = ?",
            self._ns, name,
        )  # fmt: skip
        if row is None:
            return None
        number, last_seq, token, *lease = row
        return JobRow(number, last_seq, None if token is None else LeaseRow(token, *lease))

    def _check_lease(self, new: NewCheckpoint, lease: LeaseRow | None) -> bool:
        """Refuse a write without the lease (I5). Return whether the write ends an expired lease."""
        is_live = lease is not None and lease.is_live
        if new.lease_token is not None:
            if lease is None or not is_live or lease.token != new.lease_token:
                raise lost(new.job, self._namespace)
            return False
        if lease is None or not is_live:
            return False
        if left_s := self._left_s(lease):
            raise held(new.job, self._namespace, lease.token, lease.holder, left_s)
        return True

    def _check_key(self, new: NewCheckpoint) -> None:
        """Refuse what is sealed under an old key, and what is plain in an encrypted store (I10).

        The latter is checked at the first checkpoint of a job: a store becomes encrypted only while it has no job.
        """
        current = self._current_key()
        if new.key_id and new.key_id != current:
            raise KeysChanged
        if not new.key_id and (current or self._is_encrypted()):
            raise Conflict(
                f"namespace {self._namespace} belongs to an encrypted store, and this save is not encrypted",
                hint="open the store again, with its key",
            )

    def _current_key(self) -> str:
        """Return the ID of the current data key; "" if there is none."""
        if self._key_id is None:
            row = self._one("SELECT value FROM main.meta WHERE key = ?", f"key:{self._namespace}")
            self._key_id = row[0] if row else ""
        return self._key_id

    def _first_of(self, job_no: int, new: NewCheckpoint) -> Checkpoint | None:
        row = self._one(
            f"SELECT {CHECKPOINT}, request_digest FROM main.idempotency "
            'JOIN main.checkpoint c USING ("row") WHERE job_no = ? AND key = ?',
            job_no, new.idempotency_key,
        )  # fmt: skip
        if row is None:
            return None
        *columns, request_digest = row
        first = CheckpointRow._make(columns)
        if first.id == new.takes_key_from:
            return None
        if request_digest != new.request_digest:
            raise IdempotencyConflict(
                f"idempotency key {new.idempotency_key!r} of job {new.job} was used for another state",
                hint=f"it belongs to checkpoint {first.id}; use a new key for a new state",
            )
        return checkpoint_of(new.job, columns)

    def _check_references(self, new: NewCheckpoint) -> None:
        if new.parent is not None and new.seq is None and not self._one(_IS_HERE, new.parent, self._ns):
            raise NotFound(f"parent {new.parent} not found", hint="give the ID of an existing checkpoint, or none")
        if new.reused_chunks:
            sound = self._sound(new.reused_chunks)
            if gone := [digest for digest in new.reused_chunks if digest not in sound]:
                raise ChunksGone(gone)

    def _check_place(self, new: NewCheckpoint, row: int) -> None:
        if holder := self._one('SELECT id FROM main.checkpoint WHERE "row" = ?', row):
            if holder[0] == new.id:  # another copy has saved this same one
                raise IdTaken
            raise Conflict(f"job {new.job} has a checkpoint number {new.seq}", hint="give another number, or none")

    def _insert_tags(self, job_no: int, row: int, tags: Mapping[str, str]) -> None:
        if tags:
            self._many("INSERT INTO main.tag VALUES (?, ?, ?, ?)", [(job_no, n, v, row) for n, v in tags.items()])

    def _drop_tags(self, job_no: int, row: int, tags: Mapping[str, str]) -> None:
        if tags:
            self._many(
                'DELETE FROM main.tag WHERE job_no = ? AND name = ? AND value = ? AND "row" = ?',
                [(job_no, name, value, row) for name, value in tags.items()],
            )

    # Changes of saved checkpoints

    def _find(self, checkpoint_id: str) -> tuple[CheckpointRow, str] | None:
        """Return a checkpoint's row and the name of its job."""
        sql = f"SELECT {CHECKPOINT}, j.name FROM {_OF_JOB} WHERE c.id = ? AND ns_no = ?"
        row = self._one(sql, checkpoint_id, self._ns)
        if row is None:
            return None
        *columns, job = row
        return CheckpointRow._make(columns), job

    def delete(self, checkpoint_ids: Sequence[str], even_pinned: bool, actor: str) -> list[CheckpointId]:
        pairs = [pair for i in dict.fromkeys(checkpoint_ids) if (pair := self._find(i)) is not None]
        for row, _ in pairs:
            if row.is_pinned and not even_pinned:
                raise Conflict(f"checkpoint {row.id} is pinned", hint="unpin it first: kedge pin --off ID")
        for row, job in pairs:
            for table in ("checkpoint", "idempotency", "record"):
                self._do(f'DELETE FROM main.{table} WHERE "row" = ?', row.row)
            self._drop_tags(row.job_no, row.row, json.loads(row.tags) if row.tags else {})
            self._do(
                "UPDATE main.job SET checkpoints = checkpoints - 1, size_bytes = size_bytes - ?, "
                "stored_bytes = stored_bytes - ? WHERE no = ?",
                row.size_bytes, row.stored_bytes, row.job_no,
            )  # fmt: skip
            self.event("delete", actor, job, row.id)
        return [row.id for row, _ in pairs]

    def update(self, checkpoint_id: str, update: Update, actor: str) -> Checkpoint:
        if (pair := self._find(checkpoint_id)) is None:
            raise missing(checkpoint_id)
        row, job = pair
        is_pinned, tags, status, envelope = update.is_pinned, update.tags, update.status, update.envelope
        if envelope is not None:
            if envelope.key_id != self._current_key():
                raise KeysChanged
            if row.metadata != envelope.replacing:
                raise RowChanged
        old = checkpoint_of(job, row)
        now = {name: value for name, value in {**old.tags, **(tags or {})}.items() if value is not None}
        if tags and len(now) > MAX_TAGS:
            raise Validation(f"{old.id} would have {len(now)} tags", hint=f"keep to {MAX_TAGS}: remove some first")
        changes: dict[str, object] = {}
        if is_pinned is not None:
            changes["is_pinned"] = bool(is_pinned)
            self.event("pin" if is_pinned else "unpin", actor, job, old.id)
        if tags:
            changes["tags"] = json.dumps(now) if now else None
            self._drop_tags(row.job_no, row.row, old.tags)
            self._insert_tags(row.job_no, row.row, now)
            self.event("tag", actor, job, old.id, json.dumps(dict(tags)))
        if envelope is not None:
            changes["metadata"] = envelope.metadata_json
        if status is not None:
            changes["status"] = str(status)
            self.event("status", actor, job, old.id, json.dumps({"status": str(status)}))
        for column, value in changes.items():
            self._do(f'UPDATE main.checkpoint SET {column} = ? WHERE "row" = ?', value, row.row)
        return checkpoint_of(job, row._replace(**changes))  # type: ignore[arg-type]

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, actor: str) -> list[CheckpointId]:
        standing = self._standing(seen)
        changed = [look.checkpoint.id for look in standing if look.checkpoint.status is not status]
        if changed:
            self._many("UPDATE main.checkpoint SET status = ? WHERE id = ?", [(str(status), i) for i in changed])
            self.event("status", actor, detail=json.dumps({"status": str(status), "checkpoints": len(changed)}))
        return [look.checkpoint.id for look in standing]

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        row = self._job(job)
        number = row.no if row else self._new_job(job, now_us())
        if row is None or row.last_seq < last_seq:
            self._do("UPDATE main.job SET last_seq = ? WHERE no = ?", last_seq, number)
            self._remember(job, JobRow(number, last_seq, row.lease if row else None))

    def set_retention(self, job: str, policy_json: str | None, actor: str) -> None:
        self._do("UPDATE main.job SET retention = ? WHERE no = ?", policy_json, self.job_no(job))
        self.event("retention", actor, job, detail=policy_json or "null")

    # Packs

    def set_recorded(self, places: Sequence[RecordPlace], chunks: Sequence[Chunk], up_to: int) -> None:
        packs = self._pack_numbers([*places, *chunks])
        self._many(
            'INSERT INTO main.record SELECT "row", ?, ? FROM main.checkpoint WHERE id = ? AND digest = ? '
            "ON CONFLICT DO NOTHING",
            [(packs[p.pack], p.stored_bytes, p.checkpoint_id, p.digest) for p in places],
        )
        self._many(
            'UPDATE main.chunk SET pack_no = ?, "offset" = ? '
            "WHERE ns_no = ? AND digest = ? AND data = ? AND pack_no IS NULL",
            [(packs[c.pack], c.offset, self._ns, c.digest, c.data) for c in chunks],
        )
        self._do(
            "INSERT INTO main.meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value "
            "WHERE CAST(meta.value AS bigint) < CAST(excluded.value AS bigint)",
            f"recorded:{self._namespace}", str(up_to),
        )  # fmt: skip

    def relocate(self, chunks: Sequence[Chunk], from_pack: str, records: Sequence[RecordPlace]) -> int:
        old = self._one("SELECT no FROM main.pack WHERE name = ?", from_pack)
        if old is None:
            return 0
        packs = self._pack_numbers([*chunks, *records])
        self._many(
            "UPDATE main.record SET pack_no = ?, stored_bytes = ? "
            'WHERE pack_no = ? AND "row" = (SELECT "row" FROM main.checkpoint WHERE id = ? AND digest = ?)',
            [(packs[p.pack], p.stored_bytes, *old, p.checkpoint_id, p.digest) for p in records],
        )
        sql = (
            'UPDATE main.chunk SET pack_no = ?, "offset" = ? WHERE ns_no = ? AND digest = ? AND pack_no = ? RETURNING 1'
        )
        return sum(self._one(sql, packs[c.pack], c.offset, self._ns, c.digest, *old) is not None for c in chunks)

    # Keys

    def reseal(self, new: NewCheckpoint, replacing: bytes, actor: str, envelope: str | None = None) -> bool:
        self.check_holder(new.lease_token)
        if (pair := self._find(new.id)) is None:
            return False
        row, job = pair
        if row.digest == new.digest:
            return True  # the answer to an earlier attempt was lost
        if row.digest != replacing:
            return False
        if envelope is not None and row.metadata != envelope:
            raise RowChanged
        self._check_key(new)
        self._check_references(replace(new, parent=None))
        self._insert_chunks(new.new_chunks, self._lock_packs(new.new_chunks))
        self._do(
            'UPDATE main.checkpoint SET digest = ?, metadata = ?, manifest = ?, stored_bytes = ? WHERE "row" = ?',
            new.digest, new.metadata_json, new.manifest, new.stored_bytes, row.row,
        )  # fmt: skip
        self._do(
            "UPDATE main.job SET stored_bytes = stored_bytes + ? WHERE no = ?",
            new.stored_bytes - row.stored_bytes, row.job_no,
        )  # fmt: skip
        self._do('DELETE FROM main.record WHERE "row" = ?', row.row)  # that record was under the old key
        self.event("reseal", actor, job, new.id)
        return True

    def set_keyring(
        self, keyring: str, key_id: str, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        self.check_holder(lease_token)
        is_encrypted = self._is_encrypted(is_changing=True)
        present = self._one("SELECT value FROM main.meta WHERE key = ?", f"keyring:{self._namespace}")
        if (present[0] if present else None) != replacing:
            return False
        if not is_encrypted:
            if self._one("SELECT 1 FROM main.job LIMIT 1"):
                raise Conflict(
                    "this store holds data that is not encrypted, and a key was given",
                    hint="copy it into a new encrypted store: kedge copy OLD NEW --key none --target-key KEY; or leave "
                    "the key away (key=, --key, $KEDGE_KEY, $KEDGE_KEY_FILE)",
                )
            self._mark_encrypted()
        self._note(f"keyring:{self._namespace}", keyring)
        self._note(f"key:{self._namespace}", key_id)
        self._key_id = None
        self.event("key", actor, detail=json.dumps({"key": key_id}))
        return True

    def set_locked(self, locked: Mapping[str, str]) -> None:
        self._note("locked", json.dumps(dict(locked)))

    def _note(self, name: str, value: str) -> None:
        sql = "INSERT INTO main.meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._do(sql, name, value)
