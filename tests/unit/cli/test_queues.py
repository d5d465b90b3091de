"""`kedge queue`: what queues hold, their limits, and what was given up."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import threading
from pathlib import Path
from textwrap import dedent

import pytest

import kedge
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import DEAD, DELAYED
from kedge.pipeline.heartbeat import Heartbeat
from tests.unit.cli.test_app import Run, answer, manager, run, store  # noqa: F401 - fixtures
from tests.waiting import wait_for


@kedge.pipeline
def work(number: int) -> int:
    if number == 2:
        raise ValueError("no luck")
    return number


def test_a_queue_is_listed_limited_and_retried(run: Run, store: Path) -> None:
    with kedge.open(store) as opened:
        queue = kedge.queue("q", store=opened)
        queue.submit(work, 1, key="one", group="tenant")
        queue.submit(work, 2, key="two")
    listed = answer(run("queue", "list", "q", "--json"))["entries"]
    assert [(entry["key"], entry["state"], entry["group"]) for entry in listed] == [
        ("one", "ready", "tenant"),
        ("two", "ready", ""),
    ]
    assert (
        "limits of queue q: concurrency 2, rate_per_s 0.5"
        in run("queue", "limit", "q", "--concurrency", "2", "--rate", "0.5").stdout
    )
    limited = run("queue", "limit", "q", "--group-concurrency", "3", "--group-rate", "2")
    assert "limits of queue q: group_concurrency 3, group_rate_per_s 2" in limited.stdout
    assert answer(run("queue", "limit", "q", "--max-queued", "1", "--json")) == {
        "queue": "q", "concurrency": None, "rate_per_s": None, "max_queued": 1, "group_concurrency": None,
        "group_rate_per_s": None,
    }  # fmt: skip
    with kedge.open(store) as opened:
        Worker(opened, ["q"], {"work": work}).serve(until_empty=True)
    assert [entry["note"] for entry in answer(run("queue", "list", "q", "--dead", "--json"))["entries"]] == [
        "ValueError: no luck"
    ]
    assert [entry["attempts"] for entry in answer(run("queue", "list", "q", "--dead", "--json"))["entries"]] == [1]
    run("queue", "retry", "q", "two")
    assert [entry["state"] for entry in answer(run("queue", "list", "q", "--json"))["entries"]] == ["ready"]


def test_arguments_that_a_pipeline_does_not_take_are_refused_by_schedule(run: Run, store: Path) -> None:
    program = Path("scheduled_program.py")
    program.write_text(
        dedent("""
        import kedge

        @kedge.pipeline
        def tick(folder, scheduled_at=None):
            return folder
        """)
    )
    words = ("schedule", "add", "q", "s1", f"{program}:tick", "--every", "60")
    assert "missing a required argument: 'folder'" in run(*words, code=3).stderr
    refused = run(*words, "--arg", 'foldr="x"', code=3).stderr
    assert "pipeline tick: it has no argument foldr" in refused
    assert "did you mean folder?" in refused
    assert "it takes (folder, scheduled_at=None)" in run(*words, "--arg", "x=1", code=3).stderr
    assert "there is no queue q" in run("schedule", "list", "q", code=4).stderr
    run(*words, "--arg", 'folder="x"')
    assert [found["name"] for found in answer(run("schedule", "list", "q", "--json"))["schedules"]] == ["s1"]


def test_arguments_of_a_scheduled_pipeline_may_be_called_as_options_are(run: Run, store: Path) -> None:
    program = Path("zoned_program.py")
    program.write_text("import kedge\n\n@kedge.pipeline\ndef tick(name, tz, cron):\n    return [name, tz, cron]\n")
    arguments = [word for name in ("name", "tz", "cron") for word in ("--arg", f"{name}={name}-of-pipeline")]
    run("schedule", "add", "q", "s1", f"{program}:tick", "--cron", "0 3 * * *", *arguments)
    with kedge.open(store) as opened:
        (record,) = opened.list("queue:q:schedules")
        assert opened.load(record.id)["kwargs"] == {name: f"{name}-of-pipeline" for name in ("name", "tz", "cron")}


@kedge.pipeline
def handles_a_failure() -> str:
    try:
        kedge.current_run().step("charge", work.function, 2)
    except ValueError:
        kedge.current_run().step("release", lambda: None)
    return "released"


def test_a_failure_that_a_completed_run_handled_is_retried_by_its_queue(run: Run, store: Path) -> None:
    with kedge.open(store) as opened:
        kedge.queue("q", store=opened).submit(handles_a_failure, key="booking")
        Worker(opened, ["q"], {"handles_a_failure": handles_a_failure}).serve(until_empty=True)
    assert "already completed" in run("queue", "retry", "q", "booking", code=5).stderr
    assert "charge will run again" in run("queue", "retry", "q", "booking", "--retry-failed").stderr
    with kedge.open(store) as opened:
        Worker(opened, ["q"], {"handles_a_failure": handles_a_failure}).serve(until_empty=True)
    steps = answer(run("runs", "show", "booking", "--json"))["steps"]
    assert [(step["path"], step["verdict"], step["attempts"]) for step in steps] == [
        ("charge", "failed", 1),
        ("release", "reused", 1),
    ]
    assert answer(run("runs", "show", "booking", "--json"))["run"]["sessions"] == 2


def test_a_run_that_waits_in_a_queue_is_cancelled_by_its_key(run: Run, store: Path) -> None:
    with kedge.open(store) as opened:
        kedge.queue("q", store=opened).submit(work, 1, key="one")
    assert run("runs", "cancel", "one").stdout == "one is cancelled\n"
    assert answer(run("queue", "list", "q", "--json"))["entries"] == []
    assert answer(run("runs", "show", "one", "--json"))["run"]["status"] == "cancelled"


@kedge.pipeline
def waits() -> str:
    return kedge.current_run().approval("go", wait_s=0).actor


def test_a_run_of_a_queue_is_not_resumed_by_its_key(run: Run, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its program is a worker: started again, it would carry out the whole queue."""
    said: list[str] = []
    with kedge.open(store) as opened:
        queue = kedge.queue("q", store=opened)
        queue.submit(waits, key="asks")
        queue.submit(work, 2, key="two")
        pipelines = {"waits": waits, "work": work}
        worker = Worker(opened, ["q"], pipelines, report=lambda key, text: said.append(f"{key} {text}"))
        thread = threading.Thread(target=worker.serve)
        thread.start()
        wait_for(lambda: {entry.state for entry in queue.entries()} == {DELAYED, DEAD}, "they were not carried out")
        worker.stop("enough")
        thread.join()
    assert any(line.endswith("a worker of queue q continues it") for line in said)
    assert "kedge runs resume" not in capsys.readouterr().err
    for key in ("asks", "two"):
        refused = run("runs", "resume", key, "--retry-failed", code=5).stderr
        assert f"run {key} belongs to queue q" in refused
        assert f"kedge queue retry q {key} --store {store}" in refused
    run("approve", "asks", "--resume", code=5)  # before the decision, which is final
    assert "next: a worker of queue q continues it" in run("approve", "asks").stdout
    shown = run("runs", "show", "asks").stdout
    assert "the run can go on" in shown


