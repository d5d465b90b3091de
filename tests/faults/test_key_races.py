"""I3, I10: changing keys beside another change, gc, savers, deletions and readers. Each interleaving is made by hand.

On every kind of store that can be encrypted. A store in memory has one manager, which all threads share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kedge
from kedge.errors import CheckpointError, Conflict, LeaseHeld, LeaseLost, NotFound, Validation
from kedge.model import Checkpoint, Lease
from kedge.ports import KEYS, NEWEST_INTACT, ChunksGone
from tests.parts import require
from tests.torture.mutants import applied
from tests.torture.races import Background, Gate, gate_after, gate_before

require("module:cryptography")
pytestmark = pytest.mark.faults

Manager = kedge.CheckpointManager
KEY, NEW_KEY = bytes(range(32)), bytes(range(1, 33))
POSTGRES = pytest.param("postgres", marks=[pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")])
ALL = ["directory", "files", "memory", POSTGRES]
SHARED = [kind for kind in ALL if kind != "memory"]  # where a sweep lets others write while it marks


class Stores:
    """Managers of one store: `user` and `other` share nothing but what is stored."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url = url
        self._stack = stack
        self.user = self._open()
        self.other = self.user if url == "memory:" else self._open()
        draw = random.Random(4)
        shared = draw.randbytes(150_000)
        values: list[object] = [
            {"n": 1},
            draw.randbytes(400_000),
            {"a": shared},
            {"b": shared},
            [draw.random() for _ in range(9_000)],
        ]
        self.states: dict[str, object] = {self.user.save("j", "s", value): value for value in values}

    def _open(self) -> Manager:
        return self._stack.enter_context(kedge.open(self._url, key=KEY))

    def reader(self) -> Manager:
        return self.user if self._url == "memory:" else self._open()

    @property
    def inner(self) -> Any:
        """The index of `user`, below the seals."""
        return self.user.store.index.inner  # type: ignore[attr-defined]

    @property
    def keyring(self) -> str | None:
        return self.other.store.index.keyring()

    def assert_whole(self) -> None:
        """What was saved is there, now, after gc, and for somebody who opens the store anew."""
        for store in (self.user, self.other):
            assert {i: store.load(i) for i in self.states} == self.states
        self.other.gc()
        fresh = self.reader()
        assert {i: fresh.load(i) for i in self.states} == self.states
        assert fresh.verify(deep=True).problems == ()

    def end_lease(self) -> None:
        """As when a holder was suspended for longer than its lease, and somebody else took over."""
        index = self.other.store.index
        with pytest.raises(LeaseHeld) as held:
            index.acquire_lease(KEYS, "heir", 30)
        index.release_lease(Lease(KEYS, held.value.token, held.value.holder, 30))


@pytest.fixture
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    kind = request.param
    if kind == "postgres":
        url = str(request.getfixturevalue("postgres").empty_database())
    else:
        url = {"directory": "", "files": "files:", "memory": "memory:"}[kind]
        url += "" if kind == "memory" else str(tmp_path / "store")
    with ExitStack() as stack:
        yield Stores(url, stack)


def on(kinds: list[Any]) -> Any:
    return pytest.mark.parametrize("stores", kinds, indirect=True)


def across(name: str, values: Iterable[Any], kinds: list[Any]) -> Any:
    """Each of the values on each kind of store; on PostgreSQL, where a test takes a second, the first of them."""
    chosen = [pytest.param(kind, value) for value in values for kind in kinds if kind != POSTGRES]
    first = pytest.param("postgres", next(iter(values)), marks=POSTGRES.marks)
    return pytest.mark.parametrize(("stores", name), [*chosen, first], indirect=["stores"])


def gate_at(stores: Stores, method: str) -> Any:
    """Stop the change of keys of `user` before a call of the index."""
    return gate_before(stores.inner, method)


# rekey × rekey


@across("point", ["sweep", "reseal", "scrub"], ALL)
def test_a_second_change_is_refused_and_changes_nothing(stores: Stores, point: str) -> None:
    with gate_at(stores, point) as gate:
        changing = Background(stores.user.rekey, rewrite=True)
        gate.wait_until_reached()
        before, events = stores.keyring, stores.other.events(limit=1000)
        for options in ({"rewrite": True}, {"new_key": NEW_KEY}, {"new_key": NEW_KEY, "rewrite": True}):
            with pytest.raises(LeaseHeld, match="keys of namespace default are being changed") as refusal:
                stores.other.rekey(**options)  # type: ignore[arg-type]
            assert "run it again" in refusal.value.hint
        assert (stores.keyring, stores.other.events(limit=1000)) == (before, events)
        gate.open()
        assert changing.result().unreadable == ()
    assert not (stores.other.encryption or {})["old_data_keys"] or stores.other is not stores.user
    stores.assert_whole()
    assert stores.other.rekey(rewrite=True).checkpoints == len(stores.states)  # the lease was given back
    stores.assert_whole()


