"""What is compared and copied for agents: as strictly as the encoding is."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from tests.parts import require

require("module:langgraph")

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from kedge.codec.fragments import decode_fragment, encode_fragment
from kedge.integrations.langgraph.copies import Copy, are_same, copy_of


class Text(str):
    __slots__ = ()


def unset(message: Any) -> Any:
    message.__pydantic_fields_set__.clear()
    return message


def reordered(message: Any) -> Any:
    fields = dict(reversed(message.__dict__.items()))
    object.__setattr__(message, "__dict__", fields)
    return message


MAKERS: list[Callable[[], Any]] = [
    lambda: HumanMessage("a"),
    lambda: HumanMessage("a", id="1"),
    lambda: HumanMessage("b"),
    lambda: AIMessage("a"),
    lambda: AIMessage("a", id="1"),
    lambda: unset(AIMessage("a")),
    lambda: AIMessage("a", additional_kwargs={"n": 1}),
    lambda: AIMessage("a", additional_kwargs={"n": True}),
    lambda: AIMessage("a", additional_kwargs={"n": 1.0}),
    lambda: AIMessage("a", additional_kwargs={"n": [HumanMessage("in it")]}),
    lambda: AIMessage(["a", {"type": "text", "text": "b"}]),
    lambda: AIMessage("", tool_calls=[{"name": "f", "args": {"x": 0.0}, "id": "1"}]),
    lambda: AIMessage("", tool_calls=[{"name": "f", "args": {"x": -0.0}, "id": "1"}]),
    lambda: ToolMessage("a", tool_call_id="1", artifact=None),
    lambda: ToolMessage("a", tool_call_id="1", artifact=0.5),
    lambda: {"n": 1, "of": ["b", ("c", None)]},
    lambda: {"n": True, "of": ["b", ("c", None)]},
    list,
    lambda: 1,
    lambda: True,
    lambda: b"1",
]


@pytest.mark.parametrize("number", range(len(MAKERS)))
def test_only_what_is_encoded_alike_is_the_same(number: int) -> None:
    copy = Copy(decode_fragment(encode_fragment(MAKERS[number]())))
    assert [n for n, make in enumerate(MAKERS) if copy.is_of(make())] == [number]
    assert copy.is_of(copy.again())
    assert encode_fragment(copy.again()) == encode_fragment(MAKERS[number]())


@pytest.mark.parametrize("number", range(len(MAKERS)))
def test_many_at_once_are_the_same_only_if_each_is(number: int) -> None:
    copies = [Copy(decode_fragment(encode_fragment(make()))) for make in (MAKERS[0], MAKERS[number], MAKERS[1])]
    for n, make in enumerate(MAKERS):
        if are_same(copies, [MAKERS[0](), make(), MAKERS[1]()]):
            assert n == number
    assert are_same(copies[:1], [MAKERS[0]()])
    assert not are_same(copies[:1], [])


def test_many_at_once_with_what_looks_alike() -> None:
    for ours, other in (({"n": b"a"}, {"n": bytearray(b"a")}), ({"n": "a"}, {"n": Text("a")}), ([1], (1,))):
        assert not are_same([Copy(ours)], [other])
    hidden = HumanMessage("a")
    object.__setattr__(hidden, "__pydantic_private__", {"x": 1})
    assert are_same([Copy(HumanMessage("a"))], [HumanMessage("a")])
    for other in (hidden, unset(HumanMessage("a")), HumanMessage("a", more=1)):
        assert not are_same([Copy(HumanMessage("a"))], [other])


def test_the_order_of_fields_means_nothing_and_their_types_do() -> None:
    copy = Copy(HumanMessage("a"))
    assert copy.is_of(reordered(HumanMessage("a")))
    for name, other in (("content", Text("a")), ("additional_kwargs", OrderedDict()), ("id", "1"), ("name", False)):
        changed = HumanMessage("a")
        changed.__dict__[name] = other
        assert not copy.is_of(changed)
    assert not copy.is_of(None)


def test_a_copy_shares_nothing() -> None:
    copy = Copy(AIMessage("a", response_metadata={"deep": [1]}))
    changed = copy.again()
    changed.content = "b"
    changed.additional_kwargs["x"] = 1
    changed.tool_calls.append({"name": "f", "args": {}, "id": "1"})
    changed.response_metadata["deep"].append(2)
    assert copy.is_of(AIMessage("a", response_metadata={"deep": [1]}))


def test_what_cannot_be_saved_is_not_copied() -> None:
    endless: list[Any] = []
    endless.append(endless)
    hidden = HumanMessage("a")
    object.__setattr__(hidden, "__pydantic_private__", {"x": 1})
    for value in (endless, {"a": endless}, hidden, [hidden], object(), Text("a"), {1: "a"}):
        assert copy_of(value, is_shared=True) is None


def test_a_copy_of_what_others_have_stays_as_it_was() -> None:
    message = AIMessage("a", response_metadata={"deep": [1]})
    copy = copy_of(message, is_shared=True)
    assert copy is not None
    assert copy.is_of(message)
    message.response_metadata["deep"].append(2)
    assert not copy.is_of(message)
    assert copy.is_of(AIMessage("a", response_metadata={"deep": [1]}))
