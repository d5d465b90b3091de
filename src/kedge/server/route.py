"""The way of the requests that come most: a checkpoint's metadata, and saves.

A `DirectRoute` is written like any other route: its signature says what it takes, for callers and for OpenAPI. But its
parameters are read without FastAPI's solver of dependencies, which costs more than such a request does in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope, Send

from .auth import Needs
from .gate import GatedRoute

TRACE = "fastapi.telemetry"  # in the scope of requests that are traced: the framework names their spans


class DirectRoute(GatedRoute):
    """A route with one rule (`auth`) and parameters in its path and headers; its endpoint answers a Response."""

    def __init__(self, path: str, endpoint: Callable[..., object], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        own = self.dependant
        if own.query_params or own.cookie_params or own.body_params or len(own.dependencies) != 1:
            raise TypeError(f"{path}: a direct route takes one rule, and parameters of its path and headers")
        [rule] = own.dependencies
        assert isinstance(rule.call, Needs)
        assert rule.name is not None
        self._rule, self._needs, self._access = rule, rule.call, rule.name
        self.app = self._answer

    def takes(self, scope: Scope) -> bool:
        """Whether a request is for this route, which then knows the parameters of its path."""
        if scope["method"] not in (self.methods or ()) or TRACE in scope:
            return False
        path, root = scope["path"], scope.get("root_path", "")
        if (parts := self.path_regex.match(path.removeprefix(root))) is None:
            return False
        scope["route"] = self
        scope["path_params"] = parts.groupdict()
        return True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        await self.admit(request)
        response = await self.endpoint(**await self._arguments(request))
        await response(scope, receive, send)

    async def _arguments(self, request: Request) -> dict[str, Any]:
        """What the endpoint is called with; in FastAPI's order: first who asks, then what is asked for."""
        own, rule = self.dependant, self._rule
        arguments: dict[str, object] = {}
        errors: list[object] = []
        has_query = bool(request.scope["query_string"])
        namespace = _read("query", rule.query_params, request.query_params, errors) if has_query else {}
        if not errors:
            arguments[self._access] = await self._needs(request, **namespace)
        arguments |= _read("path", own.path_params, request.path_params, errors)
        if own.header_params:
            arguments |= _read("header", own.header_params, request.headers, errors)
        if errors:
            raise RequestValidationError(errors)
        if own.request_param_name is not None:
            arguments[own.request_param_name] = request
        return arguments


def _read(
    place: str, fields: Sequence[ModelField], received: Mapping[str, str], errors: list[object]
) -> dict[str, Any]:
    """The values of those fields that were sent; what is wrong with the others is added to `errors`."""
    values = {}
    for field in fields:
        if (text := received.get(field.alias)) is not None:
            value, wrong = field.validate(text, loc=(place, field.alias))
            values[field.name] = value
            errors += wrong
    return values
