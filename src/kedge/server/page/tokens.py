"""Tokens, for those who may manage them: made, listed and revoked.

Nobody reaches further than their own token does: into no other namespace, and tokens that do are not theirs to revoke.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from kedge.errors import NotAllowed, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.server.auth import Access
from kedge.server.tokens import ACCESS, Scope, Token, Tokens

from .templates import Administrator, PageRoute, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_TOKENS = 200


@router.get("/tokens")
async def tokens(request: Request, access: Administrator) -> Response:
    return await answer(request, access, "tokens.html", lambda _: _facts(access))


@router.post("/tokens")
async def create_token(
    request: Request,
    access: Administrator,
    name: Annotated[str, Form(max_length=128)],
    scope: Annotated[Scope, Form()],
    namespaces: Annotated[list[str], Form()],
    days: Annotated[str, Form(max_length=20)] = "",
) -> Response:
    """Make a token and show it, this once."""
    if foreign := [namespace for namespace in namespaces if namespace not in access.caller.namespaces]:
        raise NotAllowed(f"namespace {foreign[0][:128]} is not open to you", hint="ask for a token for it")

    def make(_: CheckpointManager) -> dict[str, object]:
        made, text = _managed(access).create(name, scope, namespaces, expires_days=_parse_days(days))
        return {**_facts(access), "made": made, "text": text}

    return await answer(request, access, "tokens.html", make)


def _parse_days(text: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise Validation(
            f"days must be a number (got {text!r})", hint="leave it empty for a token that never expires"
        ) from None


@router.post("/tokens/revoke")
async def revoke_token(request: Request, access: Administrator, id: Annotated[str, Form(max_length=20)]) -> Response:
    def revoke() -> Token:
        managed = _managed(access)
        token = managed.get(id)
        if token is None or not _is_managed_by(access, token):
            raise NotFound(f"there is no token {id}", hint="the list shows those that you may manage")
        return managed.revoke(token.id)

    revoked = await access.service.in_thread(revoke)
    return see(request, "/tokens", f"{revoked.name} is revoked.")


def _managed(access: Access) -> Tokens:
    """The tokens of the store, in the name of the caller."""
    return Tokens(access.service.manager(ACCESS).acting_as(access.caller.actor))


def _is_managed_by(access: Access, token: Token) -> bool:
    return set(token.namespaces) <= set(access.caller.namespaces)


def _facts(access: Access) -> dict[str, Any]:
    own = [token for token in reversed(_managed(access).all()) if _is_managed_by(access, token)]
    own.sort(key=lambda token: not token.is_valid)
    return {"tokens": own[:_TOKENS], "left_out": max(0, len(own) - _TOKENS), "scopes": list(Scope), "made": None}