def end_late(stores: Stores, point: str) -> Background:
    """A change of keys slept; somebody finished it, and another one, and has begun a third when it goes on."""
    with gate_at(stores, point) as gate:
        late = Background(stores.user.rekey, rewrite=True)
        gate.wait_until_reached()
        stores.end_lease()
        stores.other.rekey(rewrite=True)
        stores.other.rekey(rewrite=True)
        index = stores.other.store.index.inner  # type: ignore[attr-defined]
        with gate_before(index, "reseal") as begun:
            third = Background(stores.other.rekey, rewrite=True)
            begun.wait_until_reached()
            gate.open()
            late.wait()
            begun.open()
            third.result()
    return late


@across("point", ["sweep", "reseal", "scrub"], SHARED)
def test_a_change_that_lost_its_lease_stops_before_it_deletes_anything(stores: Stores, point: str) -> None:
    late = end_late(stores, point)
    with pytest.raises(LeaseLost, match="another change of the keys of namespace default has begun"):
        late.result()
    stores.assert_whole()


@pytest.mark.mutant
@on(SHARED)
def test_without_the_fence_it_would_destroy_the_newer_ones(stores: Stores) -> None:
    with applied("lease of keys not checked"), pytest.raises(CheckpointError):
        end_late(stores, "sweep").result()
        stores.assert_whole()


@on(SHARED)
def test_the_end_of_a_change_compares_the_keyring_it_began_with(stores: Stores) -> None:
    """Also without the lease: what is not the keyring that the change knows is not replaced."""
    with applied("lease of keys not checked"), pytest.raises(Conflict, match="changed by another process"):
        end_late(stores, "scrub").result()
    stores.assert_whole()


@on(ALL)
def test_a_change_whose_process_died_does_not_lock_out_the_next(stores: Stores) -> None:
    from kedge.store.lease import default_holder

    host, _, started, machine = default_holder().rsplit(":", 3)
    stores.other.store.index.acquire_lease(KEYS, f"{host}:{2**22 + 1}:{started}:{machine}", 3600)
    assert stores.other.rekey(rewrite=True).unreadable == ()
    stores.assert_whole()


# rekey × gc


@on(SHARED)
def test_gc_that_marked_before_a_rewrite_deletes_after_it(stores: Stores) -> None:
    with gate_before(stores.other.store, "references") as gate:
        collecting = Background(stores.other.gc)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        gate.open()
        collecting.result()
    stores.assert_whole()


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("stores", "module"), [("directory", "sqlite.sweep"), ("files", "files.index")], indirect=["stores"]
)
def test_without_the_rule_for_late_events_it_would_delete_all(stores: Stores, module: str) -> None:
    nothing = "SELECT '', x'' WHERE ? AND ? AND 0"
    with (
        mock.patch(f"kedge.index.{module}.late_manifests", return_value=nothing),
        pytest.raises(CheckpointError),
    ):
        test_gc_that_marked_before_a_rewrite_deletes_after_it(stores)


@on(SHARED)
def test_gc_that_has_marked_all_before_a_rewrite(stores: Stores) -> None:
    """All manifests are read; the rewrite comes before the first chunk row is deleted."""
    last = sum(1 for _ in stores.other.store.index.manifests())
    gate, seen = Gate(), []
    real = stores.other.store.references

    def references(packed: bytes) -> Any:
        seen.append(packed)
        yield from list(real(packed))
        if len(seen) == last:
            gate.stop_here()

    with mock.patch.object(stores.other.store, "references", references):
        collecting = Background(stores.other.gc)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        gate.open()
        collecting.result()
    stores.assert_whole()


@pytest.mark.parametrize(
    ("stores", "point"),
    [
        ("directory", "relocate"),
        ("files", "relocate"),
        ("directory", "condemn"),
        ("files", "condemn"),
        ("memory", "condemn"),
    ],
    indirect=["stores"],
)
def test_gc_that_compacts_beside_a_rewrite(stores: Stores, point: str) -> None:
    """Where packs are files, and rewritten, and where each save has its own. Small ones of PostgreSQL have none."""
    large = stores.user.save("j", "large", random.Random(8).randbytes(3_000_000))
    stores.user.delete("j", large)
    with gate_before(stores.other.store.index, point) as gate:
        collecting = Background(stores.other.gc)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        gate.open()
        assert collecting.result().damaged == ()
    stores.assert_whole()


