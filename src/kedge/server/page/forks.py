"""A run again from one of its steps, perhaps with other arguments: its plan first, then the new run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from starlette.responses import Response

from kedge.errors import CheckpointError, Validation
from kedge.manager import CheckpointManager
from kedge.pipeline.fork import ForkPlan, fork, plan_fork

from . import states
from .templates import PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 200  # steps of each kind


@router.get("/runs/{key}/fork")
async def plan(
    request: Request,
    access: Reader,
    key: str,
    step: Annotated[str, Query(max_length=4096)],
    new_key: Annotated[str, Query(max_length=128)] = "",
    arguments: Annotated[str, Query(max_length=4000)] = "",
) -> Response:
    """What a fork would reuse and run again; what was typed may be wrong, and then says so here."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        made, problem = plan_fork(store, key, step), ""
        try:
            made = _plan(store, key, step, new_key, arguments)
        except CheckpointError as error:
            problem = f"{error.message}. {error.hint}" if error.hint else error.message
        typed = {"new_key": new_key, "arguments": arguments}
        return {"plan": made, "problem": problem, "most": _SHOWN, "is_changed": bool(new_key or arguments), **typed}

    return await answer(request, access, "fork.html", facts)


@router.post("/runs/{key}/fork")
async def make(
    request: Request,
    access: Writer,
    key: str,
    step: Annotated[str, Form(max_length=4096)],
    new_key: Annotated[str, Form(max_length=128)] = "",
    arguments: Annotated[str, Form(max_length=4000)] = "",
) -> Response:
    def work(store: CheckpointManager) -> ForkPlan:
        made = _plan(store, key, step, new_key, arguments)
        fork(store, made)
        return made

    made = await access.ask(work)
    what = f"Workers of queue {made.queue} carry it out." if made.queue else "Resume it to carry it out."
    return see(request, f"/runs/{quote(made.fork, safe='')}", f"This is the fork of {key} from {step}. {what}")


def _plan(store: CheckpointManager, key: str, step: str, new_key: str, arguments: str) -> ForkPlan:
    given = states.parse_value(arguments) if arguments.strip() else {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise Validation("the arguments must be a JSON object", hint='such as {"rate": 0.1}')
    return plan_fork(store, key, step, new_key=new_key.strip() or None, arguments=given)
