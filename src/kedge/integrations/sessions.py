"""Conversations of agent frameworks in a Kedge store, without their libraries: a session is a job, a turn a checkpoint.

    from agents import Agent, Runner                       # the OpenAI Agents SDK
    from kedge.integrations.sessions import KedgeSession

    await Runner.run(agent, "hello", session=KedgeSession("customer-7", "my-store"))

Each change is a whole checkpoint of job `session:customer-7`, durable when the call returns. So history, diff, fork,
pins, retention and encryption are those of any job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from kedge.errors import Validation
from kedge.manager import CheckpointManager
from kedge.model import parse_name

from .agents import finished
from .threads import Threads

PREFIX = "session:"


class KedgeSession(Threads):
    """The Session protocol of the OpenAI Agents SDK; `messages` and `replace` are for any other framework.

    `store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close. Two processes that
    add to the same session at the same time both succeed.
    """

    def __init__(self, session_id: str, store: str | os.PathLike[str] | CheckpointManager | None = None) -> None:
        self.session_id = session_id
        self.session_settings: object = None  # the SDK's, which it applies itself
        self.job = parse_name("session", f"{PREFIX}{session_id}")
        super().__init__(store)

    def messages(self, limit: int | None = None) -> list[object]:
        """The items of the session, or the newest `limit`, oldest first."""
        if limit is not None and (type(limit) is not int or limit < 0):
            raise Validation(f"limit={limit!r}", hint="use a whole number from 0 on, or None")
        items: list[Any] = self.read(self.job).get("items", [])
        return items if limit is None else items[max(len(items) - limit, 0) :]

    def replace(self, items: Sequence[Any], step: str = "replace") -> None:
        """Make these the items of the session, also where others have added some since you read it."""
        self._change(step, lambda _: [*items])

    async def get_items(self, limit: int | None = None) -> list[object]:
        return await finished(self.messages, limit)

    async def add_items(self, items: Sequence[object]) -> None:
        if items:
            await finished(self._change, "add", lambda before: [*before, *items])

    async def pop_item(self) -> object | None:
        before = await finished(self._change, "pop", lambda before: before[:-1])
        return before[-1] if before else None

    async def clear_session(self) -> None:
        """Empty the session. What was said stays in the job's history, until retention or `kedge delete` removes it."""
        await finished(self._change, "clear", lambda _: [])

    def _change(self, step: str, change: Callable[[list[object]], list[object]]) -> list[Any]:
        """Save the changed items; answers those before the change. An empty session stays as it is."""

        def changed(state: dict[str, Any]) -> dict[str, Any] | None:
            before = state.get("items", [])
            after = change(before)
            return {"items": after} if after or before else None

        items: list[Any] = self.change(self.job, step, changed).get("items", [])
        return items