def test_workers_are_listed(run: Run, store: Path) -> None:
    with kedge.open(store) as opened:
        Heartbeat(opened, ["q", "r"], 4).beat()
    (worker,) = answer(run("queue", "workers", "r", "--json"))["workers"]
    assert (worker["status"], worker["concurrency"], worker["runs"]) == ("alive", 4, [])
    assert "0/4" in run("queue", "workers").stdout
    assert "there is no queue other" in run("queue", "workers", "other", code=4).stderr


def test_a_bad_name_of_a_queue_is_named_as_it_was_typed(run: Run, store: Path) -> None:
    kedge.open(store).close()
    for command in (("queue", "list", "a b"), ("schedule", "list", "a b")):
        assert "'a b' is not a valid queue name" in run(*command, code=3).stderr
    assert "at most 112 characters" in run("queue", "list", "a" * 113, code=3).stderr
    for command in ("queue", "schedule"):
        assert "there is no queue aaa" in run(command, "list", "a" * 112, code=4).stderr


def test_a_worker_opens_a_store_and_makes_none(run: Run, store: Path) -> None:
    Path("worker_program.py").write_text("import kedge\n\nwork = kedge.pipeline(lambda: None)\n")
    words = ("worker", "worker_program.py", "--queue", "q", "--until-empty")
    run(*words, "--store", "typo", code=4)
    assert not Path("typo").exists()


def test_an_unknown_item_is_refused_before_anything_is_asked_for(run: Run, manager: kedge.CheckpointManager) -> None:
    def fails() -> None:
        raise ValueError("no")

    with kedge.run("r", store=manager, progress=False, signals=False) as current:
        current.log("hello", region="eu")
        with pytest.raises(ValueError, match="no"):
            current.step("charge", fails)
        current.step("release", list)
    assert "hello region=eu" in run("runs", "show", "r").stdout
    run("runs", "resume", "r", "--retry-failed", "--item", "map/key", code=4)
    assert manager.list("r:inbox") == []


def test_a_queue_that_does_not_exist_is_said_to(run: Run, store: Path, tmp_path: Path) -> None:
    with kedge.open(store) as opened:
        kedge.queue("scans", store=opened).submit(work, 1)
        Worker(opened, ["scans"], {"work": work}).serve(until_empty=True)
        kedge.queue("bills", store=opened).submit(work, 2)
    assert "queue scans is empty" in run("queue", "list", "scans").stderr
    for words in (["queue", "list"], ["queue", "workers"], ["schedule", "list"]):
        refused = run(*words, "bils", code=4)
        assert "there is no queue bils" in refused.stderr
        assert "did you mean bills?" in refused.stderr
    assert "there are: bills" in run("queue", "retry", "other", "work-1", code=4).stderr
    program = tmp_path / "worker_of_nothing.py"
    program.write_text("import kedge\n\n@kedge.pipeline\ndef nothing():\n    pass\n")
    said = run("worker", str(program), "--queue", "bils", "--until-empty").stderr
    assert "there is no queue bils yet (did you mean bills?)" in said
