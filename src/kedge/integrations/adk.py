"""Sessions of Google's Agent Development Kit in a Kedge store (docs/adk.md).

    from google.adk.runners import Runner
    from kedge.integrations.adk import KedgeSessionService

    Runner(app_name="shop", agent=agent, session_service=KedgeSessionService("my-store"))

A session is the job `adk:APP@USER@SESSION`, and each event a checkpoint of it, durable when the call returns. What an
app or a user shares between sessions (`app:…`, `user:…`) is in the jobs `adk-app:APP` and `adk-user:APP@USER`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from kedge.errors import NotFound, missing_extra

try:
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events.event import Event
    from google.adk.sessions.base_session_service import BaseSessionService, GetSessionConfig, ListSessionsResponse
    from google.adk.sessions.session import Session
    from google.adk.sessions.state import State
except ModuleNotFoundError as error:
    raise missing_extra("kedge.integrations.adk", "adk", error) from error

from .agents import finished
from .threads import Threads, job_of, parts_of

SESSION, USER, APP = "adk", "adk-user", "adk-app"

Values = dict[str, Any]


class KedgeSessionService(Threads, BaseSessionService):
    """`store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close.

    Two processes may append to the same session at the same time: both events are kept, in the order of their commits.
    """

    async def create_session(
        self, *, app_name: str, user_id: str, state: Values | None = None, session_id: str | None = None
    ) -> Session:
        chosen = (session_id or "").strip() or str(uuid.uuid4())
        return await finished(self._create, app_name, user_id, chosen, state or {})

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        return await finished(self._get, app_name, user_id, session_id.strip(), config or GetSessionConfig())

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        return await finished(self._list, app_name, user_id)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        await finished(self.manager.delete_job, job_of(SESSION, app_name, user_id, session_id.strip()))

    async def get_user_state(self, *, app_name: str, user_id: str) -> Values:
        return await finished(self._values, job_of(USER, app_name, user_id))

    async def append_event(self, session: Session, event: Event) -> Event:
        if event.partial:
            return event
        await finished(self._append, session.app_name, session.user_id, session.id, event)
        await super().append_event(session=session, event=event)  # to the caller's copy, with temporary values
        session.last_update_time = event.timestamp
        return event

    def _create(self, app: str, user: str, session: str, state: Values) -> Session:
        self._share(app, user, state)
        began = time.time()

        def create(before: Values) -> Values:
            if before:
                raise AlreadyExistsError(f"Session with id {session} already exists.")
            return {"state": _own(state), "events": [], "updated": began}

        self.change(job_of(SESSION, app, user, session), "create", create)
        return self._session(app, user, session, {"state": _own(state), "updated": began}, [])

    def _append(self, app: str, user: str, session: str, event: Event) -> None:
        delta = event.actions.state_delta
        event = event.model_copy(deep=True)
        event.actions.state_delta = {name: v for name, v in delta.items() if not name.startswith(State.TEMP_PREFIX)}
        document = event.model_dump(mode="json", exclude_none=True)

        def append(before: Values) -> Values | None:
            if not before:
                raise SessionNotFoundError(f"Session {session} not found.")
            if document in before["events"]:
                return None  # delivered again
            return {
                "state": {**before["state"], **_own(delta)},
                "events": [*before["events"], document],
                "updated": event.timestamp,
            }

        self._share(app, user, delta)  # first: an append that is repeated after a crash shares the same again
        self.change(job_of(SESSION, app, user, session), event.author, append)

    def _share(self, app: str, user: str, state: Mapping[str, Any]) -> None:
        """Save what the app and the user share of a state."""
        for prefix, job in ((State.APP_PREFIX, job_of(APP, app)), (State.USER_PREFIX, job_of(USER, app, user))):
            shared = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            if shared:
                self.change(job, "share", partial(_with_values, shared))

    def _values(self, job: str) -> Values:
        values: Values = self.read(job).get("values", {})
        return values

    def _get(self, app: str, user: str, session: str, config: GetSessionConfig) -> Session | None:
        stored = self.read(job_of(SESSION, app, user, session))
        if not stored:
            return None
        events = [Event.model_validate(document) for document in stored["events"]]
        if config.num_recent_events is not None:
            events = events[max(len(events) - config.num_recent_events, 0) :]
        if config.after_timestamp is not None:
            events = [event for event in events if event.timestamp >= config.after_timestamp]
        return self._session(app, user, session, stored, events)

    def _list(self, app: str, user: str | None) -> ListSessionsResponse:
        prefix = job_of(SESSION, app, user or "")
        sessions = []
        for job in self.manager.jobs(prefix if user is None else f"{prefix}@"):
            try:
                stored = self.manager.load(job.name, only=["state", "updated"])
            except NotFound:
                continue  # deleted meanwhile
            _, owner, session = parts_of(job.name)
            sessions.append(self._session(app, owner, session, stored, []))
        sessions.sort(key=lambda session: (session.last_update_time, session.user_id, session.id))
        return ListSessionsResponse(sessions=sessions)

    def _session(self, app: str, user: str, session: str, stored: Values, events: list[Event]) -> Session:
        shared = {State.APP_PREFIX: job_of(APP, app), State.USER_PREFIX: job_of(USER, app, user)}
        state = dict(stored.get("state", {}))
        for prefix, job in shared.items():
            state.update({f"{prefix}{name}": value for name, value in self._values(job).items()})
        return Session(
            id=session, app_name=app, user_id=user, state=state, events=events, last_update_time=stored["updated"]
        )


def _with_values(shared: Values, before: Values) -> Values:
    return {"values": {**before.get("values", {}), **shared}}


def _own(state: Mapping[str, Any]) -> Values:
    """What of a state belongs to the session itself."""
    others = (State.APP_PREFIX, State.USER_PREFIX, State.TEMP_PREFIX)
    return {name: value for name, value in state.items() if not name.startswith(others)}