@across("point", ["reseal", "sweep", "scrub"], ALL)
def test_gc_beside_a_rewrite(stores: Stores, point: str) -> None:
    doomed = stores.user.save("j", "large", random.Random(8).randbytes(3_000_000))
    with gate_at(stores, point) as gate:
        changing = Background(stores.user.rekey, rewrite=True)
        gate.wait_until_reached()
        stores.other.delete("j", doomed)
        assert stores.other.gc().damaged == ()
        gate.open()
        assert changing.result().unreadable == ()
    stores.assert_whole()


# rekey × save


@on(ALL)
def test_a_save_under_the_old_key_is_done_again(stores: Stores) -> None:
    value = {"n": random.Random(9).randbytes(90_000)}
    with gate_before(stores.other.store.index, "commit") as gate:
        saving = Background(stores.other.save, "j", "s", value)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        gate.open()
        stores.states[saving.result()] = value
    stores.assert_whole()


@across("point", ["reseal", "set_keyring", "sweep", "scrub"], ALL)
def test_saves_and_copies_beside_a_rewrite(stores: Stores, point: str) -> None:
    ids = list(stores.states)
    with gate_at(stores, point) as gate:
        changing = Background(stores.user.rekey, rewrite=True)
        gate.wait_until_reached()
        for value in ({"n": 2}, random.Random(9).randbytes(90_000), stores.states[ids[2]]):
            stores.states[stores.other.save("a", "s", value)] = value
        branch, state = stores.other.resume_from(ids[3], "branch")
        stores.states[branch.id] = state
        gate.open()
        changing.result()
    stores.assert_whole()


@on(ALL)
def test_a_branch_whose_source_is_sealed_anew_meanwhile(stores: Stores) -> None:
    source = list(stores.states)[3]
    with gate_before(stores.other.store.index, "commit") as gate:
        branching = Background(stores.other.resume_from, source, "branch")
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        stores.user.gc()
        gate.open()
        branch, state = branching.result()
    assert state == stores.states[source]
    stores.states[branch.id] = state
    stores.assert_whole()


