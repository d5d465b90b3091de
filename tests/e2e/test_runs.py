"""Runs in processes of their own: killed, asked to stop, held, resumed from the command line."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

PROGRAM = """
    import os, sys, threading, time
    import kedge

    def note(word):
        with open("log", "a") as log:
            log.write(word + "\\n")

    def watch():
        # tells by files what the main thread has come to
        while True:
            if any(thread.name == "kedge-grace" for thread in threading.enumerate()):
                open("is stopping", "a").close()  # the period of grace has begun
            frame, names = sys._current_frames()[threading.main_thread().ident], []
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            if "finish" in names and "wait" in names[: names.index("finish")]:
                open("begins no item", "a").close()
            time.sleep(0.02)  # sleep: between two looks

    threading.Thread(target=watch, daemon=True).start()

    def held(n):
        note(f"begin {n}")
        while not os.path.exists("go"):
            time.sleep(0.02)  # sleep: between two looks
        note(f"end {n}")
        return n * n

    def free(n):
        note(f"begin {n}")
        note(f"end {n}")
        return n * n

    @kedge.step(name="work {n}")
    def work(n, hold):
        return held(n) if n == hold else free(n)

    @kedge.pipeline
    def squares(count=5, hold=2):
        with kedge.current_run().stage("all"):
            return sum(work(n, hold) for n in range(count))

    @kedge.pipeline
    def mapped(executor):
        return kedge.current_run().map(held, range(6), workers=2, executor=executor)

    @kedge.pipeline
    async def later(wait_s=None):
        async def add(n):
            note(f"add {n}")
            return n + 1
        run = kedge.current_run()
        total = await run.step("add", add, 41)
        if wait_s is not None:
            await run.aio.signal("go", wait_s=wait_s)
        return total

    @kedge.pipeline(store="own")
    def at_home():
        return kedge.current_run().step("work", free, 3)

    if __name__ == "__main__":
        with kedge.run("script", grace_s=float(sys.argv[1])) as run:
            for n in range(5):
                run.step(f"work {n}", work.__wrapped__, n, int(sys.argv[2]))
        note("completed")
