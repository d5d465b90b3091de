"""The contract of `ports.Index`, continued: leases, events, chunks, gc, keys."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import CheckpointError, Conflict, LeaseHeld, LeaseLost
from kedge.model import CheckpointId
from kedge.ports import KEYS, Chunk, ChunksGone, Encoding, Index, KeysChanged, NewCheckpoint, Update, digest_of

from .index_fixtures import IndexFixtures, chunk, record, references, save, with_chunks


def row_digest(index: Index, checkpoint_id: str) -> bytes:
    return bytes.fromhex(index.get(checkpoint_id).digest)


def sealed_anew(first: NewCheckpoint, *chunks: Chunk, **fields: object) -> NewCheckpoint:
    """Return the same save with other chunks, as a change of keys writes it."""
    manifest = b"".join(chunk.digest for chunk in chunks)
    parts: dict[str, Any] = {"manifest": manifest, "digest": digest_of(manifest), "new_chunks": chunks}
    return replace(first, reused_chunks=(), **{**parts, **fields})


class IndexCareSuite(IndexFixtures):
    """The duties of an index besides saving and reading."""

    # leases

    def test_a_leased_job_takes_writes_with_the_token_only(self, index: Index) -> None:
        lease = index.acquire_lease("job", "worker-1", 30)
        with pytest.raises(LeaseHeld, match="worker-1"):
            save(index)
        with pytest.raises(LeaseLost):
            save(index, record(lease_token=lease.token + 1))
        with pytest.raises(LeaseHeld, match="worker-1"):
            index.acquire_lease("job", "worker-1", 30)
        assert save(index, record(lease_token=lease.token))[0].seq == 1
        save(index, record("another"))

    def test_a_token_is_never_given_twice(self, index: Index) -> None:
        first = index.acquire_lease("job", "a", 30)
        index.release_lease(first)
        second = index.acquire_lease("job", "b", 30)
        assert second.token > first.token
        index.release_lease(first)  # lost: ignored
        for attempt in (lambda: index.renew_lease(first), lambda: save(index, record(lease_token=first.token))):
            with pytest.raises(LeaseLost):
                attempt()
        save(index, record(lease_token=second.token))
        index.release_lease(second)
        with pytest.raises(LeaseLost):
            save(index, record(lease_token=second.token))
        with pytest.raises(LeaseLost):
            index.renew_lease(second)
        save(index)

    def test_an_expired_lease_serves_its_holder_until_somebody_else_writes(self, index: Index) -> None:
        lease = index.acquire_lease("job", "slow", 0.02)
        time.sleep(0.05)
        save(index, record(lease_token=lease.token))
        index.renew_lease(lease)
        time.sleep(0.05)
        save(index)  # ends it
        with pytest.raises(LeaseLost):
            save(index, record(lease_token=lease.token))
        with pytest.raises(LeaseLost):
            index.renew_lease(lease)

    def test_an_expired_lease_can_be_taken_over(self, index: Index, other: Index) -> None:
        old = index.acquire_lease("job", "gone", 0.02)
        time.sleep(0.05)
        new = other.acquire_lease("job", "heir", 30)
        assert new.token > old.token
        with pytest.raises(LeaseLost):
            save(index, record(lease_token=old.token))
        with pytest.raises(LeaseHeld, match="heir"):
            save(index)

    def test_what_another_object_did_counts_at_once(self, index: Index, other: Index) -> None:
        save(index)
        lease = other.acquire_lease("job", "elsewhere", 30)
        with pytest.raises(LeaseHeld, match="elsewhere"):
            save(index)
        save(other, record(lease_token=lease.token))
        other.release_lease(lease)
        assert save(index)[0].seq == 3
        other.delete([c.id for c in other.list("job")], actor="t")
        assert save(index)[0].seq == 4
        assert save(other)[0].seq == 5

    def test_renewing_keeps_others_out(self, index: Index) -> None:
        lease = index.acquire_lease("job", "busy", 0.02)
        index.renew_lease(replace(lease, ttl_s=30))
        time.sleep(0.05)
        with pytest.raises(LeaseHeld):
            save(index)

    def test_one_of_many_gets_the_lease(self, index: Index) -> None:
        def attempt(n: int) -> bool:
            try:
                index.acquire_lease("job", f"w{n}", 30)
            except LeaseHeld:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(attempt, range(24))) == 1

    # events

    def test_every_change_leaves_an_event(self, index: Index) -> None:
        saved = save(index)[0]
        index.update(saved.id, Update(is_pinned=True), actor="t")
        index.update(saved.id, Update(tags={"a": "b"}), actor="t")
        index.release_lease(index.acquire_lease("job", "w", 30))
        index.set_retention("job", "{}", actor="t")
        index.delete([saved.id], even_pinned=True, actor="t")
        index.append_event("gc", actor="cron", detail='{"chunks":1}')
        events = [e for e in index.events() if e.action != "key"]
        assert [e.action for e in events] == ["save", "pin", "tag", "lease", "release", "retention", "delete", "gc"]
        assert [e.id for e in events] == sorted({e.id for e in events})
        assert (events[0].actor, events[0].job, events[0].checkpoint) == ("tester", "job", saved.id)
        assert (events[-1].actor, events[-1].job, events[-1].detail) == ("cron", None, '{"chunks":1}')
        assert index.events(events[2].id, limit=2) == events[3:5]
        assert index.events(events[2].id, limit=2, newest=True) == events[-2:]
        assert index.events(events[-2].id, newest=True) == events[-1:]
        assert index.events(limit=2, newest=True, before=events[3].id) == events[1:3]
        assert index.events(events[0].id, before=events[3].id) == events[1:3]
        whole, part = index.audit(), index.audit(events[2].id)
        assert (whole.head, whole.broken_at) == (events[-1].chain, None)
        assert (part.entries, part.head) == (events[2].id, events[2].chain)
        assert index.events(events[-1].id) == []
        index.append_event("delete", actor="cron", job="job", checkpoints=["one", "two"])
        added = index.events(events[-1].id)
        assert [(e.action, e.job, e.checkpoint) for e in added] == [("delete", "job", "one"), ("delete", "job", "two")]
        assert len({e.chain for e in events + added}) == len(events) + 2

    def test_waiting_for_events(self, index: Index, peer: Index) -> None:
        save(index)
        last = index.events()[-1].id
        assert index.wait_for_event(0, 0)
        assert not index.wait_for_event(last, 0)
        assert not index.wait_for_event(last, 0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(index.wait_for_event, last, 60)
            save(peer)
            assert waiting.result(60)

    # chunks, packs, sweep

    def test_locate_any_number(self, index: Index) -> None:
        chunks = [chunk(str(n), f"pack-{n % 3}", n) for n in range(1300)]
        inline = Chunk(digest_of(b"in"), 2, 2, Encoding.RAW, data=b"in")
        save(index, with_chunks(*chunks, inline))
        digests = [c.digest for c in [*chunks, inline]] + [digest_of(b"unknown")]
        assert index.locate(digests) == {c.digest: c for c in [*chunks, inline]}
        assert index.locate([]) == {}

    def test_packs_and_their_chunks(self, index: Index, tenant: Index) -> None:
        a, b, c = chunk("a", "p1", 50), chunk("b", "p1", 10), chunk("c", "p2")
        save(index, with_chunks(a, b))
        save(tenant if self.is_shared else index, with_chunks(c))
        for where in (index, tenant) if self.is_shared else (index,):
            assert {(p.pack, p.live_chunks, p.live_bytes) for p in where.packs()} == {("p1", 2, 120), ("p2", 1, 60)}
            assert not where.condemn("p2")
        assert index.condemn("p3")
        assert list(index.chunks_of("p1")) == [b, a]
        assert list(index.chunks_of("p3")) == []

    def test_relocate_moves_what_is_still_there(self, index: Index) -> None:
        a, b = chunk("a", "p1"), chunk("b", "p2")
        save(index, with_chunks(a, b))
        moved = [replace(c, pack="new", offset=3 + n) for n, c in enumerate((a, b))]
        assert index.relocate(moved, from_pack="p1") == 1
        assert index.locate([a.digest, b.digest]) == {a.digest: moved[0], b.digest: b}
        assert index.condemn("p1")
        assert index.relocate(moved, from_pack="unknown") == 0

    def test_totals(self, index: Index) -> None:
        save(index, with_chunks(chunk("a"), Chunk(digest_of(b"in"), 2, 2, Encoding.RAW, data=b"in")), record("b"))
        totals = index.totals()
        assert (totals["jobs"], totals["checkpoints"], totals["size_bytes"], totals["stored_bytes"]) == (2, 2, 20, 14)
        assert (totals["chunks"], totals["inline_bytes"]) == (2, 2)
        assert totals["plain_bytes"] == chunk("a").size_bytes + 2

    def test_manifests_walk_everything_above_a_row(self, index: Index) -> None:
        plain = [record(f"job-{n % 3}") for n in range(self.many // 2)]
        named = with_chunks(chunk("a"), job="job-1")
        save(index, *plain, named)
        rows = list(index.manifests(with_chunks=False))
        assert {c.id: m for _, c, m in rows} == {r.id: r.manifest for r in [*plain, named]}
        assert [r for r, _, _ in rows] == sorted({r for r, _, _ in rows})
        assert [c.id for _, c, _ in index.manifests()] == [named.id]
        assert list(index.manifests(rows[17][0], with_chunks=False)) == rows[18:]

    def test_sweep_removes_what_no_manifest_names(self, index: Index, tenant: Index) -> None:
        used, dropped = chunk("kept", "p1"), chunk("dropped", "p2")
        save(index, with_chunks(used))
        gone = save(index, with_chunks(dropped, reused=[used]))[0]
        save(tenant, with_chunks(chunk("dropped", "p3")))
        index.delete([gone.id], actor="t")
        assert index.sweep(references) == (1, 60)
        assert set(index.locate([used.digest, dropped.digest])) == {used.digest}
        assert tenant.locate([dropped.digest])
        assert index.condemn("p2")
        assert index.sweep(references) == (0, 0)

    def test_a_save_during_a_sweep_keeps_its_chunks_or_hears_of_it(self, index: Index, other: Index) -> None:
        shared = chunk("shared")
        unnamed = save(index, with_chunks(shared))[0]
        index.delete([unnamed.id], actor="t")
        save(index, with_chunks(chunk("anchor")))
        during: list[str] = []

        def slowly(_: str, manifest: bytes) -> list[bytes]:
            if not during:
                during.append(save(other, with_chunks(chunk("fresh"), reused=[shared]))[0].id)
            return references("", manifest)

        index.sweep(slowly)
        assert set(index.locate([shared.digest, chunk("fresh").digest])) == {shared.digest, chunk("fresh").digest}

    def test_racing_saves_and_sweeps_leave_no_dangling_reference(self, index: Index, other: Index) -> None:
        stop = threading.Event()
        chunks = [chunk(str(n), f"p{n}") for n in range(6)]

        def keep_saving(where: Index, job: str) -> None:
            for n in itertools.count():
                if stop.is_set():
                    return
                used = chunks[n % len(chunks)]
                try:
                    saved = save(where, with_chunks(reused=[used], job=job))
                except ChunksGone:
                    saved = save(where, with_chunks(used, job=job))
                if n % 2:
                    where.delete([saved[0].id], actor="t")

        with ThreadPoolExecutor(3) as pool:
            savers = [pool.submit(keep_saving, where, f"job-{k}") for k, where in enumerate((index, other, other))]
            try:
                for _ in range(8):
                    index.sweep(references)
            finally:
                stop.set()
            for saver in savers:
                saver.result()
        named = {digest for _, _, manifest in index.manifests() for digest in references("", manifest)}
        assert set(index.locate(sorted(named))) == named

    def test_a_pack_is_condemned_when_nothing_names_it(self, index: Index) -> None:
        used = chunk("used", "p1")
        saved = save(index, with_chunks(used))[0]
        assert not index.condemn("p1")
        save(index, with_chunks(reused=[used]), with_chunks(chunk("more", "p1", 60)))
        assert index.condemn("p2")
        assert index.condemn("p2")  # repeated after a crash
        index.delete([c.id for c in index.list("job") if c.id != saved.id], actor="t")
        index.sweep(references)
        assert not index.condemn("p1")
        index.delete([saved.id], actor="t")
        index.sweep(references)
        assert index.condemn("p1")

    @pytest.mark.parametrize("change", ["save", "reseal"])
    def test_what_is_named_anew_while_a_sweep_marks_stays(self, index: Index, other: Index, change: str) -> None:
        """After all manifests are marked, a new one comes, or an old one is replaced under other names (I3)."""
        first = with_chunks(chunk("old name"))
        save(index, first)
        fresh = [chunk("new name"), chunk("another")]
        anew = sealed_anew(first, *fresh)
        is_done: list[bool] = []

        def late(checkpoint_id: str, manifest: bytes) -> Iterator[bytes]:
            yield from references(checkpoint_id, manifest)
            if not is_done:
                is_done.append(True)
                if change == "save":
                    save(other, with_chunks(*fresh, job="a job before"))
                else:
                    assert other.reseal(anew, replacing=row_digest(other, first.id), actor="t")

        index.sweep(late)
        assert set(index.locate([c.digest for c in fresh])) == {c.digest for c in fresh}

    # keys

    def keyring(self, index: Index, text: str) -> tuple[str, str]:
        """Return a keyring to replace the current one, and its key; sealed rows need the keyring they have."""
        present = index.keyring() if self.seals else None
        return (text, f"key of {text}") if present is None else (present, str(json.loads(present)["key"]))

    def test_a_keyring_is_compared_and_swapped(self, index: Index, peer: Index) -> None:
        present = index.keyring()
        assert self.seals or present is None
        first, _ = self.keyring(index, "first")
        assert not index.set_keyring("another", "k", replacing="what is not there", actor="t")
        assert index.keyring() == peer.keyring() == present
        for text, replacing in ((first, present), (self.keyring(index, "second")[0], first)):
            assert index.set_keyring(text, self.keyring(index, text)[1], replacing=replacing, actor="t")
            assert index.keyring() == peer.keyring() == text
            assert not peer.set_keyring(text, "k", replacing="what is not there", actor="t")
        assert [e.action for e in index.events(limit=2, newest=True)] == ["key", "key"]
        assert index.is_encrypted

    def test_a_save_is_under_the_current_key(self, index: Index, peer: Index) -> None:
        text, key = self.keyring(index, "first")
        index.set_keyring(text, key, replacing=index.keyring(), actor="t")
        with pytest.raises(KeysChanged):
            save(peer, record(key_id="00"))
        assert save(peer, record(key_id=key))[0].seq == 1
        if not self.seals:
            with pytest.raises(Conflict):
                save(peer, record("plain"))
            index.set_keyring("second", "another", replacing=text, actor="t")
            with pytest.raises(KeysChanged):
                save(peer, record(key_id=key))
        assert [job.name for job in index.jobs()] == ["job"]

    def test_a_store_that_holds_plain_data_gets_no_key(self, index: Index) -> None:
        if self.seals:
            pytest.skip("it has one")
        save(index)
        with pytest.raises(Conflict):
            index.set_keyring("first", "k", replacing=None, actor="t")
        assert (index.keyring(), index.is_encrypted) == (None, False)

    def test_one_at_a_time_changes_keys(self, index: Index, peer: Index) -> None:
        lease = index.acquire_lease(KEYS, "first", 30)
        with pytest.raises(LeaseHeld, match="keys of namespace default are being changed by first") as held:
            peer.acquire_lease(KEYS, "second", 30)
        assert (held.value.holder, held.value.token) == ("first", lease.token)
        index.renew_lease(lease)
        text, key = self.keyring(index, "first")
        present = index.keyring()
        assert index.set_keyring(text, key, replacing=present, actor="t", lease_token=lease.token)
        peer.release_lease(lease)
        later = peer.acquire_lease(KEYS, "second", 30)
        assert later.token > lease.token
        for token in (lease.token, later.token + 1):
            with pytest.raises(LeaseLost):
                index.set_keyring("late", "k", replacing=text, actor="t", lease_token=token)
        with pytest.raises(LeaseLost):
            index.renew_lease(lease)
        assert index.keyring() == text
        assert index.jobs() == []  # it is not a job
        assert [e.job for e in index.events() if e.action in ("lease", "release")] == [None] * 3

    def test_the_keys_of_another_namespace_are_not_leased(self, index: Index, tenant: Index) -> None:
        index.acquire_lease(KEYS, "first", 30)
        assert tenant.acquire_lease(KEYS, "theirs", 30).token == 1

    def test_without_its_lease_a_change_of_keys_writes_and_deletes_nothing(self, index: Index, peer: Index) -> None:
        lease = index.acquire_lease(KEYS, "first", 30)
        first = with_chunks(chunk("old name"))
        save(index, first)
        anew = sealed_anew(first, chunk("new name"), lease_token=lease.token)
        unnamed = save(index, with_chunks(chunk("unnamed")))[0]
        index.delete([unnamed.id], actor="t")
        assert index.reseal(anew, replacing=row_digest(index, first.id), actor="t")
        peer.release_lease(lease)
        peer.acquire_lease(KEYS, "second", 30)
        events = index.events()
        with pytest.raises(LeaseLost):
            index.reseal(anew, replacing=row_digest(index, first.id), actor="t")
        with pytest.raises(LeaseLost):
            index.sweep(lambda *_: [], lease_token=lease.token)
        assert len(index.locate([chunk(name).digest for name in ("old name", "new name", "unnamed")])) == 3
        assert index.events() == events

    def test_reseal_puts_a_checkpoint_there_anew(self, index: Index) -> None:
        first = with_chunks(chunk("old name"), tags={"a": "1"}, is_pinned=True, idempotency_key="k")
        saved = save(index, first)[0]
        before = row_digest(index, first.id)
        fresh = chunk("new name")
        anew = sealed_anew(first, fresh, stored_bytes=9, metadata_json='{"loss":1}')
        with pytest.raises(ChunksGone):
            index.reseal(replace(anew, reused_chunks=[digest_of(b"gone")]), replacing=before, actor="t")
        assert not index.reseal(anew, replacing=digest_of(b"another"), actor="t")
        assert not index.reseal(replace(anew, id=CheckpointId("nothing_1_0")), replacing=before, actor="t")
        assert index.locate([fresh.digest]) == {}
        assert index.reseal(anew, replacing=before, actor="t")
        checkpoint, manifest = index.read(first.id)
        assert manifest == fresh.digest
        assert checkpoint == replace(saved, digest=checkpoint.digest, stored_bytes=9, metadata={"loss": 1})
        assert checkpoint.digest != before.hex()
        job = index.job("job")
        assert job is not None
        assert (job.stored_bytes, job.checkpoints, job.last_seq) == (9, 1, 1)
        assert index.locate([fresh.digest]) == {fresh.digest: fresh}
        event = index.events(limit=1, newest=True)[0]
        assert (event.action, event.job, event.checkpoint, event.actor) == ("reseal", "job", first.id, "t")

    def test_scrub_leaves_what_is_there(self, index: Index, peer: Index) -> None:
        gone, stays = save(index, with_chunks(chunk("gone")), with_chunks(chunk("stays")))
        index.delete([gone.id], actor="t")
        index.sweep(references)
        before = index.events()
        index.scrub()
        index.scrub()
        assert [c.id for c in peer.list("job")] == [stays.id]
        assert set(peer.locate([chunk("stays").digest, chunk("gone").digest])) == {chunk("stays").digest}
        assert index.events() == before
        assert save(peer)[0].seq == 3

    # the store's earlier state, and its reserve for a full disk

    def test_the_index_of_a_store_is_not_older_than_itself(self, index: Index, peer: Index) -> None:
        save(index)
        index.refuse_older()
        index.accept({})
        index.delete([c.id for c in index.list("job")], actor="t")
        for mine in (index, peer):
            mine.refuse_older()

    def test_namespaces_that_a_rebuild_left_closed(self, index: Index, peer: Index) -> None:
        assert index.closed_namespaces() == {}
        for closed in ({"other": "a key"}, {}):
            index.accept(closed)
            assert (index.closed_namespaces(), peer.closed_namespaces()) == (closed, closed)

    def test_saves_go_on_when_room_was_made(self, index: Index) -> None:
        first = save(index)[0]
        assert index.make_room() in (True, False)
        assert save(index)[0].seq == first.seq + 1

    # closing

    def test_a_closed_index_says_so(self, tmp_path: Path) -> None:
        index = self.open_index(tmp_path)
        save(index)
        index.close()
        index.close()
        for attempt in (index.jobs, lambda: save(index), lambda: index.sweep(references)):
            with pytest.raises(CheckpointError):
                attempt()
