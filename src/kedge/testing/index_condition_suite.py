"""The contract of `ports.Index`: saves with conditions (`ports.Provided`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kedge.errors import LeaseHeld
from kedge.model import Checkpoint, CheckpointId, Lease
from kedge.ports import IdTaken, Index, Mark, Provided, Selection, Unmet

from .index_fixtures import IndexFixtures, record, save


class IndexConditionSuite(IndexFixtures):
    """Part of `IndexSuite`."""

    def test_a_save_takes_the_first_lease_of_its_job(self, index: Index, peer: Index) -> None:
        """A run begins in one transaction: lease, first record, and the mark on its queue entry."""
        lease = Lease("job", 1, "me", 60)
        first = record(lease_token=1, provided=Provided(absent_jobs=("job:inbox",), takes=lease))
        saved = save(index, first)[0]
        assert (saved.seq, [c.id for c in index.list("job")]) == (1, [first.id])
        assert [(event.action, event.checkpoint) for event in index.events()[-2:]] == [
            ("lease", None), ("save", first.id),
        ]  # fmt: skip
        assert index.audit().broken_at is None
        peer.renew_lease(lease)
        with pytest.raises(LeaseHeld):
            save(peer, record())
        with pytest.raises(LeaseHeld) as refused:
            peer.acquire_lease("job", "somebody else", 60)
        assert refused.value.token == 1
        assert save(index, record(lease_token=1))[0].seq == 2

    def test_what_exists_is_begun_by_nobody(self, index: Index, peer: Index) -> None:
        save(index, record("saved"))
        index.release_lease(index.acquire_lease("leased", "me", 60))
        save(index, record("told:inbox"))
        events = index.events()
        for job in ("saved", "leased", "told"):
            provided = Provided(absent_jobs=(f"{job}:inbox",), takes=Lease(job, 1, "me", 60))
            with pytest.raises(Unmet):
                save(peer, record(job, lease_token=1, provided=provided))
        assert index.events() == events
        assert index.job("told") is None

    def test_a_job_is_begun_once_by_whoever_comes_first(self, index: Index, peer: Index) -> None:
        def begin(number: int) -> bool:
            provided = Provided(takes=Lease("job", 1, f"worker {number}", 60))
            try:
                save((index, peer)[number % 2], record(lease_token=1, provided=provided))
            except Unmet:
                return False
            return True

        with ThreadPoolExecutor(6) as threads:
            assert sum(threads.map(begin, range(12))) == 1
        assert [c.seq for c in index.list("job")] == [1]

    def test_a_save_that_marks_another_checkpoint_finds_it_as_it_was_seen(self, index: Index) -> None:
        entry = save(index, record("queue", tags={"state": "ready", "run": "job"}))[0]

        def begin(job: str, seen: dict[str, str], checkpoint_id: str = entry.id) -> Checkpoint:
            marks = Mark(CheckpointId(checkpoint_id), seen, {"state": "running", "by": "me"})
            provided = Provided(takes=Lease(job, 1, "me", 60), marks=marks)
            return save(index, record(job, lease_token=1, provided=provided))[0]

        for seen, marked in (({"state": "held"}, entry.id), ({"by": "me"}, entry.id), ({}, "gone_1_00000000")):
            with pytest.raises(Unmet):
                begin("job", seen, marked)
        assert index.job("job") is None
        assert index.get(entry.id) == entry
        if self.seals:
            return  # a sealed row's tags are changed with its envelope, never by a save
        begin("job", {"state": "ready"})
        assert dict(index.get(entry.id).tags) == {"state": "running", "run": "job", "by": "me"}
        assert index.list("queue", Selection(tags={"state": ["ready"]})) == []
        with pytest.raises(Unmet):
            begin("another", {"state": "ready"})
        assert [event.action for event in index.events()[1:]].count("tag") == 1
        assert index.audit().broken_at is None

    def test_a_save_that_must_be_alone_is_refused_beside_what_has_its_tag(self, index: Index, peer: Index) -> None:
        def submit(run: str, to: Index = index) -> str:
            provided = Provided(absent_jobs=(run,), absent_tag=("run", run))
            return save(to, record("queue", tags={"run": run}, provided=provided))[0].id

        first = submit("a")
        submit("b", peer)
        for run in ("a", "b"):
            with pytest.raises(Unmet):
                submit(run)
        save(index, record("c"))
        with pytest.raises(Unmet):
            submit("c")
        index.delete([first], actor="t")
        submit("a")
        assert len(index.list("queue")) == 2
        with ThreadPoolExecutor(6) as threads:
            outcomes = list(threads.map(lambda n: _is_refused(submit, "d", (index, peer)[n % 2]), range(12)))
        assert outcomes.count(False) == 1

    def test_a_save_with_conditions_that_landed_is_answered_again(self, index: Index) -> None:
        entry = save(index, record("queue", tags={"state": "ready"}))[0]
        marks = None if self.seals else Mark(entry.id, {"state": "ready"}, {"state": "running"})
        begun = record(lease_token=1, provided=Provided(takes=Lease("job", 1, "me", 60), marks=marks))
        submitted = record("queue", tags={"run": "r"}, provided=Provided(absent_tag=("run", "r")))
        saved = [save(index, new)[0] for new in (begun, submitted)]
        events = index.events()
        for new, before in zip((begun, submitted), saved, strict=True):
            try:
                assert save(index, new)[0] == before
            except IdTaken:
                assert self.seals  # in another envelope: the caller checks whether it is the same
        assert index.events() == events


def _is_refused(submit: Callable[..., str], *given: object) -> bool:
    try:
        submit(*given)
    except Unmet:
        return True
    return False
