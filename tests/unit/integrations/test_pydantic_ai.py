"""Pydantic AI with the real package and models that are none."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from tests.parts import library

library("pydantic_ai")
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from kedge.integrations.pydantic_ai import KedgeDurability
from kedge.integrations.sessions import KedgeSession


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


class World:
    """An agent that weighs two parcels, one after another, and counts what it asks and calls."""

    def __init__(self) -> None:
        self.requests = 0
        self.weighed: list[int] = []
        self.is_broken = False

    def agent(self) -> Agent[None, str]:
        agent: Agent[None, str] = Agent(FunctionModel(self._ask), name="clerk", capabilities=[KedgeDurability()])

        @agent.tool_plain
        def weigh(parcel: int) -> int:
            if self.is_broken and parcel == 2:
                raise OSError("the scales are broken")
            self.weighed.append(parcel)
            return parcel * 10

        return agent

    def _ask(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.requests += 1
        turn = sum(isinstance(message, ModelResponse) for message in messages)
        if turn < 2:
            return ModelResponse(parts=[ToolCallPart("weigh", {"parcel": turn + 1})])
        return ModelResponse(parts=[TextPart(f"done after {self.requests} requests")])


def test_a_run_goes_on_where_it_was(store: kedge.CheckpointManager) -> None:
    world = World()
    world.is_broken = True
    with pytest.raises(OSError, match="broken"), kedge.run("order", store=store):
        asyncio.run(world.agent().run("weigh them"))
    assert (world.requests, world.weighed) == (2, [1])
    world.is_broken = False
    for _ in range(2):
        with kedge.run("order", store=store):
            result = asyncio.run(world.agent().run("weigh them"))
            assert result.output == "done after 3 requests"
    assert (world.requests, world.weighed) == (3, [1, 2]), "nothing was asked or called twice"


def test_the_next_attempt_of_a_step_around_an_agent_repeats_nothing(store: kedge.CheckpointManager) -> None:
    world = World()
    world.is_broken = True
    agent = world.agent()
    attempts = []

    async def weigh() -> str:
        attempts.append(len(attempts))
        world.is_broken = len(attempts) == 1
        return (await agent.run("weigh them")).output

    async def work() -> None:
        async with kedge.run("order", store=store) as run:
            assert await run.step("weigh", weigh, retries=kedge.Retry(1, delay_s=0)) == "done after 3 requests"

    asyncio.run(work())
    assert (len(attempts), world.requests, world.weighed) == (2, 3, [1, 2])


def test_several_agents_of_one_run_in_asyncio(store: kedge.CheckpointManager) -> None:
    world = World()

    async def main() -> list[str]:
        async with kedge.run("orders", store=store) as run:
            outputs = []
            for number in range(2):
                with run.stage(f"order {number}"):
                    outputs.append((await world.agent().run(f"order {number}")).output)
            return outputs

    assert asyncio.run(main()) == asyncio.run(main()) == ["done after 3 requests", "done after 6 requests"]
    assert world.requests == 6


def test_outside_of_a_run_it_is_an_ordinary_agent() -> None:
    world = World()
    assert asyncio.run(world.agent().run("weigh them")).output == "done after 3 requests"


def test_the_history_of_a_conversation(tmp_path: Path) -> None:
    def count(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse(parts=[TextPart(f"{len(messages)} messages")])

    def turn(text: str) -> str:
        with KedgeSession("customer-7", tmp_path / "store") as session:
            history = ModelMessagesTypeAdapter.validate_python(session.messages())
            result = asyncio.run(Agent(FunctionModel(count)).run(text, message_history=history))
            kept: Any = ModelMessagesTypeAdapter.dump_python(result.all_messages(), mode="json")
            session.replace(kept)
            return result.output

    assert [turn("hello"), turn("again")] == ["1 messages", "3 messages"]
