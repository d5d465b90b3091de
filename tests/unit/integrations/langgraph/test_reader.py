"""What KedgeSaver reads: few statements, nothing decoded twice, nothing shared between those it is given to."""

import random
import sqlite3
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parts import require

require("module:langgraph")

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

import kedge
from kedge.index.sqlite.index import SqliteIndex
from kedge.integrations.langgraph import KedgeSaver
from kedge.integrations.langgraph.recent import MOST_EVENTS
from kedge.model import CheckpointStatus
from kedge.ports import Seen

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
TURNS = 12


def text(seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters, k=900))


def put(saver: KedgeSaver, config: Any, values: dict[str, Any], number: int) -> Any:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, number)
    return saver.put(config, checkpoint, {"source": "loop", "step": number}, dict(checkpoint["channel_versions"]))


@pytest.fixture
def thread(tmp_path: Path) -> tuple[Path, list[Any]]:
    """A store with a thread of growing states, and what was put, newest first."""
    states: list[Any] = []
    with KedgeSaver(tmp_path / "store") as saver:
        config = CONFIG
        messages: list[Any] = []
        for n in range(TURNS):
            messages += [HumanMessage(text(2 * n), id=f"h{n}"), AIMessage(text(2 * n + 1), id=f"a{n}")]
            values = {"messages": [*messages], "notes": {"turn": n, "seen": [1, {"deep": [n]}]}}
            config = put(saver, config, values, n + 1)
            saver.put_writes(config, [("messages", [HumanMessage(text(n))]), ("other", n)], f"task {n}")
            states.insert(0, values)
    return tmp_path / "store", states


def values_of(results: list[Any]) -> list[Any]:
    return [result.checkpoint["channel_values"] for result in results]


def test_whoever_opens_the_store_gets_what_was_put(thread: tuple[Path, list[Any]]) -> None:
    path, states = thread
    with KedgeSaver(path) as saver:
        assert values_of([*saver.list(CONFIG)]) == states
        newest = saver.get_tuple(CONFIG)
        assert newest is not None
        assert values_of([newest]) == states[:1]
        assert newest.pending_writes == [
            (f"task {TURNS - 1}", "messages", [HumanMessage(text(TURNS - 1))]),
            (f"task {TURNS - 1}", "other", TURNS - 1),
        ]
        assert values_of([*saver.list(CONFIG)]) == states


def test_what_a_caller_changes_is_its_own(thread: tuple[Path, list[Any]]) -> None:
    path, states = thread
    with KedgeSaver(path) as saver:
        for _ in range(3):
            for result in [saver.get_tuple(CONFIG), *saver.list(CONFIG)]:
                assert result is not None
                values = result.checkpoint["channel_values"]
                values["messages"][0].content = "changed"
                values["messages"][-1].additional_kwargs["changed"] = True
                values["notes"]["seen"].append("changed")
                values.clear()
        assert values_of([*saver.list(CONFIG)]) == states


def test_a_thread_goes_on_in_another_process(thread: tuple[Path, list[Any]]) -> None:
    path, states = thread
    with KedgeSaver(path) as saver:
        newest = saver.get_tuple(CONFIG)
        assert newest is not None
        before = saver.manager.stats()["stored_bytes"]
        grown = {**newest.checkpoint["channel_values"]}
        grown["messages"] = [*grown["messages"], HumanMessage("one more", id="x")]
        put(saver, newest.config, grown, TURNS + 1)
        assert saver.manager.stats()["stored_bytes"] - before < 3000
    with KedgeSaver(path) as saver:
        assert values_of([*saver.list(CONFIG)]) == [grown, *states]


