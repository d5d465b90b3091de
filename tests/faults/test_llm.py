"""Killed at any durable write: no answer that is kept is paid again, and none is kept that the books do not show."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager
from kedge.llm.bills import Bill
from kedge.llm.cache import Answer, Cache
from kedge.llm.flights import JOB as FLIGHTS
from kedge.store.local import LocalStore
from tests.servers.models import ModelServer
from tests.torture.pipelines import Killed, MortalIndex, Violation, World

pytestmark = pytest.mark.faults


class Vendor(World):
    """Each call has a model of its own, by which its answer is known when it becomes durable."""

    def complete(self, metadata: dict[str, Any]) -> None:
        if metadata.get("kind") == "llm":
            self.completed.add(str(metadata["model"]))


def pipeline(run: kedge.Run, mortal: MortalIndex) -> list[Any]:
    def ask(**asked: Any) -> dict[str, Any]:
        mortal.note(asked["model"])
        return {"text": asked["model"].upper(), "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    def both() -> list[Any]:
        return [run.llm(f"inner {n}", ask, model=f"inner {n}", messages=[]) for n in range(2)]

    def item(number: int) -> Any:
        return run.llm("ask", ask, model=f"item {number % 2}", messages=[])["text"]

    first = run.llm("first", ask, model="first", messages=[])
    return [first, run.step("both", both), run.map(item, range(3), name="items", workers=1)]


def session(
    keeper: CheckpointManager, key: str, world: World, dies_at: int = 0, dies_before: bool = False
) -> tuple[Any, int]:
    """The result of one session, None when it was killed, and how many durable writes there were."""
    index = keeper.store.index
    mortal = MortalIndex(index, world, dies_at, dies_before)  # type: ignore[arg-type]
    manager = CheckpointManager("memory:")
    manager.store = LocalStore(mortal, keeper.store.blobs)  # type: ignore[arg-type]
    try:
        with kedge.run(key, store=manager, signals=False) as run:
            result = pipeline(run, mortal)
        return result, mortal._writes
    except Killed:
        Cache.of(manager).books._found.clear()  # what was in memory is gone
        if mortal.lease is not None:
            index.release_lease(mortal.lease)  # what the next owner does when it finds this one gone
        return None, mortal._writes


def check_every_kill() -> int:
    """One kill at each durable write of the pipeline, before and after it; answers how many there were."""
    kills = 0
    for dies_at in range(1, 1000):
        for dies_before in (True, False):
            world = Vendor({})
            with kedge.open("memory:") as keeper:
                result, writes = session(keeper, "r", world, dies_at, dies_before)
                if writes < dies_at:
                    return kills
                kills += result is None
                check_books(keeper, world)
                result, _ = session(keeper, "r", world)
                assert result == session(keeper, "another", world)[0]
                assert [entry["text"] for entry in (result[0], *result[1])] == ["FIRST", "INNER 0", "INNER 1"]
                assert result[2] == ["ITEM 0", "ITEM 1", "ITEM 0"]
                check_books(keeper, world)
                if sum(world.executions.values()) > 6:
                    raise Violation(f"paid more than once for a kill: {world.executions}")
    raise AssertionError("it never ends")


def check_books(keeper: CheckpointManager, world: World) -> None:
    bills = {model: bill for (model,), bill in kedge.llm.totals(keeper, by=("model",)).items()}
    for model in world.completed:
        if not bills.get(model, Bill()).paid:
            raise Violation(f"the answer of {model} is kept, and not in the books")
    for model, calls in world.executions.items():
        if bills.get(model, Bill()).paid > calls:
            raise Violation(f"{model} was called {calls} times, and more are in the books")


def test_killed_at_any_durable_write() -> None:
    assert check_every_kill() > 30


@pytest.mark.mutant
def test_an_answer_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "keep", lambda *_, **__: None)
    with pytest.raises(Violation):
        check_every_kill()


@pytest.mark.mutant
def test_books_behind_the_answers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Cache.keep

    def keep_then_pay(cache: Cache, request: Any, answer: Answer, **options: Any) -> None:
        keep(cache, request, answer, **{**options, "is_paid": False})
        cache.pay(request, answer)

    monkeypatch.setattr(Cache, "keep", keep_then_pay)
    with pytest.raises(Violation, match="not in the books"):
        check_every_kill()


DIE = """
import os, signal, sys, kedge
from kedge.llm.cache import Answer, Cache
store, url, dies_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
keep, kept = Cache.keep, 0

def keep_or_die(cache, *args, **options):
    global kept
    kept += 1
    if kept == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)     # the answer is here, and nothing of it is durable
    keep(cache, *args, **options)

Cache.keep = keep_or_die
with kedge.open(store) as opened, kedge.run("r", store=opened) as run:
    client = kedge.llm.http_client(store=opened)
    def ask(number):
        asked = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
        return client.post(url + "/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    print(run.map(ask, range(3), workers=1))
"""


def test_killed_between_the_answer_and_its_record(tmp_path: Path) -> None:
    with ModelServer() as server:
        words = [sys.executable, "-c", DIE, str(tmp_path / "store"), server.url]
        killed = subprocess.run([*words, "2"], capture_output=True, text=True, timeout=60)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert server.calls == {"question 0": 1, "question 1": 1}
        with kedge.open(tmp_path / "store") as store:
            assert len(store.list(FLIGHTS)) == 1  # nobody waits for it: its process is gone
        done = subprocess.run([*words, "0"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert server.calls == {"question 0": 1, "question 1": 2, "question 2": 1}
    with kedge.open(tmp_path / "store") as store:
        assert sum(kedge.llm.totals(store).values(), Bill()).paid == 3  # one of four died before it was written down
        assert store.list(FLIGHTS) == []
        assert store.verify().is_ok
