"""PostgreSQL: its own protocols beside the suites: fences, lost answers, migrations, pgbouncer, old readers."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ormsgpack
import pytest

import kedge
from kedge import codec
from kedge.errors import LeaseHeld, LeaseLost, OutcomeUnknown, Unavailable
from kedge.index.group_commit import Save, Waiting
from kedge.model import MAX_TAGS, CheckpointId, CheckpointStatus, Lease
from kedge.ports import (
    KEYS,
    NEWEST_INTACT,
    Chunk,
    ChunksGone,
    Encoding,
    KeysChanged,
    Mark,
    NewCheckpoint,
    Provided,
    Seen,
    Selection,
    Then,
    Unmet,
    Update,
    digest_of,
)
from kedge.store.request import parse_request
from kedge.testing.index_suite import chunk, record, save, with_chunks
from tests.parts import require
from tests.waiting import wait_for

if TYPE_CHECKING:
    from kedge.index.postgres.index import PostgresIndex
    from kedge.index.postgres.writes import PostgresWrites
    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres")]


@pytest.fixture
def url(postgres: Cluster) -> str:
    return postgres.empty_database()


@pytest.fixture
def index(url: str) -> Iterator[PostgresIndex]:
    index = open_index(url)
    yield index
    assert index.integrity_problems() == []
    index.close()


def open_index(url: str, namespace: str = "default") -> PostgresIndex:
    from kedge.index.postgres.index import PostgresIndex
    from kedge.index.postgres.server import Server

    server = Server(url)
    server.migrate()
    return PostgresIndex(server, namespace=namespace)


def sql(url: str, text: str, *parameters: object) -> list[tuple[Any, ...]]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        done = db.execute(text, parameters)  # type: ignore[call-overload]
        return done.fetchall() if done.description else []


# fences


def test_a_condemned_pack_is_never_named_again(index: PostgresIndex, url: str) -> None:
    """A writer on another machine wrote this pack, slept through the grace period, and wakes up (I3)."""
    late = chunk("late", pack="p1")
    assert index.condemn("p1")
    with pytest.raises(ChunksGone) as refusal:
        save(index, with_chunks(late))
    assert list(refusal.value.digests) == [late.digest]
    tenant = open_index(url, "tenant")
    with pytest.raises(ChunksGone):
        save(tenant, with_chunks(late))
    tenant.close()
    save(index, with_chunks(replace(late, pack="p2")))
    assert not index.condemn("p2")
    with pytest.raises(ChunksGone):
        index.relocate([replace(late, pack="p1")], from_pack="p2")
    assert index.locate([late.digest])[late.digest].pack == "p2"


def test_condemning_and_naming_at_the_same_time_never_both_succeed(index: PostgresIndex, url: str) -> None:
    other = open_index(url, "tenant")
    for n in range(40):
        one = chunk(str(n), pack=f"p{n}")
        answers: list[bool] = []
        thread = threading.Thread(target=lambda p=one.pack, a=answers: a.append(index.condemn(p)))
        thread.start()
        try:
            save(other, with_chunks(one))
            is_named = True
        except ChunksGone:
            is_named = False
        thread.join()
        assert answers == [not is_named]
    other.close()


# what is taken to be still so, and is not


def test_chunks_that_went_without_an_event_are_missed(index: PostgresIndex, url: str) -> None:
    """gc on another machine leaves no event: the end of the log says that nothing happened (I3)."""
    kept = chunk("kept")
    save(index, with_chunks(kept))
    save(index, record(has_chunks=True, reused_chunks=[kept.digest]))
    other = open_index(url)
    assert other.sweep(lambda checkpoint, manifest: [])[0] == 1
    with pytest.raises(ChunksGone):
        save(index, record(has_chunks=True, reused_chunks=[kept.digest]))
    save(index, with_chunks(kept))
    other.mark_damaged([kept], True)
    with pytest.raises(ChunksGone):
        save(index, record(has_chunks=True, reused_chunks=[kept.digest]))
    other.close()


def test_two_writers_of_a_namespace_number_in_one_order(index: PostgresIndex, url: str) -> None:
    other = open_index(url)
    numbers = [save(one)[0].seq for one in (index, other, index, index, other, other, other, index)]
    assert numbers == list(range(1, 9))
    together: list[int] = []
    threads = [
        threading.Thread(target=lambda one=one: [together.append(save(one)[0].seq) for _ in range(10)])
        for one in (index, other, index, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(together) == list(range(9, 49))
    assert [found.seq for found in index.list("job")] == list(range(1, 49))
    other.close()


def test_a_lease_that_another_machine_took_is_respected(index: PostgresIndex, url: str) -> None:
    other = open_index(url)
    save(index)
    save(index)
    lease = other.acquire_lease("job", "other", 60)
    with pytest.raises(LeaseHeld):
        save(index)
    assert [save(other, record(lease_token=lease.token))[0].seq for _ in range(3)] == [3, 4, 5]
    mine = replace(lease, token=lease.token + 1)
    with pytest.raises(LeaseLost):
        save(other, record(lease_token=mine.token))
    sql(url, "UPDATE kedge.lease SET is_live = false")  # as if it had no event
    with pytest.raises(LeaseLost):
        save(other, record(lease_token=lease.token))
    assert save(index)[0].seq == 6
    other.close()


def test_a_writer_that_is_suspended_in_its_transaction_keeps_nobody_out(
    index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.index.postgres.writes import PostgresWrites

    monkeypatch.setattr("kedge.index.postgres.server.FROZEN_MS", 2000)
    begun, go = threading.Event(), threading.Event()
    left_s = PostgresWrites._left_s

    def suspended(writes: PostgresWrites, lease: Any) -> float:
        begun.set()
        assert go.wait(60)
        return left_s(writes, lease)

    index.acquire_lease(KEYS, "first", 600)
    monkeypatch.setattr(PostgresWrites, "_left_s", suspended)
    refused: list[LeaseHeld] = []

    def acquire() -> None:
        with pytest.raises(LeaseHeld) as held:
            index.acquire_lease(KEYS, "second", 600)
        refused.append(held.value)

    frozen = threading.Thread(target=acquire)
    frozen.start()
    assert begun.wait(60)
    other = open_index(url)
    (saved,) = save(other, record())  # waits until the server ends the transaction
    assert [c.id for c in other.list(saved.job)] == [saved.id]
    other.close()
    go.set()
    frozen.join(60)
    assert len(refused) == 1  # it began again


def test_one_bad_save_of_several_that_commit_together_fails_alone(index: PostgresIndex) -> None:
    save(index)
    begin = threading.Barrier(6)
    failures: list[str] = []

    def work(n: int) -> None:
        begin.wait()
        for m in range(10):
            bad = {1: {"step": "a\0b"}, 2: {"parent": "nobody"}}.get(n, {})
            try:
                save(index, record(idempotency_key=f'{n} {m} \\ "{{}}', **bad))
            except (kedge.NotFound, kedge.errors.Validation) as error:
                failures.append(type(error).__name__)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(failures)) == ["NotFound", "Validation"]
    assert len(failures) == 20
    assert len(index.list("job")) == 41
    assert len(index.find("job", [f'{n} 9 \\ "{{}}' for n in range(6)])) == 4


# the functions that commit, check by check


def refused_lease(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    save(index, *beside, record(lease_token=index.acquire_lease("job", "me", 60).token + 1))


def held_lease(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    index.acquire_lease("job", "somebody", 60)
    save(index, *beside, record())


def lost_chunk(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    save(index, *beside, record(has_chunks=True, reused_chunks=[chunk("nowhere").digest]))


def damaged_chunk(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    bad = chunk("bad")
    save(index, with_chunks(bad))
    index.mark_damaged([bad], True)
    save(index, *beside, record(has_chunks=True, reused_chunks=[bad.digest]))


def condemned_pack(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    index.condemn("p1")
    save(index, *beside, with_chunks(chunk("late", pack="p1")))


def unknown_parent(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    save(index, *beside, record(parent="nobody"))


def old_key(index: PostgresIndex, *beside: NewCheckpoint) -> None:
    save(index, *beside, record(key_id="old"))


def begun(job: str, **conditions: Any) -> NewCheckpoint:
    provided = Provided(takes=Lease(job, 1, "me", 60), **conditions)
    return record(job, lease_token=1, provided=provided)


def begun_job(index: PostgresIndex) -> None:
    save(index, begun("job"))


def absent_job(index: PostgresIndex) -> None:
    save(index, begun("new", absent_jobs=("beside",)))


def absent_tag(index: PostgresIndex) -> None:
    save(index, record(tags={"run": "r"}))
    save(index, record(tags={"run": "r"}, provided=Provided(absent_tag=("run", "r"))))


def marked_otherwise(index: PostgresIndex) -> None:
    entry = save(index, record("beside", tags={"state": "held"}))[0]
    save(index, begun("new", marks=Mark(entry.id, {"state": "ready"}, {"state": "running"})))


def marked_nothing(index: PostgresIndex) -> None:
    save(index, begun("new", marks=Mark(CheckpointId("gone_1_00000000"), {}, {"state": "running"})))


def marked_too_much(index: PostgresIndex) -> None:
    entry = save(index, record("beside", tags={f"t{n}": "" for n in range(MAX_TAGS)}))[0]
    save(index, begun("new", marks=Mark(entry.id, {}, {"state": "running"})))


SAFEGUARDS: list[tuple[str, Any, str, str]] = [
    ("save_1", refused_lease, "coalesce(l.is_live AND l.token = new.token, false)", "true"),
    ("save_1", held_lease, "l.is_live IS NOT TRUE", "true"),
    ("save_1", lost_chunk, "c.is_damaged IS NOT FALSE", "c.is_damaged"),
    ("save_1", damaged_chunk, "c.is_damaged IS NOT FALSE", "c.is_damaged IS NULL"),
    ("save_1", condemned_pack, "NOT bool_or(named.is_condemned)", "true"),
    ("save_1", unknown_parent, "j.ns_no IS DISTINCT FROM ns", "false"),
    ("save_1", old_key, "kedge.has_key_1(namespace, key_id, has_first)", "true"),
    ("save_one_1", refused_lease, "current_token IS DISTINCT FROM token_", "false"),
    ("save_one_1", held_lease, "current_token IS DISTINCT FROM token_", "false"),
    ("save_one_1", unknown_parent, "parent_ IS NOT NULL AND", "false AND"),
    ("save_one_1", old_key, "kedge.has_key_1(namespace, key_id, coalesce(seq, 1) = 1)", "true"),
    ("has_key_1", old_key, "key_id IS NOT DISTINCT FROM", "true OR key_id IS NOT DISTINCT FROM"),
]
CONDITIONS: list[tuple[Any, str, str]] = [
    (absent_job, "j.ns_no = ns AND j.name = name_", "false"),
    (absent_tag, "t.name = absent_name AND", "false AND"),
    (marked_otherwise, "NOT marked.tags @> seen::jsonb", "false"),
    (marked_nothing, 'marked."row" IS NULL OR', "false OR"),
    (marked_too_much, "> most THEN", "> 1000 THEN"),
]


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition[0].__name__)
def test_each_condition_is_what_refuses(index: PostgresIndex, url: str, condition: tuple[Any, str, str]) -> None:
    """With the check the save is refused; without it, and with nothing else changed, it is not."""
    attempt, check, nothing = condition
    save(index)
    save(index, record("beside"))
    with pytest.raises(Unmet):
        attempt(index)
    assert index.job("new") is None
    remove(url, "save_if_1", check, nothing)
    index.delete([saved.id for saved in index.list("job")], actor="me")
    attempt(index)


def test_a_job_that_exists_is_not_begun(index: PostgresIndex, url: str) -> None:
    """Without the look, the unique name of the job refuses it, and nothing was changed."""
    save(index)
    with pytest.raises(Unmet):
        begun_job(index)
    remove(url, "save_if_1", "j.ns_no = ns AND j.name = name_", "false")
    with pytest.raises(Unmet):
        begun_job(index)
    assert [saved.seq for saved in index.list("job")] == [1]
    assert sql(url, "SELECT count(*) FROM kedge.lease") == [(0,)]


def beginning_under_an_old_key(index: PostgresIndex) -> None:
    save(index, replace(begun("new"), key_id="old"))


def beginning_behind_nobody(index: PostgresIndex) -> None:
    save(index, replace(begun("new"), parent="nobody"))


@pytest.mark.parametrize(
    ("attempt", "check", "nothing"),
    [
        (beginning_under_an_old_key, "NOT kedge.has_key_1(namespace, key_id, true)", "false"),
        (beginning_behind_nobody, "parent_ IS NOT NULL OR", ""),
    ],
)
def test_each_check_of_a_beginning_is_what_refuses(
    index: PostgresIndex, url: str, attempt: Any, check: str, nothing: str
) -> None:
    """What the function leaves alone is refused behind it (I5, I10), and the job is not made."""
    with pytest.raises((KeysChanged, kedge.NotFound)):
        attempt(index)
    assert index.job("new") is None
    remove(url, "save_if_1", check, nothing)
    attempt(index)


@pytest.mark.parametrize("safeguard", SAFEGUARDS, ids=lambda safeguard: f"{safeguard[0]}-{safeguard[1].__name__}")
def test_each_check_is_what_refuses(index: PostgresIndex, url: str, safeguard: tuple[str, Any, str, str]) -> None:
    """With the check the save is refused; without it, and with nothing else changed, it is not."""
    function, attempt, check, nothing = safeguard
    save(index)
    save(index, record("beside"))

    def beside() -> list[NewCheckpoint]:
        """Several saves are another function than one alone; both under the same key."""
        return [record("beside", key_id="old" if attempt is old_key else "")] if function == "save_1" else []

    with pytest.raises((LeaseHeld, LeaseLost, ChunksGone, KeysChanged, kedge.NotFound)):
        attempt(index, *beside())
    sql(url, "UPDATE kedge.lease SET is_live = false")
    remove(url, function, check, nothing)
    index.delete([found.id for found in index.list("job")], actor="me")
    attempt(index, *beside())


def remove(url: str, function: str, check: str, nothing: str) -> None:
    ((text,),) = sql(url, f"SELECT pg_get_functiondef('kedge.{function}'::regproc)")
    assert check in text
    sql(url, text.replace(check, nothing))


@pytest.mark.parametrize("count", [1, 2])
def test_a_plain_save_is_not_the_first_of_a_job_in_an_encrypted_store(
    index: PostgresIndex, url: str, count: int
) -> None:
    """The lease has made the job (I10). Without the check, and with nothing else changed, it is saved."""
    sql(url, "UPDATE kedge.meta SET value = 'yes' WHERE key = 'encrypted'")
    lease = index.acquire_lease("job", "me", 60)
    with pytest.raises(kedge.Conflict, match="not encrypted"):
        save(index, *(record(lease_token=lease.token) for _ in range(count)))
    remove(url, "has_key_1", "AND m.value = 'no'", "")
    save(index, *(record(lease_token=lease.token) for _ in range(count)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The statements that were sent."""
    import psycopg

    asked: list[object] = []
    execute = psycopg.Cursor.execute

    def counted(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(query)
        return execute(cursor, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    return asked


def test_most_saves_take_one_round_trip(index: PostgresIndex, asked: list[object]) -> None:
    known = chunk("known")
    first = save(index, with_chunks(known))[0]
    index.release_lease(index.acquire_lease("job", "me", 60))
    asked.clear()
    save(index)
    save(index, record(parent=first.id, tags={"k": "v"}, idempotency_key="key"), record())
    save(index, with_chunks(chunk("new"), chunk("packed", pack="p"), reused=[known]))
    assert len(asked) == 3
    assert [found.seq for found in index.list("job", Selection(tags={"k": ["v"]}))] == [3]
    assert [found.seq for found, _ in index.find("job", ["key"]).values()] == [3]
    assert index.locate([chunk("packed").digest])[chunk("packed").digest].pack == "p"


def test_the_newest_of_hundreds_of_jobs_take_one_statement(index: PostgresIndex, asked: list[object]) -> None:
    save(index, *(record(job=f"job-{number}", tags={"kind": "run"}) for number in range(300)))
    jobs = [f"job-{number}" for number in range(300)]
    for tag in (None, ("kind", "run")):
        asked.clear()
        assert len(index.newest(jobs, tag)) == 300
        assert len(asked) == 1


def test_chunks_of_one_round_trip_keep_their_own_bytes(index: PostgresIndex, asked: list[object]) -> None:
    def inline(size: int) -> Chunk:
        data = os.urandom(size)
        return Chunk(digest_of(data), size, size, Encoding.RAW, data=data)

    some = [inline(1), chunk("packed"), *map(inline, (5000, 3, 70000)), chunk("packed too", pack="p")]
    save(index)  # connects
    asked.clear()
    save(index, with_chunks(*some[:4]), with_chunks(*some[2:]))
    assert len(asked) == 1
    assert index.locate([one.digest for one in some]) == {one.digest: one for one in some}


def test_statements_go_to_the_server_as_they_are(index: PostgresIndex, asked: list[object]) -> None:
    """psycopg reads one with more than 50 parameters anew at each use: that of a batch takes it milliseconds."""
    save(index)  # connects
    asked.clear()
    index.commit_each([(record(job=f"job-{n}", tags={"k": "50 % and %s"}), "me") for n in range(3)])
    index.list("job-1", Selection(tags={"k": ["50 % and %s"]}))
    assert asked
    assert not [statement for statement in asked if "%" in str(statement)]
    assert [found.seq for found in index.list("job-2", Selection(tags={"k": ["50 % and %s"]}))] == [1]


def test_a_lease_and_the_first_save_under_it_take_one_round_trip_each(
    index: PostgresIndex, asked: list[object]
) -> None:
    save(index)
    asked.clear()
    lease = index.acquire_lease("new", "me", 60)
    save(index, record(job="new", lease_token=lease.token))
    index.release_lease(lease)
    assert len(asked) == 3
    with pytest.raises(LeaseLost):
        save(index, record(job="new", lease_token=lease.token))
    index.release_lease(lease)  # a lost one is ignored
    assert index.acquire_lease("new", "another", 60).token == 2
    with pytest.raises(LeaseHeld) as refused:
        index.acquire_lease("new", "me", 60)
    assert (refused.value.holder, refused.value.token) == ("another", 2)
    assert [event.action for event in index.events() if event.job == "new"] == ["lease", "save", "release", "lease"]


def test_a_lease_that_was_taken_is_not_taken_again_with_what_came_with_it(
    index: PostgresIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save of a job needs a second look, behind which the server is gone for a moment."""
    from kedge.index.postgres.batch import TakeLease

    together, failures = index._run_together, iter([Unavailable("the server has gone")])

    def fail_once(*args: Any) -> bool:
        for failure in failures:
            raise failure
        return together(*args)

    monkeypatch.setattr(index, "_run_together", fail_once)
    batch: list[Waiting[Any]] = [Waiting(TakeLease("a", "me", 60)), Waiting(Save([record(job="b")], "me"))]
    index._run_batch(batch)
    assert [waiting.error for waiting in batch] == [None, None]
    assert batch[0].result.token == 1
    assert [saved.seq for saved in batch[1].result] == [1]


def test_a_lease_whose_answer_was_lost_is_not_said_to_be_anothers(
    index: PostgresIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_done = index._write, True
    answers = iter([OutcomeUnknown("the connection was lost")])

    def lose_an_answer(operation: Any) -> Any:
        for lost in answers:
            if is_done:
                write(operation)
            raise lost
        return write(operation)

    monkeypatch.setattr(index, "_write", lose_an_answer)
    with pytest.raises(OutcomeUnknown):
        index.acquire_lease("job", "me", 60)
    is_done, answers = False, iter([OutcomeUnknown("the connection was lost")])
    assert index.acquire_lease("another job", "me", 60).token == 1


def test_a_run_of_one_step_takes_eight_round_trips(url: str, asked: list[object]) -> None:
    with kedge.open(url) as store:
        for key in ("first", "second"):
            asked.clear()
            with kedge.run(key, store=store, progress=False) as run:
                run.step("step", abs, -1)
        assert len(asked) <= 8


def test_a_save_looks_at_no_other_job(url: str) -> None:
    """The function is planned when the tables are empty, and its plans last (I6)."""
    count = 200
    before = "SELECT idx_scan, idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = 'job'"
    ((scans, _),) = sql(url, before) or [(0, 0)]
    with kedge.open(url) as store:
        for number in range(count):
            store.save(f"job-{number}", "step", {})
            store.save(f"job-{number}", "step", {})

    def looks() -> int | None:  # the server counts when a connection has ended
        ((now, rows),) = sql(url, before)
        return rows if now >= scans + 2 * count else None

    assert wait_for(looks, "the server has not counted") < 20 * count


@pytest.mark.parametrize(
    "change", ["kedge.tag_1(%s, 'default', %s, '{\"state\": \"taken\"}', 9, 1, 'me')",
               "kedge.delete_1(%s, 'default', ARRAY[%s], true, 1, 'me')"]
)  # fmt: skip
def test_a_changed_tag_looks_at_no_other_checkpoint_of_its_job(url: str, change: str) -> None:
    """A queue of any length: a plan that joins would read all tags of the job (I6)."""
    import psycopg

    tags = {"state": "ready", "note": "n" * 100}
    pages: dict[int, int] = {}
    with kedge.open(url) as store, psycopg.connect(url, autocommit=True) as db:
        ((namespace,),) = sql(url, "SELECT no FROM kedge.namespace WHERE name = 'default'")
        for count in (20, 2_000):
            request = parse_request(f"queue-{count}", "entry", tags=tags)
            entries = store.save_many([(request, codec.encode(None), "me")] * count)
            for entry in entries[-3:]:  # the first ones fill the session's caches
                assert not isinstance(entry, BaseException)
                answer = db.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT {change}", (namespace, entry.id))
                pages[count] = answer.fetchall()[0][0][0]["Plan"]["Shared Hit Blocks"]
    assert pages[2_000] < pages[20] + 20, pages


def test_a_save_looks_at_no_other_chunk(url: str) -> None:
    """Neither for those that it brings nor for those that it reuses; plans are made for an empty table (I6)."""
    count = 100
    counts = "SELECT n_tup_ins, idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = 'chunk'"
    index = open_index(url)
    old = chunk("old")
    save(index, with_chunks(old))
    for number in range(count):
        save(index, with_chunks(chunk(f"{number} a"), chunk(f"{number} b"), reused=[old]))
    index.close()

    def looks() -> int | None:  # the server counts when a connection has ended
        ((inserted, rows),) = sql(url, counts)
        return rows if inserted > 2 * count else None

    assert wait_for(looks, "the server has not counted") < 20 * count


def test_the_chain_goes_on_through_numbers_of_every_length(index: PostgresIndex, url: str) -> None:
    from kedge.index.event_chain import chain_of

    for number in (1, 126, 127, 128, 254, 255, 256, 65534, 65535, 65536, 2**32 - 1, 2**32, 2**40):
        ((packed,),) = sql(url, "SELECT kedge.packed(%s)", number)
        assert packed == ormsgpack.packb(number)
    save(index)
    assert len(index.events()) == 1
    sql(url, "UPDATE kedge.namespace SET last_event = 70000")
    save(index)
    index.number_events()
    before, after = sql(url, "SELECT * FROM kedge.event ORDER BY id")
    ns, number, at_us, actor, action, job, checkpoint, detail, chain = after
    assert (number, chain) == (70001, chain_of(before[8], number, at_us, ns, actor, action, job, checkpoint, detail))
    sql(url, "UPDATE kedge.namespace SET last_event = 1, chain = %s", before[8])
    sql(url, "DELETE FROM kedge.event WHERE id > 1")


# lost answers


def test_a_save_whose_answer_was_lost_is_found_not_doubled(index: PostgresIndex) -> None:
    new = with_chunks(chunk("a"), tags={"k": "v"})
    first = save(index, new)
    assert save(index, new) == first
    assert len(index.list("job")) == 1
    assert [e.action for e in index.events()] == ["save"]


def test_none_that_was_connected_when_another_broke_is_lent_again(url: str) -> None:
    """Neither one that was lent then, nor one that was idle, not even while those are closed."""
    import psycopg

    from kedge.index.postgres.server import Server

    server = Server(url)
    with server.lend() as lent:
        with server.lend() as first, server.lend() as second, server.lend() as third:
            others = {first, second, third}

        def close(connection: psycopg.Connection[Any]) -> None:
            patched.undo()
            with server.lend() as new:
                assert new not in others
            connection.close()

        with pytest.MonkeyPatch.context() as patched, pytest.raises(kedge.Unavailable), server.lend() as broken:
            broken.close()
            patched.setattr(psycopg.Connection, "close", lambda connection: connection is broken or close(connection))
            broken.execute("SELECT 1")
    assert lent.closed
    assert all(connection.closed for connection in others)
    server.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores wait for their server however long a busy machine takes to start it again."""
    from kedge.blobs.backoff import Backoff

    monkeypatch.setattr("kedge.index.postgres.server.Backoff", partial(Backoff, attempts=10_000, most_s=0.5))


@pytest.mark.faults
@pytest.mark.usefixtures("patient")
def test_crashes_of_the_server_lose_and_double_nothing(postgres: Cluster, url: str) -> None:
    """Everybody's connections break at once, in the middle of statements and commits, again and again."""
    stop = threading.Event()
    saved: dict[str, list[str]] = {f"job-{n}": [] for n in range(3)}

    with kedge.open(url) as store:

        def work(job: str, ids: list[str]) -> None:
            while not stop.is_set():
                ids.append(
                    store.save(job, "step", {"n": len(ids), "big": os.urandom(70_000) if len(ids) % 9 == 0 else b""})
                )

        threads = [threading.Thread(target=work, args=saving) for saving in saved.items()]
        for thread in threads:
            thread.start()

        def wait_for_saves() -> None:
            """Until everybody is at work again."""
            wanted = {job: len(ids) + 3 for job, ids in saved.items()}
            wait_for(
                lambda: (
                    all(len(ids) >= wanted[job] for job, ids in saved.items())
                    or any(not thread.is_alive() for thread in threads)
                ),
                "nobody saves any more",
            )

        for _ in range(4):
            wait_for_saves()
            postgres.crash()
        wait_for_saves()
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for job, ids in saved.items():
            assert [c.id for c in store.list(job)] == ids  # nothing lost, nothing twice, in order
            assert len(ids) > 4
            assert store.restore(job)["n"] == len(ids) - 1  # type: ignore[index]
        assert store.verify().is_ok


# migrations


def test_a_connection_that_fails_when_it_is_made_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg

    from kedge.index.postgres.server import Server

    made: list[psycopg.Connection[Any]] = []

    def fail(connection: psycopg.Connection[Any], *_args: object, **_options: object) -> None:
        made.append(connection)
        raise psycopg.errors.QueryCanceled("statement timeout")

    server = Server(url)
    with monkeypatch.context() as broken:
        broken.setattr(psycopg.Connection, "execute", fail)
        with pytest.raises(kedge.StorageError):
            server.migrate()
    assert made
    assert all(connection.closed for connection in made)
    server.close()


def test_a_newer_store_is_refused(url: str) -> None:
    from kedge.index.postgres.server import Server

    Server(url).migrate()
    sql(url, "UPDATE kedge.meta SET value = '99' WHERE key = 'format'")
    with pytest.raises(kedge.UnsupportedFormat, match="99"):
        Server(url).migrate()


def test_a_store_of_an_earlier_kedge_gets_the_steps_it_lacks(url: str) -> None:
    """As format 1 was made at first: without functions, and without a word about steps. What it holds stays."""
    with kedge.open(url) as store:
        first = store.save("job", "step", {"n": 1})
    sql(url, "DROP FUNCTION kedge.save_1")
    sql(url, "DROP FUNCTION kedge.packed")
    sql(url, "DELETE FROM kedge.meta WHERE key = 'schema'")
    with kedge.open(url) as store:
        assert store.load(first) == {"n": 1}
        store.save("job", "step", {"n": 2})
        assert [found.seq for found in store.list("job")] == [1, 2]
    assert sql(url, "SELECT key, value FROM kedge.meta WHERE key IN ('format', 'schema') ORDER BY key") == [
        ("format", "1"), ("schema", "2"),
    ]  # fmt: skip


def test_who_may_not_create_is_told_who_must_migrate(url: str) -> None:
    with kedge.open(url) as store:
        store.save("job", "step", {"n": 1})
    sql(url, "DROP FUNCTION kedge.save_1")
    sql(url, "DROP FUNCTION kedge.packed")
    sql(url, "DELETE FROM kedge.meta WHERE key = 'schema'")
    sql(url, "CREATE ROLE ordinary LOGIN")
    try:
        sql(url, "GRANT USAGE ON SCHEMA kedge TO ordinary")
        sql(url, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA kedge TO ordinary")
        ordinary = url.replace("postgres@", "ordinary@")
        with pytest.raises(kedge.errors.ReadOnly) as refused:
            kedge.open(ordinary)
        assert "kedge migrate" in str(refused.value)
        kedge.open(url).close()
        with kedge.open(ordinary) as store:
            store.save("job", "step", {"n": 2})
            assert store.restore("job") == {"n": 2}
    finally:
        sql(url, "DROP OWNED BY ordinary")
        sql(url, "DROP ROLE ordinary")


def test_many_may_make_the_store_at_once(url: str) -> None:
    from kedge.index.postgres.server import Server

    errors: list[BaseException] = []

    def make() -> None:
        try:
            Server(url).migrate()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sql(url, "SELECT count(*) FROM kedge.meta WHERE key = 'store_id'") == [(1,)]


def test_nothing_is_made_unless_asked_for(url: str) -> None:
    with pytest.raises(kedge.NotFound):
        kedge.open(url, create=False)
    assert sql(url, "SELECT to_regclass('kedge.meta') IS NULL") == [(True,)]


# errors


def test_what_is_wrong_with_the_address_is_said_without_the_password(postgres: Cluster) -> None:
    with pytest.raises(kedge.StorageError, match="nowhere") as caught:
        kedge.open(f"postgresql://postgres:secret@/nowhere?host={postgres.folder}")
    assert "secret" not in str(caught.value)
    with pytest.raises(kedge.Validation, match="not a valid place"):
        kedge.open(f"postgresql://x@/x?host={postgres.folder}&blobs=ftp://y")
    with pytest.raises(kedge.Validation, match="index"):
        kedge.open("s3://bucket/prefix")


def test_the_command_line_serves_it_and_keeps_the_password(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    from kedge.cli.app import cli

    with_password = url.replace("postgres@", "postgres:secret@")
    with kedge.open(with_password) as store:
        store.save("job", "step", {"a": 1})
        assert "secret" not in repr(store)
    answers = {}
    for command in ("list job", "stats", "check", "gc", "doctor"):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command.split(), "--store", with_password])
        answers[command] = ended.value.code
    shown = capfd.readouterr()
    assert answers == {
        "list job": 0,
        "stats": 0,
        "check": 0,
        "gc": 0,
        "doctor": 7,
    }  # the server of the tests does not sync
    assert "secret" not in shown.out + shown.err


# old readers and listeners


def test_old_queries_find_their_view(url: str) -> None:
    with kedge.open(url) as store:
        store.save("proc", "load", {"a": 1}, level="stage", metadata={"rows": 5, "nul": "\0"})
        store.save("proc", "merge", {"a": 2}, metadata={"rows": 7})
    rows = sql(
        url,
        "SELECT checkpoint_id, level, processor_name, data_summary->>'rows', file_size_bytes > 0, status, "
        "length(validation_checksum), created_at <= now() FROM pipeline_checkpoints ORDER BY created_at",
    )
    assert [row[1:] for row in rows] == [
        ("phase", "proc", None, True, "created", 64, True),
        ("step", "proc", "7", True, "created", 64, True),
    ]
    columns = sql(
        url,
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'pipeline_checkpoints' "
        "ORDER BY ordinal_position",
    )
    assert [name for (name,) in columns] == [
        "id", "checkpoint_id", "level", "parent_id", "processor_name", "data_summary", "file_path", "file_size_bytes",
        "compression_type", "status", "validation_checksum", "validation_result", "error_message", "created_at",
        "updated_at",
    ]  # fmt: skip


def test_commits_are_announced_to_who_waits(index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statement by statement, too. Nobody else is told: commits that notify wait for each other."""
    import psycopg

    monkeypatch.setattr("kedge.index.postgres.index._TOLD_S", 60.0)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("LISTEN kedge")
        save(index)
        assert not index.wait_for_event(index.events()[-1].id, 0.001)
        save(index)
        index.set_retention("job", None, actor="me")
        assert [heard.payload for heard in db.notifies(timeout=60, stop_after=2)] == ["default", "default"]
        sql(url, "DELETE FROM kedge.awaited")
        save(index)
        assert list(db.notifies(timeout=0)) == []


def test_who_was_told_is_not_told_again_until_it_waits_again(
    index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word costs a commit a round trip more."""
    import psycopg

    monkeypatch.setattr("kedge.index.postgres.index._TOLD_S", 0.0)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("LISTEN kedge")
        for _ in range(2):
            assert not index.wait_for_event(index.events()[-1].id if index.events() else 0, 0.001)
            for _ in range(3):
                save(index)
            assert [heard.payload for heard in db.notifies(timeout=60, stop_after=1)] == ["default"]
            assert list(db.notifies(timeout=0)) == []


def test_who_waits_on_hears_of_every_event(index: PostgresIndex, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look by itself here, and an older word than it waits for has it say again that it waits."""
    import psycopg

    monkeypatch.setattr("kedge.index.postgres.index._TOLD_S", 0.0)
    monkeypatch.setattr("kedge.index.postgres.reads._LOOK_FIRST_S", 600.0)
    save(index)
    heard: list[bool] = []

    def is_waiting() -> bool:
        return sql(url, "SELECT count(*) FROM kedge.awaited WHERE until > clock_timestamp()") == [(1,)]

    for _ in range(3):
        last = index.events()[-1].id
        waiting = threading.Thread(target=lambda last=last: heard.append(index.wait_for_event(last, 600.0)))  # type: ignore[misc]
        waiting.start()
        wait_for(is_waiting, "nobody waits")
        sql(url, "UPDATE kedge.awaited SET until = clock_timestamp()")
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("SELECT pg_notify('kedge', 'default')")
        wait_for(is_waiting, "it does not wait again")
        save(index)
        waiting.join()
    assert heard == [True] * 3


# pgbouncer


def _listens(path: str) -> bool:
    """The socket is there a moment before anybody may connect to it."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


@pytest.fixture
def bouncer(postgres: Cluster, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require("pgbouncer")
    program = str(shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin"))
    folder = postgres.folder / "bouncer"
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # port: only the name of a socket in a folder of its own
        port = free.getsockname()[1]
    conf = folder / "pgbouncer.ini"
    conf.write_text(
        f"[databases]\npostgres = host={postgres.folder} dbname=postgres user=postgres\n[pgbouncer]\n"
        f"pool_mode = transaction\ndefault_pool_size = 2\nlisten_addr =\nunix_socket_dir = {folder}\n"
        f"listen_port = {port}\nauth_type = any\nlogfile = {folder}/log\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    user = "postgres" if os.geteuid() == 0 else None
    process = subprocess.Popen([program, str(conf)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user)
    try:
        wait_for(partial(_listens, str(folder / f".s.PGSQL.{port}")), "pgbouncer does not start")
        yield f"postgresql://postgres@/postgres?host={folder}&port={port}"
    finally:
        process.terminate()
        process.wait(60)


def test_pgbouncer_may_share_connections(bouncer: str) -> None:
    """Eight threads on two connections: nothing may rely on which one it gets next."""
    with kedge.open(bouncer) as store:

        def work(job: str) -> None:
            for n in range(10):
                store.save(job, "step", {"n": n, "big": os.urandom(70_000)})

        threads = [threading.Thread(target=work, args=(f"job-{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.cleanup("job-0", keep_last=2)
        store.gc()
        assert [len(store.list(f"job-{n}")) for n in range(8)] == [2] + [10] * 7
        assert store.verify().is_ok


# a whole store


def test_gc_on_one_machine_beside_savers_on_others(url: str) -> None:
    """Index and bytes in PostgreSQL, savers that reuse what gc is about to remove."""
    stop = threading.Event()
    shared = [os.urandom(100_000) for _ in range(4)]
    failures: list[BaseException] = []

    def work(store: kedge.CheckpointManager, job: str) -> None:
        try:
            for n in itertools.count():
                store.save(job, "step", {"n": n, "a": shared[n % 4], "b": shared[(n + 1) % 4]})
                store.cleanup(job, keep_last=1)
                if stop.is_set():
                    return
        except BaseException as error:
            failures.append(error)

    stores = [kedge.open(url) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(s, f"job-{n}")) for n, s in enumerate(stores[:2])]
    for thread in threads:
        thread.start()
    for _ in range(8):
        stores[2].gc()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert stores[2].verify().is_ok
    for n in range(2):
        assert stores[2].restore(f"job-{n}")["a"] in shared  # type: ignore[index]
    for each in stores:
        each.close()


# round trips


def test_the_checkpoints_of_a_job_are_one_statement(index: PostgresIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.index.postgres.server import Server

    first, second = (save(index, record(tags={"kind": kind}))[0] for kind in ("a", "b"))
    statements: list[str] = []
    all_rows = Server.all

    def counted(self: Server, text: str, *parameters: object) -> list[tuple[Any, ...]]:
        statements.append(text)
        return all_rows(self, text, *parameters)

    monkeypatch.setattr(Server, "all", counted)
    for read, wanted in (
        (lambda: [index.list_stored("job", NEWEST_INTACT)[0][0]], [second]),
        (lambda: index.list("job"), [first, second]),
        (lambda: index.list("job", Selection(limit=1, before=2)), [first]),
        (lambda: index.list("job", Selection(tags={"kind": ("b",)})), [second]),
        (lambda: index.list("job", Selection(tags={"kind": ("b",)}, limit=1)), [second]),
        (lambda: [checkpoint for checkpoint, _ in index.find("job", range(1, 10)).values()], []),
        (lambda: index.list("none", NEWEST_INTACT), []),
        (lambda: index.list("none"), []),
    ):
        statements.clear()
        assert read() == wanted
        assert len(statements) == 1


def test_a_run_of_one_step_takes_three_round_trips(url: str, asked: list[object]) -> None:
    def carry_out(key: str) -> None:
        with kedge.run(key, store=store, progress=False) as run:
            run.step("only", lambda: 1)

    with kedge.open(url) as store:
        carry_out("warm")
        asked.clear()
        carry_out("first")
        assert len(asked) == 3
        assert [event.action for event in store.events(limit=5, newest=True)] == [
            "lease", "save", "save", "save", "release",
        ]  # fmt: skip


def test_a_put_in_which_little_is_new_asks_for_no_chunk(url: str, asked: list[object]) -> None:
    import psycopg

    from kedge.integrations.langgraph import KedgeSaver

    def put(saver: KedgeSaver, thread: str, items: list[str]) -> int:
        """How many statements it took, and how many chunks there are then."""
        config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        checkpoint: Any = {
            "v": 4, "id": f"{thread}-{items[0][:9]}", "ts": "2026-01-01T00:00:00+00:00", "versions_seen": {},
            "channel_values": {"items": items}, "channel_versions": {"items": items[0]},
        }  # fmt: skip
        asked.clear()
        at = saver.put(config, checkpoint, {}, checkpoint["channel_versions"])
        statements = len(asked)
        found = saver.get_tuple(at)
        assert found is not None
        assert found.checkpoint["channel_values"] == {"items": items}
        return statements

    def chunks() -> Any:
        with psycopg.connect(url) as db:
            return db.execute("SELECT count(*), sum(length(data)) FROM kedge.chunk").fetchone()

    items = [f"item {number:4}, " * 100 for number in range(200)]
    with KedgeSaver(url) as here, KedgeSaver(url) as elsewhere:
        changed = ["another, " * 100, *items[1:]]
        put(here, "a", items)
        assert put(here, "a", changed) == 1
        put(elsewhere, "b", items)
        before = chunks()
        put(elsewhere, "b", changed)  # its chunks are there, which nobody knows here
        assert chunks() == before  # and are there once


def test_a_submission_takes_one_round_trip_and_a_run_two_commits_and_no_read(
    url: str, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.pipeline import limits
    from kedge.pipeline.consumer import Worker

    monkeypatch.setattr(limits, "REREAD_S", 3600.0)  # on a slow machine a second is over in between

    @kedge.pipeline
    def work(number: int) -> int:
        return number

    with kedge.open(url) as store:
        queue = kedge.queue("q", store=store)
        queue.submit(work, 1)
        Worker(store, ["q"], {"work": work}).serve(until_empty=True)
        asked.clear()
        handle = queue.submit(work, 2)
        assert len(asked) == 1
        worker = Worker(store, ["q"], {"work": work})
        asked.clear()
        worker.serve(until_empty=True)
        calls = [str(query) for query in asked]
        assert handle.result(0) == 2
        assert len([call for call in calls if "save_if_1" in call]) == 1  # lease, beginning and mark
        assert len([call for call in calls if "release_1" in call]) == 1  # the end
        assert not [call for call in calls if "lease_1(" in call.replace("release_1(", "") or "tag_1(" in call]
        assert not [call for call in calls if "c.id = " in call]  # the entry came with the look that found it


def test_the_server_plans_what_a_save_calls_once_for_each_connection(index: PostgresIndex, url: str) -> None:
    """A function in the language SQL that changes something is parsed and planned at every call: a third of a run."""
    written = "SELECT proname FROM pg_proc JOIN pg_language l ON l.oid = prolang WHERE lanname = 'sql' "
    assert sql(url, written + "AND pronamespace = 'kedge'::regnamespace") == [("packed",)]  # whose callers contain it


# tags and deletions by functions of the server


def test_sound_checkpoints_are_not_looked_into_one_by_one(index: PostgresIndex, asked: list[object]) -> None:
    """A check marks hundreds at once, and nobody saves meanwhile."""
    counts = []
    for count in (2, 9):
        seen = [Seen(saved) for saved in save(index, *(record() for _ in range(count)))]
        asked.clear()
        assert len(index.mark(seen, CheckpointStatus.VALID, actor="check")) == count
        counts.append(len([query for query in asked if "FROM kedge.chunk" in str(query)]))
    assert counts == [0, 0]


def test_tags_deletions_and_the_end_of_a_run_take_one_round_trip_each(
    index: PostgresIndex, url: str, asked: list[object]
) -> None:
    first, second = save(index, record(tags={"state": "ready", "ü": "ö€😀"})), save(index, record(tags={"k": "v"}))
    lease = index.acquire_lease("job", "me", 60)
    asked.clear()
    changed = index.update(first[0].id, Update(tags={"state": "running", "k": "w" * 300, "ü": None}), actor="me")
    assert changed == index.get(first[0].id) == replace(first[0], tags={"state": "running", "k": "w" * 300})
    index.delete([second[0].id, second[0].id, "unknown_1_00000000"], actor="me")
    save(index, record(lease_token=lease.token, then=Then(delete=(first[0].id,), releases_lease=True)))
    assert len(asked) == 4  # one of them the look above
    assert [event.action for event in index.events(newest=True, limit=5)] == [
        "tag", "delete", "save", "delete", "release",
    ]  # fmt: skip
    assert sql(url, "SELECT count(*) FROM kedge.tag") == [(0,)]
    assert index.audit().broken_at is None
    assert index.integrity_problems() == []


def test_what_the_functions_leave_alone_is_refused_as_ever(index: PostgresIndex) -> None:
    (saved,) = save(index, record(is_pinned=True))
    with pytest.raises(kedge.Conflict, match="pinned"):
        index.delete([saved.id], actor="me")
    with pytest.raises(kedge.NotFound):
        index.update("unknown_1_00000000", Update(tags={"k": "v"}), actor="me")
    with pytest.raises(kedge.errors.Validation, match="64"):
        index.update(saved.id, Update(tags={f"k{n}": "v" for n in range(65)}), actor="me")
    assert index.get(saved.id) == saved
    assert index.delete([saved.id], even_pinned=True, actor="me") == [saved.id]
