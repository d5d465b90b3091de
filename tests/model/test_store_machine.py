"""The whole API against a dictionary model: whatever order users call it in, it answers like the model."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import holdfast
from holdfast.testing.strategies import equal, states

JOBS = st.sampled_from(["train", "Train", "nightly.2", "a:b@c+d"])
LEVELS = st.sampled_from(["pipeline", "stage", "step", "substep"])
STEPS = st.sampled_from(["load", "fit ✓", "a/b", "x" * 1024, "."])
BIG = st.builds(
    lambda seed, size, rest: {"blob": bytes([seed]) * size, "rest": rest},
    st.integers(0, 255),
    st.sampled_from([5_000, 70_000, 1_100_000, 2_500_000]),
    st.integers(),
)
STATES = st.one_of(states(), BIG)


@dataclass
class Known:
    job: str
    state: object
    level: str
    tags: dict[str, str] = field(default_factory=dict)
    pinned: bool = False


class StoreMachine(RuleBasedStateMachine):
    ids: Bundle[str] = Bundle("ids")

    @initialize()
    def begin(self) -> None:
        self.place = self.make_place()
        self.store = holdfast.open(self.place)
        self.model: dict[str, Known] = {}  # in order of saving

    def make_place(self) -> str:
        return tempfile.mkdtemp(prefix="holdfast-machine-") + "/store"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            if self.place != "memory:":
                shutil.rmtree(self.place.removesuffix("/store"))

    def of(self, job: str) -> list[str]:
        return [i for i, known in self.model.items() if known.job == job]

    @rule(target=ids, job=JOBS, step=STEPS, state=STATES, level=LEVELS, pin=st.booleans(), tag=st.booleans())
    def save(self, job: str, step: str, state: object, level: str, pin: bool, tag: bool) -> str:
        tags = {"kind": "tagged"} if tag else {}
        saved = self.store.save(job, step, state, level=level, pin=pin, tags=tags)
        assert saved not in self.model
        self.model[saved] = Known(job, state, level, tags, pin)
        return saved

    @rule(target=ids, job=JOBS, state=STATES)
    def save_async(self, job: str, state: object) -> str:
        saved = self.store.save_async(job, "later", state).result(60)
        self.model[saved] = Known(job, state, "step")
        return saved

    @rule(target=ids, job=JOBS, state=states(), key=st.sampled_from(["k1", "k2"]))
    def save_idempotent(self, job: str, state: object, key: str) -> object:
        try:
            saved = self.store.save(job, "once", state, idempotency_key=key)
        except holdfast.Conflict:
            return multiple()
        if saved in self.model:
            assert equal(self.model[saved].state, state)
            return multiple()
        self.model[saved] = Known(job, state, "step")
        return saved

    @rule(checkpoint=ids)
    def load(self, checkpoint: str) -> None:
        known = self.model.get(checkpoint)
        if known is None:
            assert not self.store.exists(checkpoint)
            with pytest.raises(FileNotFoundError):
                self.store.load(checkpoint)
            return
        assert equal(self.store.load(checkpoint), known.state)
        assert equal(self.store.restore(known.job, checkpoint), known.state)

    @rule(job=JOBS)
    def latest(self, job: str) -> None:
        found = self.store.load_latest(job)
        ours = self.of(job)
        if not ours:
            assert found is None
        else:
            assert found is not None
            assert found[0].id == ours[-1]
            assert equal(found[1], self.model[ours[-1]].state)

    @rule(checkpoint=consumes(ids))
    def delete(self, checkpoint: str) -> None:
        known = self.model.get(checkpoint)
        if known is None:
            assert self.store.delete("train", checkpoint) is False
        elif known.pinned:
            with pytest.raises(holdfast.Conflict):
                self.store.delete(known.job, checkpoint)
        else:
            assert self.store.delete(known.job, checkpoint) is True
            del self.model[checkpoint]

    @rule(checkpoint=ids, pinned=st.booleans())
    def pin(self, checkpoint: str, pinned: bool) -> None:
        if known := self.model.get(checkpoint):
            self.store.pin(checkpoint, pinned)
            known.pinned = pinned

    @rule(checkpoint=ids, value=st.one_of(st.none(), st.text(max_size=5)))
    def tag(self, checkpoint: str, value: str | None) -> None:
        if known := self.model.get(checkpoint):
            self.store.tag(checkpoint, mood=value)
            known.tags.pop("mood", None)
            if value is not None:
                known.tags["mood"] = value

    @rule(target=ids, checkpoint=ids, job=st.one_of(st.none(), JOBS))
    def resume_from(self, checkpoint: str, job: str | None) -> object:
        known = self.model.get(checkpoint)
        if known is None:
            return multiple()
        branch, state = self.store.resume_from(checkpoint, job)
        assert equal(state, known.state)
        assert branch.parent == checkpoint
        self.model[branch.id] = Known(job or known.job, known.state, known.level, dict(branch.tags), branch.is_pinned)
        return branch.id

    @rule(job=JOBS, keep=st.integers(1, 4))
    def cleanup(self, job: str, keep: int) -> None:
        parents = {i: self.store.get(i).parent for i in self.model}
        stay = set(self.of(job)[-keep:]) | {i for i in self.of(job) if self.model[i].pinned}
        frontier = list(stay) + [i for i in self.model if self.model[i].job != job]
        while frontier:
            parent = parents.get(frontier.pop())
            if parent in self.model and parent not in stay:
                stay.add(parent)
                frontier.append(parent)
        gone = [i for i in self.of(job) if i not in stay]
        deleted = self.store.cleanup(job, keep_last=keep)
        assert deleted <= len(gone) or deleted == len(gone)
        for i in self.of(job):
            if not self.store.exists(i):
                assert i not in self.of(job)[-keep:]
                assert not self.model[i].pinned
                del self.model[i]

    @rule()
    def gc(self) -> None:
        self.store.gc()

    @rule(deep=st.booleans())
    def verify(self, deep: bool) -> None:
        report = self.store.verify(deep=deep)
        assert report.is_ok, report.problems
        assert report.checkpoints == len(self.model)

    @rule()
    def reopen(self) -> None:
        if self.place != "memory:":
            self.store.close()
            self.store = holdfast.open(self.place)

    @invariant()
    def lists_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        for job in {known.job for known in self.model.values()}:
            listed = self.store.list(job)
            assert [c.id for c in listed] == self.of(job)
            assert [c.seq for c in listed] == sorted({c.seq for c in listed})
            for c in listed:
                known = self.model[c.id]
                assert (c.level, dict(c.tags), c.is_pinned) == (known.level, known.tags, known.pinned)
        assert {j.name: j.checkpoints for j in self.store.jobs() if j.checkpoints} == {
            job: len(self.of(job)) for job in {known.job for known in self.model.values()}
        }


class MemoryMachine(StoreMachine):
    def make_place(self) -> str:
        return "memory:"


TestStore = StoreMachine.TestCase
TestMemoryStore = MemoryMachine.TestCase
