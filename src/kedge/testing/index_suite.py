"""The contract of `ports.Index`, sentence by sentence: saving, changing, deleting.

Reading is in `index_query_suite`, the rest in `index_care_suite`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kedge.errors import CheckpointError, Conflict, IdempotencyConflict, LeaseHeld, LeaseLost, NotFound
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus
from kedge.ports import (
    Chunk,
    ChunksGone,
    Encoding,
    IdTaken,
    Index,
    NewCheckpoint,
    Seen,
    Selection,
    Then,
    Update,
    digest_of,
)

from .index_care_suite import IndexCareSuite
from .index_condition_suite import IndexConditionSuite
from .index_fixtures import chunk, record, references, save, with_chunks
from .index_query_suite import IndexQuerySuite
from .index_record_suite import IndexRecordSuite

__all__ = ["IndexSuite", "chunk", "digest_of", "record", "references", "save", "with_chunks"]


class IndexSuite(IndexQuerySuite, IndexConditionSuite, IndexCareSuite, IndexRecordSuite):
    """All suites. Derive from this and define how to open the adapter."""

    # commit

    def test_what_was_committed_is_read_back(self, index: Index) -> None:
        first = record(step="läuft → weiter", tags={"a": "1"}, metadata_json='{"loss":0.5}', is_pinned=True)
        second = record(level=CheckpointLevel.STAGE, parent=first.id, status=CheckpointStatus.VALID)
        saved = save(index, first, second)
        assert [c.seq for c in saved] == [1, 2]
        assert [index.get(c.id) for c in saved] == saved
        assert index.read(first.id) == (saved[0], first.manifest)
        checkpoint = saved[0]
        assert (checkpoint.step, checkpoint.tags, checkpoint.metadata) == ("läuft → weiter", {"a": "1"}, {"loss": 0.5})
        assert checkpoint.is_pinned
        assert self.seals or checkpoint.digest == first.digest.hex()
        assert (saved[1].level, saved[1].parent, saved[1].status) == ("stage", first.id, "valid")
        assert int(checkpoint.created_at.timestamp() * 1e6) == pytest.approx(first.created_us, abs=1)

    def test_sequence_numbers_are_never_used_twice(self, index: Index) -> None:
        saved = save(index, record(), record())
        index.delete([c.id for c in saved], actor="t")
        assert save(index)[0].seq == 3

    def test_reserved_numbers_are_used_by_nobody(self, index: Index, peer: Index) -> None:
        save(index, record())
        peer.reserve_numbers("job", 7)
        assert save(index, record())[0].seq == 8
        index.reserve_numbers("job", 3)
        assert save(peer, record())[0].seq == 9
        index.reserve_numbers("new", 5)
        assert save(peer, record("new"))[0].seq == 6

    def test_a_given_number_is_kept_and_counting_goes_on_behind_it(self, index: Index) -> None:
        assert [c.seq for c in save(index, record(seq=7), record(seq=3))] == [7, 3]
        assert save(index)[0].seq == 8

    def test_a_number_that_is_taken_is_refused(self, index: Index) -> None:
        save(index, record(seq=7))
        with pytest.raises(CheckpointError):
            save(index, record(seq=7))
        assert [c.seq for c in index.list("job")] == [7]

    def test_the_same_record_again_is_an_id_that_is_taken(self, index: Index) -> None:
        """Two copies into one store bring the same checkpoint: its number is taken, but that is not a conflict."""
        again = record(seq=7)
        save(index, again)
        with pytest.raises(IdTaken):
            save(index, again)
        assert [c.seq for c in index.list("job")] == [7]

    def test_all_records_or_none(self, index: Index) -> None:
        taken = save(index)[0]
        before = index.events()
        with pytest.raises(IdTaken):
            save(index, record(tags={"a": "b"}), with_chunks(chunk("x")), record(id=taken.id))
        assert [c.id for c in index.list("job")] == [taken.id]
        assert index.events() == before
        assert index.locate([chunk("x").digest]) == {}

    def test_an_id_is_taken_once_in_the_store(self, index: Index, tenant: Index) -> None:
        self.need_sharing()
        taken = save(index)[0].id
        for where in (index, tenant):
            with pytest.raises(IdTaken):
                save(where, record("another", id=taken))
        twin = record()
        with pytest.raises(IdTaken):
            save(index, twin, replace(twin, job="another"))

    def test_a_parent_must_exist_in_the_namespace(self, index: Index, tenant: Index) -> None:
        foreign = save(tenant)[0].id
        for parent in (foreign, CheckpointId("nothing_1_00000000")):
            with pytest.raises(NotFound):
                save(index, record(parent=parent))
        assert index.list("job") == []
        elsewhere = save(index, record("elsewhere"))[0].id
        assert save(index, record(parent=elsewhere))[0].parent == elsewhere

    def test_a_refused_save_changes_nothing(self, index: Index) -> None:
        save(index)
        job, events = index.job("job"), index.events()
        for refused in (record(parent=CheckpointId("no_1_0")), record(lease_token=5)):
            with pytest.raises(CheckpointError):
                save(index, refused)
        assert (index.job("job"), index.events()) == (job, events)

    def test_an_idempotency_key_answers_the_first_save(self, index: Index) -> None:
        key: dict[str, Any] = {"idempotency_key": "k", "request_digest": b"same"}
        first = save(index, record(**key))[0]
        assert save(index, record(**key)) == [first]
        assert len(index.list("job")) == 1
        with pytest.raises(IdempotencyConflict):
            save(index, record(idempotency_key="k", request_digest=b"other"))
        assert save(index, record("another", **key))[0].id != first.id

    def test_find_answers_what_was_saved_under_keys(self, index: Index, tenant: Index) -> None:
        keys = [f"k{n}" for n in range(self.many)]
        saved = dict(zip(keys, save(index, *(record(idempotency_key=key) for key in keys)), strict=True))
        save(index, record("other", idempotency_key="elsewhere"))
        save(tenant, record(idempotency_key="of the tenant"))
        answers = index.find("job", ["unknown", "elsewhere", "of the tenant", *saved])
        assert {key: checkpoint for key, (checkpoint, _) in answers.items()} == saved
        assert self.seals or all(digest_of(manifest).hex() == c.digest for c, manifest in answers.values())
        assert index.find("unknown job", ["k1"]) == {}
        assert index.find("job", []) == {}
        index.delete([saved["k7"].id], actor="tester")
        assert "k7" not in index.find("job", ["k7", "k8"])

    def test_keys_of_checkpoints(self, index: Index, tenant: Index) -> None:
        keyed, plain = save(index, record(idempotency_key="k", request_digest=b"d"), record())
        other = save(tenant, record(idempotency_key="k"))[0]
        assert index.keys_of([keyed.id, plain.id, other.id, "nothing_1_0"]) == {keyed.id: ("k", b"d")}
        assert index.keys_of([]) == {}

    def test_a_numbered_record_may_name_a_parent_that_is_not_there(self, index: Index) -> None:
        parent = CheckpointId("before_1_00000000")
        assert save(index, record(seq=9, parent=parent))[0].parent == parent

    def test_find_reads_ahead_in_a_range(self, index: Index, tenant: Index) -> None:
        assert index.find("job", range(1, 11)) == {}
        saved = save(index, *(record(idempotency_key=f"k{n}" if n % 2 else None) for n in range(10)))
        save(index, record("other", idempotency_key="elsewhere"))
        save(tenant, record(idempotency_key="of the tenant"))
        job = saved[0].job
        ahead = index.find(job, range(1, 101))
        assert list(ahead) == ["k1", "k3", "k5", "k7", "k9"]
        assert ahead["k5"] == index.find(job, ["k5"])["k5"]
        assert list(index.find(job, range(saved[3].seq + 1, saved[3].seq + 5))) == ["k5", "k7"]
        assert index.find(job, range(saved[-1].seq + 1, 1 << 40)) == {}
        assert index.find("unknown", range(1, 11)) == {}

    def test_threads_with_one_idempotency_key_save_once(self, index: Index) -> None:
        with ThreadPoolExecutor(8) as pool:
            keyed = [record(idempotency_key="k", request_digest=b"d") for _ in range(16)]
            answers = list(pool.map(lambda r: save(index, r)[0].id, keyed))
        assert len(set(answers)) == 1
        assert len(index.list("job")) == 1

    def test_damaged_chunks_are_not_reused_until_they_are_replaced(self, index: Index) -> None:
        old = chunk("x")
        save(index, with_chunks(old))
        index.mark_damaged([old], True)
        assert index.locate([old.digest])[old.digest].is_damaged
        with pytest.raises(ChunksGone):
            save(index, with_chunks(reused=[old]))
        fresh = replace(old, pack="f" * 32, offset=8192)
        save(index, with_chunks(fresh))
        assert index.locate([old.digest]) == {old.digest: fresh}
        index.mark_damaged([old], True)  # no longer at that place
        assert index.locate([old.digest]) == {old.digest: fresh}
        index.mark_damaged([fresh], True)
        index.mark_damaged([fresh], False)
        save(index, with_chunks(reused=[fresh]))

    def test_bounds_outside_the_job_stay_inside_it(self, index: Index) -> None:
        for job in ("a", "b", "c"):
            save(index, record(job))
        assert [c.job for c in index.list("b", Selection(before=1 << 40))] == ["b"]
        assert [c.job for c in index.list("b", Selection(after=-(1 << 40)))] == ["b"]
        assert index.list("b", Selection(after=1 << 40)) == []
        assert index.list("b", Selection(before=-(1 << 40))) == []

    def test_reused_chunks_must_exist(self, index: Index) -> None:
        here, gone = chunk("here"), chunk("gone")
        save(index, with_chunks(here))
        save(index, with_chunks(reused=[here]))
        with pytest.raises(ChunksGone) as refusal:
            save(index, with_chunks(reused=[here, gone]))
        assert list(refusal.value.digests) == [gone.digest]

    def test_a_known_chunk_keeps_its_first_place(self, index: Index) -> None:
        first = chunk("x", "pack-1", 5)
        save(index, with_chunks(first))
        save(index, with_chunks(replace(first, pack="pack-2", offset=9)))
        assert index.locate([first.digest]) == {first.digest: first}

    def test_threads_get_every_number_once(self, index: Index) -> None:
        with ThreadPoolExecutor(16) as pool:
            seqs = list(pool.map(lambda n: save(index, record(f"job-{n % 3}"))[0].seq, range(120)))
        assert sorted(seqs) == sorted(list(range(1, 41)) * 3)
        assert [c.seq for c in index.list("job-0")] == list(range(1, 41))

    def test_a_refusal_reaches_only_its_own_caller(self, index: Index) -> None:
        taken = save(index)[0].id

        def attempt(n: int) -> str:
            kinds = [record(), record(id=taken), record(parent=CheckpointId("no_1_0")), record(seq=1)]
            try:
                return save(index, kinds[n % 4])[0].id
            except IdTaken:
                return "taken"
            except NotFound:
                return "parent"
            except CheckpointError:
                return "number"

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(attempt, range(80)))
        assert [a for n, a in enumerate(answers) if n % 4] == ["taken", "parent", "number"] * 20
        assert len({a for n, a in enumerate(answers) if n % 4 == 0}) == 20
        assert len(index.list("job")) == 21

    def test_commit_each_settles_every_save_by_itself(self, index: Index) -> None:
        """Refused saves among good ones; two with one key; the actors."""
        taken = save(index)[0].id
        keyed = record(idempotency_key="k", request_digest=b"same")
        saves = [
            (record(), "ann"),
            (record(id=taken), "bob"),
            (record(parent=CheckpointId("no_1_0")), "bob"),
            (keyed, "ann"),
            (record(idempotency_key="k", request_digest=b"same"), "ann"),
            (record(idempotency_key="k", request_digest=b"other"), "bob"),
            (record("another job"), "cleo"),
        ]
        outcomes = index.commit_each(saves)
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [Checkpoint, IdTaken, NotFound, Checkpoint, Checkpoint, IdempotencyConflict, Checkpoint]
        answered = [outcome.id for outcome in outcomes if isinstance(outcome, Checkpoint)]
        assert answered == [saves[0][0].id, keyed.id, keyed.id, saves[6][0].id]
        assert [c.id for c in index.list("job")] == [taken, saves[0][0].id, keyed.id]
        saved = [(event.actor, event.checkpoint) for event in index.events() if event.action == "save"]
        assert saved[1:] == [("ann", saves[0][0].id), ("ann", keyed.id), ("cleo", saves[6][0].id)]
        assert index.commit_each([]) == []

    def test_commit_each_beside_threads_that_commit(self, index: Index) -> None:
        def work(n: int) -> int:
            if n % 2:
                return len({save(index)[0].seq for _ in range(8)})
            outcomes = index.commit_each([(record(), "tester") for _ in range(8)])
            return len({outcome.seq for outcome in outcomes if isinstance(outcome, Checkpoint)})

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(16))) == [8] * 16
        assert [c.seq for c in index.list("job")] == list(range(1, 129))

    def test_another_object_sees_a_commit_at_once(self, index: Index, other: Index) -> None:
        assert other.store_id == index.store_id
        for n in range(1, 6):
            saved = save(index if n % 2 else other)[0]
            assert saved.seq == n
            assert other.get(saved.id) == index.get(saved.id) == saved

    # delete, update, mark

    def test_delete_answers_those_that_existed(self, index: Index) -> None:
        a, b = save(index, record(tags={"k": "v"}), record())
        assert index.delete([a.id, "nothing_1_0", a.id], actor="t") == [a.id]
        assert [c.id for c in index.list("job")] == [b.id]
        assert index.list("job", Selection(tags={"k": ["v"]})) == []
        assert index.delete([a.id], actor="t") == index.delete([], actor="t") == []

    def test_a_pinned_one_stops_the_whole_deletion(self, index: Index) -> None:
        a, b = save(index, record(), record(is_pinned=True))
        with pytest.raises(Conflict):
            index.delete([a.id, b.id], actor="t")
        assert len(index.list("job")) == 2
        assert sorted(index.delete([a.id, b.id], even_pinned=True, actor="t")) == sorted([a.id, b.id])

    def test_update_changes_what_may_change(self, index: Index) -> None:
        saved = save(index, record(tags={"a": "1", "b": "2"}))[0]
        changed = index.update(saved.id, Update(tags={"a": None, "b": "3", "c": "4"}, is_pinned=True), actor="t")
        assert changed == replace(saved, tags={"b": "3", "c": "4"}, is_pinned=True) == index.get(saved.id)
        assert index.list("job", Selection(tags={"a": ["1"]})) == index.list("job", Selection(tags={"b": ["2"]})) == []
        assert [c.id for c in index.list("job", Selection(tags={"b": ["3"], "c": ["4"]}))] == [saved.id]
        assert index.update(saved.id, Update(status=CheckpointStatus.VALID), actor="t").status == "valid"
        assert not index.update(saved.id, Update(is_pinned=False), actor="t").is_pinned
        with pytest.raises(NotFound):
            index.update("nothing_1_0", Update(is_pinned=True), actor="t")

    def test_mark_sets_the_status_of_those_that_exist_with_one_event(self, index: Index, tenant: Index) -> None:
        saved = save(index, record(), record(), record())
        gone = replace(saved[1], id=CheckpointId("nothing_1_0"))
        before = index.events()[-1].id
        seen = [Seen(saved[0]), Seen(gone), Seen(saved[2])]
        assert tenant.mark(seen, CheckpointStatus.VALID, actor="t") == []
        assert index.mark(seen, CheckpointStatus.VALID, actor="t") == [saved[0].id, saved[2].id]
        assert [c.status for c in index.list("job")] == ["valid", "created", "valid"]
        assert [e.action for e in index.events(before)] == ["status"]
        again = [Seen(c) for c in index.list("job")[::2]]
        assert index.mark(again, CheckpointStatus.VALID, actor="t") == [saved[0].id, saved[2].id]
        assert len(index.events(before)) == 1  # nothing changed
        assert index.mark([], CheckpointStatus.VALID, actor="t") == []

    def test_mark_leaves_alone_what_is_not_as_it_was_seen(self, index: Index) -> None:
        saved = save(index)[0]
        for other in (replace(saved, digest="00" * 32), replace(saved, status=CheckpointStatus.ARCHIVED)):
            assert index.mark([Seen(other)], CheckpointStatus.CORRUPTED, actor="t") == []
        index.update(saved.id, Update(status=CheckpointStatus.ARCHIVED), actor="t")
        assert index.mark([Seen(saved)], CheckpointStatus.VALID, actor="t") == []
        assert index.get(saved.id).status is CheckpointStatus.ARCHIVED

    def test_a_checkpoint_is_condemned_for_chunks_only_while_they_lie_where_they_were_seen(self, index: Index) -> None:
        packed = chunk("packed", offset=4096)
        inline = Chunk(digest_of(b"in"), 2, 2, Encoding.RAW, data=b"in")
        saved = save(index, with_chunks(packed, inline))[0]
        other_bytes = replace(inline, data=b"IN")
        for moved in (
            replace(packed, pack="elsewhere"),
            replace(packed, offset=8192),
            replace(packed, stored_bytes=61),
            replace(packed, encoding=Encoding.RAW),
            other_bytes,
            chunk("unknown"),
        ):
            assert index.mark([Seen(saved, [moved])], CheckpointStatus.CORRUPTED, actor="t") == []
            assert index.mark_damaged([moved], True) == []
        assert index.mark([Seen(saved, (), [packed.digest])], CheckpointStatus.CORRUPTED, actor="t") == []
        assert index.get(saved.id) == saved
        assert sorted(index.mark_damaged([packed, inline, chunk("unknown")], True)) == sorted(
            [packed.digest, inline.digest]
        )
        for seen in (Seen(saved, [other_bytes, packed]), Seen(saved, [inline]), Seen(saved, (), [digest_of(b"none")])):
            assert index.mark([seen], CheckpointStatus.CORRUPTED, actor="t") == [saved.id]
            index.update(saved.id, Update(status=saved.status), actor="t")

    def test_a_key_goes_over_to_who_takes_it(self, index: Index) -> None:
        first = save(index, record(idempotency_key="k", request_digest=b"one"))[0]
        late = save(index)[0]
        for taken in (None, late.id):
            with pytest.raises(Conflict):
                save(index, record(seq=7, idempotency_key="k", request_digest=b"two", takes_key_from=taken))
        heir = record(seq=7, idempotency_key="k", request_digest=b"two", takes_key_from=first.id)
        assert save(index, heir)[0].id == heir.id
        assert index.find("job", ["k"])["k"][0].id == heir.id
        assert set(index.keys_of([first.id, heir.id])) == {heir.id}
        assert index.get(first.id) == first
        same = record(idempotency_key="k", request_digest=b"two", takes_key_from=heir.id)  # even with the same digest
        assert save(index, same)[0].id == same.id
        index.delete([heir.id], actor="t")
        assert index.find("job", ["k"])["k"][0].id == same.id

    def test_what_a_save_does_besides_is_done_with_it_or_not_at_all(self, index: Index) -> None:
        entry = save(index, record("queue", tags={"state": "running"}, is_pinned=True))[0]
        lease = index.acquire_lease("job", "me", 60)
        then = Then(delete=(entry.id, CheckpointId("gone_1_00000000")), releases_lease=True)
        with pytest.raises(LeaseLost):
            save(index, record(lease_token=lease.token + 1, then=then))
        assert index.get(entry.id) == entry
        index.renew_lease(lease)
        last = save(index, record(lease_token=lease.token, then=then))[0]
        assert [checkpoint.id for checkpoint in index.list("job")] == [last.id]
        assert index.list("queue") == index.list("queue", Selection(tags={"state": ["running"]})) == []
        with pytest.raises(LeaseLost):
            index.renew_lease(lease)
        assert [(event.action, event.checkpoint) for event in index.events(newest=True, limit=3)] == [
            ("save", last.id), ("delete", entry.id), ("release", None),
        ]  # fmt: skip
        assert index.audit().broken_at is None

    def test_a_save_that_landed_is_answered_although_its_lease_has_ended_since(self, index: Index) -> None:
        """The answer to a commit was lost: saving again returns the saved checkpoint (I9)."""

        def again(new: NewCheckpoint) -> Checkpoint:
            try:
                return save(index, new)[0]
            except IdTaken:
                assert self.seals  # in another envelope: the caller checks whether it is the same
                return index.get(new.id)

        entry = save(index, record("queue"))[0]
        lease = index.acquire_lease("job", "me", 60)
        middle = record(lease_token=lease.token)
        last = record(lease_token=lease.token, then=Then(delete=(entry.id,), releases_lease=True))
        plain = record("plain")
        saved = [save(index, new)[0] for new in (middle, last, plain)]
        index.acquire_lease("plain", "somebody else", 60)
        events = index.events()
        assert [again(new) for new in (middle, last, plain)] == saved
        for another in (record(lease_token=lease.token), replace(last, id=record().id)):
            with pytest.raises(LeaseLost):
                save(index, another)
        with pytest.raises(LeaseHeld):
            save(index, record("plain"))
        assert index.events() == events
