"""KedgeSaver in real graphs: exact types, one writer, time travel, growth, whole threads."""

import asyncio
import random
import re
import string
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest

from tests.parts import require

require("module:langgraph")

from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Interrupt, Send, interrupt

import kedge
from kedge.integrations.langgraph import KedgeSaver, names

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


@pytest.fixture
def saver(tmp_path: Path):
    with KedgeSaver(tmp_path / "store") as found:
        yield found


def text(size: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + " ", k=size))


def chat_graph(saver: KedgeSaver, answer: Callable[[MessagesState], str]) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("chat", lambda state: {"messages": [AIMessage(answer(state))]})
    builder.add_edge(START, "chat")
    builder.add_edge("chat", END)
    return builder.compile(checkpointer=saver)


def put(saver: KedgeSaver, values: dict[str, Any], config: Any = CONFIG, **metadata: Any) -> Any:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, 1)
    return saver.put(config, checkpoint, {"source": "loop", "step": 1, **metadata}, checkpoint["channel_versions"])


def loaded(saver: KedgeSaver, config: Any = CONFIG) -> dict[str, Any]:
    """The values as another process would see them."""
    with KedgeSaver(saver.manager) as fresh:
        found = fresh.get_tuple(config)
    assert found is not None
    return found.checkpoint["channel_values"]


# Types


class Unknown:
    """Without fields to save by."""


