"""Objects that save themselves and are resumed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import (
    CheckpointableProcess,
    CheckpointManager,
    CheckpointPolicy,
    Conflict,
    Paused,
    Validation,
    checkpoint_on_interval,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


class Summing(CheckpointableProcess):
    """Adds numbers up; dies, or is asked to stop, where it is told to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(process_id="sum", **options)
        self.total = 0
        self.seen: list[int] = []

    def get_state(self) -> Any:
        return {"total": self.total}

    def restore_state(self, state: Any) -> None:
        self.total = state["total"]

    def work(self, count: int, stop_at: int | None = None, number: int = signal.SIGTERM) -> int:
        for item in range(self.items_done, count):
            if item == stop_at:
                os.kill(os.getpid(), number)
            self.seen.append(item)
            self.total += item
            self.update_progress(1, total=count)
            self.auto_checkpoint()
        return self.total


def policy(**fields: Any) -> CheckpointPolicy:
    return CheckpointPolicy(**{"interval_items": 10, "interval_memory_mb": None, **fields})


def test_it_goes_on_after_a_crash_from_the_last_checkpoint(store: CheckpointManager) -> None:
    crashed = Summing(store=store, checkpoint_policy=policy(keep_failed_checkpoints=False))
    with pytest.raises(ZeroDivisionError), crashed:
        crashed.work(25)
        _ = 1 / 0
    with Summing(store=store, checkpoint_policy=policy()) as process:
        assert process.items_done == 20
        assert process.get_progress_percentage() == 80.0
        assert process.work(40) == sum(range(40))
        assert process.seen == list(range(20, 40))
        assert process.get_progress() == {"items_done": 40, "items_total": 40, "percent": 100.0}


def test_sigterm_saves_and_stops(store: CheckpointManager, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Paused) as caught, Summing(store=store) as process:
        process.work(100, stop_at=7)
    assert caught.value.code == 75
    assert "sum stops (SIGTERM)" in capsys.readouterr().err
    with Summing(store=store) as process:
        assert process.items_done == 8
        assert process.work(100) == sum(range(100))


def test_sighup_saves_now(store: CheckpointManager) -> None:
    with Summing(store=store) as process:
        process.work(5, stop_at=2, number=signal.SIGHUP)
        assert process.checkpoint_metadata["items_done"] == 3


def test_a_failure_is_saved_and_kept(store: CheckpointManager) -> None:
    with pytest.raises(KeyError) as caught, Summing(store=store, checkpoint_policy=policy()) as process:
        process.work(5)
        raise KeyError("x")
    assert not getattr(caught.value, "__notes__", [])
    (failed,) = store.list("sum", tags={"failed": "KeyError"})
    with Summing(store=store, checkpoint_policy=policy(max_checkpoints=2)) as process:
        assert process.items_done == 0  # the failed state may be in the middle of an item
        assert process.load_checkpoint(failed.id) == {"total": 10}
        process.work(100)
        assert store.exists(failed.id)
        assert len(store.list("sum")) == 3
        assert process.get_checkpoint_info()["checkpoints"] == 3


def test_one_at_a_time(store: CheckpointManager) -> None:
    with Summing(store=store), pytest.raises(Conflict), Summing(store=store):
        pass


def test_the_callers_data_is_left_alone_and_errors_are_raised(store: CheckpointManager) -> None:
    process = Summing(store=store)
    data = {"total": 3, "rows": [1]}
    saved = process.save_checkpoint("stage", data, "by hand", {"kind": "x"})
    assert data == {"total": 3, "rows": [1]}
    assert process.load_checkpoint(saved) == data
    assert process.total == 3
    assert (store.get(saved).level, store.get(saved).step, store.get(saved).tags) == ("stage", "by hand", {"kind": "x"})
    with pytest.raises(kedge.UnsupportedType):
        process.save_checkpoint(data={"x": object()})
    with pytest.raises(kedge.NotFound):
        process.load_checkpoint("missing")
    other = store.save("other", "x", {})
    with pytest.raises(Conflict, match="not saved by a process"):
        process.load_checkpoint(other)


