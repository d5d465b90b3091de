"""KedgeSaver beside LangGraph's rules for runs: the order of writes, cancelled calls, replays, errors."""

import asyncio
import gc
import operator
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

from tests.parts import require

require("module:langgraph")

from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.graph import START, StateGraph

import kedge
from kedge.integrations.langgraph import KedgeSaver

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[KedgeSaver]:
    with KedgeSaver(tmp_path / "store") as opened:
        yield opened


class Words(TypedDict):
    words: Annotated[list[str], operator.add]


def word_graph(saver: Any, word: str = "word") -> Any:
    builder = StateGraph(Words)
    builder.add_node("say", lambda state: {"words": [word]})
    builder.add_edge(START, "say")
    return builder.compile(checkpointer=saver)


def put(saver: KedgeSaver, config: Any = CONFIG, **metadata: Any) -> Any:
    return saver.put(config, empty_checkpoint(), {"source": "loop", "step": 1, **metadata}, {})


# Writes


def test_writes_come_back_by_task_and_index_whatever_came_first(saver: KedgeSaver) -> None:
    config = put(saver)
    saver.put_writes(config, [("x", 3), ("y", 4)], "task 2")
    saver.put_writes(config, [("x", 1), ("__error__", "no"), ("x", 2)], "task 1")
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes == [
        ("task 1", "__error__", "no"),
        ("task 1", "x", 1),
        ("task 1", "x", 2),
        ("task 2", "x", 3),
        ("task 2", "y", 4),
    ]


def test_writes_come_back_in_the_order_of_the_tasks_paths(saver: KedgeSaver) -> None:
    """The order in which the run applied them: task IDs are hashes of paths."""
    config = put(saver)
    saver.put_writes(config, [("x", 3)], "task 1", "~__pregel_pull, b")
    saver.put_writes(config, [("x", 2)], "task 2", "~__pregel_pull, a")
    saver.put_writes(config, [("x", 1)], "task 3")
    found = saver.get_tuple(config)
    assert found is not None
    assert [value for _, _, value in found.pending_writes or ()] == [1, 2, 3]


def test_writes_that_came_before_their_checkpoint_are_copied_with_it(saver: KedgeSaver) -> None:
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": "agent:1"}}
    checkpoint = empty_checkpoint()
    early: Any = {"configurable": {**config["configurable"], "checkpoint_id": checkpoint["id"]}}
    saver.put_writes(early, [("x", 1)], "task")
    saver.put(config, checkpoint, {"source": "loop", "step": 1}, {})
    saver.copy_thread("t", "copy")
    copied = saver.get_tuple({"configurable": {"thread_id": "copy", "checkpoint_ns": "agent:1"}})
    assert copied is not None
    assert copied.pending_writes == [("task", "x", 1)]
    assert [job.name for job in saver.manager.jobs()] == ["thread:copy@agent:1", "thread:t@agent:1"]


# Two runs at once


def test_two_runs_with_the_same_input_do_not_take_each_others_checkpoints_for_theirs(saver: KedgeSaver) -> None:
    """As a button that is clicked twice begins them. A run is told that it was saved only where its checkpoint is."""
    config = put(saver)
    for _ in range(2):
        saver.get_tuple(CONFIG)
    put(saver, config)
    with pytest.raises(kedge.Conflict, match="continued by another run"):
        put(saver, config)


# Pruning


