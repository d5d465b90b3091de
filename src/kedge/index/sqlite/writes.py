"""What happens inside write transactions (`transactions`). Every function runs in an open one and checks before it
changes.

An operation that refuses has changed nothing, so that the others in its group commit are not disturbed; only a commit
of several records needs a savepoint.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kedge.errors import Conflict, IdempotencyConflict, NotFound, Validation
from kedge.index.reads import missing
from kedge.index.rows import CHECKPOINT, DAMAGED, SEQ_BITS, Row, checkpoint_of, find_chunks
from kedge.model import MAX_TAGS, Checkpoint, CheckpointId, CheckpointStatus, to_datetime
from kedge.ports import Chunk, ChunksGone, IdTaken, KeysChanged, NewCheckpoint, Seen

from .database import is_encrypted, mark_encrypted, overwrite_deleted
from .marks import mark_damaged, stands
from .transactions import Transactions, check_holder, held, lost, seconds_left


class Writes(Transactions):
    """The write operations of one namespace on one connection."""

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], actor: str) -> list[Checkpoint]:
        if len(records) == 1:
            return [self._insert(records[0], actor)]
        self._db.execute("SAVEPOINT several")
        try:
            saved = [self._insert(record, actor) for record in records]
        except BaseException:
            if self._db.in_transaction:
                self.undo("several")
            raise
        finally:
            if self._db.in_transaction:
                self._db.execute("RELEASE several")
        return saved

    def _insert(self, new: NewCheckpoint, actor: str) -> Checkpoint:
        db = self._db
        job = (
            self._jobs.get(new.job)
            or db.execute(
                "SELECT no, last_seq, token, holder, boot_id, until_s, is_live FROM job LEFT JOIN lease ON job_no = no "
                "WHERE ns_no = ? AND name = ?",
                (self._ns, new.job),
            ).fetchone()
        )
        if job and new.idempotency_key is not None and (first := self._first_of(job[0], new)):
            return first  # also to somebody who has lost the lease since: it was saved when they had it
        ends_lease = self._check_lease(new, job[2:] if job else None)
        if new.key_id or job is None or not job[1]:
            self._check_key(new)
        self._check_references(new)
        created_us = new.created_us
        if job is None:
            if db.execute("SELECT 1 FROM checkpoint WHERE id = ?", (new.id,)).fetchone():
                raise IdTaken
            seq = new.seq or 1
            job_no = db.execute(
                "INSERT INTO job VALUES (NULL, ?, ?, ?, 1, ?, ?, ?, ?, NULL)",
                (self._ns, new.job, seq, new.size_bytes, new.stored_bytes, created_us, created_us),
            ).lastrowid
            assert job_no is not None
            job = (job_no, 0, None, None, None, None, 0)
            is_new_job = True
        else:
            job_no, last_seq = job[:2]
            seq = new.seq or last_seq + 1
            place = (job_no << SEQ_BITS | seq,)
            if new.seq and (holder := db.execute("SELECT id FROM checkpoint WHERE row = ?", place).fetchone()):
                if holder[0] == new.id:  # another copy has brought this very one
                    raise IdTaken
                raise Conflict(f"job {new.job} has a checkpoint number {seq}", hint="give another number, or none")
            is_new_job = False
        row = job_no << SEQ_BITS | seq
        tags = json.dumps(dict(new.tags)) if new.tags else None
        metadata = None if new.metadata_json == "{}" else new.metadata_json
        fields = (
            row, new.id, new.step, str(new.level), new.parent, created_us, str(new.status), new.size_bytes,
            new.stored_bytes, new.digest, new.codec, new.schema_version, tags, int(new.is_pinned), metadata,
        )  # fmt: skip
        try:  # before anything else of a known job is changed: an ID that is taken is a refusal
            db.execute(
                "INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*fields, int(new.has_chunks), new.manifest),
            )
        except sqlite3.IntegrityError:
            raise IdTaken from None
        if not is_new_job:
            db.execute(
                "UPDATE job SET last_seq = max(last_seq, ?), checkpoints = checkpoints + 1, "
                "size_bytes = size_bytes + ?, stored_bytes = stored_bytes + ?, updated_us = ? WHERE no = ?",
                (seq, new.size_bytes, new.stored_bytes, created_us, job_no),
            )
            if ends_lease:
                db.execute("UPDATE lease SET is_live = 0 WHERE job_no = ?", (job_no,))
        lease = (*job[2:6], 0) if ends_lease else job[2:]
        self._jobs[new.job] = (job_no, max(job[1], seq), *lease)
        if new.new_chunks:
            self._insert_chunks(new.new_chunks)
        if new.tags:
            self._insert_tags(job_no, row, new.tags)
        if new.idempotency_key is not None:
            db.execute(  # the key is free, or taken from its holder: `_first_of` has looked
                "INSERT INTO idempotency VALUES (?, ?, ?, ?) "
                "ON CONFLICT (job_no, key) DO UPDATE SET row = excluded.row, request_digest = excluded.request_digest",
                (job_no, new.idempotency_key, row, new.request_digest),
            )
        self.event("save", actor, new.job, new.id)
        return Checkpoint(
            new.id, new.job, seq, new.step, new.level, new.parent, to_datetime(created_us), new.status,
            new.size_bytes, new.stored_bytes, new.digest.hex(), new.codec, new.schema_version, new.tags,
            new.is_pinned, json.loads(metadata) if metadata else {},
        )  # fmt: skip

    def _check_key(self, new: NewCheckpoint) -> None:
        """Refuse what is sealed under an old key, and what is plain in an encrypted store (I10).

        The latter is asked when a job gets its first checkpoint: a store becomes encrypted only while it has no job.
        """
        if self._key_id is None:
            found = self._db.execute("SELECT value FROM meta WHERE key = ?", (f"key:{self._namespace}",)).fetchone()
            self._key_id = found[0] if found else ""
        if new.key_id and new.key_id != self._key_id:
            raise KeysChanged
        if not new.key_id and (self._key_id or is_encrypted(self._db)):
            raise plain_refused(self._namespace)

    def _check_lease(self, new: NewCheckpoint, lease: tuple[int, str, str, float, int] | None) -> bool:
        """Refuse a write without the right to it (I5); answers whether it ends an expired lease."""
        is_live = lease is not None and lease[0] is not None and lease[4]
        if new.lease_token is not None:
            if lease is None or not is_live or lease[0] != new.lease_token:
                raise lost(new.job, self._namespace)
            return False
        if lease is None or not is_live:
            return False
        if left_s := seconds_left(lease[2], lease[3]):
            raise held(new.job, self._namespace, lease[0], lease[1], left_s)
        return True

    def _first_of(self, job_no: int, new: NewCheckpoint) -> Checkpoint | None:
        found = self._db.execute(
            f"SELECT {CHECKPOINT}, request_digest FROM idempotency JOIN checkpoint c USING (row) "
            "WHERE job_no = ? AND key = ?",
            (job_no, new.idempotency_key),
        ).fetchone()
        if found is None or found[1] == new.takes_key_from:
            return None
        if found[15] != new.request_digest:
            raise IdempotencyConflict(
                f"idempotency key {new.idempotency_key!r} of job {new.job} was used for another state",
                hint=f"it belongs to checkpoint {found[1]}; use a new key for a new state",
            )
        return checkpoint_of(new.job, found[:15])

    def _check_references(self, new: NewCheckpoint) -> None:
        db = self._db
        if new.parent is not None and new.seq is None:
            parent = db.execute(
                "SELECT 1 FROM checkpoint JOIN job ON no = row >> 32 WHERE id = ? AND ns_no = ?", (new.parent, self._ns)
            )
            if not parent.fetchone():
                raise NotFound(f"parent {new.parent} not found", hint="give the ID of an existing checkpoint, or none")
        if new.reused_chunks:
            rows = self.find_chunks("digest, encoding", new.reused_chunks)
            there = {digest for digest, encoding in rows if encoding < DAMAGED}
            if gone := [digest for digest in new.reused_chunks if digest not in there]:
                raise ChunksGone(gone)

    def find_chunks(self, columns: str, digests: Sequence[bytes]) -> Iterable[Row]:
        return find_chunks(self._db, self._ns, columns, digests)

    def _insert_chunks(self, chunks: Sequence[Chunk]) -> None:
        packs: dict[str, int | None] = {"": None}
        for name in {chunk.pack for chunk in chunks} - {""}:
            self._db.execute("INSERT OR IGNORE INTO pack (name) VALUES (?)", (name,))
            packs[name] = self._db.execute("SELECT no FROM pack WHERE name = ?", (name,)).fetchone()[0]
        self._db.executemany(
            "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET stored_bytes = excluded.stored_bytes, encoding = excluded.encoding, pack_no = excluded.pack_no, "
            f"offset = excluded.offset, data = excluded.data WHERE encoding >= {DAMAGED}",
            [
                (self._ns, c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), packs[c.pack], c.offset, c.data)
                for c in chunks
            ],
        )

    def _insert_tags(self, job_no: int, row: int, tags: Mapping[str, str]) -> None:
        self._db.executemany("INSERT INTO tag VALUES (?, ?, ?, ?)", [(job_no, n, v, row) for n, v in tags.items()])

    def delete(self, checkpoint_ids: Sequence[str], even_pinned: bool, actor: str) -> list[CheckpointId]:
        found = [row for i in dict.fromkeys(checkpoint_ids) if (row := self._find(i)) is not None]
        for row in found:
            if row[13] and not even_pinned:
                raise Conflict(f"checkpoint {row[1]} is pinned", hint="unpin it first: kedge pin --off ID")
        for row in found:
            number, job_no, job = row[0], row[0] >> SEQ_BITS, row[15]
            self._db.execute("DELETE FROM checkpoint WHERE row = ?", (number,))
            self._db.execute("DELETE FROM idempotency WHERE row = ?", (number,))
            if row[12]:
                self._drop_tags(job_no, number, json.loads(row[12]))
            self._db.execute(
                "UPDATE job SET checkpoints = checkpoints - 1, size_bytes = size_bytes - ?, "
                "stored_bytes = stored_bytes - ? WHERE no = ?",
                (row[7], row[8], job_no),
            )
            self.event("delete", actor, job, row[1])
        return [row[1] for row in found]

    def reseal(self, new: NewCheckpoint, replacing: bytes, actor: str) -> bool:
        found = self._find(new.id)
        check_holder(self._ns, self._namespace, new.lease_token, self._db)
        if found is None or found[9] != replacing:
            return False
        self._check_key(new)
        self._check_references(replace(new, parent=None))
        self._insert_chunks(new.new_chunks)
        self._db.execute(
            "UPDATE checkpoint SET digest = ?, metadata = ?, manifest = ?, stored_bytes = ? WHERE row = ?",
            (new.digest, new.metadata_json, new.manifest, new.stored_bytes, found[0]),
        )
        self._db.execute(
            "UPDATE job SET stored_bytes = stored_bytes + ? WHERE no = ?",
            (new.stored_bytes - found[8], found[0] >> SEQ_BITS),
        )
        self.event("reseal", actor, found[15], new.id)
        return True

    def set_keyring(
        self, keyring: str, key_id: str, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        db, name = self._db, f"keyring:{self._namespace}"
        check_holder(self._ns, self._namespace, lease_token, db)
        found = db.execute("SELECT value FROM meta WHERE key = ?", (name,)).fetchone()
        if (found[0] if found else None) != replacing:
            return False
        if not is_encrypted(db):
            if db.execute("SELECT 1 FROM job LIMIT 1").fetchone():
                raise holds_plain()
            mark_encrypted(db)
            overwrite_deleted(db)
        rows = [(name, keyring), (f"key:{self._namespace}", key_id)]
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        self._key_id = None
        self.event("key", actor, detail=json.dumps({"key": key_id}))
        return True

    def _find(self, checkpoint_id: str) -> Row | None:
        found: Row | None = self._db.execute(
            f"SELECT {CHECKPOINT}, job.name FROM checkpoint c JOIN job ON no = row >> 32 WHERE id = ? AND ns_no = ?",
            (checkpoint_id, self._ns),
        ).fetchone()
        return found

    def _drop_tags(self, job_no: int, row: int, tags: Mapping[str, str]) -> None:
        self._db.executemany(
            "DELETE FROM tag WHERE job_no = ? AND name = ? AND value = ? AND row = ?",
            [(job_no, name, value, row) for name, value in tags.items()],
        )

    def update(
        self,
        checkpoint_id: str,
        is_pinned: bool | None,
        tags: Mapping[str, str | None] | None,
        status: CheckpointStatus | None,
        actor: str,
    ) -> Checkpoint:
        row = self._find(checkpoint_id)
        if row is None:
            raise missing(checkpoint_id)
        number, job = row[0], row[15]
        job_no = number >> SEQ_BITS
        old = checkpoint_of(job, row[:15])
        if is_pinned is not None:
            self._db.execute("UPDATE checkpoint SET is_pinned = ? WHERE row = ?", (int(is_pinned), number))
            self.event("pin" if is_pinned else "unpin", actor, old.job, old.id)
        if tags:
            now = {k: v for k, v in {**old.tags, **tags}.items() if v is not None}
            if len(now) > MAX_TAGS:
                raise Validation(f"{old.id} would have {len(now)} tags", hint=f"keep to {MAX_TAGS}: remove some first")
            self._drop_tags(job_no, number, old.tags)
            self._insert_tags(job_no, number, now)
            self._db.execute("UPDATE checkpoint SET tags = ? WHERE row = ?", (json.dumps(now) if now else None, number))
            self.event("tag", actor, old.job, old.id, json.dumps(dict(tags)))
        if status is not None:
            self._db.execute("UPDATE checkpoint SET status = ? WHERE row = ?", (str(status), number))
            self.event("status", actor, old.job, old.id, json.dumps({"status": str(status)}))
        changed = self._find(checkpoint_id)
        assert changed is not None
        return checkpoint_of(old.job, changed[:15])

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, actor: str) -> list[CheckpointId]:
        standing = [look for look in seen if stands(self._db, self._ns, look, self._find(look.checkpoint.id))]
        changed = [look.checkpoint.id for look in standing if look.checkpoint.status is not status]
        if changed:
            self._db.executemany("UPDATE checkpoint SET status = ? WHERE id = ?", [(str(status), i) for i in changed])
            self.event("status", actor, detail=json.dumps({"status": str(status), "checkpoints": len(changed)}))
        return [look.checkpoint.id for look in standing]

    def set_retention(self, job: str, policy_json: str | None, actor: str) -> None:
        self._db.execute("UPDATE job SET retention = ? WHERE no = ?", (policy_json, self.job_no(job)))
        self.event("retention", actor, job, detail=policy_json or "null")

    # Chunks

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
        return mark_damaged(self._db, self._ns, chunks, is_damaged)

    def relocate(self, chunks: Sequence[Chunk], from_pack: str) -> int:
        old = self._db.execute("SELECT no FROM pack WHERE name = ?", (from_pack,)).fetchone()
        if old is None:
            return 0
        moved = 0
        for chunk in chunks:
            self._db.execute("INSERT OR IGNORE INTO pack (name) VALUES (?)", (chunk.pack,))
            moved += self._db.execute(
                "UPDATE chunk SET pack_no = (SELECT no FROM pack WHERE name = ?), offset = ? "
                "WHERE ns_no = ? AND digest = ? AND pack_no = ?",
                (chunk.pack, chunk.offset, self._ns, chunk.digest, old[0]),
            ).rowcount
        return moved


def plain_refused(namespace: str) -> Conflict:
    return Conflict(
        f"namespace {namespace} belongs to an encrypted store, and this save is not encrypted",
        hint="open the store again, with its key",
    )


def holds_plain() -> Conflict:
    return Conflict(
        "this store holds data that is not encrypted, and a key was given",
        hint="copy it into a new encrypted store: kedge copy OLD NEW --key none --target-key KEY; or leave the key "
        "away (key=, --key, $KEDGE_KEY, $KEDGE_KEY_FILE)",
    )
