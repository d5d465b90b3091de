"""The two requests that come most, answered without the framework: a checkpoint's metadata, and a save of plain JSON.

Nothing is decided here that the routes do not decide: the same rules (`auth`), the same parsing (`uploads`), the same
documents. And only what is plain is answered: no query, no cookie, a caller known from memory, names in their form, a
small body that came whole. Whatever else a request is goes the long way, with what was read of its body, and is told
there what is wrong with it. tests/server/test_hot.py asks both ways and compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.types import Message, Receive, Scope, Send

from kedge.errors import CheckpointError

from .auth import Access, Needs, recall_caller, rule_of
from .responses import JsonAnswer
from .routes.checkpoints import get_checkpoint
from .routes.saves import MAX_KEY, save_checkpoint
from .schemas import NAME_PATTERN
from .tokens import Scope as Right
from .uploads import PlainSave, media_type

if TYPE_CHECKING:
    from .service import Service

SMALL_BYTES = 64 << 10
TELEMETRY = "fastapi.telemetry"  # in the scope of requests that are traced: the framework names their spans
_NAME = NAME_PATTERN.strip("^$")
_LOOK = re.compile(f"/api/v1/checkpoints/({_NAME})")
_SAVE = re.compile(f"/api/v1/jobs/({_NAME})/checkpoints")
# What would have to be looked at: a page's cookie, another site's page, somebody behind a proxy.
_UNUSUAL = (b"cookie", b"origin", b"sec-fetch-site", b"x-forwarded-for", b"forwarded")

Headers = Mapping[bytes, bytes]


class Hot:
    """Made when all routes are there: their rules and names are taken from them."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        routes = {route.endpoint: route for route in iter_route_contexts(app.routes)}
        self._service = service
        self._look, self._save = routes[get_checkpoint], routes[save_checkpoint]
        self._may_look, self._may_save = (Needs(rule_of(route) or Right.ADMIN) for route in (self._look, self._save))

    async def answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> Receive | None:
        """None when it is answered; else what the long way is to read the body from."""
        method = scope["method"]
        if method not in ("GET", "POST") or scope["query_string"] or TELEMETRY in scope:
            return receive
        if len(headers) != len(scope["headers"]) or any(name in headers for name in _UNUSUAL):
            return receive
        if method == "POST":
            return await self._answer_save(scope, headers, receive, send)
        found = _LOOK.fullmatch(_path(scope))
        access = found and self._admit(self._may_look, scope, headers)
        if not found or not access:
            return receive
        try:
            checkpoint = await self._service.looks.ask((access.namespace, found[1]))
        except CheckpointError:
            return receive
        scope["route"] = self._look
        await JsonAnswer(checkpoint.to_json())(scope, receive, send)
        return None

    async def _answer_save(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> Receive | None:
        found = _SAVE.fullmatch(_path(scope))
        length = headers.get(b"content-length", b"")
        if not found or media_type(headers.get(b"content-type", b"")) != b"application/json":
            return receive
        if not length.isdigit() or int(length) > SMALL_BYTES or b"expect" in headers:
            return receive
        key = headers[b"idempotency-key"].decode("latin-1") if b"idempotency-key" in headers else None
        access = self._admit(self._may_save, scope, headers)
        if access is None or (key is not None and not 1 <= len(key) <= MAX_KEY):
            return receive
        message = await receive()
        again = _replay(message, receive)
        if message["type"] != "http.request" or message.get("more_body"):
            return again
        scope["route"] = self._save
        try:
            checkpoint = await self._service.saves.ask(PlainSave(access, found[1], key, message.get("body", b"")))
        except RequestValidationError:
            return again  # nothing was saved; the long way says it in full
        await JsonAnswer(checkpoint.to_json(), 201)(scope, receive, send)
        return None

    def _admit(self, needs: Needs, scope: Scope, headers: Headers) -> Access | None:
        caller = recall_caller(self._service, scope.get("client"), headers.get(b"authorization"))
        if caller is None:
            return None
        try:
            access = needs.admit(caller, None, self._service)
        except CheckpointError:
            return None
        scope.setdefault("state", {})["actor"] = caller.actor
        return access


def _path(scope: Scope) -> str:
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _replay(message: Message, receive: Receive) -> Receive:
    """`receive` with a message that was read already."""
    seen = [message]

    async def again() -> Message:
        return seen.pop() if seen else await receive()

    return again