@on(ALL)
def test_a_branch_whose_new_chunks_are_gone_is_made_again(stores: Stores) -> None:
    """As when gc condemned the pack that it had written chunks to, which it does while keys are being changed."""
    source = list(stores.states)[3]
    index = stores.other.store.index
    real, refusals = index.commit, [ChunksGone([b"d" * 32])]

    def commit(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return real(*args, **options)

    with mock.patch.object(index, "commit", commit):
        branch, state = stores.other.resume_from(source, "branch")
    assert (refusals, state) == ([], stores.states[source])
    stores.states[branch.id] = state
    stores.assert_whole()


@on(ALL)
def test_a_branch_whose_source_is_deleted_meanwhile(stores: Stores) -> None:
    source = list(stores.states)[1]
    with gate_before(stores.other.store.index, "commit") as gate:
        branching = Background(stores.other.resume_from, source, "branch")
        gate.wait_until_reached()
        stores.user.delete("j", source)
        del stores.states[source]
        stores.user.gc()
        gate.open()
        with pytest.raises(NotFound, match=f"parent {source} not found"):
            branching.result()
    stores.assert_whole()


@on(SHARED)
def test_a_save_while_a_rewrite_marks_what_is_named(stores: Stores) -> None:
    with gate_before(stores.user.store, "contents") as gate:
        stop = gate.stop_here
        gate.stop_here = lambda: None  # type: ignore[method-assign] # until it sweeps
        real = stores.inner.sweep

        def sweep(*args: Any, **options: Any) -> Any:
            gate.stop_here = stop  # type: ignore[method-assign]
            return real(*args, **options)

        with mock.patch.object(stores.inner, "sweep", sweep):
            changing = Background(stores.user.rekey, rewrite=True)
            gate.wait_until_reached()
            value = random.Random(9).randbytes(90_000)
            stores.states[stores.other.save("a", "s", value)] = value
            gate.open()
            changing.result()
    stores.assert_whole()


# rekey × change


CHANGES: dict[str, Callable[[Manager, str], Checkpoint]] = {
    "pin": lambda store, i: store.pin(i),
    "tag": lambda store, i: store.tag(i, color="red"),
    "status": lambda store, i: store.set_status(i, "archived"),
}


@across("change", CHANGES, SHARED)
def test_who_cannot_read_a_checkpoint_any_more_does_not_change_it(stores: Stores, change: str) -> None:
    """An error says that nothing was done, also to who has the store open under the master key of before."""
    wanted = next(iter(stores.states))
    before = stores.user.get(wanted)
    stores.user.rekey(new_key=NEW_KEY, rewrite=True)
    with pytest.raises(Validation, match="master key of this store was changed"):
        CHANGES[change](stores.other, wanted)
    assert replace(stores.user.get(wanted), digest=before.digest) == before  # that of the row as it is sealed now


@across("change", CHANGES, SHARED)
def test_what_was_changed_when_the_keys_were_is_acknowledged(stores: Stores, change: str) -> None:
    wanted = next(iter(stores.states))
    with gate_after(stores.other.store.index.inner, "update") as gate:  # type: ignore[attr-defined]
        changing = Background(CHANGES[change], stores.other, wanted)
        gate.wait_until_reached()
        stores.user.rekey(new_key=NEW_KEY, rewrite=True)
        gate.open()
        answer = changing.result()
    assert replace(answer, digest="") == replace(stores.user.get(wanted), digest="")


# rekey × delete


@across("point", ["reseal", "sweep", "scrub"], ALL)
def test_deletions_beside_a_rewrite(stores: Stores, point: str) -> None:
    with gate_at(stores, point) as gate:
        changing = Background(stores.user.rekey, rewrite=True)
        gate.wait_until_reached()
        for doomed in list(stores.states)[:3]:
            stores.other.delete("j", doomed)
            del stores.states[doomed]
        stores.other.gc()
        gate.open()
        assert changing.result().unreadable == ()
    stores.assert_whole()


@on(ALL)
def test_a_checkpoint_deleted_while_its_chunks_are_sealed_anew(stores: Stores) -> None:
    doomed = list(stores.states)[1]
    with gate_after(stores.inner, "locate") as gate:
        changing = Background(stores.user.rekey, rewrite=True)
        gate.wait_until_reached()
        stores.other.delete("j", doomed)
        del stores.states[doomed]
        stores.other.gc()
        gate.open()
        assert changing.result().unreadable == ()
    stores.assert_whole()


# rekey × readers


def forget_old_keys(reader: Manager) -> None:
    """As when another thread has met the new key."""
    vault = reader.store.vault
    assert vault is not None
    vault.refresh()


READS: dict[str, tuple[str, Callable[[Manager, str], object]]] = {
    "load": ("read", lambda store, i: store.load(i)),
    "get": ("get", lambda store, i: store.get(i).metadata),
    "latest": (
        "list_stored",
        lambda store, i: (newest := store.catalogue.list_stored("j", NEWEST_INTACT)) and store.load_stored(newest[0]),
    ),
    "load_latest": ("list_stored", lambda store, i: (store.load_latest("j") or ("", None))[1]),
    "list": ("list", lambda store, i: [c.id for c in store.list("j")]),
    "list_stored": ("list_stored", lambda store, i: [store.load_stored(c) for c in store.catalogue.list_stored("j")]),
    "find": ("find", lambda store, i: (store.load_by_key("k", "key") or ("", None))[1]),
    "find in a range": ("find", lambda store, i: [load() for _, load in store.read_ahead("k", 0).values()]),
    "update": ("update", lambda store, i: store.pin(i).is_pinned),
}


@across("read", READS, ALL)
def test_a_row_that_was_read_before_a_rewrite_is_read_again(stores: Stores, read: str) -> None:
    method, call = READS[read]
    stores.states[stores.user.save("k", "s", {"keyed": 1}, idempotency_key="key")] = {"keyed": 1}
    reader, wanted = stores.reader(), list(stores.states)[1]
    expected = call(reader, wanted)
    with gate_after(reader.store.index.inner, method) as gate:  # type: ignore[attr-defined]
        reading = Background(call, reader, wanted)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        forget_old_keys(reader)
        gate.open()
        assert reading.result() == expected
    stores.assert_whole()


@across("is_collected", [False, True], ALL)
@pytest.mark.parametrize("number", [1, 4])
def test_chunks_that_were_found_before_a_rewrite_are_found_again(
    stores: Stores, number: int, is_collected: bool
) -> None:
    reader, wanted = stores.reader(), list(stores.states)[number]
    with gate_after(reader.store.index.inner, "locate") as gate:  # type: ignore[attr-defined]
        reading = Background(reader.load, wanted)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        forget_old_keys(reader)
        if is_collected:
            stores.user.gc()
        gate.open()
        assert reading.result() == stores.states[wanted]


@across("method", ["locate", "manifests", "chunks_of", "packs"], SHARED)
def test_verify_beside_a_rewrite_reports_no_damage(stores: Stores, method: str) -> None:
    reader = stores.reader()
    index = reader.store.index.inner  # type: ignore[attr-defined]
    real = index.manifests
    with (
        mock.patch.object(index, "manifests", lambda *a, **o: iter(list(real(*a, **o)))),
        gate_after(index, method) as gate,
    ):
        verifying = Background(reader.verify, deep=True)
        gate.wait_until_reached()
        stores.user.rekey(rewrite=True)
        forget_old_keys(reader)
        stores.user.gc()
        gate.open()
        assert verifying.result().problems == ()
    assert {str(c.status) for c in reader.list("j")} <= {"created", "valid"}
    stores.assert_whole()
