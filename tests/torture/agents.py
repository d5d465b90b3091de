"""Agents killed anywhere: with durability "sync" no node that another one followed runs again, and nothing is lost.

A graph of ten nodes, each of which writes down that it began. Its process is killed at random moments and started
again until the graph has ended; then another thread begins. The processes are forks: LangGraph is imported once.
"""

from __future__ import annotations

import operator
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, TypedDict

NODES = 10


def kill_agents(folder: Path, *, kills: int, seed: int, until: float = float("inf")) -> dict[str, float]:
    rnd = random.Random(seed)
    done = killed = threads = 0
    longest_s = 0.0  # the first thread is left alone, to see how long one takes
    while killed < kills and time.monotonic() < until:
        thread, log = f"thread {threads}", folder / f"log-{threads}"
        while True:
            start = time.monotonic()
            child = os.fork()
            if child == 0:
                _work(folder / "store", log, thread)
            if longest_s and killed < kills:  # a machine that became slower would never get to the end
                time.sleep(rnd.uniform(0, longest_s))  # sleep: to be killed at any moment
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0, f"{thread}: the agent failed"
                longest_s = max(longest_s, time.monotonic() - start)
                break
            killed += 1
        _check(log, thread)
        threads += 1
        done += NODES
    return {"kills": killed, "threads": threads, "nodes": done}


def _work(store: Path, log: Path, thread: str) -> None:
    """In the child: run or resume the thread, then leave without any of the parent's exit handlers."""
    try:
        from kedge.integrations.langgraph import KedgeSaver

        config: Any = {"configurable": {"thread_id": thread}}
        with KedgeSaver(store) as saver:
            graph = _graph(log).compile(checkpointer=saver)
            is_new = saver.get_tuple(config) is None
            result = graph.invoke({"done": []} if is_new else None, config, durability="sync")
            if result["done"] != list(range(NODES)):
                raise AssertionError(f"{thread} ended with {result}")
    except BaseException as error:
        print(f"{thread}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


class _State(TypedDict):
    done: Annotated[list[int], operator.add]


def _graph(log: Path) -> Any:
    from langgraph.graph import START, StateGraph

    def node(number: int) -> Any:
        def run(state: _State) -> _State:
            with open(log, "a") as file:
                file.write(f"{number}\n")
            return {"done": [number]}

        return run

    builder = StateGraph(_State)
    for number in range(NODES):
        builder.add_node(str(number), node(number))
        builder.add_edge(START if number == 0 else str(number - 1), str(number))
    return builder


def _check(log: Path, thread: str) -> None:
    """Once a node has begun, none before it begins again."""
    furthest = 0
    began: Counter[int] = Counter()
    for number in map(int, log.read_text().split()):
        assert number >= furthest, f"{thread}: node {number} ran again after node {furthest} had begun"
        furthest = number
        began[number] += 1
    assert set(began) == set(range(NODES)), f"{thread}: {began}"


def torture(minutes: float, folder: Path) -> dict[str, float]:
    import langgraph.graph  # noqa: F401 - once, for all children

    import kedge.integrations.langgraph  # noqa: F401

    return kill_agents(folder, kills=200, seed=time.time_ns(), until=time.monotonic() + 60 * minutes)


if __name__ == "__main__":
    import tempfile

    import langgraph.graph  # noqa: F401

    import kedge.integrations.langgraph  # noqa: F401

    with tempfile.TemporaryDirectory() as place:
        print(kill_agents(Path(place), kills=int(sys.argv[1]), seed=int(sys.argv[2])))
