"""Sessions of the Agent Development Kit, with the real package and a model that is none."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from tests.parts import library

library("google.adk")
from google.adk.agents import LlmAgent
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types

from kedge.integrations.adk import KedgeSessionService

OWNER = {"app_name": "the shop", "user_id": "käte@example.org"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[KedgeSessionService]:
    with KedgeSessionService(tmp_path / "store") as opened:
        yield opened


class Echo(BaseLlm):
    """Answers with how many contents it was given."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        text = f"{len(llm_request.contents)} so far"
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=text)]))


def said(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


def event(number: int, **delta: Any) -> Event:
    content = said(f"message {number}")
    return Event(
        id=f"e{number}",
        author="user",
        timestamp=float(number),
        content=content,
        actions=EventActions(state_delta=delta),
    )


def test_a_conversation_goes_on_in_another_process(tmp_path: Path) -> None:
    async def turn(text: str) -> list[str]:
        async with KedgeSessionService(tmp_path / "store") as service:
            agent = LlmAgent(name="clerk", model=Echo(model="echo"))
            runner = Runner(app_name="the shop", agent=agent, session_service=service, auto_create_session=True)
            events = runner.run_async(user_id="7", session_id="s", new_message=said(text))
            return [e.content.parts[0].text async for e in events if e.content and e.content.parts]

    assert asyncio.run(turn("hello")) == ["1 so far"]
    assert asyncio.run(turn("again")) == ["3 so far"]
    with kedge.open(tmp_path / "store") as store:
        assert [job.name for job in store.jobs()] == ["adk:the+20shop@7@s"]
        steps = [checkpoint.step for checkpoint in store.list("adk:the+20shop@7@s")]
        assert steps == ["create", "user", "clerk", "user", "clerk"]


def test_state_is_that_of_the_session_the_user_and_the_app(service: KedgeSessionService) -> None:
    async def main() -> None:
        first = await service.create_session(
            **OWNER, state={"colour": "blue", "user:name": "Käte", "app:open": True, "temp:x": 1}
        )
        assert first.state == {"colour": "blue", "user:name": "Käte", "app:open": True}
        await service.append_event(first, event(1, colour="red", **{"user:age": 40, "temp:now": 1}))
        assert first.state["temp:now"] == 1
        loaded = await service.get_session(**OWNER, session_id=first.id)
        assert loaded is not None
        assert loaded.state == {"colour": "red", "user:name": "Käte", "user:age": 40, "app:open": True}
        assert [e.id for e in loaded.events] == ["e1"]
        assert loaded.events[0].actions.state_delta == {"colour": "red", "user:age": 40}
        assert loaded.last_update_time == 1.0
        other = await service.create_session(app_name="the shop", user_id="another")
        assert other.state == {"app:open": True}
        assert await service.get_user_state(**OWNER) == {"name": "Käte", "age": 40}
        assert await service.get_user_state(app_name="the shop", user_id="nobody") == {}

    asyncio.run(main())


def test_sessions_are_listed_and_deleted(service: KedgeSessionService) -> None:
    async def main() -> None:
        for user, session in (("b", "2"), ("a", "1"), ("a", "3")):
            made = await service.create_session(app_name="x", user_id=user, session_id=session, state={"n": {"m": 1}})
            await service.append_event(made, event(int(session)))
        await service.create_session(app_name="x2", user_id="a", session_id="1")
        await service.create_session(app_name="x", user_id="ab", session_id="0")
        everybody = (await service.list_sessions(app_name="x")).sessions
        assert [(s.user_id, s.id) for s in everybody] == [("a", "1"), ("b", "2"), ("a", "3"), ("ab", "0")]
        mine = (await service.list_sessions(app_name="x", user_id="a")).sessions
        assert [(s.id, s.state, s.events) for s in mine] == [("1", {"n": {"m": 1}}, []), ("3", {"n": {"m": 1}}, [])]
        for _ in range(2):
            await service.delete_session(app_name="x", user_id="a", session_id="1")
        assert [s.id for s in (await service.list_sessions(app_name="x", user_id="a")).sessions] == ["3"]
        assert await service.get_session(app_name="x", user_id="a", session_id="1") is None

    asyncio.run(main())


def test_events_of_a_session(service: KedgeSessionService) -> None:
    async def main() -> None:
        session = await service.create_session(**OWNER, session_id="s")
        for number in range(1, 5):
            await service.append_event(session, event(number))
        stale = await service.get_session(**OWNER, session_id="s", config=GetSessionConfig(num_recent_events=0))
        assert stale is not None
        await service.append_event(stale, event(5))
        await service.append_event(stale, event(5))  # delivered again
        assert (await service.append_event(stale, Event(author="m", partial=True))).partial

        async def ids(**config: Any) -> list[str]:
            loaded = await service.get_session(**OWNER, session_id="s", config=GetSessionConfig(**config))
            assert loaded is not None
            return [e.id for e in loaded.events]

        assert await ids() == ["e1", "e2", "e3", "e4", "e5"]
        assert await ids(num_recent_events=2) == ["e4", "e5"]
        assert await ids(after_timestamp=3.0) == ["e3", "e4", "e5"]

    asyncio.run(main())


def test_refusals_change_nothing(service: KedgeSessionService) -> None:
    async def main() -> None:
        session = await service.create_session(**OWNER, session_id="s")
        with pytest.raises(AlreadyExistsError):
            await service.create_session(**OWNER, session_id="s")
        lost = session.model_copy(update={"id": "nowhere"}, deep=True)
        with pytest.raises(SessionNotFoundError):
            await service.append_event(lost, event(1))
        assert lost.events == []
        with pytest.raises(kedge.InvalidName):
            await service.create_session(app_name="x" * 200, user_id="u")
        with pytest.raises(kedge.UnsupportedType):
            await service.create_session(**OWNER, state={"socket": object()})
        assert len(service.manager.jobs()) == 1

    asyncio.run(main())