"""


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
        self.env = {**os.environ, "KEDGE_STORE": str(folder / "store")}

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.env,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, (out, err)
        return out + err

    def kedge(self, *words: str, code: int = 0) -> str:
        return self.run("-m", "kedge", *words, code=code)

    def go(self) -> None:
        """End the step that is held"""
        (self.folder / "go").touch()

    def wait_until(self, state: str) -> None:
        """Until the program, which looks at itself, says so"""
        wait_for((self.folder / state).exists, f"it does not come to this: {state}")

    def wait_for(self, line: str) -> None:
        wait_for(lambda: line in self.lines(), f"it does not say {line!r}")

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def runs(self) -> Any:
        return {run["key"]: run for run in json.loads(self.kedge("runs", "list", "--json"))["runs"]}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def test_killed_and_started_again_at_once(program: Program) -> None:
    process = program.start("program.py", "5", "2")
    program.wait_for("begin 2")
    process.kill()
    process.communicate()
    found = program.runs()["script"]
    assert found["status"] == "abandoned"
    assert found["is_abandoned"]
    program.go()
    program.run("program.py", "5", "2")  # its lease still runs, but its owner is known to be gone
    lines = program.lines()
    assert [lines.count(f"end {n}") for n in range(5)] == [1, 1, 1, 1, 1]
    assert lines.count("begin 2") == 2
    assert program.runs()["script"]["status"] == "completed"


def test_sigterm_finishes_the_step_pauses_and_says_how_to_resume(program: Program) -> None:
    process = program.start("program.py", "60", "1")
    program.wait_for("begin 1")
    process.terminate()
    program.go()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"kedge runs resume script --store {program.folder}/store" in err
    assert program.lines() == ["begin 0", "end 0", "begin 1", "end 1"]
    assert program.runs()["script"]["status"] == "paused"
    assert "program.py" in program.kedge("runs", "resume", "script", "--print")
    program.kedge("runs", "resume", "script")
    assert [program.lines().count(f"end {n}") for n in range(5)] == [1, 1, 1, 1, 1]
    assert program.lines()[-1] == "completed"
    program.kedge("runs", "resume", "script", code=5)  # completed


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_sigterm_finishes_the_items_under_way(program: Program, executor: str) -> None:
    process = program.start("-m", "kedge", "run", "program.py:mapped", "--id", "m", "--arg", f"executor={executor}")
    program.wait_for("begin 0")
    program.wait_for("begin 1")
    process.terminate()
    program.wait_until("begins no item")
    assert process.poll() is None
    program.go()
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert sorted(program.lines()) == ["begin 0", "begin 1", "end 0", "end 1"]
    program.kedge("runs", "resume", "m")
    assert sorted(program.lines()) == sorted(f"{word} {n}" for word in ("begin", "end") for n in range(6))


def test_the_processes_of_a_killed_run_end_with_it(program: Program) -> None:
    process = program.start("-m", "kedge", "run", "program.py:mapped", "--id", "m", "--arg", "executor=process")
    program.wait_for("begin 0")
    program.wait_for("begin 1")
    process.kill()
    process.communicate(timeout=60)  # nobody has its streams any more
    program.go()
    program.kedge("runs", "resume", "m")
    assert sorted(program.lines()) == sorted(
        [f"{w} {n}" for w in ("begin", "end") for n in range(6)] + ["begin 0", "begin 1"]
    )


@pytest.mark.parametrize("how", ["grace", "twice"])
def test_a_step_that_takes_too_long_is_left_at_once(program: Program, how: str) -> None:
    process = program.start("program.py", "0.2" if how == "grace" else "60", "0")
    program.wait_for("begin 0")
    process.send_signal(signal.SIGINT)
    if how == "twice":  # two that come at once would be one
        program.wait_until("is stopping")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert program.runs()["script"]["status"] == "paused"
    assert program.lines() == ["begin 0"]


def test_held_and_let_go_by_signals(program: Program) -> None:
    process = program.start("program.py", "60", "0")
    program.wait_for("begin 0")
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGHUP)
    program.go()
    program.wait_for("end 0")
    wait_for(lambda: program.runs()["script"]["status"] == "paused", "it is not held")
    assert program.lines() == ["begin 0", "end 0"]
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert program.lines()[-1] == "completed"


def test_a_pipeline_of_a_file(program: Program) -> None:
    words = ("run", "program.py:squares", "--id", "sq", "--arg", "count=5", "--json")
    process = program.start("-m", "kedge", *words)
    program.wait_for("begin 2")
    process.send_signal(signal.SIGUSR1)  # hold on behind the step
    program.kedge(*words, code=5)  # another owner
    program.go()
    wait_for(lambda: program.runs()["sq"]["status"] == "paused", "it is not held")  # the step is kept by then
    process.kill()
    process.communicate()
    assert json.loads(program.kedge(*words)) == {"run": "sq", "status": "completed", "result": 30}
    assert program.lines().count("begin 2") == 1
    steps = {s["path"]: s for s in json.loads(program.kedge("runs", "explain", "sq", "--json"))["steps"]}
    assert [steps[f"all/work {n}"]["verdict"] for n in range(5)] == ["reused"] * 3 + ["ran"] * 2
    assert "all/work 4" in program.kedge("runs", "explain", "sq")
    assert "work 4" in program.kedge("runs", "show", "sq")
    assert json.loads(program.kedge("run", "program.py:squares", "--id", "sq", "--arg", "count=5", "--json"))


def test_wrong_use_of_the_commands(program: Program) -> None:
    program.kedge("run", "program.py", code=3)
    program.kedge("run", "missing.py:x", code=4)
    program.kedge("run", "program.py:work", code=4)
    program.kedge("run", "program.py:squares", "--arg", 'count="x"', code=1)
    for command in ("show", "explain", "resume", "cancel"):
        program.kedge("runs", command, "unknown", code=4)
    (key,) = program.runs()
    assert program.runs()[key]["status"] == "failed"
    assert "is cancelled" in program.kedge("runs", "cancel", key)
    program.kedge("runs", "resume", key, code=5)


def test_a_pipeline_of_coroutines(program: Program) -> None:
    said = program.kedge("run", "program.py:later", "--id", "a", "--json")
    assert json.loads(said) == {"run": "a", "status": "completed", "result": 42}
    program.kedge("run", "program.py:later", "--id", "b", "--arg", "wait_s=0", code=75)
    program.kedge("runs", "signal", "b", "go")
    program.kedge("runs", "resume", "b")
    assert program.lines() == ["add 41"] * 2


def test_the_store_is_that_of_the_decorator_unless_another_is_asked_for(program: Program) -> None:
    program.kedge("run", "program.py:at_home", "--id", "h")
    assert "work" in program.kedge("runs", "show", "h", "--store", "own")
    program.kedge("run", "program.py:at_home", "--id", "h", "--store", "other")
    assert "work" in program.kedge("runs", "show", "h", "--store", "other")
    assert not (program.folder / "store").exists()


@pytest.mark.parametrize("place", ["files:kept", "file:with space", "~/kept"])
def test_a_run_is_resumed_in_the_store_that_has_it(program: Program, place: str) -> None:
    program.env |= {"KEDGE_STORE": place, "HOME": str(program.folder)}
    said = program.kedge("run", "program.py:later", "--id", "r", "--arg", "wait_s=0", code=75)
    program.kedge("runs", "signal", "r", "go")
    command = shlex.split(said.split("to resume it: ")[1].splitlines()[0])
    program.env["KEDGE_STORE"] = "elsewhere"
    program.kedge(*command[1:])
    assert program.lines() == ["add 41"]
    assert not (program.folder / "elsewhere").exists()


def test_what_cannot_be_called_leaves_no_run_behind(program: Program) -> None:
    assert "it has no argument q" in program.kedge("run", "program.py:squares", "--arg", "q=1", code=3)
    program.kedge("run", "program.py:squares", "--id", "", code=3)
    (program.folder / "broken.py").write_text("def x(:")
    assert "SyntaxError" in program.kedge("run", "broken.py:x", code=1)
    (program.folder / "inner").mkdir()
    (program.folder / "inner" / "json.py").write_text("")
    assert "rename the file" in program.kedge("run", "inner/json.py:x", code=3)
    assert not (program.folder / "store").exists()


def test_a_program_whose_processes_cannot_start_is_told_why(program: Program) -> None:
    (program.folder / "bare.py").write_text(
        "import kedge\nwith kedge.run('bare') as run:\n    run.map(abs, [1, 2], executor='process', workers=1)\n"
    )
    said = program.run("bare.py", code=1)
    assert 'below `if __name__ == "__main__":`' in said
    assert program.runs()["bare"]["status"] == "failed"
