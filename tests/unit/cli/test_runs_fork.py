"""`kedge runs fork` and `kedge runs diff`."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.unit.cli.test_app import Run, answer, run, store  # noqa: F401 - fixtures


def test_a_run_is_forked_with_another_argument_and_compared(run: Run, store: Path) -> None:
    program = Path("forked_program.py")
    program.write_text(
        dedent("""
        import kedge

        @kedge.pipeline
        def report(region="us"):
            run = kedge.current_run()
            rows = run.step("read", lambda: [1, 2])
            return run.step("publish", lambda rows, region: [region, *rows], rows, region)
        """)
    )
    began = [sys.executable, "-m", "kedge", "run", f"{program}:report", "--id", "monday", "--store", str(store)]
    subprocess.run(began, check=True, capture_output=True)
    plan = run("runs", "fork", "monday", "--from", "publish", "--arg", "region=eu", "--key", "tuesday")
    assert "1 step reused, 1 to run again" in plan.stdout
    assert "--apply" in plan.stdout
    assert run("runs", "show", "tuesday", code=4).stderr
    words = ("runs", "fork", "monday", "--from", "publish", "--arg", "region=eu", "--key", "tuesday")
    made = answer(run(*words, "--apply", "--json"))
    assert (made["applied"], made["reused"], made["again"]) == (True, ["read"], ["publish"])
    shown = answer(run("runs", "show", "tuesday", "--json"))
    assert (shown["run"]["status"], shown["fork_of"]) == ("paused", {"run": "monday", "step": "publish"})
    assert "monday, from publish" in run("runs", "show", "tuesday").stdout
    assert answer(run("runs", "resume", "tuesday", "--print", "--json"))["argv"] == [
        *began[:5], "--store", str(store), "--id", "tuesday", "--arg", 'region="eu"',
    ]  # fmt: skip
    assert answer(run("run", f"{program}:report", "--id", "tuesday", "--arg", "region=eu", "--json"))["result"] == [
        "eu", 1, 2,
    ]  # fmt: skip
    steps = answer(run("runs", "diff", "monday", "tuesday", "--json"))["steps"]
    assert {step["path"]: step["verdict"] for step in steps} == {"read": "same", "publish": "different"}
    shown = run("runs", "diff", "monday", "tuesday").stdout
    assert "different inputs: region" in shown
    assert shown.endswith("the runs differ: 1 step same, 1 step different\n")
    assert run("runs", "diff", "monday", "monday").stdout.endswith("the results are the same: 2 steps\n")
    assert "no step nowhere" in run("runs", "fork", "monday", "--from", "nowhere", code=4).stderr
    assert (
        "no parameter regoin" in run("runs", "fork", "monday", "--from", "publish", "--arg", "regoin=eu", code=3).stderr
    )
    many = run("runs", "fork", "--from", "publish", "--pipeline", "report", "--arg", "region=eu")
    assert "monday → monday-fork-" in many.stdout
    assert many.stdout.endswith("would make 1 fork; run it again with --apply\n")  # tuesday is one
    (document,) = answer(run("runs", "fork", "--from", "publish", "--status", "completed", "--apply", "--json"))[
        "forks"
    ]
    assert (document["run"], document["applied"]) == ("monday", True)
    again = run("runs", "fork", "--from", "publish", "--status", "completed", "--apply")
    assert again.stdout.endswith("made 0 forks (1 of 1 exist)\n")
    assert "name a RUN" in run("runs", "fork", "--from", "publish", code=3).stderr
    assert "names one fork" in run("runs", "fork", "--from", "read", "--prefix", "m", "--key", "k", code=3).stderr
    assert "no such run" in run("runs", "fork", "--from", "read", "--prefix", "none", code=4).stderr
    listed = answer(run("runs", "list", "--status", "paused", "--pipeline", "report", "--json"))["runs"]
    assert [each["key"] for each in listed] == [document["fork"]]
