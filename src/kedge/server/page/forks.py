"""A run again from one of its steps, perhaps with other arguments: its plan first, then the new run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from kedge.errors import CheckpointError, Validation
from kedge.manager import CheckpointManager
from kedge.pipeline.fork import ForkPlan, fork, plan_fork

from . import states
from .templates import PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 200  # steps of each kind


class Asked(BaseModel):
    step: str = Field(max_length=4096)
    new_key: str = Field("", max_length=128)
    arguments: str = Field("", max_length=4000)


@router.get("/runs/{key}/fork")
async def plan(request: Request, access: Reader, key: str, asked: Annotated[Asked, Query()]) -> Response:
    """What a fork would reuse and run again; what was typed may be wrong, and then says so here."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        made, problem = plan_fork(store, key, asked.step), ""
        try:
            made = _plan(store, key, asked)
        except CheckpointError as error:
            problem = f"{error.message}. {error.hint}" if error.hint else error.message
        return {"plan": made, "problem": problem, "most": _SHOWN, **asked.model_dump(exclude={"step"})}

    return await answer(request, access, "fork.html", facts)


@router.post("/runs/{key}/fork")
async def make(request: Request, access: Writer, key: str, asked: Annotated[Asked, Form()]) -> Response:
    def work(store: CheckpointManager) -> ForkPlan:
        made = _plan(store, key, asked)
        fork(store, made)
        return made

    made = await access.ask(work)
    what = f"Workers of queue {made.queue} carry it out." if made.queue else "Resume it to carry it out."
    return see(request, f"/runs/{quote(made.fork, safe='')}", f"This is the fork of {key} from {asked.step}. {what}")


def _plan(store: CheckpointManager, key: str, asked: Asked) -> ForkPlan:
    given = states.parse_value(asked.arguments) if asked.arguments.strip() else {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise Validation("the arguments must be a JSON object", hint='such as {"rate": 0.1}')
    return plan_fork(store, key, asked.step, new_key=asked.new_key.strip() or None, arguments=given)
