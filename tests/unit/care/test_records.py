"""A policy for all jobs leaves alone what Kedge itself needs; one that names such a job is followed."""

from collections.abc import Iterator

import pytest

import kedge
from kedge.care.records import needed_for
from kedge.process import Workflows


@pytest.fixture
def store() -> Iterator[kedge.CheckpointManager]:
    with kedge.open("memory:") as opened:
        yield opened


def finished(store: kedge.CheckpointManager, calls: list[str]) -> None:
    with kedge.run("nightly", store=store) as run:
        for name in ("a", "b"):
            run.step(name, calls.append, name)


def test_retention_in_all_jobs_makes_no_step_and_no_llm_call_run_again(store: kedge.CheckpointManager) -> None:
    calls: list[str] = []
    finished(store, calls)
    kedge.send(store, "nightly", "rows", 1)
    kedge.send(store, "nightly", "rows", 2)
    Workflows(store).start_workflow_execution("order", "release")
    for job in ("llm:cache", "llm:calls", "llm:flights", "own"):
        for number in range(3):
            store.save(job, "record", {"number": number})
    plan = store.apply(kedge.RetentionPolicy(keep_last=1), dry_run=False)
    assert {gone.job for gone in plan.delete} == {"own"}
    assert {reason for kept in plan.keep if kept.checkpoint.job == "llm:calls" for reason in kept.reasons} == {
        "the costs of LLM calls: they would be missing in every bill"
    }
    assert len(store.list("llm:calls")) == 3
    assert len(store.list("nightly:inbox")) == 2
    finished(store, calls)
    assert calls == ["a", "b"]


def test_ancestors_of_what_a_run_needs_stay_in_other_jobs(store: kedge.CheckpointManager) -> None:
    parent = store.save("own", "old", {})
    store.save("own", "new", {})
    store.save("llm:cache", "response", {}, parent=parent)
    store.save("llm:cache", "newer", {})
    assert store.apply(kedge.RetentionPolicy(keep_last=1), dry_run=False).delete == ()


def test_a_policy_that_names_a_run_is_followed(store: kedge.CheckpointManager) -> None:
    calls: list[str] = []
    finished(store, calls)
    assert "would run again" in needed_for(store.catalogue, "nightly")
    assert store.cleanup("nightly", keep_last=1) > 0
    finished(store, calls)
    assert calls == ["a", "b", "a", "b"]


def test_a_job_of_the_user_is_needed_for_nothing(store: kedge.CheckpointManager) -> None:
    store.save("own", "step", {}, tags={"kind": "run"})  # the tag alone makes no run
    assert needed_for(store.catalogue, "own") == needed_for(store.catalogue, "unknown") == ""