MESSAGES = [
    HumanMessage("hello", id="1"),
    HumanMessage([{"type": "text", "text": text(600, 1)}, {"type": "image_url", "image_url": {"url": "x"}}]),
    AIMessage(text(2000, 2), id="2", usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
    AIMessage("", tool_calls=[{"name": "f", "args": {"n": 1, "f": 1.0, "b": True}, "id": "c"}]),
    ToolMessage("done", tool_call_id="c", artifact={"rows": (1, 2)}),
    SystemMessage("be brief", additional_kwargs={"k": [1, {"deep": None}]}),
    RemoveMessage(id="1"),
]

VALUES: dict[str, Any] = {
    "tuple": (1, (2,), [3]),
    "set": {1, 2},
    "objects": np.array([1, "a", None], dtype=object),
    "array": np.arange(5000.0),
    "decimal": Decimal("1.10"),
    "when": datetime(2026, 1, 1, tzinfo=UTC),
    "uuid": uuid.UUID(int=7),
    "keys": {1: "a", (2, 3): "b"},
    "error": ValueError("bad", 3),
    "send": Send("node", {"x": (1,)}),
    "interrupt": Interrupt("why?", id="i"),
    "command": Command(update={"a": 1}, goto="b"),
    "delta": _DeltaSnapshot([1]),
    "bytes": b"x" * 9000,
    "long": text(50_000, 3),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_what_it_was(saver: KedgeSaver, name: str) -> None:
    put(saver, {name: VALUES[name]})
    found = loaded(saver)[name]
    assert type(found) is type(VALUES[name])
    if isinstance(found, np.ndarray):
        assert found.dtype == VALUES[name].dtype
        assert found.tolist() == VALUES[name].tolist()
    elif isinstance(found, Exception):
        assert found.args == VALUES[name].args
    else:
        assert found == VALUES[name]


def test_messages_come_back_as_what_they_were(saver: KedgeSaver) -> None:
    put(saver, {"messages": MESSAGES})
    for found in (loaded(saver)["messages"], saver.get_tuple(CONFIG).checkpoint["channel_values"]["messages"]):
        assert found == MESSAGES
        for message, original in zip(found, MESSAGES, strict=True):
            assert message.__dict__ == original.__dict__
            assert type(message) is type(original)
            assert message.model_fields_set == original.model_fields_set
        assert type(found[3].tool_calls[0]["args"]["f"]) is float
        assert type(found[3].tool_calls[0]["args"]["b"]) is bool
        assert type(found[4].artifact["rows"]) is tuple


def test_what_cannot_be_saved_is_named_and_nothing_is_stored(saver: KedgeSaver) -> None:
    with pytest.raises(kedge.UnsupportedType) as refused:
        put(saver, {"messages": [HumanMessage("a")], "work": {"model": [Unknown()]}})
    assert 'state["channel_values"]["work"]["model"][0]' in str(refused.value)
    assert saver.get_tuple(CONFIG) is None
    config = put(saver, {})
    with pytest.raises(kedge.UnsupportedType):
        saver.put_writes(config, [("work", [Unknown()])], "task")


def test_loading_imports_nothing(saver: KedgeSaver) -> None:
    put(saver, {"messages": MESSAGES})
    before = set(sys.modules)
    loaded(saver)
    assert set(sys.modules) == before


# What is remembered is never what others hold


def test_changes_in_place_are_seen_and_never_shared(saver: KedgeSaver) -> None:
    messages = [HumanMessage(f"m{n}", id=str(n), additional_kwargs={"n": 1}) for n in range(20)]
    config = put(saver, {"messages": messages})
    first = saver.get_tuple(config).checkpoint["channel_values"]["messages"]
    first[3].content = "changed by a reader"
    first[4].additional_kwargs["n"] = 2
    assert saver.get_tuple(config).checkpoint["channel_values"]["messages"] == messages
    messages[5].additional_kwargs["n"] = True  # equal to 1, but not the same
    messages[6].content += "!"
    put(saver, {"messages": messages}, config)
    assert loaded(saver)["messages"] == messages
    assert loaded(saver)["messages"][5].additional_kwargs["n"] is True
    assert loaded(saver, config)["messages"][6].content == "m6"


@pytest.mark.parametrize(
    ("count", "size"), [(0, 1), (1, 255), (15, 256), (16, 257), (300, 1), (300, 100), (300, 1000), (40, 9000)]
)
def test_lists_of_all_sizes(saver: KedgeSaver, count: int, size: int) -> None:
    values = {"a": [text(size, n) for n in range(count)], "b": 7, "c": {"d": text(size, 1)}, "e": list(range(count))}
    put(saver, values)
    assert loaded(saver) == values


@pytest.mark.parametrize("levels", [150, 196, 197, 198, 200, 400])
def test_values_of_any_depth(saver: KedgeSaver, levels: int) -> None:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    put(saver, {"a": value, "b": {"c": value}})
    assert loaded(saver) == {"a": value, "b": {"c": value}}


# Threads


@pytest.mark.parametrize("thread", ["plain", "a b/ü@+%", "x" * 500, "ü" * 100, "-", "a@b"])
@pytest.mark.parametrize("namespace", ["", "child:1", "a:" + "b" * 40 + "|c:" + "d" * 90])
def test_any_name_of_a_thread_will_do(saver: KedgeSaver, thread: str, namespace: str) -> None:
    config = {"configurable": {"thread_id": thread, "checkpoint_ns": namespace}}
    put(saver, {"x": 1}, config)
    put(saver, {"x": 2}, {"configurable": {"thread_id": "other", "checkpoint_ns": namespace}})
    (found,) = saver.list(config)
    assert found.config["configurable"]["thread_id"] == thread
    assert found.config["configurable"]["checkpoint_ns"] == namespace
    saver.copy_thread(thread, "copy of " + thread)
    copy = {"configurable": {"thread_id": "copy of " + thread, "checkpoint_ns": namespace}}
    assert loaded(saver, copy) == {"x": 1}
    saver.delete_thread(thread)
    assert saver.get_tuple(config) is None
    assert {t.config["configurable"]["thread_id"] for t in saver.list(None)} == {"other", "copy of " + thread}


def test_names_can_be_told_apart() -> None:
    pairs = [
        ("a", ""),
        ("a", "b"),
        ("a@b", ""),
        ("a+40b", ""),
        ("a", "b@c"),
        ("A", ""),
        ("x" * 200, ""),
        ("x" * 201, ""),
    ]
    assert len({names.job_of(*pair) for pair in pairs}) == len(pairs)
    assert [names.names_of(names.job_of(*pair)) for pair in pairs[:6]] == pairs[:6]


@pytest.mark.parametrize("thread", ["", "\ud800"])
def test_a_thread_must_have_a_name(saver: KedgeSaver, thread: str) -> None:
    with pytest.raises(kedge.Validation):
        saver.get_tuple({"configurable": {"thread_id": thread}})


def test_threads_are_jobs(saver: KedgeSaver) -> None:
    graph = chat_graph(saver, lambda state: "yes")
    graph.invoke({"messages": [HumanMessage("really?")]}, {"configurable": {"thread_id": "customer 7"}})
    (job,) = saver.manager.jobs()
    assert job.name == "thread:customer+207"
    steps = saver.manager.list(job.name, level="step")
    assert [checkpoint.step for checkpoint in steps] == ["input -1", "loop 0", "loop 1"]
    assert steps[1].parent == steps[0].id
    assert saver.manager.diff(steps[1].id, steps[2].id).changes
    found = saver.checkpoints({"configurable": {"thread_id": "customer 7"}}, filter={"source": "loop"})
    assert [checkpoint.id for checkpoint in found] == [steps[2].id, steps[1].id]


@pytest.mark.parametrize("key", ["a.b", 'a"b', "a') OR 1=1 --", "", "x" * 200, "step"])
def test_filters_are_data(saver: KedgeSaver, key: str) -> None:
    put(saver, {}, **{key: "v"})
    put(saver, {}, other="w")
    assert len(list(saver.list(CONFIG, filter={key: "v"}))) == 1
    assert not list(saver.list(CONFIG, filter={key: "w' OR '1'='1"}))
    assert not list(saver.list(CONFIG, filter={key: {"$ne": 1}}))


def test_metadata_comes_back_as_it_was(saver: KedgeSaver) -> None:
    given = {"score": 1.5, "many": {"a": [1, 2]}, "long": "x" * 5000, "nan": float("inf"), "thread": "y", "a.b": None}
    put(saver, {}, **given)
    found = saver.get_tuple(CONFIG).metadata
    assert found == {"source": "loop", "step": 1, **given}


# Runs


def test_a_run_stops_for_approval_and_goes_on_in_another_process(tmp_path: Path) -> None:
    class State(TypedDict, total=False):
        plan: str
        ok: bool

    calls: list[str] = []

    def ask(state: State) -> State:
        return {"ok": interrupt({"publish": state["plan"]})}

    builder = StateGraph(State)
    builder.add_node("plan", lambda state: calls.append("plan") or {"plan": "p"})
    builder.add_node("ask", ask)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "ask")
    with KedgeSaver(tmp_path / "s") as saver:
        stopped = builder.compile(checkpointer=saver).invoke({}, CONFIG)
        assert stopped["__interrupt__"][0].value == {"publish": "p"}
    with KedgeSaver(tmp_path / "s") as saver:
        graph = builder.compile(checkpointer=saver)
        assert graph.get_state(CONFIG).next == ("ask",)
        assert graph.invoke(Command(resume=True), CONFIG) == {"plan": "p", "ok": True}
    assert calls == ["plan"]


def test_time_travel_and_edits_make_branches(saver: KedgeSaver) -> None:
    answers = iter("abcdefgh")
    graph = chat_graph(saver, lambda state: next(answers))
    for question in "12":
        graph.invoke({"messages": [HumanMessage(question)]}, CONFIG)
    old = next(s for s in graph.get_state_history(CONFIG) if s.next == ("chat",) and len(s.values["messages"]) == 1)
    branch = graph.invoke(None, old.config)
    assert [m.content for m in branch["messages"]] == ["1", "c"]
    edited = graph.update_state(old.config, {"messages": [HumanMessage("1b")]})
    assert [m.content for m in graph.get_state(edited).values["messages"]] == ["1", "1b"]
    copied = graph.update_state(graph.get_state(CONFIG).config, None, as_node="__copy__")
    assert graph.get_state(copied).values == graph.get_state(CONFIG).values


def test_async_graphs(saver: KedgeSaver) -> None:
    graph = chat_graph(saver, lambda state: str(len(state["messages"])))

    async def talk() -> Any:
        for _ in range(3):
            await graph.ainvoke({"messages": [HumanMessage("?")]}, CONFIG)
        found = [state async for state in graph.aget_state_history(CONFIG)]
        return found[0].values["messages"]

    assert [m.content for m in asyncio.run(talk())[1::2]] == ["1", "3", "5"]


def test_two_runs_on_one_thread_do_not_lose_each_other(tmp_path: Path) -> None:
    with KedgeSaver(tmp_path / "s") as one, KedgeSaver(tmp_path / "s") as two:
        chat_graph(one, lambda state: "first").invoke({"messages": [HumanMessage("1")]}, CONFIG)

        def intrude(state: MessagesState) -> str:
            chat_graph(two, lambda state: "quick").invoke({"messages": [HumanMessage("3")]}, CONFIG)
            return "slow"

        with pytest.raises(kedge.Conflict, match="continued by another run"):
            chat_graph(one, intrude).invoke({"messages": [HumanMessage("2")]}, CONFIG, durability="sync")
        kept = [m.content for m in loaded(two)["messages"]]
        assert kept == ["1", "first", "2", "3", "quick"], "the run that was told success is whole"
        chat_graph(one, lambda state: "again").invoke({"messages": [HumanMessage("4")]}, CONFIG)
        assert [m.content for m in loaded(one)["messages"]][-2:] == ["4", "again"]


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_runs_that_read_the_same_checkpoint(tmp_path: Path, is_shared: bool) -> None:
    with KedgeSaver(tmp_path / "s") as one, KedgeSaver(tmp_path / "s") as other:
        two = one if is_shared else other
        config = put(one, {"x": 0})
        one.get_tuple(CONFIG), two.get_tuple(CONFIG)
        put(one, {"x": 1}, config)
        with pytest.raises(kedge.Conflict):
            put(two, {"x": 2}, config)
        assert loaded(one) == {"x": 1}


def test_two_runs_that_both_begin_a_thread(saver: KedgeSaver) -> None:
    saver.get_tuple(CONFIG), saver.get_tuple(CONFIG)
    put(saver, {"x": 1})
    with pytest.raises(kedge.Conflict):
        put(saver, {"x": 2})


# Delta channels


def test_delta_channels_are_rebuilt_also_after_pruning(saver: KedgeSaver) -> None:
    config: Any = CONFIG
    for step in range(6):
        counters = {"counters_since_delta_snapshot": {"ch": (step % 3, step % 3)}}
        config = put(saver, {"ch": _DeltaSnapshot(step)} if step in (0, 3) else {}, config, **counters)
        saver.put_writes(config, [("ch", step)], f"task {step}")

    def history() -> tuple[Any, list[Any]]:
        found = saver.get_delta_channel_history(config=config, channels=["ch"])["ch"]
        return found["seed"], [value for _, _, value in found["writes"]]

    assert history() == (_DeltaSnapshot(3), [3, 4])
    assert asyncio.run(saver.aget_delta_channel_history(config=config, channels=[])) == {}
    saver.prune(["t"])
    assert len(list(saver.list(CONFIG))) == 3
    assert history() == (_DeltaSnapshot(3), [3, 4])


# Growth


def test_a_long_conversation_stays_small(tmp_path: Path) -> None:
    """200 turns of 500 and 1,500 random characters: on disk, in the index and again in packs, one by one and in
    blocks, at most 7 times the final state, every checkpoint readable."""
    turns = 200
    with KedgeSaver(tmp_path / "s") as saver:
        graph = chat_graph(saver, lambda state: text(1500, len(state["messages"])))
        for turn in range(turns):
            graph.invoke({"messages": [HumanMessage(text(500, -turn))]}, CONFIG, durability="sync")
    files = [file for file in (tmp_path / "s").rglob("*") if file.is_file() and file.parent.name != "reserve"]
    size = sum(file.stat().st_size for file in files)
    with KedgeSaver(tmp_path / "s") as saver:
        state = saver.manager.load_latest("thread:t", level="step")
        assert state is not None
        final = state[0].size_bytes
        assert final > turns * 2000
        assert size <= 7 * final, f"{size:,} bytes for a final state of {final:,}"
        checkpoints = saver.checkpoints(CONFIG)
        assert len(checkpoints) == 3 * turns
        for checkpoint in checkpoints[::20]:
            assert saver.manager.load(checkpoint.id)["checkpoint"]["v"]  # type: ignore[index]
        assert len(loaded(saver)["messages"]) == 2 * turns
        saver.prune(["t"])
        saver.manager.gc()
        assert len(loaded(saver)["messages"]) == 2 * turns
        assert saver.manager.verify().problems == ()


def test_the_document_runs_as_it_stands(tmp_path: Path) -> None:
    document = (Path(__file__).parents[4] / "docs" / "agents.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    (tmp_path / "agents.py").write_text("\n".join(blocks))
    subprocess.run([sys.executable, "agents.py"], check=True, cwd=tmp_path, timeout=100)


def test_turns_wait_for_each_other(tmp_path: Path) -> None:
    with KedgeSaver(tmp_path / "s") as one, KedgeSaver(tmp_path / "s") as two:

        def talk(saver: KedgeSaver) -> None:
            graph = chat_graph(saver, lambda state: f"answer {len(state['messages'])}")
            for _ in range(2):
                with saver.turn("t"):
                    graph.invoke({"messages": [HumanMessage("question")]}, CONFIG)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(talk, saver) for saver in (one, two, one)]:
                done.result()
        assert len(loaded(one)["messages"]) == 12
        with one.turn("t"):
            with pytest.raises(kedge.LeaseHeld), two.turn("t", wait_s=0.05):
                pass
            with pytest.raises(kedge.LeaseHeld):
                chat_graph(two, lambda state: "late").invoke(
                    {"messages": [HumanMessage("no turn")]}, CONFIG, durability="sync"
                )

        async def asynchronously() -> None:
            async with two.aturn("t"):
                await chat_graph(two, lambda state: "async").ainvoke({"messages": [HumanMessage("x")]}, CONFIG)

        asyncio.run(asynchronously())
        assert len(loaded(one)["messages"]) == 14


@pytest.mark.requires("module:cryptography")
def test_an_encrypted_thread_leaves_nothing_to_read(tmp_path: Path) -> None:
    secret = "hunter2-is-the-word"
    config: Any = {"configurable": {"thread_id": f"thread {secret}"}, "metadata": {"note": secret}}

    def leaves(place: Path, **options: Any) -> bool:
        with kedge.open(place, **options) as manager:
            saver = KedgeSaver(manager)
            chat_graph(saver, lambda state: f"you said {secret}").invoke({"messages": [HumanMessage(secret)]}, config)
            put(saver, {"primitive": secret, "long": secret * 5000}, {"configurable": {"thread_id": secret}})
            assert loaded(saver, config)["messages"][0].content == secret
        needles = secret.encode(), secret.encode("utf-16-le")[:20]
        return any(needle in file.read_bytes() for file in place.rglob("*") if file.is_file() for needle in needles)

    assert leaves(tmp_path / "plain"), "the search finds what is there"
    assert not leaves(tmp_path / "encrypted", key=bytes(range(32)), encrypt_names=True)
