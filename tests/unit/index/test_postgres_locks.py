"""PostgreSQL: what writers lock, one pair after the other, and how their events get numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kedge.errors import Conflict, LeaseLost, NotFound, StorageError
from kedge.index.group_commit import Save
from kedge.index.rows import late_manifests
from kedge.model import Lease
from kedge.ports import ChunksGone, KeysChanged, Mark, NewCheckpoint, Provided, Seen, Then, Unmet, Update
from kedge.testing.index_suite import chunk, record, references, save, with_chunks
from tests.unit.index.test_postgres import index, open_index, remove, sql, url
from tests.waiting import wait_for

if TYPE_CHECKING:
    from kedge.index.postgres.index import PostgresIndex
    from kedge.index.postgres.writes import PostgresWrites

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")]

__all__ = ["index", "url"]  # fixtures

OTHER_JOB = "pg_advisory_xact_lock(keys[i]) IS NULL"
SHARED = "pg_advisory_xact_lock_shared(keys[i]) IS NULL"
NAMESPACE = "pg_advisory_xact_lock_shared(1801806951, ns) IS NULL"
STORE = "pg_advisory_xact_lock_shared(1801806951, 0) IS NULL"


class Alone(NamedTuple):
    """What has its namespace to itself."""

    change: Callable[[PostgresWrites], object]


class Sweep(NamedTuple):
    """Of all chunks."""


@contextmanager
def uncommitted(index: PostgresIndex, *operations: Any) -> Iterator[None]:
    """These are done, in a transaction that commits at the end of the block: as while its flush takes its time."""
    from kedge.index.postgres.batch import commit_together
    from kedge.index.postgres.writes import PostgresWrites

    with index._server.lend() as db:
        db.execute("BEGIN")
        if isinstance(operations[0], Sweep):
            assert index._sweep(db, lambda checkpoint, manifest: [], None)[0]
        elif isinstance(operations[0], Alone):
            operations[0].change(PostgresWrites(db, index._ns, index.namespace, is_careful=True))
        else:
            outcomes, _ = commit_together(db, operations, index._ns, index.namespace)
            assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
        yield
        db.execute("COMMIT")


def waits(url: str, thread: threading.Thread) -> bool:
    """Whether it waits for such a lock; else it ends, or waits for something else."""

    def seen() -> list[str] | None:
        kinds = [kind for (kind,) in sql(url, "SELECT locktype FROM pg_locks WHERE NOT granted")]
        return kinds or (None if thread.is_alive() else ["none"])

    return wait_for(seen, "it neither ends nor waits") == ["advisory"]


def saving(*records: NewCheckpoint) -> Save:
    return Save(records, "me")


def begun(job: str, **conditions: Any) -> NewCheckpoint:
    return record(job, lease_token=1, provided=Provided(takes=Lease(job, 1, "me", 60), **conditions))


KEPT = chunk("kept")


def prepare(index: PostgresIndex) -> dict[str, Any]:
    """A job, one with an expired lease, a queue of two entries, a chunk."""
    parent, child = (save(index, record())[0] for _ in range(2))
    entries = [save(index, record("queue", tags={"state": "ready"}))[0] for _ in range(2)]
    kept = save(index, with_chunks(KEPT, job="chunks"))[0]
    index.acquire_lease("leased", "old", 0)  # has ended at once
    # More than are deleted by the function of the server.
    many = [parent.id, *(saved.id for saved in save(index, *(record("many") for _ in range(8))))]
    return {
        "parent": parent.id, "child": child.id, "entries": [entry.id for entry in entries], "many": many, "kept": kept,
    }  # fmt: skip


def retag(name: str) -> Callable[[dict[str, Any]], Any]:
    from kedge.index.postgres.batch import Retag

    return lambda there: Retag(there["entries"][0], Update(tags={"state": name}), "me")


def delete(number: int) -> Callable[[dict[str, Any]], Any]:
    from kedge.index.postgres.batch import Delete

    return lambda there: Delete([there["entries"][number]], False, "me")


def delete_kept(there: dict[str, Any]) -> Any:
    from kedge.index.postgres.batch import Delete

    return Delete([there["kept"].id], False, "me")


def take_over(there: dict[str, Any]) -> Any:
    from kedge.index.postgres.batch import TakeLease

    return TakeLease("leased", "next", 60)


def delete_many(there: dict[str, Any]) -> Alone:
    return Alone(lambda writes: writes.delete(there["many"], False, "me"))


def pin(there: dict[str, Any]) -> Alone:
    return Alone(lambda writes: writes.update(there["entries"][0], Update(is_pinned=True), "me"))


def sealed(there: dict[str, Any]) -> NewCheckpoint:
    """The same checkpoint, as after a change of keys."""
    new = with_chunks(job="chunks", reused=[KEPT])
    return replace(new, id=there["kept"].id, digest=b"under the next key".ljust(32))


def reseal(there: dict[str, Any]) -> Alone:
    return Alone(lambda writes: writes.reseal(sealed(there), bytes.fromhex(there["kept"].digest), "me"))


def mark(there: dict[str, Any]) -> Mark:
    return Mark(there["entries"][0], {"state": "ready"}, {"state": "running"})


# What has not committed yet, who comes, the lock without which the second would not wait, and what it is told.
REUSE = record("chunks", has_chunks=True, reused_chunks=[KEPT.digest])
CROSSINGS: dict[str, tuple[Callable[[dict[str, Any]], Any], Any, str, type[BaseException] | None]] = {
    "two savers of one job": (
        lambda there: saving(record()), lambda index, there: save(index, record()), OTHER_JOB, None,
    ),
    "two first savers of one job": (
        lambda there: saving(record("new")), lambda index, there: save(index, record("new")), OTHER_JOB, None,
    ),
    "a lease is taken over beside a save under it": (
        lambda there: saving(record("leased", lease_token=1)),
        lambda index, there: index.acquire_lease("leased", "next", 60), OTHER_JOB, None,
    ),
    "a save under a lease that is being taken over": (
        take_over,
        lambda index, there: save(index, record("leased", lease_token=1)), OTHER_JOB, LeaseLost,
    ),
    "a parent is deleted beside a save": (
        lambda there: saving(record("beside", parent=there["parent"])),
        lambda index, there: index.delete([there["parent"]], actor="me"), SHARED, None,
    ),
    "a save behind a parent that is being deleted": (
        delete(0),
        lambda index, there: save(index, record("beside", parent=there["entries"][0])), SHARED, NotFound,
    ),
    "a chunk is swept beside a save that reuses it": (
        lambda there: saving(REUSE), lambda index, there: index.sweep(lambda checkpoint, manifest: []), NAMESPACE, None,
    ),
    "a chunk is said to be damaged beside a save that reuses it": (
        lambda there: saving(REUSE), lambda index, there: index.mark_damaged([KEPT], True), NAMESPACE, None,
    ),
    "a run is begun twice": (
        lambda there: saving(begun("run")), lambda index, there: save(index, begun("run")), OTHER_JOB, Unmet,
    ),
    "a message comes beside the beginning of its run": (
        lambda there: saving(begun("run", absent_jobs=("run:inbox",))),
        lambda index, there: save(index, record("run:inbox")), OTHER_JOB, None,
    ),
    "a run is begun beside its first message": (
        lambda there: saving(record("run:inbox")),
        lambda index, there: save(index, begun("run", absent_jobs=("run:inbox",))), OTHER_JOB, Unmet,
    ),
    "an entry is taken by two workers": (
        lambda there: saving(begun("one", marks=mark(there))),
        lambda index, there: save(index, begun("two", marks=mark(there))), OTHER_JOB, Unmet,
    ),
    "a run is submitted twice": (
        lambda there: saving(record("queue", tags={"run": "r"}, provided=Provided(("r",), ("run", "r")))),
        lambda index, there: save(index, record("queue", tags={"run": "r"}, provided=Provided(("r",), ("run", "r")))),
        OTHER_JOB, Unmet,
    ),
    "an entry is deleted while its tags change": (
        retag("running"), lambda index, there: index.delete([there["entries"][0]], actor="me"), OTHER_JOB, None,
    ),
    "a checkpoint is marked beside a save": (
        lambda there: saving(record()),
        lambda index, there: index.mark([Seen(index.get(there["child"]))], "archived", actor="me"), NAMESPACE, None,
    ),
    "a save that reuses a chunk that is being swept": (
        lambda there: Sweep(), lambda index, there: save(index, REUSE), NAMESPACE, ChunksGone,
    ),
    "a save that reuses a chunk that is being said to be damaged": (
        lambda there: Alone(lambda writes: writes.mark_damaged([KEPT], True)),
        lambda index, there: save(index, REUSE), NAMESPACE, ChunksGone,
    ),
    "many are deleted beside a save behind one of them": (
        lambda there: saving(record("beside", parent=there["parent"])),
        lambda index, there: index.delete(there["many"], actor="me"), NAMESPACE, None,
    ),
    "a save behind a parent that is being deleted with many": (
        delete_many, lambda index, there: save(index, record("beside", parent=there["parent"])), NAMESPACE, NotFound,
    ),
    "a checkpoint is pinned that is being deleted": (
        delete(0), lambda index, there: index.update(there["entries"][0], Update(is_pinned=True), actor="me"),
        NAMESPACE, NotFound,
    ),
    "a checkpoint is deleted that is being pinned": (
        pin, lambda index, there: index.delete([there["entries"][0]], actor="me"), NAMESPACE, Conflict,
    ),
    "tags are changed of a checkpoint that is being deleted": (
        delete(0), lambda index, there: index.update(there["entries"][0], Update(tags={"state": "held"}), actor="me"),
        OTHER_JOB, NotFound,
    ),
    "tags are changed of an entry whose run is ending": (
        lambda there: saving(record("run", then=Then(delete=[there["entries"][0]]))),
        lambda index, there: index.update(there["entries"][0], Update(tags={"state": "held"}), actor="me"),
        OTHER_JOB, NotFound,
    ),
    "a worker begins an entry that is being deleted": (
        delete(0), lambda index, there: save(index, begun("one", marks=mark(there))), OTHER_JOB, Unmet,
    ),
    "an entry is deleted that a worker begins": (
        lambda there: saving(begun("one", marks=mark(there))),
        lambda index, there: index.delete([there["entries"][0]], actor="me"), OTHER_JOB, None,
    ),
    "a lease is taken that its run is releasing": (
        lambda there: saving(record("leased", lease_token=1, then=Then(releases_lease=True))),
        lambda index, there: index.acquire_lease("leased", "next", 60), OTHER_JOB, None,
    ),
    "a lease is renewed that is being taken over": (
        take_over, lambda index, there: index.renew_lease(Lease("leased", 1, "old", 60)), OTHER_JOB, LeaseLost,
    ),
    "a lease is released that is being taken over": (
        take_over, lambda index, there: index.release_lease(Lease("leased", 1, "old", 60)), OTHER_JOB, None,
    ),
    "a checkpoint is sealed anew that is being deleted": (
        delete_kept,
        lambda index, there: index.reseal(sealed(there), replacing=bytes.fromhex(there["kept"].digest), actor="me"),
        NAMESPACE, None,
    ),
    "a checkpoint is deleted that is being sealed anew": (
        reseal, lambda index, there: index.delete([there["kept"].id], actor="me"), NAMESPACE, None,
    ),
    "numbers are reserved beside a save": (
        lambda there: saving(record()), lambda index, there: index.reserve_numbers("job", 100), NAMESPACE, None,
    ),
    "a policy is set beside a save": (
        lambda there: saving(record()), lambda index, there: index.set_retention("job", "{}", actor="me"),
        NAMESPACE, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CROSSINGS)
def test_who_relies_on_the_same_waits(index: PostgresIndex, url: str, name: str) -> None:
    first, second, lock, refusal = CROSSINGS[name]

    def cross() -> tuple[bool, list[BaseException]]:
        there, refused = prepare(index), list[BaseException]()

        def act() -> None:
            try:
                second(other, there)
            except (ChunksGone, Conflict, LeaseLost, NotFound, Unmet) as error:
                refused.append(error)

        other = open_index(url)
        thread = threading.Thread(target=act)
        with uncommitted(index, first(there)):
            thread.start()
            has_waited = waits(url, thread)
        thread.join()
        other.close()
        return has_waited, refused

    has_waited, refused = cross()
    assert has_waited
    assert [isinstance(error, refusal) for error in refused if refusal] == [True] * (refusal is not None)
    assert refusal is not None or refused == []
    assert index.integrity_problems() == []
    sql(url, "TRUNCATE kedge.job, kedge.checkpoint, kedge.lease, kedge.tag, kedge.chunk, kedge.deleted")
    remove(url, "lock_1", lock, "false")
    assert not cross()[0]
    sql(url, "TRUNCATE kedge.job, kedge.checkpoint, kedge.lease, kedge.tag, kedge.chunk, kedge.deleted")


def test_a_store_is_not_made_an_encrypted_one_beside_the_first_save_of_another_namespace(
    index: PostgresIndex, url: str
) -> None:
    def cross(job: str) -> bool:
        from kedge.errors import Conflict

        other = open_index(url, "other")
        outcome: list[object] = []

        def encrypt() -> None:
            try:
                outcome.append(other.set_keyring("{}", "key", replacing=None, actor="me"))
            except Conflict as refused:
                outcome.append(refused)

        thread = threading.Thread(target=encrypt)
        with uncommitted(index, saving(record(job))):
            thread.start()
            has_waited = waits(url, thread)
        thread.join()
        other.close()
        assert isinstance(outcome[0], Conflict) is has_waited
        return has_waited

    assert cross("job")
    sql(url, "TRUNCATE kedge.job, kedge.checkpoint")
    remove(url, "lock_1", STORE, "false")
    assert not cross("job")
    sql(url, "TRUNCATE kedge.job, kedge.checkpoint")


def test_keys_are_not_changed_beside_a_save_under_them(index: PostgresIndex, url: str) -> None:
    """Else the save would be under a key that nobody has any more (I10)."""

    def sealed_as(key: str) -> NewCheckpoint:
        return record(key_id=key)

    def change(new: str, old: str | None) -> Alone:
        return Alone(lambda writes: writes.set_keyring(new, new, old, "me"))

    def cross(first: object, second: Callable[[], object]) -> tuple[bool, list[BaseException]]:
        refused = list[BaseException]()

        def act() -> None:
            try:
                second()
            except KeysChanged as error:
                refused.append(error)

        thread = threading.Thread(target=act)
        with uncommitted(index, first):
            thread.start()
            has_waited = waits(url, thread)
        thread.join()
        return has_waited, refused

    other = open_index(url)
    assert index.set_keyring("one", "one", replacing=None, actor="me")
    beside = cross(saving(sealed_as("one")), lambda: other.set_keyring("two", "two", replacing="one", actor="me"))
    assert beside == (True, [])
    has_waited, refused = cross(change("three", "two"), lambda: save(other, sealed_as("two")))
    assert (has_waited, len(refused)) == (True, 1)
    saved = [found.id for found in index.list("job")]
    remove(url, "lock_1", NAMESPACE, "false")
    assert cross(change("four", "three"), lambda: save(other, sealed_as("three"))) == (False, [])
    assert len(index.list("job")) == len(saved) + 1  # and nobody can read it
    other.close()


@pytest.mark.parametrize("is_condemned_first", [False, True])
def test_a_pack_is_not_condemned_beside_a_save_that_names_it(
    index: PostgresIndex, url: str, is_condemned_first: bool
) -> None:
    """Packs belong to all namespaces: no lock of one keeps this true, but that of the pack's row (I3)."""
    other = open_index(url, "tenant")

    def cross(n: int) -> tuple[bool, bool]:
        """Whether the pack was condemned, and whether it was named."""
        save(index, with_chunks(chunk("known", pack=f"p{n}")))  # the pack has a row
        sql(url, "DELETE FROM kedge.chunk")
        naming, answers = with_chunks(chunk(f"{n}", pack=f"p{n}"), job="beside"), list[bool]()

        def name() -> None:
            try:
                answers.append(bool(save(other, naming)))
            except ChunksGone:
                answers.append(False)

        def is_done() -> bool:
            return not thread.is_alive() or sql(url, "SELECT 1 FROM pg_locks WHERE NOT granted") != []

        second = name if is_condemned_first else lambda: answers.append(other.condemn(f"p{n}"))
        thread = threading.Thread(target=second)
        if is_condemned_first:
            with index._server.lend() as db:
                db.execute("BEGIN")
                assert index._condemn(db, f"p{n}")
                thread.start()
                wait_for(is_done, "it hangs")
                db.execute("COMMIT")
        else:
            with uncommitted(index, saving(naming)):
                thread.start()
                wait_for(is_done, "it hangs")
        thread.join()
        return (True, answers[0]) if is_condemned_first else (answers[0], True)

    assert cross(1) == (is_condemned_first, not is_condemned_first)
    remove(url, "save_1", "FOR SHARE", "")
    assert cross(2) == (True, True)
    sql(url, "DELETE FROM kedge.chunk")
    other.close()


