"""Calls of models in pipelines: paid once in all runs, and counted."""

import asyncio
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli import cli
from kedge.llm.bills import Bill
from kedge.llm.cache import JOB, Cache
from kedge.pipeline.history import bills_of

ASKED: list[dict[str, Any]] = []


def ask(**asked: Any) -> dict[str, Any]:
    """As a vendor's client answers, as plain data."""
    ASKED.append(asked)
    text = f"answer {len(ASKED)}"
    usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    return {"model": asked["model"], "choices": [{"message": {"content": text}}], "usage": usage}


def ask_text(**asked: Any) -> str:
    ASKED.append(asked)
    return f"text {len(ASKED)}"


@pytest.fixture(autouse=True)
def _nothing_asked_yet() -> None:
    ASKED.clear()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def question(text: str) -> dict[str, Any]:
    return {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": text}]}


def total(store: kedge.CheckpointManager, **options: Any) -> Bill:
    return sum(kedge.llm.totals(store, **options).values(), Bill())


def test_paid_once_in_all_runs(store: kedge.CheckpointManager) -> None:
    answers = []
    for key in ("monday", "monday", "tuesday"):
        with kedge.run(key, store=store) as run:
            answers.append(run.llm("ask", ask, **question("why?"), temperature=1))
    assert answers[0] == answers[1] == answers[2]
    assert len(ASKED) == 1
    assert ASKED[0] == {**question("why?"), "temperature": 1}
    monday, tuesday = total(store, run="monday"), total(store, run="tuesday")
    assert (monday.paid, monday.found, monday.saved) == (1, 0, 0)
    assert (tuesday.paid, tuesday.found, tuesday.spent) == (0, 1, 0)
    assert monday.spent == tuesday.saved == Decimal("0.00021")
    assert monday.tokens_paid.input == 1000


def test_what_makes_another_call(store: kedge.CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        run.llm("1", ask_text, **question("a"))
        run.llm("2", ask_text, **question("a"))
        run.llm("3", ask_text, **question("a"), temperature=0.0)
        run.llm("4", ask_text, **question("a"), temperature=0)  # the same as 3
        run.llm("5", ask_text, **question("a"), tools=[{"type": "function", "name": "f"}])
        run.llm("6", ask_text, **question("a"), sample=1)
        run.llm("7", ask_text, **question("a"), version=2)
        run.llm("8", ask, **question("a"))  # its answers have another form
        run.llm("9", ask_text, **question("a"), mode="refresh")
        run.llm("10", ask_text, **question("a"), mode="off")
        assert run.llm("11", ask_text, **question("a"), mode="replay") == "text 7"
        with pytest.raises(kedge.ReplayMiss, match='content was "a", is "b"'):
            run.llm("12", ask_text, **question("b"), mode="replay")
    assert len(ASKED) == 8


def test_async_calls(store: kedge.CheckpointManager) -> None:
    async def ask_later(**asked: Any) -> str:
        await asyncio.sleep(0)  # sleep: a round of the loop, in which the others ask too
        return ask_text(**asked)

    async def main(key: str) -> list[str]:
        async with kedge.run(key, store=store) as run:
            return await asyncio.gather(*(run.llm(f"ask {n}", ask_later, **question("same")) for n in range(5)))

    assert asyncio.run(main("a")) == asyncio.run(main("b")) == ["text 1"] * 5


def test_a_step_for_all_runs(store: kedge.CheckpointManager) -> None:
    calls = []

    @kedge.step(cache="llm", name="judge {text}")
    def judge(text: str) -> dict[str, Any]:
        calls.append(text)
        return ask(**question(text))

    for key in ("a", "b"):
        with kedge.run(key, store=store, progress=False) as run:
            judge("good")
            with run.stage("more"):
                judge("bad")
    assert calls == ["good", "bad"]
    assert (total(store).paid, total(store).found) == (2, 2)
    with pytest.raises(kedge.Validation):
        kedge.step(cache="forever")  # type: ignore[call-overload]


def test_failures_are_tried_again_and_not_kept(store: kedge.CheckpointManager) -> None:
    def moody(**asked: Any) -> str:
        if len(ASKED) < 2:
            ASKED.append(asked)
            raise OSError("busy")
        return ask_text(**asked)

    with kedge.run("r", store=store) as run:
        retry = kedge.Retry(times=5, delay_s=0.001)
        assert run.llm("ask", moody, **question("x"), retries=retry) == "text 3"
    assert len(store.list(JOB)) == 1
    assert total(store).paid == 1


def test_answers_that_cannot_be_kept(store: kedge.CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        with pytest.raises(kedge.UnsupportedType, match="an answer cannot be saved"):
            run.llm("object", lambda **_: object(), **question("x"))

        async def later() -> str:
            return ""

        with pytest.raises(kedge.Validation, match="coroutine"):
            run.llm("coroutine", lambda **_: later(), **question("x"))
        with pytest.raises(kedge.Validation):
            run.llm("nonsense", ask, model="m", messages=[{"content": float("nan")}])
        with pytest.raises(kedge.Validation, match="not a list of messages"):
            run.llm("text", ask, model="m", messages="hello")
        with pytest.raises(kedge.Validation):
            run.llm("sample", ask, **question("x"), sample=-1)


def test_objects_of_the_vendors_become_data(store: kedge.CheckpointManager) -> None:
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage(role="assistant", content="hello")
    for key in ("a", "b"):
        with kedge.run(key, store=store) as run:
            answer = run.llm("ask", lambda **_: message, model="m", messages=[message])
            assert answer["content"] == "hello"


def work(number: int) -> str:
    with kedge.llm.http_client(store=STORE["url"], transport=_answering()) as client:
        asked = {**question(f"item {number % 2}")}
        return str(client.post("http://m/v1/chat/completions", json=asked).json()["text"])


STORE: dict[str, str] = {}


def _answering() -> Any:
    import httpx2

    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    return httpx2.MockTransport(lambda request: httpx2.Response(200, json={"text": "x", "usage": usage}))


def test_money_of_a_map_and_of_what_is_inside(store: kedge.CheckpointManager) -> None:
    STORE["url"] = store.url
    with kedge.run("r", store=store) as run:
        with run.stage("many"):
            assert run.map(work, range(4), name="items", workers=2) == ["x"] * 4
        run.step("outer", lambda: run.llm("inner", ask, **question("inside")))
    bills = bills_of(store, "r")
    assert (bills["many/items"].paid, bills["many/items"].found) == (2, 2)
    assert bills["outer"] == bills["outer/inner"]
    assert bills[""].paid == 3
    outer = next(c for c in store.list("r") if c.step == "outer")
    assert Bill.from_json(outer.metadata["llm"]) == bills["outer"]


@pytest.fixture
def kedge_says(store: kedge.CheckpointManager) -> Callable[..., str]:
    def say(*words: str) -> str:
        result = CliRunner().invoke(cli, [*words, "--store", store.url])
        assert result.exit_code == 0, result.output
        return result.stdout

    return say


def test_on_the_command_line(store: kedge.CheckpointManager, kedge_says: Callable[..., str], tmp_path: Path) -> None:
    assert "none yet" in kedge_says("llm", "stats")
    for key in ("one", "two"):
        with kedge.run(key, store=store) as run:
            run.llm("ask", ask, **question("why?"))
            run.llm("tell", ask_text, model="house-model", messages=[])
    shown = kedge_says("llm", "stats")
    assert "2 paid, $0.00021 spent and 1 unpriced; 2 found, $0.00021 saved and 1 unpriced" in shown
    assert "house-model" in shown
    told = json.loads(kedge_says("llm", "stats", "--json", "--by", "run", "--by", "step"))
    assert told["answers"] == 2
    assert told["total"]["spent"] == "0.00021"
    spent = {(group["run"], group["step"]): (group["spent"], group["saved"]) for group in told["groups"]}
    assert spent["one", "ask"] == ("0.00021", "0")
    assert spent["two", "ask"] == ("0", "0.00021")
    only = json.loads(kedge_says("llm", "stats", "--json", "--run", "two"))
    assert (only["total"]["paid"], only["total"]["found"]) == (0, 2)
    assert "models    2 paid, $0.00021 spent and 1 unpriced" in kedge_says("runs", "show", "one")
    assert json.loads(kedge_says("runs", "show", "two", "--json"))["llm"]["saved"] == "0.00021"
    kedge_says("llm", "export", "--to", str(tmp_path / "answers.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["gpt-4o-mini", "house-model"]
    assert lines[0]["request"]["body"] == question("why?")
    assert lines[0]["answer"]["result"]["choices"][0]["message"]["content"] == "answer 1"
    assert lines[1]["cost"] is None
    assert kedge_says("llm", "export").count("\n") == 2
    assert "1 answer would be removed" in kedge_says("llm", "clear", "--model", "house-model")
    assert json.loads(kedge_says("llm", "clear", "--older-than", "1d", "--json", "--yes"))["answers"] == 0
    assert "1 answer removed" in kedge_says("llm", "clear", "--model", "house-model", "--apply")
    assert len(list(Cache.of(store).entries())) == 1
    assert json.loads(kedge_says("llm", "stats", "--json"))["total"] == told["total"]  # the books stay


def test_progress_shows_money(store: kedge.CheckpointManager, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("one", "two"):
        with kedge.run(key, store=store, progress=True) as run:
            run.llm("ask", ask, **question("why?"))
    err = capsys.readouterr().err
    assert "(1 paid, $0.00021 spent)" in err
    assert "(1 found, $0.00021 saved)" in err
    assert "models: 1 found, $0.00021 saved" in err


def test_retention_like_everything_else(store: kedge.CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        for number in range(5):
            run.llm(f"ask {number}", ask_text, **question(f"question {number}"))
    store.cleanup(JOB, keep_last=2)
    with kedge.run("again", store=store) as run:
        for number in range(5):
            run.llm(f"ask {number}", ask_text, **question(f"question {number}"))
    assert len(ASKED) == 8
    assert total(store).paid == 8