def test_states_are_validated_and_must_be_of_use(store: CheckpointManager) -> None:
    def positive(state: Any) -> None:
        if state["total"] < 0:
            raise Validation("negative")

    process = Summing(store=store, checkpoint_validator=positive)
    process.total = -1
    with pytest.raises(Validation, match="negative"):
        process.save_checkpoint()
    assert store.list("sum") == []
    process.total = 1
    process.save_checkpoint()
    process.can_resume_from = lambda state: False  # type: ignore[method-assign]
    with pytest.raises(Conflict, match="cannot resume"):
        process.load_checkpoint()


def test_background_saves(store: CheckpointManager) -> None:
    with Summing(store=store, checkpoint_policy=policy(async_save=True)) as process:
        process.work(95)
    with Summing(store=store) as process:
        assert process.items_done == 95
        assert process.total == sum(range(95))


def test_on_interval(store: CheckpointManager) -> None:
    class Counting(Summing):
        @checkpoint_on_interval(items=4, seconds=1000)
        def one(self, value: int) -> int:
            self.total += value
            return value

    with Counting(store=store) as process:
        assert [process.one(n) for n in range(10)] == list(range(10))
        assert len(store.list("sum")) == 2
    with pytest.raises(Validation, match="not a method"):
        checkpoint_on_interval()(lambda: 1)()


def test_policies() -> None:
    rule = CheckpointPolicy()
    assert (rule.interval_items, rule.interval_seconds, rule.interval_memory_mb, rule.max_checkpoints) == (
        100,
        300,
        500,
        5,
    )
    assert rule.should_checkpoint_by_items(100)
    assert not rule.should_checkpoint_by_items(99)
    assert rule.should_checkpoint_by_time(300)
    assert rule.should_checkpoint_by_memory(501)
    assert not CheckpointPolicy(interval_items=None).should_checkpoint_by_items(10**9)
    for nonsense in (
        {"interval_items": 0}, {"interval_items": 1.5}, {"interval_seconds": -1}, {"interval_seconds": float("nan")},
        {"interval_memory_mb": "1"}, {"max_checkpoints": 0}, {"max_checkpoints": None}, {"async_save": 1},
        {"keep_per_level": {"galaxy": 1}}, {"keep_per_level": {"step": 0}},
        {"max_age_hours": 0}, {"max_age_hours": 1e-9}, {"max_age_hours": float("inf")}, {"max_age_hours": "1"},
        {"verify_on_load": "no"},
    ):  # fmt: skip
        with pytest.raises(Validation):
            CheckpointPolicy(**nonsense)  # type: ignore[arg-type]
    with pytest.raises(Validation):
        checkpoint_on_interval(items=0)


def test_old_checkpoints_go(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Summing(store=store, checkpoint_policy=policy(max_checkpoints=50, max_age_hours=24))
    now = time.time_ns()
    for hours in range(0, 60, 5):
        monkeypatch.setattr("kedge.model.time.time_ns", lambda hours=hours: now + hours * 3600 * 10**9)
        process.save_checkpoint("step", {"total": hours})
    kept = [int(store.load(c.id)["state"]["total"]) for c in store.list(process.process_id)]  # type: ignore[index]
    assert kept == [35, 40, 45, 50, 55]


def test_when_the_validator_is_asked(store: CheckpointManager) -> None:
    asked = []
    for save, load in ((True, False), (False, True)):
        rule = policy(validate_on_save=save, verify_on_load=load)
        process = Summing(checkpoint_policy=rule, checkpoint_validator=asked.append, store=store)
        process.save_checkpoint("step", {"total": 1})
        assert len(asked) == save
        process.load_checkpoint()
        assert len(asked) == 1
        asked.clear()


def test_keep_per_level(store: CheckpointManager) -> None:
    process = Summing(store=store, checkpoint_policy=policy(max_checkpoints=2, keep_per_level={"pipeline": 2}))
    for level in ("pipeline", "pipeline", "pipeline", "step", "step", "step", "step"):
        process.save_checkpoint(level, {"total": 0})
    assert [str(c.level) for c in store.list("sum")] == ["pipeline", "pipeline", "step", "step"]
