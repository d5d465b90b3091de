"""LLM calls by the user's own functions: `run.llm` and `@kedge.step(cache="llm")`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from kedge import codec
from kedge.errors import UnsupportedType, Validation
from kedge.manager import CheckpointManager
from kedge.pipeline.place import sample as sample_here

from .bills import Meter, metered
from .cache import Answer, Cache
from .exchange import Policy, Send, Step, Store, once
from .flights import Flight
from .keys import Request, canonical, parse_sample
from .pricing import cost_of, prepare, tokens_of
from .redaction import redact


def call_request(call: Callable[..., object], body: Mapping[str, object], sample: int | None, version: str) -> Request:
    """Return the request of `run.llm`: model, parameters, messages and tools, and the function that makes the call.

    Without a sample it belongs to that of `kedge.llm.sample`.
    """
    name = getattr(call, "__qualname__", type(call).__qualname__)
    shown, hidden = redact(json.loads(canonical(_plain(body))))
    number = sample_here.get() if sample is None else parse_sample(sample)
    return Request("CALL", f"{name} {version}".strip(), shown, number, hidden)


def imported_request(run: str, stage: str, prompt: str) -> Request:
    """Return the request for a prompt of an imported run: older systems recorded no model and no parameters."""
    return Request("IMPORTED", run, {"stage": stage, "prompt": prompt})


def single_prompt(body: Mapping[str, Any]) -> str | None:
    """Return the only prompt of a call, without system messages; None for a conversation.

    Older systems had no key for a conversation.
    """
    prompts = [m for m in body.get("messages", ()) if not (isinstance(m, Mapping) and m.get("role") == "system")]
    content = prompts[0].get("content") if len(prompts) == 1 and isinstance(prompts[0], Mapping) else None
    return content if isinstance(content, str) else None


def step_request(name: str, version: str, inputs: Mapping[str, bytes]) -> Request:
    """Return the request of a step cached across runs: its name, version and inputs, without its path."""
    known = {arg: digest.hex() for arg, digest in inputs.items()}
    return Request("STEP", f"{name} {version}".strip(), known, sample_here.get())


@dataclass(frozen=True, slots=True)
class Shared:
    """A step whose answer is cached for all runs of a store."""

    request: Request
    policy: Policy
    older: Request | None = None  # its request in an older system

    def steps(self, store: CheckpointManager) -> Generator[Step, Any, Any]:
        cache = Cache.of(store)

        def call(_: Flight) -> Generator[Step, Any, Answer]:
            prepare()
            with metered() as meter:
                result = storable((yield Send()))
            return (yield Store(lambda: _saved(cache, self.request, self.policy, result, meter)))  # type: ignore[no-any-return]

        answer = yield from once(cache, self.policy, self.request, call, self.older)
        return answer.content["result"]


def _saved(cache: Cache, request: Request, policy: Policy, result: object, meter: Meter) -> Answer:
    """Record what was paid, unless the calling client did, and make the answer durable."""
    bill = meter.bill
    if bill:
        cost = None if bill.paid_unpriced or bill.found_unpriced else bill.spent + bill.saved
        answer = Answer({"result": result}, meter.model, bill.tokens_paid + bill.tokens_found, cost)
    else:
        answer = _priced(request, result)
    cache.keep(request, answer, is_paid=not bill, replace=policy.is_replacing)
    return answer


def _priced(request: Request, result: object) -> Answer:
    model = _model(request, result)
    document = result if isinstance(result, Mapping) else {}
    return Answer({"result": result}, model, tokens_of(document), cost_of(document, model))


def _model(request: Request, result: object) -> str:
    model = result.get("model") if isinstance(result, Mapping) else None
    return model if request.model == "unknown" and isinstance(model, str) and model else request.model


def storable(result: object) -> object:
    """Return a result in a form that can be saved: itself, or the plain data of a vendor's object."""
    if inspect.iscoroutine(result):
        result.close()
        raise Validation("the call returned a coroutine", hint="wrap it: async def ask(**request): return await …")
    try:
        codec.encode(result)
    except UnsupportedType as error:
        if callable(dump := getattr(result, "model_dump", None)):
            return dump(mode="json")
        path = error.path.replace("state", "result", 1)
        raise UnsupportedType(
            f"an answer cannot be saved: {error.message.replace(error.path, path)}",
            hint="return text or plain data from the call",
            path=path,
        ) from error
    return result


def _plain(value: object) -> object:
    """Return messages and tools as plain data; objects of the vendors' SDKs dump themselves."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if callable(dump := getattr(value, "model_dump", None)) and not inspect.isclass(value):
        return dump(mode="json", exclude_none=True)
    return value
