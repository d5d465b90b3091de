"""The whole API against a dictionary model: whatever order users call it in, it answers like the model.

Two managers stand on the store and take turns, and a third one in another namespace must never see anything of it.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import kedge
from tests.strategies import equal, states

JOBS = st.sampled_from(["train", "Train", "nightly.2", "a:b@c+d"])
LEVELS = st.sampled_from(["pipeline", "stage", "step", "substep"])
STEPS = st.sampled_from(["load", "fit ✓", "a/b", "x" * 1024, "."])
BIG = st.builds(
    lambda seed, size, rest: {"blob": bytes([seed]) * size, "rest": rest},
    st.integers(0, 255),
    st.sampled_from([5_000, 70_000, 1_100_000, 2_500_000]),
    st.integers(),
)
STATES = st.one_of(states(), states(with_arrays=True), BIG)


@dataclass
class Known:
    job: str
    state: object
    seq: int
    level: str = "step"
    tags: dict[str, str] = field(default_factory=dict)
    pinned: bool = False
    parent: str | None = None
    metadata: dict[str, object] = field(default_factory=dict)
    corrupted: bool = False


class StoreMachine(RuleBasedStateMachine):
    ids: Bundle[str] = Bundle("ids")

    @initialize()
    def begin(self) -> None:
        self.place = self.make_place()
        self.store = kedge.open(self.place)
        self.other = self.store if self.place == "memory:" else kedge.open(self.place)
        self.model: dict[str, Known] = {}  # in order of saving
        self.last_seq: dict[str, int] = {}  # never falls, whatever is deleted
        self.keys: dict[tuple[str, str], str] = {}  # idempotency keys: the checkpoint each belongs to
        self.events_seen = 0

    def make_place(self) -> str:
        return tempfile.mkdtemp(prefix="kedge-machine-") + "/store"

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.gc()
        assert self.store.verify(deep=True).problems == ()
        for checkpoint, known in self.model.items():
            assert equal(self.store.load(checkpoint), known.state)
        self.store.close()
        self.other.close()
        if self.place != "memory:":
            shutil.rmtree(self.place.removesuffix("/store"))

    def of(self, job: str) -> list[str]:
        return [i for i, known in self.model.items() if known.job == job]

    def add(self, checkpoint: str, known: Known) -> str:
        """A new checkpoint: its ID and its sequence number were never used before."""
        assert checkpoint not in self.model
        self.last_seq[known.job] = self.last_seq.get(known.job, 0) + 1
        assert known.seq == self.last_seq[known.job]
        self.model[checkpoint] = known
        return checkpoint

    def seq(self, checkpoint: str) -> int:
        return self.store.get(checkpoint).seq

    # Saving

    @rule(target=ids, job=JOBS, step=STEPS, state=STATES, level=LEVELS, pin=st.booleans(), tag=st.booleans())
    def save(self, job: str, step: str, state: object, level: str, pin: bool, tag: bool) -> str:
        tags = {"kind": "tagged"} if tag else {}
        saved = self.store.save(job, step, state, level=level, pin=pin, tags=tags, metadata={"size": len(step)})
        assert self.store.get(saved).step == step
        return self.add(saved, Known(job, state, self.seq(saved), level, tags, pin, metadata={"size": len(step)}))

    @rule(target=ids, job=JOBS, some=st.lists(STATES, min_size=1, max_size=3))
    def save_async(self, job: str, some: list[object]) -> object:
        saved = [pending.result(60) for pending in [self.store.save_async(job, "later", state) for state in some]]
        return multiple(*(self.add(i, Known(job, state, self.seq(i))) for i, state in zip(saved, some, strict=True)))

    @rule(target=ids, job=JOBS, state=states(), parent=ids)
    def save_with_parent(self, job: str, state: object, parent: str) -> object:
        if parent not in self.model:
            with pytest.raises(kedge.NotFound):
                self.store.save(job, "child", state, parent=parent)
            return multiple()
        saved = self.store.save(job, "child", state, parent=parent)
        return self.add(saved, Known(job, state, self.seq(saved), parent=parent))

    @rule(target=ids, job=JOBS, state=st.one_of(st.integers(0, 2), BIG), key=st.sampled_from(["k1", "k2"]))
    def save_once(self, job: str, state: object, key: str) -> object:
        first = self.keys.get((job, key))
        if first in self.model:
            if equal(self.model[first].state, state):
                assert self.store.save(job, "once", state, idempotency_key=key) == first
            else:
                with pytest.raises(kedge.Conflict):
                    self.store.save(job, "once", state, idempotency_key=key)
            return multiple()
        saved = self.store.save(job, "once", state, idempotency_key=key)
        self.keys[job, key] = saved
        return self.add(saved, Known(job, state, self.seq(saved)))

    @rule(job=JOBS, bad=st.sampled_from([object(), {"a": [print]}, {1: {2: type}}]))
    def save_what_cannot_be(self, job: str, bad: object) -> None:
        with pytest.raises(kedge.UnsupportedType):
            self.store.save(job, "bad", bad)

    @rule(target=ids, job=JOBS, state=states())
    def save_under_lease(self, job: str, state: object) -> str:
        with ExitStack() as stack:
            lease = stack.enter_context(self.store.lease(job, ttl_s=60))
            with pytest.raises(kedge.LeaseHeld):
                self.other.save(job, "intruder", state)
            with pytest.raises(kedge.LeaseHeld):
                stack.enter_context(self.other.lease(job, ttl_s=60))
            saved = self.store.save(job, "leased", state, lease=lease)
        with pytest.raises(kedge.LeaseLost):
            self.store.save(job, "too late", state, lease=lease)
        return self.add(saved, Known(job, state, self.seq(saved)))

    # Loading

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

    @rule(job=JOBS, level=st.one_of(st.none(), LEVELS))
    def latest(self, job: str, level: str | None) -> None:
        ours = [i for i in self.of(job) if level is None or self.model[i].level == level]
        sound = [i for i in ours if not self.model[i].corrupted]
        if not ours:
            assert self.store.load_latest(job, level=level) is None
        elif not sound:
            with pytest.raises(kedge.Corrupted):
                self.store.load_latest(job, level=level)
        else:
            # A newer one that is corrupted is passed over, and that is said.
            with nullcontext() if sound[-1] == ours[-1] else pytest.warns(UserWarning, match="passed over"):
                found = self.store.load_latest(job, level=level)
            assert found is not None
            assert found[0].id == sound[-1]
            assert equal(found[1], self.model[sound[-1]].state)

    @rule(a=ids, b=ids)
    def diff(self, a: str, b: str) -> None:
        if a in self.model and b in self.model:
            found = self.store.diff(a, b)
            if equal(self.model[a].state, self.model[b].state):
                assert not found.changes

    @rule(job=JOBS, limit=st.integers(1, 3), level=st.one_of(st.none(), LEVELS))
    def pages(self, job: str, limit: int, level: str | None) -> None:
        ours = [i for i in self.of(job) if level is None or self.model[i].level == level]
        backwards: list[str] = []
        before: str | None = None
        while page := self.store.list(job, limit=limit, before=before, level=level):
            assert len(page) <= limit
            backwards = [c.id for c in page] + backwards
            before = page[0].id
        assert backwards == ours
        forwards: list[str] = []
        after = 0
        while page := self.store.list(job, limit=limit, after=after, level=level):
            forwards += [c.id for c in page]
            after = page[-1].seq
        assert forwards == ours

    @rule(job=JOBS)
    def filters(self, job: str) -> None:
        tagged = [i for i in self.of(job) if self.model[i].tags.get("kind") == "tagged"]
        assert [c.id for c in self.store.list(job, tags={"kind": "tagged"})] == tagged
        short = [i for i in self.of(job) if self.model[i].metadata.get("size") == 4]
        assert [c.id for c in self.store.list(job, metadata={"size": 4})] == short

    # Changing

    @rule(checkpoint=consumes(ids))
    def delete(self, checkpoint: str) -> None:
        known = self.model.get(checkpoint)
        if known is None:
            assert self.store.delete("train", checkpoint) is False
        elif known.pinned:
            with pytest.raises(kedge.Conflict):
                self.store.delete(known.job, checkpoint)
        else:
            assert self.store.delete(known.job, checkpoint) is True
            assert self.store.delete(known.job, checkpoint) is False
            del self.model[checkpoint]

    @rule(checkpoint=ids, pinned=st.booleans())
    def pin(self, checkpoint: str, pinned: bool) -> None:
        if known := self.model.get(checkpoint):
            self.store.pin(checkpoint, pinned)
            known.pinned = pinned

    @rule(checkpoint=ids, value=st.one_of(st.none(), st.text(st.characters(exclude_characters="\0"), max_size=5)))
    def tag(self, checkpoint: str, value: str | None) -> None:
        if known := self.model.get(checkpoint):
            self.store.tag(checkpoint, mood=value)
            known.tags.pop("mood", None)
            if value is not None:
                known.tags["mood"] = value

    @rule(checkpoint=ids, corrupted=st.booleans())
    def mark(self, checkpoint: str, corrupted: bool) -> None:
        if known := self.model.get(checkpoint):
            self.store.set_status(checkpoint, "corrupted" if corrupted else "archived")
            known.corrupted = corrupted

    @rule(target=ids, checkpoint=ids, job=st.one_of(st.none(), JOBS))
    def resume_from(self, checkpoint: str, job: str | None) -> object:
        known = self.model.get(checkpoint)
        if known is None:
            return multiple()
        branch, state = self.store.resume_from(checkpoint, job)
        assert equal(state, known.state)
        copied = replace(known, job=job or known.job, seq=branch.seq, parent=checkpoint, corrupted=False)
        return self.add(branch.id, replace(copied, tags=dict(known.tags)))

    @rule(target=ids, source=JOBS, target_job=JOBS)
    def copy(self, source: str, target_job: str) -> object:
        history = self.of(source)
        if source == target_job or not history:
            with pytest.raises(kedge.Conflict if source == target_job else kedge.NotFound):
                self.store.copy(source, target_job)
            return multiple()
        try:
            copies = self.store.copy(source, target_job)
        except kedge.Conflict:
            assert self.of(target_job)  # another history
            return multiple()
        renamed: dict[str | None, str] = {}
        new: list[str] = []
        for original, copied in zip(history, copies, strict=True):
            known = self.model[original]
            renamed[original] = copied.id
            first = self.keys.get((target_job, f"copy:{original}"))
            if first in self.model:
                assert copied.id == first
                continue
            self.keys[target_job, f"copy:{original}"] = copied.id
            parent = renamed.get(known.parent, known.parent if known.parent in self.model else None)
            made = replace(known, job=target_job, seq=copied.seq, parent=parent, tags=dict(known.tags), corrupted=False)
            new.append(self.add(copied.id, made))
        return multiple(*new)

    @rule(job=JOBS, keep=st.integers(1, 4))
    def cleanup(self, job: str, keep: int) -> None:
        ours = self.of(job)
        usable = [i for i in ours if not self.model[i].corrupted]
        # A mark deletes nothing: what counts is counted among all, and once more among those that are sound.
        stay = {*ours[-keep:], *usable[-keep:]} | {i for i in ours if self.model[i].pinned}
        for kept in list(stay):
            above = self.model[kept].parent
            while above in self.model:
                stay.add(above)
                above = self.model[above].parent
        gone = [i for i in ours if i not in stay]
        plan = self.store.apply(kedge.RetentionPolicy(keep_last=keep), job=job)
        assert sorted(c.id for c in plan.delete) == sorted(gone)
        assert self.store.cleanup(job, keep_last=keep) == len(gone)
        for checkpoint in gone:
            del self.model[checkpoint]

    # Caring

    @rule()
    def gc(self) -> None:
        self.store.gc()

    @rule(deep=st.booleans())
    def verify(self, deep: bool) -> None:
        report = self.store.verify(deep=deep)
        assert report.is_ok, report.problems
        assert report.checkpoints == len(self.model)
        if deep:
            for known in self.model.values():
                known.corrupted = False  # read back and found sound

    @rule()
    def stats(self) -> None:
        assert self.store.stats()["checkpoints"] == len(self.model)

    @rule()
    def take_turns(self) -> None:
        self.store, self.other = self.other, self.store

    @rule()
    def reopen(self) -> None:
        if self.place != "memory:":
            self.store.close()
            self.store = kedge.open(self.place)

    @rule()
    def look_from_another_namespace(self) -> None:
        if self.place != "memory:":
            with kedge.open(self.place, namespace="stranger") as stranger:
                assert stranger.jobs() == []
                for checkpoint in self.model:
                    assert not stranger.exists(checkpoint)
                stranger.gc()

    @invariant()
    def lists_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        for store in (self.store, self.other):
            for job in {known.job for known in self.model.values()}:
                listed = store.list(job)
                assert [c.id for c in listed] == self.of(job)
                for c in listed:
                    known = self.model[c.id]
                    assert (c.seq, c.level, dict(c.tags), c.is_pinned, c.parent, dict(c.metadata)) == (
                        known.seq, known.level, known.tags, known.pinned, known.parent, known.metadata,
                    )  # fmt: skip
            counted = {j.name: (j.checkpoints, j.last_seq) for j in store.jobs() if j.checkpoints}
            assert counted == {job: (len(self.of(job)), last) for job, last in self.last_seq.items() if self.of(job)}

    @invariant()
    def events_only_grow(self) -> None:
        if hasattr(self, "store"):
            new = self.store.events(after=self.events_seen, limit=1000)
            numbers = [event.id for event in new]
            assert numbers == sorted(set(numbers))
            assert all(number > self.events_seen for number in numbers)
            self.events_seen = numbers[-1] if numbers else self.events_seen


class MemoryMachine(StoreMachine):
    def make_place(self) -> str:
        return "memory:"


TestStore = StoreMachine.TestCase
TestMemoryStore = MemoryMachine.TestCase