def test_reading_takes_few_statements(thread: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = thread
    statements: list[str] = []
    fetch = SqliteIndex._fetch

    def counted(self: Any, db: Any, sql: str, *parameters: object) -> Any:
        if "main.event" not in sql:  # which says what has changed
            statements.append(sql)
        return fetch(self, db, sql, *parameters)

    with KedgeSaver(path) as saver:
        saver.get_tuple(CONFIG)
        monkeypatch.setattr(SqliteIndex, "_fetch", counted)
        saver.get_tuple(CONFIG)
        assert statements == []  # nothing has changed
        saver.manager.save("another-job", "step", 1)
        statements.clear()
        saver.get_tuple(CONFIG)
        assert statements == []  # nothing of this thread has
        saver.put_writes(saver.get_tuple(CONFIG).config, [("other", 1)], "task x")  # type: ignore[union-attr]
        statements.clear()
        saver.get_tuple(CONFIG)
        assert len([sql for sql in statements if "main.checkpoint" in sql]) == 2  # the checkpoint, and its writes
        statements.clear()
        assert len([*saver.list(CONFIG, limit=10)]) == 10
        assert len([sql for sql in statements if "main.checkpoint" in sql]) == 2
        in_pieces = [sql for sql in statements if "main.chunk" in sql]
        assert len(in_pieces) < 30  # most chunks of a state are those of the one before
        statements.clear()
        assert len([*saver.list(CONFIG, limit=10)]) == 10
        assert statements == []
        saver.manager.save("another-job", "step", 2)
        statements.clear()
        assert len([*saver.list(CONFIG, limit=10)]) == 10
        assert statements == []


@pytest.mark.parametrize("is_main", [True, False])
def test_what_others_change_is_seen_at_once(thread: tuple[Path, list[Any]], is_main: bool) -> None:
    path, states = thread

    def see() -> None:
        with KedgeSaver(path) as saver, KedgeSaver(path) as other:
            newest = saver.get_tuple(CONFIG)
            assert newest is not None
            assert saver.get_tuple(CONFIG) == newest == next(iter(saver.list(CONFIG, limit=2)))
            config = put(other, newest.config, {"n": 1}, TURNS + 1)
            assert values_of([saver.get_tuple(CONFIG)]) == [{"n": 1}]
            assert len([*saver.list(CONFIG, limit=99)]) == TURNS + 1
            other.put_writes(config, [("n", 2)], "task")
            assert saver.get_tuple(CONFIG).pending_writes == [("task", "n", 2)]  # type: ignore[union-attr]
            for n in range(2 * MOST_EVENTS):
                other.manager.save(f"elsewhere-{n % 3}", "step", n)
            assert saver.get_tuple(CONFIG).pending_writes == [("task", "n", 2)]  # type: ignore[union-attr]
            (last,) = saver.checkpoints(CONFIG, limit=1)
            stored, _ = saver.manager.catalogue.read(last.id)
            other.manager.store.index.mark(  # type: ignore[attr-defined]
                [Seen(stored, missing=[bytes(32)])], CheckpointStatus.CORRUPTED, actor="t"
            )
            assert values_of([saver.get_tuple(CONFIG)]) == [states[0]]  # the event of a mark names no job
            other.manager.delete("thread:t", last.id)
            assert values_of([saver.get_tuple(CONFIG), *saver.list(CONFIG, limit=1)]) == [states[0], states[0]]
            other.delete_thread("t")
            assert saver.get_tuple(CONFIG) is None
            assert [*saver.list(CONFIG, limit=2)] == []

    if is_main:
        see()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(see).result()


def test_rows_are_read_again_only_when_something_has_changed(
    thread: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = thread
    statements: list[str] = []
    with KedgeSaver(path) as saver, KedgeSaver(path) as other:
        rows = saver.checkpoints(CONFIG, limit=3)
        assert rows == saver.manager.list("thread:t", level="step", limit=3)[::-1]
        fetch = SqliteIndex._fetch

        def count(index: SqliteIndex, db: Any, sql: str, *parameters: object) -> Any:
            if "main.event" not in sql:
                statements.append(sql)
            return fetch(index, db, sql, *parameters)

        monkeypatch.setattr(SqliteIndex, "_fetch", count)
        assert saver.checkpoints(CONFIG, limit=3) == rows
        assert statements == []
        rows[0].metadata["step"] = "changed by the caller"  # type: ignore[index]
        assert saver.checkpoints(CONFIG, limit=3) == saver.manager.list("thread:t", level="step", limit=3)[::-1]
        first, second = rows[0].id, rows[1].id
        for change in (
            lambda: other.manager.pin(second),
            lambda: other.manager.tag(first, a="b"),
            lambda: put(other, CONFIG, {"n": 1}, TURNS + 1),
            lambda: other.manager.delete("thread:t", first),
        ):
            change()
            before, rows = rows, saver.checkpoints(CONFIG, limit=3)
            assert rows == saver.manager.list("thread:t", level="step", limit=3)[::-1] != before
        assert len(saver.checkpoints(CONFIG)) == TURNS


def test_damage_is_named_by_whoever_reads_it(thread: tuple[Path, list[Any]]) -> None:
    path, _ = thread
    with sqlite3.connect(path / "index.sqlite") as db:
        db.execute("UPDATE chunk SET data = zeroblob(length(data)), pack_no = NULL WHERE length(data) > 500")
    db.close()
    with KedgeSaver(path) as saver, pytest.raises(kedge.Corrupted, match="chunk"):
        saver.get_tuple(CONFIG)


def test_what_other_namespaces_write_is_passed_over_once(
    thread: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, states = thread
    asked: list[int] = []
    with KedgeSaver(path) as saver, kedge.open(path, namespace="busy") as busy:
        look = saver.manager.catalogue.changed_jobs

        def counted(after: int, limit: int) -> Any:
            asked.append(len(answer := look(after, limit) or ()))
            return answer

        monkeypatch.setattr(saver.manager.catalogue, "changed_jobs", counted)
        for writes in (0, 3, 2 * MOST_EVENTS, 0):
            for n in range(writes):
                busy.save("job", "step", n)
            saver.get_tuple(CONFIG)
            assert values_of([saver.get_tuple(CONFIG)]) == states[:1]
        assert max(asked) == MOST_EVENTS
        assert asked[1::2] == [0, 0, 0, 0]  # nothing is looked at twice