def test_pruning_leaves_alone_what_a_run_saves_meanwhile(saver: KedgeSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    config, listed, checkpoint = put(saver, put(saver)), saver.manager.list, empty_checkpoint()
    last = put(saver, config)

    def list_late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        saver.put_writes(last, [("x", 1)], "task")
        early = {"configurable": {**CONFIG["configurable"], "checkpoint_id": checkpoint["id"]}}
        saver.put_writes(early, [("x", 2)], "task")
        saver.put(last, checkpoint, {"source": "loop", "step": 2}, {})
        return listed(*arguments, **options)

    monkeypatch.setattr(saver.manager, "list", list_late)
    saver.prune(["t"])
    newest = saver.get_tuple(CONFIG)
    assert newest is not None
    assert newest.checkpoint["id"] == checkpoint["id"]
    assert newest.pending_writes == [("task", "x", 2)]
    assert len(list(saver.list(CONFIG))) == 2
    saver.prune(["t"])
    assert len(list(saver.list(CONFIG))) == 1


def test_two_runs_that_continue_a_thread_which_is_pruned_meanwhile(saver: KedgeSaver) -> None:
    config = put(saver, put(saver))
    for _ in range(2):
        saver.get_tuple(CONFIG)
    saver.prune(["t"])
    put(saver, config)
    with pytest.raises(kedge.Conflict):
        put(saver, config)


def test_a_delta_channel_is_rebuilt_as_the_run_left_it(tmp_path: Path) -> None:
    """Tasks beside each other, whose IDs are in another order than they ran in; and a fork."""
    append = DeltaChannel(lambda state, writes: [*state, *(word for words in writes for word in words)], list)
    builder = StateGraph(TypedDict("State", {"words": Annotated[list, append]}))
    for n in range(8):
        builder.add_node(f"n{n:02}", lambda state, n=n: {"words": [n]})  # type: ignore[misc]
        builder.add_edge(START, f"n{n:02}")
    with KedgeSaver(tmp_path / "store") as saver:
        graph = builder.compile(checkpointer=saver)
        results = [graph.invoke({"words": [turn]}, CONFIG)["words"] for turn in range(12)]
        steps = [*graph.get_state_history(CONFIG)]
    assert results[-1] == [word for turn in range(12) for word in (turn, *range(8))]
    assert [state.values["words"] for state in steps if not state.next][::-1] == results
    with KedgeSaver(tmp_path / "store") as saver:
        graph = builder.compile(checkpointer=saver)
        assert graph.get_state(CONFIG).values["words"] == results[-1]
        fork = next(state.config for state in steps if state.values["words"] == results[3])
        assert graph.invoke({"words": ["again"]}, fork)["words"] == [*results[3], "again", *range(8)]
        assert graph.get_state(CONFIG).values["words"] == [*results[3], "again", *range(8)]


def test_the_history_of_a_delta_channel_is_what_following_parents_gives(saver: KedgeSaver) -> None:
    config: Any = CONFIG
    for step in range(90):
        checkpoint = empty_checkpoint()
        if step == 0:
            checkpoint["channel_values"] = {"b": "seed"}
        config = saver.put(config, checkpoint, {"source": "loop", "step": step}, {})
        saver.put_writes(config, [("a", step), ("b", -step)], f"task {step}")
        beside = saver.put(config, empty_checkpoint(), {"source": "fork", "step": step}, {})
        saver.put_writes(beside, [("a", "of a fork")], "task")
        saver.get_tuple(config)
    channels = ["a", "b", "none"]
    for fresh in (saver, KedgeSaver(saver.manager)):
        history = fresh.get_delta_channel_history(config=config, channels=channels)
        assert history == BaseCheckpointSaver.get_delta_channel_history(fresh, config=config, channels=channels)
    assert [value for _, _, value in history["a"]["writes"]] == [*range(89)]
    unknown: Any = {"configurable": {"thread_id": "another"}}
    assert saver.get_delta_channel_history(config=unknown, channels=["a"]) == {"a": {"writes": []}}


def test_the_error_of_a_task_is_text(saver: KedgeSaver) -> None:
    builder = StateGraph(Words)

    def fail(state: Words) -> Words:
        raise ValueError("no", 3)

    builder.add_node("fail", fail)
    builder.add_edge(START, "fail")
    graph = builder.compile(checkpointer=saver)
    with pytest.raises(ValueError, match="no"):
        graph.invoke({"words": []}, CONFIG)
    assert graph.get_state(CONFIG).tasks[0].error == "ValueError('no', 3)"  # type: ignore[comparison-overlap]


def test_metadata_has_lists_where_it_had_tuples(saver: KedgeSaver) -> None:
    put(saver, counters={"ch": (1, (2, 3))})
    found = saver.get_tuple(CONFIG)
    assert found is not None
    assert found.metadata == {"source": "loop", "step": 1, "counters": {"ch": [1, [2, 3]]}}  # type: ignore[comparison-overlap]


# Cancelled calls


class Held(KedgeSaver):
    """Its first put waits, in its thread, until it may go on."""

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self.began, self.may_commit, self.has_read = threading.Event(), threading.Event(), threading.Event()

    def put(self, *arguments: Any) -> Any:
        is_first = not self.began.is_set()
        self.began.set()
        if is_first:
            assert self.may_commit.wait(60)
        return super().put(*arguments)

    def get_tuple(self, config: Any) -> Any:
        found = super().get_tuple(config)
        if self.began.is_set():
            self.has_read.set()
        return found


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_turn_after_a_cancelled_one_gets_no_conflict(tmp_path: Path, times: int, durability: str) -> None:
    async def talk() -> Any:
        async with Held(tmp_path / "store") as saver:
            graph = word_graph(saver)
            cancelled = asyncio.create_task(graph.ainvoke({"words": ["1"]}, CONFIG, durability=durability))
            await asyncio.to_thread(saver.began.wait, 60)
            for _ in range(times):  # as anyio does it: again, until the task has ended
                cancelled.cancel()
                await asyncio.sleep(0)  # sleep: one step of the loop
            following = asyncio.create_task(graph.ainvoke({"words": ["2"]}, CONFIG))
            assert not await asyncio.to_thread(saver.has_read.wait, 0.2), "it reads what is about to be continued"
            saver.may_commit.set()
            with suppress(asyncio.CancelledError):
                await cancelled
            return await following

    assert asyncio.run(talk())["words"][-2:] == ["2", "word"]


def test_a_read_waits_for_the_put_that_is_about_to_begin_behind_one_that_has_just_ended(tmp_path: Path) -> None:
    """LangGraph begins a put once the one before it has ended, some steps of the loop later, also after a cancel."""

    async def read() -> Any:
        async with KedgeSaver(tmp_path / "store") as saver:
            metadata: Any = {"source": "loop", "step": 1}
            first = asyncio.create_task(saver.aput(CONFIG, empty_checkpoint(), metadata, {}))

            async def put_behind() -> Any:
                config = await first
                for _ in range(3):
                    await asyncio.sleep(0)  # sleep: one step of the loop
                return await saver.aput(config, empty_checkpoint(), metadata, {})

            following = asyncio.create_task(put_behind())
            await first
            found = await saver.aget_tuple(CONFIG)
            assert found is not None
            return found.config, await following

    found, newest = asyncio.run(read())
    assert found == newest


def test_writes_of_loops_that_are_closed_are_forgotten(tmp_path: Path) -> None:
    metadata: Any = {"source": "loop", "step": 1}
    with KedgeSaver(tmp_path / "store") as saver:
        before = tasks()
        for n in range(8):
            thread: Any = {"configurable": {"thread_id": f"thread {n}", "checkpoint_ns": ""}}
            asyncio.run(saver.aput(thread, empty_checkpoint(), metadata, {}))
        assert tasks() <= before + 1


def tasks() -> int:
    """How many there are in this process. By their type: asking some object for its class may run code of its own."""
    gc.collect()
    return sum(issubclass(type(known), asyncio.Task) for known in gc.get_objects())


def test_a_cancelled_put_has_ended_when_the_call_has(tmp_path: Path) -> None:
    async def cancel() -> None:
        async with Held(tmp_path / "store") as saver:
            call = asyncio.create_task(saver.aput(CONFIG, empty_checkpoint(), {"source": "loop", "step": 1}, {}))
            await asyncio.to_thread(saver.began.wait, 60)
            call.cancel()
            asyncio.get_running_loop().call_later(0.05, saver.may_commit.set)
            with pytest.raises(asyncio.CancelledError):
                await call
            assert len(list(saver.list(CONFIG))) == 1

    asyncio.run(cancel())


def test_a_cancelled_turn_keeps_nobody_out(tmp_path: Path) -> None:
    async def cancel() -> None:
        async with KedgeSaver(tmp_path / "store") as saver:

            async def wait() -> None:
                async with saver.aturn("t"):
                    raise AssertionError("another turn is under way")

            with saver.turn("t"):
                waiting = asyncio.create_task(wait())
                for _ in range(5):
                    await asyncio.sleep(0)  # sleep: one step of the loop
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            async with saver.aturn("t", wait_s=0):
                pass

    asyncio.run(cancel())


# One process, nothing concurrent: no conflicts


def sub_graph(saver: KedgeSaver) -> Any:
    inner = StateGraph(Words)
    inner.add_node("inner", lambda state: {"words": ["inner"]})
    inner.add_edge(START, "inner")
    outer = StateGraph(Words)
    outer.add_node("before", lambda state: {"words": ["before"]})
    outer.add_node("sub", inner.compile(checkpointer=True))
    outer.add_edge(START, "before")
    outer.add_edge("before", "sub")
    return outer.compile(checkpointer=saver)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_stateful_subgraph_is_replayed(saver: KedgeSaver, is_asynchronous: bool) -> None:
    graph = sub_graph(saver)

    def invoke(value: Any, config: Any) -> Any:
        return asyncio.run(graph.ainvoke(value, config)) if is_asynchronous else graph.invoke(value, config)

    for turn in "12":
        invoke({"words": [turn]}, CONFIG)
        graph.get_state(CONFIG, subgraphs=True)  # a reader that does not continue
    for state in [s for s in graph.get_state_history(CONFIG) if s.next == ("sub",)]:
        for _ in range(2):
            assert invoke(None, state.config)["words"][-1] == "inner"


def test_copies_of_a_checkpoint(saver: KedgeSaver) -> None:
    graph = word_graph(saver)
    for turn in "12":
        graph.invoke({"words": [turn]}, CONFIG)
    for state in [*graph.get_state_history(CONFIG)]:
        for _ in range(2):
            copied = graph.update_state(state.config, None, as_node="__copy__")
            assert graph.get_state(copied).values == state.values


def test_a_copy_is_seen_by_a_run_that_is_under_way(saver: KedgeSaver) -> None:
    graph = word_graph(saver)
    graph.invoke({"words": ["1"]}, CONFIG)
    first = graph.get_state(CONFIG).config
    saver.get_tuple(CONFIG)
    graph.update_state(first, None, as_node="__copy__")
    with pytest.raises(kedge.Conflict):
        put(saver, first)
