"""LangGraph's own savers: the graph goes on from what they kept, under KedgeSaver."""

from __future__ import annotations

import operator
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import UUID

import pytest

from tests.parts import require

require("module:langgraph.checkpoint.sqlite")

from langchain_core.messages import AIMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import kedge
from kedge.integrations.langgraph import KedgeSaver
from kedge.legacy.importers import Verdict, bring, look


@pytest.fixture
def store() -> Iterator[kedge.CheckpointManager]:
    with kedge.open("memory:") as opened:
        yield opened


def graph(saver: Any) -> Any:
    """Asks a person before its second answer."""
    builder = StateGraph(MessagesState)
    builder.add_node("chat", lambda state: {"messages": [AIMessage(f"answer {len(state['messages'])}")]})
    builder.add_node("ask", lambda state: {"messages": [AIMessage(f"you said {interrupt('go on?')}")]})
    builder.add_edge(START, "chat")
    builder.add_edge("chat", "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


def config(thread: str, **more: str) -> Any:
    return {"configurable": {"thread_id": thread, **more}}


def talk(saver: Any, threads: list[str]) -> None:
    chat = graph(saver)
    for thread in threads:
        chat.invoke({"messages": [("user", f"hello {thread}")]}, config(thread))
    chat.invoke(Command(resume="yes"), config(threads[0]))  # the others still wait for a person


def history(saver: Any, thread: str) -> list[Any]:
    return [
        (
            found.config["configurable"]["checkpoint_id"],
            found.parent_config and found.parent_config["configurable"]["checkpoint_id"],
            found.checkpoint["ts"],
            found.checkpoint["channel_versions"],
            found.checkpoint["channel_values"],
            {key: value for key, value in found.metadata.items() if key in ("source", "step", "parents")},
            sorted((task, channel, repr(value)) for task, channel, value in found.pending_writes or ()),
        )
        for found in saver.list(config(thread))
    ]


THREADS = ["one", "two ü/..", "three"]


def check(source: str, before: dict[str, Any], store: kedge.CheckpointManager, form: str) -> None:
    plan = look(source)
    report = bring(source, store)
    assert not report.findings
    assert plan.imported == report.imported == sum(map(len, before.values()))
    assert report.by_format == {form: report.imported}
    again = bring(source, store)
    assert (again.imported, again.present) == (0, report.imported)
    saver = KedgeSaver(store)
    for thread in THREADS:
        assert history(saver, thread) == before[thread], thread
    chat = graph(saver)
    answer = chat.invoke(Command(resume="certainly"), config("two ü/.."))  # the person answers here
    assert answer["messages"][-1].content == "you said certainly"
    oldest = before["three"][-1][0]
    branch = chat.invoke(None, config("three", checkpoint_id=oldest))
    assert branch["messages"][0].content == "hello three"
    after = bring(source, store)
    assert after.imported == 0


@pytest.mark.parametrize("is_live", [False, True])
def test_sqlite(tmp_path: Path, store: kedge.CheckpointManager, is_live: bool) -> None:
    path = tmp_path / "old" / "threads.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path, check_same_thread=False)) as db:
        saver = SqliteSaver(db)
        talk(saver, THREADS)
        before = {thread: history(saver, thread) for thread in THREADS}
        if is_live:  # what is in the log only counts too, and nothing is written beside it
            names = {p.name: p.stat().st_size for p in path.parent.iterdir()}
            check(str(path.parent), before, store, "langgraph-sqlite")
            assert {p.name: p.stat().st_size for p in path.parent.iterdir()} == names
            return
    check(str(path), before, store, "langgraph-sqlite")
    assert [p.name for p in path.parent.iterdir()] == ["threads.db"]


@pytest.mark.xdist_group("postgres")
def test_postgres(store: kedge.CheckpointManager, postgres: Any) -> None:
    import psycopg
    from langgraph.checkpoint.postgres import PostgresSaver

    url = postgres.empty_database()
    with PostgresSaver.from_conn_string(url) as saver:
        saver.setup()
        talk(saver, THREADS)
        before = {thread: history(saver, thread) for thread in THREADS}
    try:
        check(url, before, store, "langgraph-postgres")
    finally:
        with psycopg.connect(url) as db:
            db.execute("DROP TABLE checkpoints, checkpoint_blobs, checkpoint_writes, checkpoint_migrations")


def test_types_that_are_not_built(tmp_path: Path, store: kedge.CheckpointManager) -> None:
    """A row may name any class: none is imported, and the report says which."""
    import ormsgpack

    path = tmp_path / "threads.db"
    with closing(sqlite3.connect(path, check_same_thread=False)) as db:
        saver = SqliteSaver(db)
        talk(saver, ["one"])
        bad = ormsgpack.Ext(2, ormsgpack.packb(["kedge.no_such_module", "Thing", {"a": 1}]))
        kind, blob = db.execute("SELECT type, checkpoint FROM checkpoints LIMIT 1").fetchone()
        assert kind == "msgpack"
        state = saver.serde.loads_typed((kind, blob))
        state["channel_values"] = {"x": bad}
        db.execute("UPDATE checkpoints SET checkpoint = ?", (ormsgpack.packb(state),))
        db.execute("INSERT INTO checkpoints VALUES ('damaged', '', '1', NULL, 'msgpack', x'c1', '{}')")
        db.execute("INSERT INTO checkpoints VALUES ('pickled', '', '1', NULL, 'pickle', x'80', '{}')")
        db.commit()
    report = bring(str(path), store)
    lossy = report.of(Verdict.LOSSY)
    assert lossy[0].paths == ("kedge.no_such_module.Thing",)
    assert "--allow kedge.no_such_module.Thing" in lossy[0].reason
    assert len(report.of(Verdict.CORRUPTED)) == 2


class Old(TypedDict):
    messages: Annotated[list[Any], operator.add]
    at: datetime
    ids: set[int]
    wait: timedelta
    who: UUID


@pytest.mark.parametrize("version", ["0.0.66", "0.1.19", "0.2.3"])
def test_savers_of_earlier_years(tmp_path: Path, store: kedge.CheckpointManager, version: str) -> None:
    """data/ has what these versions wrote for the same graph, stopped before its second node."""
    with closing(sqlite3.connect(tmp_path / "old.db")) as db:
        db.executescript((Path(__file__).parent / "data" / f"langgraph-{version}.sql").read_text())
    report = bring(str(tmp_path), store)
    assert (report.imported, report.findings) == (3, [])
    assert bring(str(tmp_path), store).present == 3
    builder = StateGraph(Old)
    builder.add_node("first", lambda _: {"messages": [AIMessage("never")]})
    builder.add_node("second", lambda _: {"messages": [AIMessage("bye")]})
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    chat = builder.compile(checkpointer=KedgeSaver(store))
    state = chat.get_state(config("t1"))
    assert [m.content for m in state.values["messages"]] == ["hello", "hi"]
    assert {name: state.values[name] for name in ("at", "ids", "wait", "who")} == {
        "at": datetime(2024, 6, 1, 12, 30, tzinfo=UTC),
        "ids": {1, 2},
        "wait": timedelta(days=1, seconds=2),
        "who": UUID(int=7),
    }
    assert len(list(chat.get_state_history(config("t1")))) == 3


@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize("is_shallow", [False, True])
def test_older_tables_of_postgres(store: kedge.CheckpointManager, postgres: Any, is_shallow: bool) -> None:
    require("module:langgraph.checkpoint.postgres")
    import psycopg
    from langgraph.checkpoint.postgres import PostgresSaver

    url = postgres.empty_database()
    with PostgresSaver.from_conn_string(url) as saver:
        saver.setup()
        talk(saver, THREADS)
        before = {thread: history(saver, thread) for thread in THREADS}
    with psycopg.connect(url) as db:
        db.execute("ALTER TABLE checkpoint_writes DROP COLUMN task_path")
        if is_shallow:
            db.execute(
                "DELETE FROM checkpoints c USING checkpoints d WHERE c.thread_id = d.thread_id "
                "AND c.checkpoint_ns = d.checkpoint_ns AND c.checkpoint_id < d.checkpoint_id"
            )
            db.execute(
                "DELETE FROM checkpoint_blobs b WHERE NOT EXISTS (SELECT 1 FROM checkpoints c WHERE "
                "c.thread_id = b.thread_id AND c.checkpoint->'channel_versions'->>b.channel = b.version)"
            )
            db.execute("ALTER TABLE checkpoints DROP COLUMN checkpoint_id, DROP COLUMN parent_checkpoint_id")
            db.execute("ALTER TABLE checkpoint_blobs DROP COLUMN version")
    try:
        report = bring(url, store)
    finally:
        with psycopg.connect(url) as db:
            db.execute("DROP TABLE checkpoints, checkpoint_blobs, checkpoint_writes, checkpoint_migrations")
    assert not report.findings
    saver = KedgeSaver(store)
    for thread in THREADS:
        newest = before[thread][:1] if is_shallow else before[thread]
        assert [entry[4] for entry in history(saver, thread)] == [entry[4] for entry in newest]
        assert [entry[6] for entry in history(saver, thread)] == [entry[6] for entry in newest]
