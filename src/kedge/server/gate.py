"""The gate before a route: who asks is known, has the scope and a slot before a byte of the body is read.

A framework reads the body first and asks who sent it later: strangers would fill memory, disk and slots. So the edge
hands out bodies closed (`limits.Body`), and a route's gate opens them, as far as the route needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kedge.errors import CheckpointError, Unavailable

from .auth import SAFE_METHODS, identify, refuse_narrow_scope, refuse_other_sites, rule_of, service_of
from .limits import Body, body_of
from .problems import OLDER_PREFIX
from .query import QueryRule, query_rule
from .service import Service
from .tokens import Scope

_TAKES_STATES = "kedge_takes_states"


def takes_states(endpoint: Callable[..., object]) -> Callable[..., object]:
    """Mark a route whose bodies are states; those of all others are small."""
    endpoint.__dict__[_TAKES_STATES] = True
    return endpoint


class GatedRoute(APIRoute):
    """A route with a gate. All routes are such ones: `create_app` refuses others."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_admitted(request: Request) -> Response:
            await self.admit(request)
            try:
                response: Response = await handle(request)
            except HTTPException as error:
                if isinstance(error.__cause__, CheckpointError):  # of the body: the framework calls all of these 400
                    raise error.__cause__ from None
                raise
            return response

        return handle_admitted

    @cached_property
    def rule(self) -> Scope | None:
        return rule_of(self)

    @cached_property
    def query_rule(self) -> QueryRule | None:
        """None for the older routes: they took any."""
        if self.path.startswith(OLDER_PREFIX):
            return None
        return query_rule(self.dependant, is_page=not self.include_in_schema)

    async def admit(self, request: Request) -> None:
        """Let the request in, or raise: Unauthorized, NotAllowed, Validation, Unavailable, TooLarge."""
        service, body = service_of(request), body_of(request.scope)
        limits = service.limits
        if self.rule is not None:
            refuse_narrow_scope(await identify(request), self.rule)
        if request.scope["query_string"] and (query := self.query_rule) is not None:
            query.check(request.query_params)
        if self.rule is not None:
            _take_slot(service, service.slots, limits.concurrent, body)
            takes_states = getattr(self.endpoint, _TAKES_STATES, False)
            body.open(limits.body_bytes if takes_states else limits.document_bytes, limits.receive_s)
        elif request.method not in SAFE_METHODS:  # signing in and out
            refuse_other_sites(request, has_cookie=False)
            _take_slot(service, service.sign_ins, limits.sign_ins, body)
            body.open(limits.form_bytes, limits.form_s)


def _take_slot(service: Service, slots: set[Body], most: int, body: Body) -> None:
    """A place among the requests that are served at once, until the edge takes it back."""
    if len(slots) >= most:
        service.metrics.refused.labels("busy").inc()
        raise Unavailable("the service has too much to do", hint="try again in a moment")
    slots.add(body)
