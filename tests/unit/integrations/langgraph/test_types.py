"""What agents keep in their states every day, without a line of registration."""

import array
import enum
import ipaddress
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ormsgpack
import pytest
from pydantic import BaseModel, HttpUrl, PostgresDsn

from tests.parts import require

require("module:langgraph")

from langchain_core.agents import AgentAction, AgentFinish
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint

from kedge.codec import decode
from kedge.codec.by_name import Unrestored
from kedge.errors import UnsupportedType, Validation
from kedge.integrations.langgraph import KedgeSaver

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


class Mood(enum.StrEnum):
    GOOD = "good"


class Weather(BaseModel):
    degrees: float
    mood: Mood = Mood.GOOD


@dataclass
class Plan:
    steps: list[Weather]


VALUES: dict[str, Any] = {
    "the text of a message": AIMessage("hello").text,
    "a structured response": Weather(degrees=3),
    "the artifact of a tool": ToolMessage("done", tool_call_id="c", artifact=Weather(degrees=3)),
    "a parsed message": AIMessage("", additional_kwargs={"parsed": Weather(degrees=3)}),
    "an action": AgentAction("search", {"q": "x"}, "log"),
    "a finish": AgentFinish({"output": 1}, "log"),
    "an enum": Mood.GOOD,
    "a dataclass": Plan([Weather(degrees=1)]),
    "a view": memoryview(bytearray(b"ab")),
    "an array": array.array("d", [1.5]),
    "a namespace": types.SimpleNamespace(a=[1]),
    "the address of a database": PostgresDsn("postgresql://me@host/db"),
    "numpy scalars": [np.float64(1.5), np.int32(4), np.bool_(True)],
    "a pattern": re.compile("a+", re.IGNORECASE),
    "an address": ipaddress.ip_address("1.2.3.4"),
    "a link": HttpUrl("https://example.com/a"),
}


@pytest.mark.parametrize("name", VALUES)
def test_it_comes_back_as_what_it_was(tmp_path: Path, name: str) -> None:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"value": VALUES[name], "list": [VALUES[name]]}
    with KedgeSaver(tmp_path) as saver:
        saver.put_writes(saver.put(CONFIG, checkpoint, {}, {}), [("value", VALUES[name])], "task")
    with KedgeSaver(tmp_path) as saver:
        found = saver.get_tuple(CONFIG)
    assert found is not None
    assert found.pending_writes is not None
    for value in (*found.checkpoint["channel_values"]["list"], found.pending_writes[0][2]):
        assert value == VALUES[name]
        assert type(value) is type(VALUES[name])


def test_exceptions_of_python_are_read_as_older_versions_saved_them(tmp_path: Path) -> None:
    tree = ormsgpack.packb(ormsgpack.Ext(28, ormsgpack.packb(["builtins.ValueError", 1, ["x", 1]])))
    found = decode(tree, lambda number: b"")
    assert type(found) is ValueError
    assert found.args == ("x", 1)


def test_an_error_that_an_agent_keeps_is_rebuilt_with_what_it_says(tmp_path: Path) -> None:
    error = FileNotFoundError(2, "no such file", "a.txt")
    error.add_note("looked twice")
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"errors": [error]}
    with KedgeSaver(tmp_path) as saver:
        saver.put(CONFIG, checkpoint, {}, {})
    with KedgeSaver(tmp_path) as saver:
        found = saver.get_tuple(CONFIG)
    assert found is not None
    (again,) = found.checkpoint["channel_values"]["errors"]
    assert (str(again), again.filename, again.__notes__) == (str(error), "a.txt", ["looked twice"])


PROGRAM = """
import sys
from typing import Any, TypedDict
from langgraph.graph import START, StateGraph
from kedge.integrations.langgraph import KedgeSaver
from state_of_the_program import Plan

class State(TypedDict):
    plan: Any

builder = StateGraph(State)
builder.add_node("grow", lambda state: {"plan": Plan(state["plan"].steps + ["more"])})
builder.add_edge(START, "grow")
with KedgeSaver("store") as saver:
    graph = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "t"}}
    if sys.argv[1] == "first":
        graph.invoke({"plan": Plan(["a"])}, config)
    else:
        plan = graph.get_state(config).values["plan"]
        assert type(plan) is Plan and plan.steps == ["a", "more"], plan
"""


def test_the_next_process_rebuilds_what_is_its_own_and_a_stranger_gets_data(tmp_path: Path) -> None:
    (tmp_path / "state_of_the_program.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Plan:\n    steps: list\n"
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    for which in ("first", "second"):
        subprocess.run([sys.executable, "program.py", which], check=True, cwd=tmp_path, timeout=100)
    with KedgeSaver(tmp_path / "store") as saver, pytest.warns(UserWarning, match="state_of_the_program:Plan"):
        found = saver.get_tuple({"configurable": {"thread_id": "t"}})
    assert found is not None
    plan = found.checkpoint["channel_values"]["plan"]
    assert isinstance(plan, Unrestored)
    assert plan.content == {"steps": ["a", "more"]}
    assert "state_of_the_program" not in sys.modules


def test_what_cannot_be_saved_is_refused_in_a_list_too(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    hidden = AIMessage("a")
    object.__setattr__(hidden, "__pydantic_private__", {"x": 1})
    with KedgeSaver(tmp_path) as saver:
        for value in (endless, hidden):
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"list": ["first", value]}
            with pytest.raises((UnsupportedType, Validation), match="list"):
                saver.put(CONFIG, checkpoint, {}, {})
        assert saver.get_tuple(CONFIG) is None
