"""Messages of each framework, read as one conversation; and what changed between generations of a container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.server.page.conversation import Call, conversation_in, newest_conversation
from kedge.server.page.generations import generations_of
from kedge.server.page.states import Outlines

CALL = Call("find", '{"n": 1}')


@pytest.mark.parametrize("arguments", [{(1, 2): "x"}, {b"n": 1}])
def test_arguments_that_json_has_not(tmp_path: Path, arguments: object) -> None:
    block = {"type": "tool_use", "name": "find", "input": arguments}
    with kedge.open(tmp_path / "store") as store:
        store.save("session:a", "turn", {"messages": [{"role": "assistant", "content": [block]}]})
        found = newest_conversation(store, Outlines(), "session:a")
    assert found is not None
    assert found.messages[0].calls[0].arguments


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, [("user", "hi", ())]),
        ({"messages": [{"type": "human", "content": [{"type": "text", "text": "hi"}]}]}, [("user", "hi", ())]),
        ({"channel_values": {"n": 1, "chat": [{"role": "ai", "content": "hi"}]}}, [("assistant", "hi", ())]),
        (
            {"items": [
                {"type": "function_call", "name": "find", "arguments": '{"n": 1}'},
                {"type": "function_call_output", "output": "three"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
            ]},
            [("assistant", "", [CALL]), ("tool", "three", ()), ("assistant", "3", ())],
        ),
        (
            {"messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "name": "find", "input": {"n": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "three"}]}]},
                {"role": "assistant", "content": None,
                 "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}]},
            ]},
            [("assistant", "", [CALL]), ("tool", '[{"type": "text", "text": "three"}]', ()), ("assistant", "", [CALL])],
        ),
        (
            {"events": [
                {"author": "user", "content": {"role": "user", "parts": [{"text": "hi"}]}},
                {"author": "clerk", "content": {"role": "model", "parts": [
                    {"function_call": {"name": "find", "args": {"n": 1}}}]}},
                {"author": "clerk", "content": {"role": "user", "parts": [
                    {"function_response": {"name": "find", "response": {"r": 3}}}]}},
            ]},
            [("user", "hi", ()), ("assistant", "", [CALL]), ("tool", '{"r": 3}', ())],
        ),
    ],
)  # fmt: skip
def test_messages_of_every_framework(tmp_path: Path, state: dict[str, Any], said: list[Any]) -> None:
    with kedge.open(tmp_path / "store") as store:
        store.save("session:a", "turn", state)
        found = newest_conversation(store, Outlines(), "session:a")
    assert found is not None
    assert [(each.role, each.text, each.calls or ()) for each in found.messages] == said


@pytest.mark.parametrize("state", [{}, [], None, {"messages": []}, {"messages": "hi"}, {"items": [1, 2]},
                                   {"messages": [{"role": 7, "content": "x"}]},
                                   {"state": {"list": [{"a": 1}]}}])  # fmt: skip
def test_what_is_no_conversation_is_none(tmp_path: Path, state: Any) -> None:
    with kedge.open(tmp_path / "store") as store:
        store.save("session:a", "turn", state)
        assert newest_conversation(store, Outlines(), "session:a") is None
        assert newest_conversation(store, Outlines(), "nowhere") is None


@pytest.mark.parametrize("odd", [{"role": "user", "content": {"x": [1]}}, {"role": "user", "content": [None, 3, {}]},
                                 {"role": "a", "tool_calls": [1, {}, {"function": 3}], "content": 1.5}])  # fmt: skip
def test_odd_messages_break_no_page(tmp_path: Path, odd: dict[str, Any]) -> None:
    with kedge.open(tmp_path / "store") as store:
        checkpoint = store.get(store.save("a", "turn", {}))
    found = conversation_in(checkpoint, {"messages": [odd] * 120})
    assert found is not None
    assert (found.start, found.total, len(found.messages)) == (70, 120, 50)


def test_a_long_message_is_cut_and_says_so(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        checkpoint = store.get(store.save("a", "turn", {}))
    found = conversation_in(checkpoint, {"messages": [{"role": "user", "content": "x" * 10_000}]})
    assert found is not None
    assert (len(found.messages[0].text), found.messages[0].left_out) == (8000, 2000)


def test_generations_of_odd_states_are_shown(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        outlines = Outlines()
        store.save("container:a", "a", {"n": 1})
        assert generations_of(store, outlines, "container:a") is None  # not a checkpoint of a container
        for processes in ({"1": {"name": "sh", "parent": 1}, "2": 3}, {"1": {"parent": 2}, "2": {"parent": 1}}, None):
            store.save(
                "container:a", "a", {"processes": processes, "spec": 1}, metadata={"kind": "container", "pod": 3}
            )
        found = generations_of(store, outlines, "container:a")
        assert found is not None
        assert [list(row.changes) for row in found.rows] == [
            ["2 ended: ? (1), ? (2)"],
            ["1 started: ? (2)"],
            ["1 started: sh (1)"],
            [],
        ]
        assert found.restore == "kedge container restore a"
