"""`kedge runs` and `kedge approve`: what became of runs, and what can be done about them."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import json
import threading
from pathlib import Path

import pytest

import kedge
from tests.unit.cli.test_app import Run, answer, run, store  # noqa: F401 - fixtures
from tests.waiting import wait_for


def asks(store: Path) -> None:
    with pytest.raises(kedge.Paused), kedge.run("r", store=store) as made:
        made.approval("go", prompt="Publish?", wait_s=0)


def test_failed_items_are_listed_with_their_reasons_until_they_are_done(run: Run, store: Path) -> None:
    broken = {1, 2}

    def work(item: int) -> int:
        if item in broken:
            raise ValueError(f"no {item}")
        return item

    def pipeline() -> None:
        with kedge.run("r", store=store) as made:
            made.map(work, range(3), key=str, name="m", on_error="collect")

    pipeline()
    shown = run("runs", "show", "r").stdout
    assert "1 item done, 2 failed" in shown
    assert "ValueError: no 2" in shown
    failed = answer(run("runs", "show", "r", "--json"))["failed_items"]
    assert sorted((item["map"], item["key"], item["error"]) for item in failed) == [
        ("m", "1", "ValueError: no 1"),
        ("m", "2", "ValueError: no 2"),
    ]  # listed as they failed, which is in no order: two threads work on them
    broken.discard(1)
    pipeline()
    assert [item["key"] for item in answer(run("runs", "show", "r", "--json"))["failed_items"]] == ["2"]


def test_a_decision_says_by_whom_and_what_follows_at_once(run: Run, store: Path) -> None:
    asks(store)
    assert "waits for approval go: Publish?" in run("runs", "show", "r").stdout
    said = run("approve", "r", "--by", "ada", "--comment", "fine").stdout
    assert f"go of r is approved by ada; next: kedge runs resume r --store {store}, if it is paused" in said
    for words in (("show", "r"), ("list",)):
        assert "go was approved by ada on" in run("runs", *words).stdout
    assert "was approved by ada on" in run("approve", "r", "go", code=5).stderr


def test_a_denial_offers_no_resume(run: Run, store: Path) -> None:
    asks(store)
    run("approve", "r", "--deny", "--resume", code=2)
    assert "use another key" in run("approve", "r", "--deny", "--by", "bob").stdout
    with pytest.raises(kedge.Denied) as caught, kedge.run("r", store=store) as made:
        made.approval("go", wait_s=0)
    assert not any("to resume it" in note for note in caught.value.__notes__)
    assert "a denial is final" in run("runs", "show", "r").stdout
    assert "a denial is final" in run("runs", "resume", "r", code=5).stderr


def test_a_signal_that_nobody_waits_for_is_refused(run: Run, store: Path) -> None:
    with pytest.raises(kedge.Paused), kedge.run("r", store=store) as made:
        made.signal("rows", wait_s=0)
    refused = run("runs", "signal", "r", "row", "1", code=4).stderr
    assert "it waits for: rows" in refused
    run("runs", "signal", "r", "rows", "1")
    run("runs", "signal", "r", "later", "2", "--ahead")
    with kedge.run("r", store=store) as made:
        assert [made.signal("rows"), made.signal("later")] == [1, 2]


def test_a_run_is_deleted_with_the_messages_to_it(run: Run, store: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        with kedge.run("r", store=store) as made:
            made.step("work", calls.append, 1)
    kedge.send(store, "r", "x")
    assert "would delete run r (completed, 5 records)" in run("runs", "delete", "r").stdout
    assert answer(run("runs", "delete", "r", "--apply", "--json")) == {"run": "r", "deleted": 6}
    run("runs", "show", "r", code=4)
    run("runs", "delete", "r", "--apply", code=4)
    with kedge.run("r", store=store) as made:
        made.step("work", calls.append, 1)
    assert calls == [1, 1]


def test_a_handled_failure_is_tried_again_on_request(run: Run, store: Path) -> None:
    with kedge.run("r", store=store) as made:
        with pytest.raises(ZeroDivisionError):
            made.step("divide", lambda: 1 / 0)
        made.step("compensate", int)
    assert "already completed on" in run("runs", "resume", "r", "--print", code=5).stderr
    run("runs", "resume", "r", "--retry", "compensate", "--print", code=4)
    asked = run("runs", "resume", "r", "--retry-failed", "--print")
    assert "divide will run again" in asked.stderr
    with kedge.run("r", store=store) as made:
        assert made.step("divide", lambda: 2) == 2


def test_a_run_that_is_owned_is_not_started_again(run: Run, store: Path) -> None:
    with kedge.run("r", store=store) as made:
        made.step("one", int)
        refused = run("runs", "resume", "r", "--retry-failed", code=5).stderr
    assert "run r has another owner" in refused
    assert "resuming" not in refused


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("wrong_syntax", "import kedge\ndef f(:\n", "SyntaxError"),
        ("wrong_import", "import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "wrong_work",
            "import kedge\n\n@kedge.pipeline\ndef f() -> None:\n    raise ValueError('theirs')\n",
            "ValueError: theirs",
        ),
    ],
)
def test_an_error_in_the_users_file_shows_no_frames_of_ours(run: Run, name: str, text: str, error: str) -> None:
    Path(f"{name}.py").write_text(text)
    shown = run("run", f"{name}.py:f", code=1).stderr
    assert error in shown
    assert name in shown
    assert str(Path(kedge.__file__).parent) not in shown
    assert "importlib" not in shown


def test_a_run_is_watched_until_it_ends(run: Run, store: Path) -> None:
    """From its first record on, by whatever process it is carried out."""
    may_end = threading.Event()

    @kedge.pipeline
    def work() -> None:
        made = kedge.current_run()
        made.step("read", lambda: 1)
        made.map(abs, [1, 2], name="tiles", workers=1)
        made.log("half done", level="warning", rows=7)
        may_end.wait()
        made.step("bad", lambda: 1 / 0)

    with kedge.open(store) as opened:
        handle = kedge.start(work, store=opened)
        threading.Thread(
            target=lambda: (wait_for(lambda: handle.status == "running", "it waits"), may_end.set())
        ).start()
        shown = run("runs", "watch", "work", "--wait", code=1).stdout  # its first record may be yet to come
        with pytest.raises(ZeroDivisionError):
            handle.result()
    said = [line[line.index("  ") + 2 :] for line in shown.splitlines()]
    assert said[:2] == ["running  run work", f"ran  read  {said[1].rpartition('  ')[2]}"]
    assert "warning  half done rows=7" in said
    assert sum(line.startswith("ran  tiles  ") for line in said) >= 1
    assert said[-2:] == [
        "failed  bad  ZeroDivisionError: division by zero", "failed  run work  ZeroDivisionError: division by zero",
    ]  # fmt: skip
    kinds = [json.loads(line)["kind"] for line in run("runs", "watch", "work", "--json", code=1).stdout.splitlines()]
    assert (kinds[0], kinds[-1]) == ("run", "run")
    with kedge.run("good", store=store) as made:
        made.step("one", lambda: 1)
    assert "completed  run good" in run("runs", "watch", "good").stdout
    assert "there is no run god" in run("runs", "watch", "god", code=4).stderr