def test_two_savers_replace_one_damaged_chunk(index: PostgresIndex, url: str) -> None:
    """One waits for the other's row, and finds that it is sound."""
    save(index, with_chunks(KEPT, job="chunks"))
    assert index.mark_damaged([KEPT], True) == [KEPT.digest]
    other = open_index(url)
    thread = threading.Thread(target=lambda: save(other, with_chunks(KEPT, job="b")))
    with uncommitted(index, saving(with_chunks(KEPT, job="a"))):
        thread.start()
        wait_for(lambda: not thread.is_alive() or sql(url, "SELECT 1 FROM pg_locks WHERE NOT granted"), "it hangs")
        assert thread.is_alive()
    thread.join()
    assert not index.locate([KEPT.digest])[KEPT.digest].is_damaged
    assert [len(index.list(job)) for job in ("a", "b")] == [1, 1]
    other.close()


INDEPENDENT: dict[str, tuple[Callable[[dict[str, Any]], Any], Any]] = {
    "savers of two jobs": (lambda there: saving(record()), lambda index, there: save(index, record("beside"))),
    "two first saves of jobs": (
        lambda there: saving(record("a")), lambda index, there: save(index, record("b"), record("c")),
    ),
    "savers that reuse one chunk": (
        lambda there: saving(REUSE),
        lambda index, there: save(index, record("b", has_chunks=True, reused_chunks=[KEPT.digest])),
    ),
    "savers into one pack": (
        lambda there: saving(with_chunks(chunk("x", pack="p"), job="a")),
        lambda index, there: save(index, with_chunks(chunk("y", pack="p"), job="b")),
    ),
    "a submission beside a worker": (retag("running"), lambda index, there: save(index, record("queue"))),
    "two workers that end entries": (delete(0), lambda index, there: index.delete([there["entries"][1]], actor="me")),
    "a worker that begins beside one that ends": (
        delete(1), lambda index, there: save(index, begun("run", marks=mark(there))),
    ),
    "a renewed lease beside a save": (
        lambda there: saving(record()),
        lambda index, there: index.renew_lease(Lease("leased", 1, "old", 60)),
    ),
    "readers": (lambda there: saving(record()), lambda index, there: (index.events(), index.jobs(), index.totals())),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_does_not_touch_is_not_waited_for(index: PostgresIndex, name: str) -> None:
    first, second = INDEPENDENT[name]
    there = prepare(index)
    save(index, with_chunks(chunk("known pack", pack="p")))
    with uncommitted(index, first(there)):
        second(index, there)


def test_locks_are_taken_in_one_order(index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch waits for its lower lock and has not taken the higher one: so nobody waits in a circle."""
    from kedge.index.postgres import locks

    keys = {locks.of_job(index._ns, job).key: job for job in ("a", "b")}
    low, high = sorted(keys)

    def is_high_free() -> bool:
        other = open_index(url)
        thread = threading.Thread(target=lambda: save(other, record(keys[high]), record(keys[low])))
        with index._server.lend() as db:
            db.execute("BEGIN")
            db.execute("SELECT kedge.lock_1(%s, true, ARRAY[%s], ARRAY[false])", (index._ns, low))
            thread.start()
            assert waits(url, thread)
            row = db.execute("SELECT pg_try_advisory_xact_lock(%s)", (high,)).fetchone()
            db.execute("COMMIT")
        thread.join()
        other.close()
        return row == (True,)

    assert is_high_free()
    monkeypatch.setattr(locks, "sorted", lambda wanted: sorted(wanted, reverse=True), raising=False)
    assert not is_high_free()


def test_batches_that_cross_are_committed_without_a_second_look(
    index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.index.postgres.index import PostgresIndex

    looks: list[object] = []
    together = PostgresIndex._run_together
    monkeypatch.setattr(PostgresIndex, "_run_together", lambda *args: looks.append(args) or together(*args))
    indexes = [open_index(url) for _ in range(3)]
    jobs = ["a", "b", "c", "d"]

    def work(number: int) -> None:
        mine = jobs[number:] + jobs[:number]
        for n in range(30):
            saved = save(indexes[number], *(with_chunks(chunk(f"{n}", pack="p"), job=job) for job in mine))
            indexes[number].delete([saved[0].id, saved[1].id], actor="me")

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert looks == []
    for job in jobs:
        assert [c.seq for c in index.list(job)] == sorted(c.seq for c in index.list(job))
    assert sum(job.checkpoints for job in index.jobs()) == 3 * 30 * 2
    index.tidy()
    assert sql(url, "SELECT count(*) FROM kedge.deleted") == [(0,)]
    assert sum(job.checkpoints for job in index.jobs()) == 3 * 30 * 2
    for each in indexes:
        each.close()


def test_a_batch_of_very_many_jobs_has_the_namespace_to_itself(index: PostgresIndex, url: str) -> None:
    from kedge.index.postgres.locks import MOST_LOCKS

    other = open_index(url)
    thread = threading.Thread(target=lambda: save(other, record("beside")))
    with uncommitted(index, saving(*(record(f"job-{n}") for n in range(MOST_LOCKS + 1)))):
        thread.start()
        assert waits(url, thread)
    thread.join()
    other.close()
    assert len(index.jobs()) == MOST_LOCKS + 2


def test_where_commits_are_slow_two_batches_of_a_process_are_under_way(index: PostgresIndex, url: str) -> None:
    """One of them waits for a job here; what would wait for the same one comes into the same batch."""
    from kedge.index.postgres.batch import lane_of

    first = saving(record("job"))
    other = next(f"job-{n}" for n in range(1000) if (lane_of(saving(record(f"job-{n}"))) - lane_of(first)) % 2)
    index._lanes[0].took_s = 1.0
    assert index._lane(first) is index._lane(saving(record("job")))
    thread = threading.Thread(target=lambda: save(index, record("job")))
    with uncommitted(index, first):
        thread.start()
        assert waits(url, thread)
        assert save(index, record(other))[0].seq == 1
    thread.join()


def test_a_key_that_two_use_at_once_belongs_to_one(index: PostgresIndex, url: str) -> None:
    other = open_index(url)
    for n in range(10):
        begin = threading.Barrier(2)

        def use(one: PostgresIndex, n: int = n, begin: threading.Barrier = begin) -> str:
            begin.wait(60)
            return save(one, record(idempotency_key=f"key-{n}", request_digest=b"asked"))[0].id

        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(use, (index, other))
        assert first == second
    assert len(index.list("job")) == 10
    other.close()


# how events get their numbers


def test_events_of_a_job_are_in_the_order_of_its_saves(index: PostgresIndex, url: str) -> None:
    other = open_index(url)

    def work(number: int) -> None:
        for n in range(20):
            save((index, other)[number % 2], record(f"job-{n % 3}"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    events = other.events(limit=1000)
    assert [event.id for event in events] == list(range(1, 81))
    for job in index.jobs():
        saved = [event.checkpoint for event in events if event.job == job.name]
        assert saved == [checkpoint.id for checkpoint in index.list(job.name)]
    assert other.audit().broken_at is None
    remove(url, "number_1", "SELECT * FROM moved ORDER BY no", "SELECT * FROM moved ORDER BY no DESC")
    one, two = save(index)[0], save(index)[0]
    assert [event.checkpoint for event in index.events(80)] == [two.id, one.id]
    other.close()


def test_numbering_that_is_killed_half_way_is_done_again(index: PostgresIndex, url: str) -> None:
    saved = [save(index)[0].id for _ in range(5)]
    with index._server.lend() as db:
        db.execute("BEGIN")
        db.execute("SELECT kedge.number_1(%s, 3)", (index._ns,))
        assert sql(url, "SELECT count(*) FROM kedge.event") == [(0,)]  # nobody reads a number that is not durable
        sql(url, "SELECT pg_terminate_backend(%s)", db.info.backend_pid)
        db.close()
    assert [event.checkpoint for event in index.events()] == saved
    assert index.audit().broken_at is None


def test_two_that_number_at_once_make_one_chain(index: PostgresIndex, url: str) -> None:
    def number() -> bool:
        """Another numbers while one has done so and not committed, and more has come. Whether all is well."""
        other, failures = open_index(url), list[BaseException]()

        def number_too() -> None:
            try:
                other.number_events()
            except StorageError as error:
                failures.append(error)

        thread = threading.Thread(target=number_too)
        save(index)
        with index._server.lend() as db:
            db.execute("BEGIN")
            db.execute("SELECT kedge.number_1(%s, 1000)", (index._ns,))
            save(index)
            thread.start()
            wait_for(lambda: not thread.is_alive() or sql(url, "SELECT 1 FROM pg_locks WHERE NOT granted"), "it hangs")
            db.execute("COMMIT")
        thread.join()
        other.close()
        return not failures and index.audit().broken_at is None

    assert number()
    assert [event.id for event in index.events()] == [1, 2]
    remove(url, "number_1", "FOR UPDATE", "")
    assert not number()
    sql(url, "TRUNCATE kedge.event, kedge.unnumbered")
    sql(url, "UPDATE kedge.namespace SET last_event = 0, chain = decode(repeat('00', 32), 'hex')")


@pytest.mark.parametrize("numbered", ["not yet", "meanwhile", "half-way"])
def test_a_sweep_heeds_events_that_have_no_number_yet(
    index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch, numbered: str
) -> None:
    import psycopg

    other = open_index(url)
    numbering = psycopg.connect(url, autocommit=True)

    def sweep() -> int:
        """Of a chunk that a save reuses while the others are marked, in a row that was passed already."""
        kept, has_come = chunk("kept"), list[object]()
        save(index, record("early"))
        (first,) = save(index, with_chunks(kept))
        index.delete([first.id], actor="me")
        save(index, with_chunks(chunk("marked")))

        def mark(checkpoint: str, manifest: bytes) -> list[bytes]:
            if not has_come:
                has_come.extend(save(other, with_chunks(job="early", reused=[kept])))
                if numbered == "meanwhile":
                    other.number_events()
                elif numbered == "half-way":
                    numbering.execute("BEGIN")
                    numbering.execute("SELECT kedge.number_1(%s, 1000)", (index._ns,))
            return list(references(checkpoint, manifest))

        gone = index.sweep(mark)[0]
        numbering.execute("COMMIT")  # of nothing, where nothing was begun
        return gone

    assert sweep() == 0
    index.delete([c.id for job in index.jobs() for c in index.list(job.name)], actor="me")
    index.sweep(lambda checkpoint, manifest: [])
    here = "main.event"
    if numbered == "meanwhile":
        here = f"(SELECT ns_no, {2**63 - 1} AS id, checkpoint FROM main.unnumbered)"
    monkeypatch.setattr("kedge.index.postgres.index._LATE_MANIFESTS", late_manifests(here))
    assert sweep() == 1
    numbering.close()
    other.close()


def test_counters_are_right_beside_those_that_delete(index: PostgresIndex, url: str) -> None:
    """One reader after the other, while what was deleted is taken off."""
    other = open_index(url)
    saved = save(index, *(record() for _ in range(40)))
    ended = threading.Event()

    def fold() -> None:
        while not ended.is_set():
            other.tidy()

    def work() -> None:
        try:
            for one in saved[:30]:
                index.delete([one.id], actor="me")
                save(index)
        finally:
            ended.set()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(fold), threads.submit(work)]:
            done.result()
    job = index.job("job")
    assert job is not None
    assert job.checkpoints == len(index.list("job")) == 40
    other.close()
