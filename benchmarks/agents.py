"""KedgeSaver and KedgeStore against LangGraph's own SqliteSaver and SqliteStore, as durable: synchronous=FULL."""

from __future__ import annotations

import random
import sqlite3
import string
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypedDict

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


def _after_a_write(bench: Bench, rounds: int, savers: tuple[Any, Any]) -> tuple[list[float], list[float]]:
    """Reading the newest checkpoint when another thread of the store has just been written: nothing is as it was."""
    elsewhere: Any = {"configurable": {"thread_id": "elsewhere", "checkpoint_ns": ""}}
    samples: tuple[list[float], list[float]] = ([], [])
    for n in range(rounds):
        for saver, costs in zip(savers, samples, strict=True):
            _put(saver, elsewhere, {"n": n}, n + 1)
            costs.append(timed(lambda saver=saver: saver.get_tuple(CONFIG)))  # type: ignore[misc]
    return samples


def calls(bench: Bench) -> list[Row]:
    """Single calls: states of 1 KB and of 1 MB, listings of ten of them, writes of a task."""
    rnd = random.Random(1)
    rows = []
    for size, count, name, target in ((1, 1, "1 KB", 1.0), (2, 500, "1 MB, one item of 500 changed", 0.6)):
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
        ours, theirs = _after_a_write(bench, rounds, savers)
        rows.append(Row("the same, after a write elsewhere", ours, "SqliteSaver", theirs, 1.0, "share", milliseconds))
        ten = [lambda n, saver=saver: list(saver.list(CONFIG, limit=10)) for saver in savers]  # type: ignore[misc]
        ours, theirs = _interleaved(bench, 5 * bench.rounds, *ten)
        rows.append(Row(f"list 10 of {name}", ours, "SqliteSaver", theirs, 1.5, "share", milliseconds))
        plain = [timed(lambda: savers[0].checkpoints(CONFIG, limit=10)) for _ in theirs]  # noqa: B023
        rows.append(Row("the same, metadata only", plain, "SqliteSaver list", theirs, 0.05, "share", milliseconds))
        write = [
            lambda n, saver=saver, head=head: saver.put_writes(head, [("items", _text(200, rnd))], f"task {n}")  # type: ignore[misc]
            for saver, head in zip(savers, heads, strict=True)
        ]
        ours, theirs = _interleaved(bench, rounds, *write)
        rows.append(Row(f"put_writes, {name}", ours, "SqliteSaver", theirs, 1.0, "share", milliseconds))
        savers[0].close()
        savers[1].conn.close()
    return rows


def _converse(bench: Bench, name: str, schema: Any) -> tuple[Path, tuple[list[float], list[float]], float]:
    """A conversation of 200 turns, 500 and 1,500 characters each, kept by both savers: where, what each turn took, and
    the bytes of the final state as ours counts them."""
    savers = _savers(bench, name)
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.graph import START, StateGraph

    rnd = random.Random(1)
    builder = StateGraph(schema)
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
    return bench.workspace / name, turns, float(newest.size_bytes)


def _on_disk(bench: Bench, place: Path) -> tuple[float, float]:
    """Ours, without what a store keeps for a full disk, and the peer's."""
    from kedge.integrations.langgraph import KedgeSaver

    empty = bench.fresh("empty")
    KedgeSaver(empty).close()
    peer = float(sum(f.stat().st_size for f in place.glob("peer.*")))
    return _bytes_in(place / "store") - _bytes_in(empty), peer


def conversation(bench: Bench) -> list[Row]:
    """A conversation of 200 turns: bytes on disk, what the last turns take, and a process that opens it again."""
    try:
        from langgraph.graph import MessagesState
    except ImportError as error:
        raise Missing(str(error)) from None
    place, turns, state = _converse(bench, "conversation", MessagesState)
    ours, peer = _on_disk(bench, place)
    return [
        Row("200 turns, on disk", [ours], "the final state", [state], 2.0, "share", mib),
        Row("200 turns, on disk", [ours], "SqliteSaver", [peer], 0.05, "share", mib),
        Row("a turn at the end", turns[0][-20:], "at the beginning", turns[0][1:21], 1.2, "share", milliseconds),
        Row("a turn at the end", turns[0][-20:], "SqliteSaver", turns[1][-20:], 1.0, "share", milliseconds),
        *_opened_again(bench, place),
    ]


