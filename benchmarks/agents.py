"""KedgeSaver against LangGraph's own SqliteSaver, made as durable: synchronous=FULL."""

from __future__ import annotations

import random
import sqlite3
import string
from collections.abc import Callable
from typing import Any

from .harness import Bench, Missing, Row, mib, milliseconds, timed

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
TURNS = 200


def _savers(bench: Bench, name: str) -> tuple[Any, Any]:
    try:
        from langgraph.checkpoint.sqlite import SqliteSaver

        from kedge.integrations.langgraph import KedgeSaver
    except ImportError as error:
        raise Missing(str(error)) from None
    place = bench.fresh(name)
    connection = sqlite3.connect(place / "peer.sqlite", check_same_thread=False)
    peer = SqliteSaver(connection)
    peer.setup()
    connection.execute("PRAGMA synchronous=FULL")
    return KedgeSaver(place / "store"), peer


def _text(size: int, rnd: random.Random) -> str:
    return "".join(rnd.choices(string.ascii_letters + " ", k=size))


def _put(saver: Any, parent: Any, values: dict[str, Any], version: int) -> Any:
    from langgraph.checkpoint.base import empty_checkpoint

    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, version)
    return saver.put(parent, checkpoint, {"source": "loop", "step": version}, checkpoint["channel_versions"])


def _interleaved(bench: Bench, rounds: int, ours: Callable[[int], Any], theirs: Callable[[int], Any]) -> Any:
    samples: tuple[list[float], list[float]] = ([], [])
    for n in range(rounds):
        for work, costs in zip((ours, theirs), samples, strict=True):
            costs.append(timed(lambda work=work, n=n: work(n)))  # type: ignore[misc]
    return samples


def calls(bench: Bench) -> list[Row]:
    """Single calls: 1 KB and 1 MB states; listings of ten states of 1 MB."""
    rnd = random.Random(1)
    rows = []
    for size, count, name, target in ((1, 1, "1 KB", 1.0), (2, 500, "1 MB, one item of 500 changed", 0.7)):
        savers = _savers(bench, f"calls-{size}")
        heads = [CONFIG, CONFIG]
        items = [_text(1000 * size, rnd) for _ in range(count)]

        def put(which: int, n: int) -> None:
            items[n % len(items)] = _text(1000, random.Random(n))  # noqa: B023
            heads[which] = _put(savers[which], heads[which], {"items": items}, n + 1)  # noqa: B023

        rounds = 40 * bench.rounds if count == 1 else 10 * bench.rounds
        ours, theirs = _interleaved(bench, rounds, lambda n: put(0, n), lambda n: put(1, n))
        rows.append(Row(f"put {name}", ours, "SqliteSaver", theirs, target, "share", milliseconds))
        get = [lambda n, saver=saver: saver.get_tuple(CONFIG) for saver in savers]  # type: ignore[misc]
        ours, theirs = _interleaved(bench, rounds, *get)
        rows.append(Row(f"get latest {name}", ours, "SqliteSaver", theirs, 1.0, "share", milliseconds))
        if count > 1:
            ten = [lambda n, saver=saver: list(saver.list(CONFIG, limit=10)) for saver in savers]  # type: ignore[misc]
            ours, theirs = _interleaved(bench, 3 * bench.rounds, *ten)
            rows.append(Row("list 10 of 1 MB", ours, "SqliteSaver", theirs, 0.8, "share", milliseconds))
            plain = [timed(lambda: savers[0].checkpoints(CONFIG, limit=10)) for _ in theirs]  # noqa: B023
            rows.append(Row("the same, metadata only", plain, "SqliteSaver list", theirs, 0.05, "share", milliseconds))
        savers[0].close()
        savers[1].conn.close()
    return rows


def conversation(bench: Bench) -> list[Row]:
    """A conversation of 200 turns, 500 and 1,500 characters each: bytes on disk, and what the last turns take."""
    savers = _savers(bench, "conversation")
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.graph import START, MessagesState, StateGraph

    rnd = random.Random(1)
    builder = StateGraph(MessagesState)
    builder.add_node("chat", lambda state: {"messages": [AIMessage(_text(1500, rnd))]})
    builder.add_edge(START, "chat")
    graphs = [builder.compile(checkpointer=saver) for saver in savers]
    turns: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for graph, costs in zip(graphs, turns, strict=True):
            question = {"messages": [HumanMessage(_text(500, rnd))]}
            costs.append(timed(lambda graph=graph, question=question: graph.invoke(question, CONFIG)))  # type: ignore[misc]
    newest = savers[0].checkpoints(CONFIG, limit=1)[0]
    savers[0].close()
    savers[1].conn.close()
    place = bench.workspace / "conversation"
    ours = float(sum(f.stat().st_size for f in (place / "store").rglob("*") if f.is_file()))
    peer = float(sum(f.stat().st_size for f in place.glob("peer.*")))
    return [
        Row("200 turns, on disk", [ours], "the final state", [float(newest.size_bytes)], 4.0, "share", mib),
        Row("200 turns, on disk", [ours], "SqliteSaver", [peer], 0.05, "share", mib),
        Row("a turn at the end", turns[0][-20:], "at the beginning", turns[0][1:21], 1.3, "share", milliseconds),
        Row("a turn at the end", turns[0][-20:], "SqliteSaver", turns[1][-20:], 1.0, "share", milliseconds),
    ]
