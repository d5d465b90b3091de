"""Saved views: addresses of this page under a name, for everybody who sees the namespace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from kedge.errors import Conflict, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.server.auth import Access
from kedge.server.tokens import ACCESS, own_job

from .templates import PageRoute, Writer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST = 100
_ADDRESS = re.compile(r"/(?!/)[A-Za-z0-9._~!$&'()*+,;=:@%/?-]{0,1999}")  # a place of this page, and no other


@dataclass(frozen=True, slots=True)
class View:
    name: str
    address: str
    checkpoint: str


def views_of(access: Access) -> list[View]:
    """Those of the namespace that is shown, by name."""
    views = [
        View(record.step, str(record.metadata.get("address", "/")), record.id)
        for record in _records(access).list(_job(access), limit=_MOST)
    ]
    return sorted(views, key=lambda view: view.name.lower())


@router.post("/views")
async def save_view(
    request: Request,
    access: Writer,
    name: Annotated[str, Form(min_length=1, max_length=100)],
    address: Annotated[str, Form(max_length=2000)],
) -> Response:
    root = request.scope.get("root_path", "")
    place = address.removeprefix(root)
    if _ADDRESS.fullmatch(place) is None:
        raise Validation("this is not an address of this page", hint="open the view, then save it")

    def save() -> None:
        known = views_of(access)
        if any(view.name == name.strip() for view in known):
            raise Conflict(f"there is a view {name.strip()} already", hint="delete it first, or choose another name")
        if len(known) >= _MOST:
            raise Conflict(f"there are {_MOST} views already", hint="delete some")
        _records(access).save(_job(access), name.strip() or "view", None, metadata={"address": place})

    await access.service.in_thread(save)
    return see(request, place, f"The view {name.strip()} is saved: the search page lists it.")


@router.post("/views/delete")
async def delete_view(request: Request, access: Writer, id: Annotated[str, Form(max_length=200)]) -> Response:
    def delete() -> None:
        if all(view.checkpoint != id for view in views_of(access)):
            raise NotFound("there is no such view", hint="somebody else may have deleted it")
        _records(access).delete(_job(access), id)

    await access.service.in_thread(delete)
    return see(request, "/search", "The view is deleted.")


def _records(access: Access) -> CheckpointManager:
    return access.service.manager(ACCESS).acting_as(access.caller.actor)


def _job(access: Access) -> str:
    return own_job("views", access.namespace)
