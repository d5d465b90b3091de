"""Webhooks of a namespace, for those who may manage it: made, tried, deleted, and what was sent last."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from kedge.manager import CheckpointManager
from kedge.server.auth import Access
from kedge.server.webhooks import EVENTS, Webhook, Webhooks

from .templates import Administrator, PageRoute, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 50  # messages that wait

Identity = Annotated[str, Form(max_length=20)]


@router.get("/webhooks")
async def webhooks(request: Request, access: Administrator) -> Response:
    return await answer(request, access, "webhooks.html", lambda _: _facts(access))


@router.post("/webhooks")
async def create_webhook(
    request: Request,
    access: Administrator,
    url: Annotated[str, Form(max_length=2000)],
    events: Annotated[list[Annotated[str, Form(max_length=20)]], Form(max_length=len(EVENTS))] = [],  # noqa: B006
) -> Response:
    """Make one and show its secret, this once."""

    def make(store: CheckpointManager) -> dict[str, Any]:
        made = _managed(access).create(store, url.strip(), events)
        access.service.notifier.wake()
        return {**_facts(access), "made": made}

    return await answer(request, access, "webhooks.html", make)


@router.post("/webhooks/test")
async def try_webhook(request: Request, access: Administrator, id: Identity) -> Response:
    problem = await access.service.in_thread(lambda: _managed(access).send_test(access.namespace, id))
    return see(request, "/webhooks", f"The test failed: {problem}." if problem else "The receiver took the test.")


@router.post("/webhooks/delete")
async def delete_webhook(request: Request, access: Administrator, id: Identity) -> Response:
    await access.service.in_thread(lambda: _managed(access).delete(access.namespace, id))
    return see(request, "/webhooks", "The webhook is deleted. What it had still to send is not sent.")


def _managed(access: Access) -> Webhooks:
    return access.service.webhooks(access.caller.actor)


def _facts(access: Access) -> dict[str, Any]:
    managed = _managed(access)
    known: list[Webhook] = managed.all(access.namespace)
    record = managed.record_of(access.namespace)
    return {
        "webhooks": known,
        "addresses": {webhook.id: webhook.url for webhook in known},
        "unsent": record["pending"][:_SHOWN],
        "recent": record["recent"][::-1],
        "kinds": EVENTS,
        "made": None,
    }
