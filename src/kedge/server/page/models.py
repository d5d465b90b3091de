"""The page of what LLM calls cost."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from kedge.llm.pricing import dollars
from kedge.manager import CheckpointManager

from .memory import memory_of
from .templates import PageRoute, Reader, answer

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/models")
async def models(
    request: Request, access: Reader, span: Literal["", "hour", "day", "week", "month", "year"] = ""
) -> Response:
    """What LLM calls cost: spent and saved, never mixed."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        return {**memory_of(request).of(access.namespace).spending.look(store, span), "dollars": dollars}

    return await answer(request, access, "models.html", facts)
