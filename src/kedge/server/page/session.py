"""Signing in and out, and choosing a namespace."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request
from starlette.responses import Response

from kedge.errors import NotAllowed, Unauthorized
from kedge.server import auth

from .templates import NAMESPACE, Anyone, PageRoute, page, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_NEXT = re.compile(r"/(?!/)[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*")


@router.get("/login")
@auth.public
async def login(request: Request, next: Annotated[str, Query(max_length=2000)] = "") -> Response:
    return page(request, None, "login.html", {"problem": "", "next": next})


@router.post("/login")
@auth.public
async def sign_in(
    request: Request, token: Annotated[str, Form(max_length=200)], next: Annotated[str, Form(max_length=2000)] = ""
) -> Response:
    root = request.scope.get("root_path", "")
    wanted = next.removeprefix(root) if _NEXT.fullmatch(next) else "/"
    response = see(request, wanted or "/")
    try:
        await auth.sign_in(request, response, token.strip())
    except Unauthorized:
        facts = {"problem": "This token is unknown, expired or revoked.", "next": next}
        return page(request, None, "login.html", facts, status=401)
    return response


@router.post("/logout")
async def sign_out(request: Request, access: Anyone) -> Response:
    response = see(request, "/login")
    await auth.sign_out(request, response)
    return response


@router.post("/namespace")
async def choose_namespace(
    request: Request, access: Anyone, namespace: Annotated[str, Form(max_length=128)]
) -> Response:
    if namespace not in access.caller.namespaces:
        raise NotAllowed(f"namespace {namespace} is not open to you", hint="ask for a token for it")
    response = see(request, "/")
    root = request.scope.get("root_path", "")
    response.set_cookie(NAMESPACE, namespace, path=root or "/", httponly=True, samesite="strict")
    return response
