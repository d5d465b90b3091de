"""The step that `run.llm` is: shared with all runs of the store that ask the same of the same function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kedge.errors import Validation
from kedge.llm.calls import Shared, call_request, imported_request, single_prompt
from kedge.llm.exchange import Policy

from .keys import Path
from .session import Session
from .step import Call, Options

if TYPE_CHECKING:
    from kedge.llm.budget import Budget


def llm_call(
    session: Session,
    path: Path,
    call: Callable[..., Any],
    body: dict[str, Any],
    options: Options,
    sample: int | None,
    mode: str,
    ttl_s: float | None,
    budget: Budget | None,
) -> Call[object]:
    messages = body["messages"]
    if isinstance(messages, str | bytes | Mapping):
        raise Validation(
            f"step {path[-1]}: messages is a {type(messages).__name__}, not a list of messages",
            hint='use messages=[{"role": "user", "content": "…"}]',
        )
    body = {**body, "messages": list(messages)}
    request = call_request(call, body, sample, options.version)
    is_old = session.is_imported and not (request.sample or session.version or options.version)
    prompt = single_prompt(request.body) if is_old else None
    older = None if prompt is None else imported_request(session.key, path[0], prompt)
    shared = None if mode == "off" else Shared(request, Policy(mode, ttl_s, budget), older)
    if request.sample:
        options = replace(options, version=f"{options.version} sample {request.sample}")
    return Call(call, (), request.body, options, share=None if shared is None else lambda _: shared)
