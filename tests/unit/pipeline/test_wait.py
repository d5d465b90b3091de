"""Signals, approvals, sleep, progress and log: what is answered stays answered."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Conflict, Denied, NotFound, Paused, Validation
from kedge.pipeline.approval import find_approvals, pending_approvals
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.history import find_run, logs_of
from kedge.pipeline.session import Session
from kedge.process import Workflows
from tests.waiting import Clock, wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def test_an_approval_pauses_the_process_and_is_decided_once(store: CheckpointManager) -> None:
    done: list[str] = []

    def pipeline() -> kedge.Approval:
        with kedge.run("r", store=store) as run:
            with run.stage("release"):
                decision = run.approval("publish", prompt="Go live?", wait_s=0)
            run.step("publish", lambda: done.append("published"))
            return decision

    for _ in range(2):
        with pytest.raises(Paused, match="approval release/publish") as caught:
            pipeline()
        assert caught.value.code == 75
    found = find_run(store, "r")
    assert found.status == "paused"
    (waiting,) = found.waiting
    assert [waiting["for"], waiting["name"], waiting["prompt"]] == ["approval", "release/publish", "Go live?"]
    with pytest.raises(NotFound, match="it waits for: release/publish"):
        kedge.decide(store, "r", "other", True)
    with pytest.raises(kedge.Validation, match="is not a decision"):
        kedge.decide(store, "r", "release/publish", "no")  # type: ignore[arg-type]
    made = kedge.decide(store, "r", "release/publish", True, actor="ada", comment="fine")
    with pytest.raises(Conflict, match="was approved by ada"):
        kedge.decide(store, "r", "release/publish", False, actor="bob")
    assert done == []
    assert pipeline() == made
    assert pipeline().actor == "ada"
    assert done == ["published"]
    assert find_run(store, "r").waiting == []


def test_pending_approvals_are_listed_until_somebody_decides(store: CheckpointManager) -> None:
    for key in ("r", "s", "t"):
        with pytest.raises(Paused), kedge.run(key, store=store) as run:
            run.approval("go", prompt="Now?", expires_s=3600, wait_s=0)
    flow = Workflows(store)
    execution = flow.start_workflow_execution("c", "release")
    made = flow.create_checkpoint(execution, "publish", "agent", approval_required=True)
    store.save("plain", "s", {})

    def listed() -> list[tuple[str, str, str]]:
        return [(asked.job, asked.kind, asked.name) for asked in find_approvals(store)]

    asked = [("r", "run", "go"), ("s", "run", "go"), ("t", "run", "go")]
    assert listed() == [(execution, "execution", "publish"), *asked]
    (pending,) = pending_approvals(store, "r")
    assert (pending.prompt, pending.expires_at) == ("Now?", pending.asked_at + timedelta(hours=1))  # type: ignore[operator]
    kedge.decide(store, "r", "go", True, actor="ada")
    cancel(store, "s")
    kedge.decide(store, execution, made["checkpoint_id"], True, actor="bob")  # the same call for both
    assert listed() == asked[2:]
    assert flow.get_execution(execution)["checkpoints"][0]["approval_actor"] == "bob"
    assert flow.get_checkpoint_history(execution)[-1]["change"] == "approve publish"
    for again in ("publish", made["checkpoint_id"]):
        with pytest.raises(Conflict):
            kedge.decide(store, execution, again, False)


def test_nobody_decides_what_has_expired(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(Paused), kedge.run("r", store=store) as run:
        run.approval("go", expires_s=60, wait_s=0)
    clock.advance(61)
    assert pending_approvals(store, "r") == []
    with pytest.raises(Conflict, match="was denied by expiry"):
        kedge.decide(store, "r", "go", True)


def test_nothing_goes_on_behind_a_denial(store: CheckpointManager) -> None:
    def pipeline(on_denied: str = "raise") -> Any:
        with kedge.run(f"r-{on_denied}", store=store) as run:
            answer = run.approval("go", wait_s=0, on_denied=on_denied)
            run.step("behind", lambda: 1)
            return answer

    for rule in ("raise", "return"):
        with pytest.raises(Paused):
            pipeline(rule)
        kedge.decide(store, f"r-{rule}", "go", False, actor="bob", comment="not today")
    for _ in range(2):
        with pytest.raises(Denied, match="denied by bob: not today"):
            pipeline()
    assert not [c for c in store.list("r-raise") if c.step == "behind"]
    assert not pipeline("return").approved


def test_an_approval_expires_from_when_it_was_first_asked(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipeline() -> None:
        with kedge.run("r", store=store) as run:
            run.approval("go", wait_s=0, expires_s=60)

    clock = Clock(monkeypatch)
    for _ in range(3):
        with pytest.raises(Paused):
            pipeline()
        clock.advance(25)  # asked again before 60 s are over: that does not count
    with pytest.raises(Denied, match="denied by expiry"):
        pipeline()
    with pytest.raises(Conflict, match="was denied by expiry"):
        kedge.decide(store, "r", "go", True)


def test_a_decision_made_meanwhile_lets_the_run_go_on(store: CheckpointManager) -> None:
    def is_decided() -> bool:
        try:
            kedge.decide(store, "r", "go", True)
        except NotFound:
            return False
        return True

    decider = threading.Thread(target=wait_for, args=(is_decided, "nobody asks"))
    with kedge.run("r", store=store) as run:
        decider.start()
        assert run.approval("go").approved
    decider.join()


def test_signals_are_kept_and_may_come_first(store: CheckpointManager) -> None:
    for _ in range(2):
        with pytest.raises(Paused), kedge.run("r", store=store) as run:
            run.signal("data", wait_s=0)
    kedge.send(store, "r", "data", {"rows": [1, 2]})
    kedge.send(store, "r", "data", "too late")
    for _ in range(2):
        with kedge.run("r", store=store) as run:
            assert run.signal("data") == {"rows": [1, 2]}


def check_sleep(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(Paused), kedge.run("r", store=store) as run:
        run.sleep(10, name="cool down", wait_s=0)
    clock.advance(7)
    slept = []
    for _ in range(2):
        clock.slept_s = 0.0
        with kedge.run("r", store=store) as run:
            run.sleep(10, name="cool down")
        slept.append(round(clock.slept_s))
    assert slept == [3, 0]  # what is left; then it is over for good


def test_sleep_counts_from_the_first_time(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sleep(store, monkeypatch)


@pytest.mark.mutant
def test_a_sleep_that_began_anew_would_be_seen(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "asked_at", lambda *_: time.time())
    with pytest.raises(AssertionError, match=r"\[10, 0\]"):
        check_sleep(store, monkeypatch)


def test_progress_and_log(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        run.progress(3, 10)
        run.log("three of ten", rate=1.5)
        run.log("slow", level="warning")
        run.log("lost", level="error")
        with pytest.raises(Validation):
            run.log("x", level="loud")
        with pytest.raises(Validation):
            run.progress(5, 3)
        run.progress(10, 10)
    assert find_run(store, "r").progress == {"done": 10, "total": 10}
    line, slow, lost = logs_of(store, "r")
    assert logs_of(store, "r", level="warning") == [slow, lost]
    assert logs_of(store, "r", 1, level="info", before=lost.seq) == [slow]
    assert line.metadata["level"] == "info"
    assert line.metadata["text"] == "three of ten"
    assert line.metadata["fields"] == {"rate": 1.5}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (Path("a/b"), "a/b"), (datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01 00:00:00+00:00"), (float("nan"), "nan"),
        (2**70, str(2**70)), ("\ud800", "?"), ({1: (Path("a"), None)}, {"1": ["a", None]}), ("x" * 10_000, "x" * 2000),
    ],
)  # fmt: skip
def test_no_run_fails_by_a_log_line(store: CheckpointManager, value: object, kept: object) -> None:
    with kedge.run("r", store=store) as run:
        run.log("\ud800", value=value, text="of a field")
        circle: list[object] = []
        circle.append(circle)
        run.log("circle", value=circle)
    line, _ = logs_of(store, "r")
    assert line.metadata["text"] == "?"
    assert line.metadata["fields"] == {"value": kept, "text": "of a field"}


def test_nonsense_is_refused(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        with pytest.raises(Validation):
            run.approval("a", on_denied="ignore")
        with pytest.raises(Validation):
            run.approval("b", expires_s=-1)
        with pytest.raises(Validation):
            run.sleep(-1)
        with pytest.raises(Validation):
            run.signal("s", wait_s=-1)


def test_each_message_under_a_name_is_taken_once_in_order(store: CheckpointManager) -> None:
    for number in range(3):
        kedge.send(store, "r", "rows", number)
    with pytest.raises(Paused), kedge.run("r", store=store) as run:
        assert [run.signal("rows"), run.signal("rows")] == [0, 1]
        raise Paused("here")
    with kedge.run("r", store=store) as run:
        with run.stage("other"):
            assert run.signal("rows") == 2  # not one that the calls below have taken
        assert [run.signal("rows"), run.signal("rows")] == [0, 1]
        with pytest.raises(Paused):
            run.signal("rows", wait_s=0)
    (waiting,) = find_run(store, "r").waiting
    assert waiting["name"] == "rows"  # what one sends to


def test_stores_are_given_by_their_paths(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with pytest.raises(Paused), kedge.run("r", store=place) as run:
        run.approval("go", wait_s=0)
    kedge.decide(place, "r", "go", True)
    kedge.send(str(place), "r", "rows", 5)
    with kedge.run("r", store=place) as run:
        assert run.approval("go").approved
        assert run.signal("rows") == 5
    with pytest.raises(NotFound):
        kedge.send(tmp_path / "none", "r", "rows")