def delta(bench: Bench) -> list[Row]:
    """The same conversation in a DeltaChannel: what was written is stored, and every hundredth state whole."""
    try:
        from langgraph.channels.delta import DeltaChannel
        from langgraph.graph import MessagesState, StateGraph
    except ImportError as error:
        raise Missing(str(error)) from None
    append = DeltaChannel(lambda state, writes: [*state, *(message for some in writes for message in some)], list)
    schema = TypedDict("schema", {"messages": Annotated[list, append]})  # type: ignore[misc] # noqa: UP013 - not text
    place, turns, _ = _converse(bench, "delta", schema)
    ours, peer = _on_disk(bench, place)
    plain, _, _ = _converse(bench, "plain", MessagesState)
    without, _ = _on_disk(bench, plain)
    name = "SqliteSaver, DeltaChannel"
    builder = StateGraph(schema)
    builder.add_node("chat", lambda state: {})
    builder.set_entry_point("chat")
    return [
        Row("DeltaChannel, 200 turns, on disk", [ours], name, [peer], 1.0, "share", mib),
        Row("without DeltaChannel, 200 turns, on disk", [without], name, [peer], 1.0, "share", mib),
        Row("DeltaChannel, a turn at the end", turns[0][-20:], name, turns[1][-20:], 1.0, "share", milliseconds),
        _opened(bench, place, "DeltaChannel, cold state", 1.0, lambda s: builder.compile(s).get_state(CONFIG), name),
    ]


def _bytes_in(folder: Path) -> float:
    return float(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))


def _opened_again(bench: Bench, place: Path) -> list[Row]:
    """What the first call takes of a process that has just opened the store of the conversation."""
    return [
        _opened(bench, place, "cold thread of 200 turns, get", 1.0, lambda saver: saver.get_tuple(CONFIG)),
        _opened(bench, place, "cold thread of 200 turns, list 10", 1.5, lambda s: list(s.list(CONFIG, limit=10))),
    ]


def _opened(
    bench: Bench, place: Path, name: str, target: float, call: Callable[[Any], object], peer: str = "SqliteSaver"
) -> Row:
    """A call of savers that were just opened."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    from kedge.integrations.langgraph import KedgeSaver

    def ours() -> float:
        with KedgeSaver(place / "store") as saver:
            return timed(lambda: call(saver))

    def theirs() -> float:
        with closing(sqlite3.connect(place / "peer.sqlite", check_same_thread=False)) as connection:
            saver = SqliteSaver(connection)
            saver.setup()
            return timed(lambda: call(saver))

    samples = [(ours(), theirs()) for _ in range(3 * bench.rounds)]
    mine, peers = ([pair[n] for pair in samples] for n in (0, 1))
    return Row(name, mine, peer, peers, target, "share", milliseconds)


def memories(bench: Bench) -> list[Row]:
    """Long-term memory: 1,000 items in three namespaces."""
    try:
        from langgraph.store.sqlite import SqliteStore

        from kedge.integrations.langgraph import KedgeStore
    except ImportError as error:
        raise Missing(str(error)) from None
    place, rnd = bench.fresh("memories"), random.Random(1)
    connection = sqlite3.connect(place / "peer.sqlite", check_same_thread=False, isolation_level=None)
    peer = SqliteStore(connection)
    peer.setup()
    connection.execute("PRAGMA synchronous=FULL")
    with KedgeStore(place / "store") as store, closing(connection):
        stores: tuple[Any, Any] = (store, peer)
        items = [{"n": n, "colour": ("red", "green", "blue")[n % 3], "text": _text(300, rnd)} for n in range(1000)]
        put = [lambda n, s=s: s.put(("users", f"{n % 3}"), f"{n}", items[n]) for s in stores]  # type: ignore[misc]
        rows = [Row("put a memory", *_pair(_interleaved(bench, 1000, *put)), 1.0, "share", milliseconds)]
        for name, target, call in (
            ("get a memory", 1.0, lambda s: s.get(("users", "1"), "1")),
            ("search 1,000 memories, one fits", 1.0, lambda s: s.search(("users",), filter={"n": 500})),
            ("search 1,000 memories, a comparison", 1.0, lambda s: s.search(("users",), filter={"n": {"$gt": 990}})),
            ("search 1,000 memories, none fits", 1.0, lambda s: s.search(("users",), filter={"n": -1})),
        ):
            calls = [lambda n, s=s, call=call: call(s) for s in stores]  # type: ignore[misc]
            samples = _pair(_interleaved(bench, 10 * bench.rounds, *calls))
            rows.append(Row(name, *samples, target, "share", milliseconds))
    return rows


def _pair(samples: tuple[list[float], list[float]]) -> tuple[list[float], str, list[float]]:
    return samples[0], "SqliteStore", samples[1]
