"""What happens inside write transactions on PostgreSQL. As in `writes`, operations check before they change.

The transaction is in `postgres_transactions`. Only packs, IDs and nothing else are shared between namespaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kedge.errors import Conflict, IdempotencyConflict, NotFound
from kedge.index.reads import missing
from kedge.index.rows import CHECKPOINT, DAMAGED, SEQ_BITS, Row, checkpoint_of
from kedge.index.sqlite.writes import holds_plain, plain_refused
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus
from kedge.ports import ENCRYPTED_FORMAT_VERSION, Chunk, ChunksGone, IdTaken, KeysChanged, NewCheckpoint, Seen

from .marks import mark_damaged, standing
from .server import Array
from .transactions import PostgresTransaction, check_lease

_CHUNK = ("bytea", "bigint", "bigint", "smallint", "bigint", "bigint", "bytea")


class PostgresWrites(PostgresTransaction):
    """The write operations of one transaction."""

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], actor: str) -> list[Checkpoint]:
        if len(records) == 1:
            return [self._insert(records[0], actor)]
        head = self._head
        self._do("SAVEPOINT several")
        try:
            return [self._insert(record, actor) for record in records]
        except (Conflict, NotFound, ChunksGone, IdTaken, KeysChanged):
            self._do("ROLLBACK TO several")
            self._head = head
            raise

    def _insert(self, new: NewCheckpoint, actor: str) -> Checkpoint:
        job = self._job(new.job)
        twin = self._twin(new) if self._is_careful else None
        if job and new.idempotency_key is not None and (first := self._first_of(job[0], new)):
            return first
        if twin is not None:
            return self._landed(new, twin)
        ends_lease = check_lease(new, self._namespace, job[2:] if job else None)
        if new.key_id or job is None or not job[1]:
            self._check_key(new)
        self._check_references(new)
        packs = self._name_packs(new.new_chunks)
        created_us = new.created_us
        if job is None:
            seq = new.seq or 1
            made = self._one(
                "INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, "
                "updated_us) VALUES (%s, %s, %s, 1, %s, %s, %s, %s) RETURNING no",
                self._ns, new.job, seq, new.size_bytes, new.stored_bytes, created_us, created_us,
            )  # fmt: skip
            assert made is not None
            job_no = made[0]
        else:
            job_no = job[0]
            seq = new.seq or job[1] + 1
            place = job_no << SEQ_BITS | seq
            if new.seq and (holder := self._one('SELECT id FROM kedge.checkpoint WHERE "row" = %s', place)):
                if holder[0] == new.id:  # another copy has brought this very one
                    raise IdTaken
                raise Conflict(f"job {new.job} has a checkpoint number {seq}", hint="give another number, or none")
            self._do(
                "UPDATE kedge.job SET last_seq = greatest(last_seq, %s), checkpoints = checkpoints + 1, "
                "size_bytes = size_bytes + %s, stored_bytes = stored_bytes + %s, updated_us = %s WHERE no = %s",
                seq, new.size_bytes, new.stored_bytes, created_us, job_no,
            )  # fmt: skip
            if ends_lease:
                self._do("UPDATE kedge.lease SET is_live = false WHERE job_no = %s", job_no)
        row = job_no << SEQ_BITS | seq
        self._insert_chunks(new.new_chunks, packs)
        fields = (
            row, new.id, new.step, str(new.level), new.parent, created_us, str(new.status), new.size_bytes,
            new.stored_bytes, new.digest, new.codec, new.schema_version,
            json.dumps(dict(new.tags)) if new.tags else None, new.is_pinned,
            None if new.metadata_json == "{}" else new.metadata_json,
        )  # fmt: skip
        self._do(
            f"INSERT INTO kedge.checkpoint VALUES ({', '.join(['%s'] * 17)})",
            *fields, new.has_chunks, new.manifest,
        )  # fmt: skip
        if new.tags:
            self._insert_tags(job_no, row, new.tags)
        if new.idempotency_key is not None:
            self._do(
                "INSERT INTO kedge.idempotency VALUES (%s, %s, %s, %s) ON CONFLICT (job_no, key) "
                'DO UPDATE SET "row" = excluded."row", request_digest = excluded.request_digest',
                job_no, new.idempotency_key, row, new.request_digest,
            )  # fmt: skip
        self.event("save", actor, new.job, new.id)
        return checkpoint_of(new.job, fields)

    def _check_key(self, new: NewCheckpoint) -> None:
        """Refuse what is sealed under an old key, and what is plain in an encrypted store (I10).

        The latter is asked when a job gets its first checkpoint: a store becomes encrypted only while it has no job.
        """
        if not new.key_id:
            if self._is_encrypted():
                raise plain_refused(self._namespace)
            return
        found = self._one("SELECT value FROM kedge.meta WHERE key = %s", f"key:{self._namespace}")
        if found is None or found[0] != new.key_id:
            raise KeysChanged

    def _is_encrypted(self) -> bool:
        # FOR SHARE: until this transaction ends nobody makes the store an encrypted one.
        found = self._one("SELECT value FROM kedge.meta WHERE key = 'format' FOR SHARE")
        return found is not None and found[0] == str(ENCRYPTED_FORMAT_VERSION)

    def reseal(self, new: NewCheckpoint, replacing: bytes, actor: str) -> bool:
        self.check_holder(new.lease_token)
        found = self._find(new.id)
        if found is not None and found[9] == new.digest:
            return True  # the answer to an earlier try was lost
        if found is None or found[9] != replacing:
            return False
        self._check_key(new)
        self._check_references(replace(new, parent=None))
        self._insert_chunks(new.new_chunks, self._name_packs(new.new_chunks))
        self._do(
            "UPDATE kedge.checkpoint SET digest = %s, metadata = %s, manifest = %s, stored_bytes = %s "
            'WHERE "row" = %s',
            new.digest, new.metadata_json, new.manifest, new.stored_bytes, found[0],
        )  # fmt: skip
        self._do(
            "UPDATE kedge.job SET stored_bytes = stored_bytes + %s WHERE no = %s",
            new.stored_bytes - found[8], found[0] >> SEQ_BITS,
        )  # fmt: skip
        self.event("reseal", actor, found[15], new.id)
        return True

    def set_keyring(
        self, keyring: str, key_id: str, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        self.check_holder(lease_token)
        # Its lock keeps namespaces apart that would both be the first, and plain saves out meanwhile.
        form = self._one("SELECT value FROM kedge.meta WHERE key = 'format' FOR UPDATE")
        assert form is not None
        found = self._one("SELECT value FROM kedge.meta WHERE key = %s", f"keyring:{self._namespace}")
        if (found[0] if found else None) != replacing:
            return False
        if form[0] != str(ENCRYPTED_FORMAT_VERSION):
            if self._one("SELECT 1 FROM kedge.job LIMIT 1"):
                raise holds_plain()
            self._do("UPDATE kedge.meta SET value = %s WHERE key = 'format'", str(ENCRYPTED_FORMAT_VERSION))
        for name, value in ((f"keyring:{self._namespace}", keyring), (f"key:{self._namespace}", key_id)):
            self._do(
                "INSERT INTO kedge.meta VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                name, value,
            )  # fmt: skip
        self.event("key", actor, detail=json.dumps({"key": key_id}))
        return True

    def _job(self, name: str) -> Row | None:
        return self._one(
            "SELECT no, last_seq, token, holder, extract(epoch FROM until - clock_timestamp())::float8, is_live "
            "FROM kedge.job LEFT JOIN kedge.lease ON job_no = no WHERE ns_no = %s AND name = %s",
            self._ns, name,
        )  # fmt: skip

    def _twin(self, new: NewCheckpoint) -> Row | None:
        return self._one(
            f"SELECT {CHECKPOINT}, name, ns_no FROM kedge.checkpoint c "
            'JOIN kedge.job ON no = "row" >> 32 WHERE id = %s',
            new.id,
        )

    def _first_of(self, job_no: int, new: NewCheckpoint) -> Checkpoint | None:
        found = self._one(
            f"SELECT {CHECKPOINT}, request_digest FROM kedge.idempotency "
            'JOIN kedge.checkpoint c USING ("row") '
            "WHERE job_no = %s AND key = %s",
            job_no, new.idempotency_key,
        )  # fmt: skip
        if found is None or found[1] == new.takes_key_from:
            return None
        if found[15] != new.request_digest:
            raise IdempotencyConflict(
                f"idempotency key {new.idempotency_key!r} of job {new.job} was used for another state",
                hint=f"it belongs to checkpoint {found[1]}; use a new key for a new state",
            )
        return checkpoint_of(new.job, found[:15])

    def _landed(self, new: NewCheckpoint, twin: Row) -> Checkpoint:
        """IdTaken, unless it is this very save that has it: then the answer to its commit was lost, and it is done."""
        if (twin[15], twin[16], twin[5], twin[9]) != (new.job, self._ns, new.created_us, new.digest):
            raise IdTaken
        return checkpoint_of(new.job, twin[:15])

    def _check_references(self, new: NewCheckpoint) -> None:
        if new.parent is not None and new.seq is None and self._find(new.parent) is None:
            raise NotFound(f"parent {new.parent} not found", hint="give the ID of an existing checkpoint, or none")
        if new.reused_chunks:
            there = {
                digest
                for (digest,) in self._db.execute(
                    f"SELECT digest FROM kedge.chunk WHERE ns_no = %s AND digest = ANY(%s) AND encoding < {DAMAGED}",
                    (self._ns, Array("bytea", new.reused_chunks)),
                )
            }
            if gone := [digest for digest in new.reused_chunks if digest not in there]:
                raise ChunksGone(gone)

    def _name_packs(self, chunks: Iterable[Chunk]) -> dict[str, int | None]:
        """Numbers of the packs, locked against `condemn`; ChunksGone for chunks in a pack that is condemned (I3)."""
        packs: dict[str, int | None] = {"": None}
        for name in sorted({chunk.pack for chunk in chunks} - {""}):
            found = self._one(
                "INSERT INTO kedge.pack (name) VALUES (%s) ON CONFLICT (name) DO UPDATE SET name = excluded.name "
                "RETURNING no, is_condemned",
                name,
            )
            assert found is not None
            if found[1]:
                raise ChunksGone([chunk.digest for chunk in chunks if chunk.pack == name])
            packs[name] = found[0]
        return packs

    def _insert_chunks(self, chunks: Sequence[Chunk], packs: Mapping[str, int | None]) -> None:
        """In one statement: a state of many small pieces has thousands."""
        if not chunks:
            return
        rows = [
            (c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), packs[c.pack], c.offset, c.data)
            for c in {chunk.digest: chunk for chunk in reversed(chunks)}.values()
        ]
        self._do(
            "INSERT INTO kedge.chunk SELECT %s::integer, * FROM unnest(%s::bytea[], %s::bigint[], %s::bigint[], "
            "%s::smallint[], %s::bigint[], %s::bigint[], %s::bytea[]) ON CONFLICT (ns_no, digest) DO UPDATE "
            "SET stored_bytes = excluded.stored_bytes, encoding = excluded.encoding, pack_no = excluded.pack_no, "
            f'"offset" = excluded."offset", data = excluded.data WHERE chunk.encoding >= {DAMAGED}',
            self._ns, *map(Array, _CHUNK, zip(*rows, strict=True)),
        )  # fmt: skip

    def _insert_tags(self, job_no: int, row: int, tags: Mapping[str, str]) -> None:
        self._many("INSERT INTO kedge.tag VALUES (%s, %s, %s, %s)", [(job_no, n, v, row) for n, v in tags.items()])

    def _many(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            with self._db.cursor() as cursor:
                cursor.executemany(sql, rows)

    def delete(self, checkpoint_ids: Sequence[str], even_pinned: bool, actor: str) -> list[CheckpointId]:
        found = [row for i in dict.fromkeys(checkpoint_ids) if (row := self._find(i)) is not None]
        for row in found:
            if row[13] and not even_pinned:
                raise Conflict(f"checkpoint {row[1]} is pinned", hint="unpin it first: kedge pin --off ID")
        for row in found:
            for table in ("checkpoint", "idempotency", "tag"):
                where = '"row" = %s' if table != "tag" else f'job_no = {row[0] >> SEQ_BITS} AND "row" = %s'
                self._do(f"DELETE FROM kedge.{table} WHERE {where}", row[0])
            self._do(
                "UPDATE kedge.job SET checkpoints = checkpoints - 1, size_bytes = size_bytes - %s, "
                "stored_bytes = stored_bytes - %s WHERE no = %s",
                row[7], row[8], row[0] >> SEQ_BITS,
            )  # fmt: skip
            self.event("delete", actor, row[15], row[1])
        return [row[1] for row in found]

    def _find(self, checkpoint_id: str) -> Row | None:
        return self._one(
            f'SELECT {CHECKPOINT}, name FROM kedge.checkpoint c JOIN kedge.job ON no = "row" >> 32 '
            "WHERE id = %s AND ns_no = %s",
            checkpoint_id, self._ns,
        )  # fmt: skip

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
        number, job_no = row[0], row[0] >> SEQ_BITS
        old = checkpoint_of(row[15], row[:15])
        if is_pinned is not None:
            self._do('UPDATE kedge.checkpoint SET is_pinned = %s WHERE "row" = %s', is_pinned, number)
            self.event("pin" if is_pinned else "unpin", actor, old.job, old.id)
        if tags:
            now = {k: v for k, v in {**old.tags, **tags}.items() if v is not None}
            self._do('DELETE FROM kedge.tag WHERE job_no = %s AND "row" = %s', job_no, number)
            self._insert_tags(job_no, number, now)
            text = json.dumps(now) if now else None
            self._do('UPDATE kedge.checkpoint SET tags = %s WHERE "row" = %s', text, number)
            self.event("tag", actor, old.job, old.id, json.dumps(dict(tags)))
        if status is not None:
            self._do('UPDATE kedge.checkpoint SET status = %s WHERE "row" = %s', str(status), number)
            self.event("status", actor, old.job, old.id, json.dumps({"status": str(status)}))
        changed = self._find(checkpoint_id)
        assert changed is not None
        return checkpoint_of(old.job, changed[:15])

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, actor: str) -> list[CheckpointId]:
        alike = standing(self._db, self._ns, seen)
        changed = [look.checkpoint.id for look in alike if look.checkpoint.status is not status]
        if changed:
            self._do("UPDATE kedge.checkpoint SET status = %s WHERE id = ANY(%s)", str(status), changed)
            self.event("status", actor, detail=json.dumps({"status": str(status), "checkpoints": len(changed)}))
        return [look.checkpoint.id for look in alike]

    def set_retention(self, job: str, policy_json: str | None, actor: str) -> None:
        self._do("UPDATE kedge.job SET retention = %s WHERE no = %s", policy_json, self.job_no(job))
        self.event("retention", actor, job, detail=policy_json or "null")

    # Chunks

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
        return mark_damaged(self._db, self._ns, chunks, is_damaged)

    def relocate(self, chunks: Sequence[Chunk], from_pack: str) -> int:
        packs = self._name_packs(chunks)
        moved = 0
        for chunk in chunks:
            changed = self._db.execute(
                'UPDATE kedge.chunk SET pack_no = %s, "offset" = %s WHERE ns_no = %s AND digest = %s '
                "AND pack_no = (SELECT no FROM kedge.pack WHERE name = %s) RETURNING 1",
                (packs[chunk.pack], chunk.offset, self._ns, chunk.digest, from_pack),
            )
            moved += len(changed.fetchall())
        return moved
