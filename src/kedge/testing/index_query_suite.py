"""The contract of `ports.Index`, continued: get, read, list, jobs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kedge.errors import CheckpointError, NotFound, Validation
from kedge.model import CheckpointLevel, CheckpointStatus
from kedge.ports import NEWEST_INTACT, ChunksGone, Index, Selection, Update

from .index_fixtures import IndexFixtures, chunk, record, save, with_chunks


class IndexQuerySuite(IndexFixtures):
    """Finding checkpoints and jobs."""

    # get, read, list

    def test_what_is_unknown_is_not_found(self, index: Index) -> None:
        for ask in (index.get, index.read):
            with pytest.raises(NotFound):
                ask("nothing_1_00000000")
        assert index.list("nothing") == []
        assert index.job("nothing") is None

    def test_namespaces_do_not_see_each_other(self, index: Index, tenant: Index) -> None:
        mine = save(index, with_chunks(chunk("x")))[0]
        assert tenant.list("job") == []
        assert tenant.jobs() == []
        assert [e for e in tenant.events() if e.action != "key"] == []
        assert list(tenant.manifests()) == []
        assert tenant.locate([chunk("x").digest]) == {}
        assert tenant.totals()["checkpoints"] == 0
        with pytest.raises(NotFound):
            tenant.get(mine.id)
        with pytest.raises(NotFound):
            tenant.update(mine.id, Update(is_pinned=True), actor="t")
        assert tenant.delete([mine.id], actor="t") == []
        with pytest.raises(ChunksGone):
            save(tenant, with_chunks(reused=[chunk("x")]))
        assert save(tenant)[0].seq == 1

    def test_latest_is_the_highest_number_that_is_not_corrupted(self, index: Index) -> None:
        stage = save(index, record(level=CheckpointLevel.STAGE, created_us=9 * 10**15))[0]
        last, bad = save(index, record(created_us=1), record())
        index.update(bad.id, Update(status=CheckpointStatus.CORRUPTED), actor="t")
        assert [c.id for c in index.list("job", NEWEST_INTACT)] == [last.id]  # by number, not by clock (I4)
        assert [c.id for c, _ in index.list_stored("job", NEWEST_INTACT)] == [last.id]
        at_level = replace(NEWEST_INTACT, level=CheckpointLevel.STAGE)
        assert [c.id for c in index.list("job", at_level)] == [stage.id]
        assert index.list("job", replace(NEWEST_INTACT, level=CheckpointLevel.PIPELINE)) == []
        assert [c.id for c in index.list("job", Selection(is_intact=True, after=0))] == [stage.id, last.id]
        assert bad.id in [c.id for c in index.list("job")]

    def test_the_newest_of_each_job_is_found_with_those_of_others(self, index: Index, tenant: Index) -> None:
        for job, value in (("a", "x"), ("a", "y"), ("a", "x"), ("a", "y"), ("b", "y"), ("c", "x"), ("c", "x")):
            save(index, replace(record(job=job), tags={"k": value}))
        save(tenant, replace(record(job="a"), tags={"k": "x"}))
        index.delete([index.list("c", Selection(limit=1))[0].id], actor="t")
        jobs = [*"abc", "nothing", *(f"job-{number}" for number in range(1200))]
        assert {job: c.seq for job, c in index.newest(jobs).items()} == {"a": 4, "b": 1, "c": 1}
        with_tag = index.newest(jobs, ("k", "x"))
        assert {job: (c.job, c.seq) for job, c in with_tag.items()} == {"a": ("a", 3), "c": ("c", 1)}
        assert with_tag["a"] == index.list("a")[2]
        assert index.newest(["b"], ("k", "x")) == index.newest([]) == {}

    def test_every_change_is_one_of_its_job(self, index: Index, tenant: Index) -> None:
        (saved,) = save(index, record(tags={"a": "b"}))
        changes: list[Callable[[], object]] = [
            lambda: save(index),
            lambda: index.update(saved.id, Update(is_pinned=True), actor="t"),
            lambda: index.update(saved.id, Update(tags={"a": None}), actor="t"),
            lambda: index.update(saved.id, Update(status=CheckpointStatus.CORRUPTED), actor="t"),
            lambda: index.delete([saved.id], even_pinned=True, actor="t"),
        ]
        if index.changed_jobs(0, 1) is None:
            return
        for change in changes:
            seen = index.events(limit=1, newest=True)[0].id
            assert index.changed_jobs(seen, 8) == []
            change()
            changed = index.changed_jobs(seen, 8)
            assert changed
            assert [job for _, job in changed] in (["job"], [None])
            assert [number for number, _ in changed] == [event.id for event in index.events(seen)][::-1]
            assert index.changed_jobs(seen, 1) == changed[:1]
        seen = index.events(limit=1, newest=True)[0].id
        for _ in range(3):
            save(tenant)
        assert [job for _, job in index.changed_jobs(seen, 8) or ()] == ["", "", ""]
        save(index)
        assert [job for _, job in index.changed_jobs(seen, 2) or ()] == ["job", ""]

    def test_the_log_is_read_as_others_have_written_it(self, index: Index, peer: Index) -> None:
        for _ in range(2):
            save(index)
            assert peer.audit() == index.audit()
            assert peer.audit().head == index.events()[-1].chain
            assert peer.integrity_problems() == []

    def test_list_is_oldest_first_and_pages_both_ways(self, index: Index) -> None:
        save(index, *(record() for _ in range(10)))
        index.delete([index.list("job")[4].id], actor="t")  # number 5

        def numbers(**window: Any) -> list[int]:
            return [c.seq for c in index.list("job", Selection(**window))]

        assert numbers() == [1, 2, 3, 4, 6, 7, 8, 9, 10]
        assert numbers(limit=3) == [8, 9, 10]
        assert numbers(limit=3, before=8) == [4, 6, 7]
        assert numbers(before=4) == [1, 2, 3]
        assert numbers(after=7) == [8, 9, 10]
        assert numbers(limit=3, after=3) == [4, 6, 7]
        assert numbers(after=0, limit=1) == [1]
        assert numbers(after=3, before=7) == [4, 6]
        for limit in (0, -1):
            with pytest.raises(Validation):
                numbers(limit=limit)
        assert numbers(before=1) == numbers(after=10) == []

    def test_list_filters_by_level_and_tags(self, index: Index) -> None:
        save(
            index,
            record(tags={"k": "a", "l": "x"}),
            record(level=CheckpointLevel.STAGE, tags={"k": "a"}),
            record(tags={"k": "b", "l": "x"}),
            record(),
        )
        save(index, record("another", tags={"k": "a"}))

        def numbers(**filters: Any) -> list[int]:
            return [c.seq for c in index.list("job", Selection(**filters))]

        assert numbers(level=CheckpointLevel.STAGE) == [2]
        assert numbers(tags={"k": ["a"]}) == [1, 2]
        assert numbers(tags={"k": ["a"]}, limit=1) == [2]
        assert numbers(tags={"k": ["a"]}, after=1) == [2]
        assert numbers(tags={"k": ["a"], "l": ["x"]}) == [1]
        assert numbers(tags={"k": ["a"]}, level=CheckpointLevel.STEP) == [1]
        assert numbers(tags={"k' OR 1=1 --": ["a"]}) == []

    def test_list_stored_is_list_with_manifests_and_any_of_several_tags(self, index: Index, tenant: Index) -> None:
        assert index.list_stored("job") == []
        saved = save(index, *(record(tags={"of": "abc"[n % 3]} if n < 8 else {}) for n in range(10)))
        save(index, record("another", tags={"of": "a"}))
        save(tenant, record(tags={"of": "a"}))
        assert index.list_stored("job") == [index.read(checkpoint.id) for checkpoint in saved]

        def numbers(**window: Any) -> list[int]:
            return [checkpoint.seq for checkpoint, _ in index.list_stored("job", Selection(**window))]

        assert numbers(limit=3, before=8) == [5, 6, 7]
        assert numbers(limit=3, after=3) == [4, 5, 6]
        assert numbers(level=CheckpointLevel.STAGE) == []
        assert numbers(tags={"of": ["a", "c", "unknown"]}) == [1, 3, 4, 6, 7]
        assert numbers(tags={"of": ["b"]}, limit=1) == [8]
        assert numbers(tags={"of": ["b", "c"]}, limit=2, before=8) == [5, 6]
        assert numbers(tags={"of": []}) == []
        index.update(saved[0].id, Update(status=CheckpointStatus.CORRUPTED), actor="t")
        assert numbers(limit=2, after=0) == [1, 2]

    def test_list_filters_by_metadata_with_types(self, index: Index) -> None:
        texts = ['{"v":1}', '{"v":true}', '{"v":"1"}', '{"v":null}', "{}", '{"m":{"é b":"x"}}', '{"v":2.5}']
        save(index, *(record(metadata_json=text) for text in texts))

        def numbers(**metadata: object) -> list[int]:
            return [c.seq for c in index.list("job", Selection(metadata=metadata))]

        assert numbers(v=1) == [1]
        assert numbers(v=True) == [2]
        assert numbers(v="1") == [3]
        assert numbers(v=None) == [4]
        assert numbers(v=2.5) == [7]
        assert numbers(**{"m.é b": "x"}) == [6]
        assert numbers(**{"m.none": "x"}) == numbers(**{"v.deeper": 1}) == []
        assert len(index.list("job", Selection(metadata={}))) == 7

    def test_hostile_filters_find_nothing_or_are_refused(self, index: Index) -> None:
        save(index, record(metadata_json='{"v":1}'))
        paths = ["v') OR 1=1 --", '$."v"', "v[0]", 'a"b', "", ".", "a..b", "\0", "\ud800"]
        values: list[object] = [1, 2**70, "x' OR '1'='1", "\ud800", [1]]
        for path, value in itertools.product(paths, values):
            try:
                assert index.list("job", Selection(metadata={path: value})) == []
            except CheckpointError:
                pass

    def test_what_cannot_be_stored_is_refused_and_changes_nothing(self, index: Index) -> None:
        save(index)
        job, events = index.job("job"), index.events()
        for wrong in (record(step="\ud800"), record(size_bytes=2**70), record(tags={"a": "\ud800"})):
            with pytest.raises(CheckpointError):
                save(index, wrong)
        assert (index.job("job"), index.events()) == (job, events)
        assert save(index)[0].seq == 2

    # jobs

    def test_jobs_are_counted_and_paged_by_name(self, index: Index) -> None:
        for name in ("b", "a-2", "a-1", "a.1"):
            save(index, record(name), record(name, size_bytes=5))
        assert [j.name for j in index.jobs()] == ["a-1", "a-2", "a.1", "b"]
        assert [j.name for j in index.jobs(prefix="a-")] == ["a-1", "a-2"]
        assert [j.name for j in index.jobs(limit=2, after="a-1")] == ["a-2", "a.1"]
        job = index.job("b")
        assert job is not None
        assert (job.checkpoints, job.last_seq, job.size_bytes, job.stored_bytes) == (2, 2, 15, 14)
        index.delete([index.list("b")[0].id], actor="t")
        job = index.job("b")
        assert job is not None
        assert (job.checkpoints, job.last_seq, job.size_bytes, job.stored_bytes) == (1, 2, 5, 7)

    def test_retention_is_kept_and_makes_the_job(self, index: Index) -> None:
        index.set_retention("new", '{"keep_last":3}', actor="t")
        job = index.job("new")
        assert job is not None
        assert (job.retention, job.checkpoints) == ('{"keep_last":3}', 0)
        index.set_retention("new", None, actor="t")
        job = index.job("new")
        assert job is not None
        assert job.retention is None
        assert save(index, record("new"))[0].seq == 1
