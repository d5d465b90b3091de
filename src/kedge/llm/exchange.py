"""One HTTP call through the cache, without input and output: the same for threads and event loops.

`exchange` is a generator. It yields steps and is sent their results; `drive` and `drive_async` carry them out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kedge.errors import ReplayMiss, Validation
from kedge.pipeline.place import payer
from kedge.pipeline.telemetry import span

from .budget import Budget
from .cache import Answer, Cache
from .flights import Flight
from .keys import Request, http_request, may_cost
from .nearest import describe_nearest
from .pricing import cost_of, prepare, tokens_of
from .redaction import public_url

T = TypeVar("T")

MODES = ("record", "replay", "refresh", "off")
SAVED_HEADERS = ("content-type", "request-id", "x-request-id")
HIT = "x-kedge-cache"
_LAST_LINES = (b"data: [DONE]", b"data:[DONE]")
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
_OF_ANSWERS = ("model", "modelVersion", "usageMetadata", "output")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a client uses the cache."""

    mode: str = "record"
    ttl_s: float | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise Validation(f"mode={self.mode!r}", hint=f"use one of: {', '.join(MODES)}")
        number = self.ttl_s
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or not number > 0):
            raise Validation(f"ttl_s must be seconds above 0 (got {number!r})", hint="use None for no end")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise Validation(f"budget={self.budget!r}", hint="use kedge.llm.Budget(run=1, day=10)")
        if self.budget is not None and self.mode == "off":
            raise Validation("mode='off' counts no calls, so no budget holds", hint="use mode='refresh', or no budget")

    @property
    def is_replacing(self) -> bool:
        """Whether a new answer replaces an older one."""
        return self.mode == "refresh" or self.ttl_s is not None


# The steps of an exchange


@dataclass(frozen=True, slots=True)
class Store:
    """Call this function, which may wait for the store."""

    work: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request; the result is the response, its body unread."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read the body of the response; the result is its decoded bytes."""


Step = Store | Pause | Send | Read


def drive(steps: Generator[Step, object, T], send: Callable[[], object], read: Callable[[], object] | None = None) -> T:
    """Carry out `steps` in this thread."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.send(outcome) if failure is None else steps.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        outcome, failure = None, None
        try:
            if isinstance(step, Store):
                outcome = step.work()
            elif isinstance(step, Pause):
                time.sleep(step.seconds)
            else:
                outcome = send() if isinstance(step, Send) or read is None else read()
        except BaseException as error:  # noqa: BLE001 - raised again by the steps, after their cleanup
            failure = error


async def drive_async(
    steps: Generator[Step, Any, T], send: Callable[[], Any], read: Callable[[], Any] | None = None
) -> T:
    """The same on an event loop, which never waits for the store."""
    from anyio import sleep
    from anyio.to_thread import run_sync

    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.send(outcome) if failure is None else steps.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        outcome, failure = None, None
        try:
            if isinstance(step, Store):
                outcome = await run_sync(step.work)
            elif isinstance(step, Pause):
                await sleep(step.seconds)
            else:
                outcome = await (send() if isinstance(step, Send) or read is None else read())
        except BaseException as error:  # noqa: BLE001 - raised again by the steps, after their cleanup
            failure = error


def who_asks() -> object:
    """Return an ID of this task or thread. It must never wait for itself, as for a stream that it reads later."""
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return (threading.get_ident(), id(task) if task is not None else 0)


# The results of an HTTP call


@dataclass(frozen=True, slots=True)
class Hit:
    """A cache hit."""

    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Streamed:
    """Pass the stream on; when it is closed, `recorder` gets its content."""

    recorder: Recorder


class Plain:
    """Pass the response on unchanged."""


Result = Hit | Streamed | Plain


def exchange(cache: Cache, policy: Policy, method: str, url: str, body: bytes) -> Generator[Step, object, Result]:
    """Answer a request. The response of a paid call is durable before it is returned."""
    request = None if policy.mode == "off" else http_request(method, url, body)
    if request is None:
        parts = urlsplit(url)
        name = f"{method} {public_url(parts).partition('?')[0]}"
        if policy.mode == "replay":
            raise ReplayMiss(f"{name} is not a call that is cached", hint="nothing is sent when replaying")
        if policy.budget is not None and may_cost(method, parts.path):
            raise Validation(
                f"{name}: the cost of this call is unknown, so no budget can limit it",
                hint="make it with a client without a budget",
            )
        yield Send()
        return Plain()
    result = yield from once(cache, policy, request, lambda flight: _call(cache, policy, request, flight))
    return _hit(result) if isinstance(result, Answer) else result


def once(
    cache: Cache,
    policy: Policy,
    request: Request,
    call: Callable[[Flight], Generator[Step, object, T]],
    older: Request | None = None,
) -> Generator[Step, object, Answer | T]:
    """Return the cached answer, or the result of `call`, made by one of all concurrent callers.

    `older` is the same request as an older system knew it. A call that returns a stream ends the flight itself.
    """
    with span(f"llm {request.model}"):
        return (yield from _once(cache, policy, request, call, older))


def _once(
    cache: Cache,
    policy: Policy,
    request: Request,
    call: Callable[[Flight], Generator[Step, object, T]],
    older: Request | None,
) -> Generator[Step, Any, Answer | T]:
    def look() -> Answer | None:
        if policy.mode == "refresh":
            return None
        answer = cache.find(request, policy.ttl_s)
        return cache.find(older, policy.ttl_s) if answer is None and older is not None else answer

    if (answer := (yield Store(look))) is not None:
        return answer  # type: ignore[no-any-return]
    if policy.mode == "replay":
        raise (yield Store(lambda: describe_nearest(cache, request)))
    flight = yield from turn(cache, policy, request)
    try:
        answer = yield Store(look)  # from another caller, while we waited
        if answer is None and (budget := policy.budget) is not None:
            yield Store(lambda: cache.flights.check(request, flight, budget))
        result = answer if answer is not None else (yield from call(flight))
    except BaseException:
        flight.end()
        raise
    if not isinstance(result, Streamed):
        flight.end()
    return result


def _call(cache: Cache, policy: Policy, request: Request, flight: Flight) -> Generator[Step, Any, Streamed | Plain]:
    prepare()
    recorder = Recorder(cache, policy, request, flight)
    try:
        response = yield Send()
    except Exception as error:
        if type(error).__name__ == "ReadTimeout":  # of either library: the vendor was at work
            recorder.drop()
        raise
    if response.status_code != 200:
        return Plain()
    if "text/event-stream" in response.headers.get("content-type", ""):
        return Streamed(recorder)
    try:
        content = yield Read()
    except BaseException:
        recorder.drop()
        raise
    yield Store(lambda: recorder.record(response.headers, content))
    return Plain()


def turn(cache: Cache, policy: Policy, request: Request) -> Generator[Step, object, Flight]:
    """Wait until nobody else makes the same call."""
    who, wait_s = who_asks(), 0.002
    lock, is_cancelled = threading.Lock(), False
    begun: Flight | None = None

    def begin() -> None:
        nonlocal begun
        flight = cache.flights.begin(request, who, policy.budget)
        with lock:
            begun = flight
            if flight is not None and is_cancelled:
                flight.end()

    try:
        while True:
            yield Store(begin)
            if begun is not None:
                return begun
            yield Pause(wait_s)
            wait_s = min(0.1, wait_s * 1.5)
    except BaseException:  # a cancelled task leaves its thread at work
        with lock:
            is_cancelled = True
            if begun is not None:
                begun.end()
        raise


def _hit(answer: Answer) -> Hit:
    body = answer.content["body"]
    return Hit({**answer.content["headers"], HIT: "hit"}, body if isinstance(body, bytes) else body.encode())


class Recorder:
    """Caches the answer of a call if it is complete."""

    def __init__(self, cache: Cache, policy: Policy, request: Request, flight: Flight) -> None:
        self._cache = cache
        self._policy = policy
        self._request = request
        self._flight = flight
        self._payer = payer()
        self._is_recorded = False

    def record(self, headers: Mapping[str, str], content: bytes) -> None:
        if headers.get("content-type", "").startswith("audio/"):
            self._keep(headers, content, {}, is_sound=True)
            return
        document = _document(content)
        if document is not None and _is_lasting(document):
            self._keep(headers, content, document)
        else:
            self._pay(document or {})

    def record_stream(self, headers: Mapping[str, str], content: bytes) -> None:
        """Cache a stream's content if the vendor ended it. An abandoned stream is only recorded as paid."""
        self._is_recorded = True
        try:
            events = _events(content)
            merged = _merged(events)
            if _is_over(content, events):
                self._keep(headers, content, merged)
            else:
                self._pay(merged, is_whole=False)
        finally:
            self._flight.end()

    def forget(self) -> None:
        """Let others make the call, whose cost is unknown; for finalizers, which must not take a lock."""
        if not self._is_recorded:
            self.drop()
        self._flight.forget()

    def drop(self) -> None:
        """Count a call whose answer was lost on its way: it may have been paid, and its cost is unknown."""
        self._cache.drop(self._request, *self._payer)

    def _answer(self, content: object, document: Mapping[str, object]) -> Answer:
        request = self._request
        cost = cost_of(document, request.model, request.where)
        return Answer(content, request.model, tokens_of(document), cost)

    def _pay(self, document: Mapping[str, object], *, is_whole: bool = True) -> None:
        self._cache.pay(self._request, self._answer(None, document), is_whole=is_whole)

    def _keep(
        self, headers: Mapping[str, str], content: bytes, document: Mapping[str, object], *, is_sound: bool = False
    ) -> None:
        try:
            body = content if is_sound else content.decode()
        except UnicodeDecodeError:
            self._pay(document)  # not a vendor's response
            return
        saved = {name: headers[name] for name in SAVED_HEADERS if name in headers}
        answer = self._answer({"headers": saved, "body": body}, document)
        self._cache.keep(self._request, answer, is_paid=True, replace=self._policy.is_replacing)


def _document(content: bytes) -> dict[str, object] | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and not document.get("error") else None


def _is_lasting(document: Mapping[str, object]) -> bool:
    """Return whether an answer is complete, and valid later: addresses of images expire after an hour."""
    data = document.get("data")
    images = data if isinstance(data, list) else []
    has_addresses = any(isinstance(image, dict) and image.get("url") for image in images)
    return document.get("status", "completed") in ("completed", "incomplete") and not has_addresses


def _events(content: bytes) -> list[dict[str, object]]:
    events = []
    for line in content.splitlines():
        if line.startswith(b"data:"):
            try:
                event = json.loads(line[5:])
            except (ValueError, RecursionError):
                continue  # [DONE], or a truncated event
            if isinstance(event, dict):
                events.append(event)
    return events


def _is_over(content: bytes, events: list[dict[str, object]]) -> bool:
    """Return whether the vendor ended the stream. A model's own text is inside JSON, never such a line.

    A stream that failed is not over, though some servers end it as they end others.
    """
    if any(event.get("error") or event.get("type") == "error" for event in events):
        return False
    return (
        any(event.get("type") in _LAST_EVENTS for event in events)
        or any(line.rstrip() in _LAST_LINES for line in content.splitlines())
        or _are_finished(events)
    )


def _are_finished(events: list[dict[str, object]]) -> bool:
    """Return whether all of Gemini's candidates are finished, as Gemini has no separate end line."""
    is_finished: dict[str, bool] = {}
    for event in events:
        candidates = event.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else ():
            if isinstance(candidate, dict):
                index = str(candidate.get("index", 0))
                is_finished[index] = is_finished.get(index, False) or bool(candidate.get("finishReason"))
    return bool(is_finished) and all(is_finished.values())


def _merged(events: list[dict[str, object]]) -> dict[str, object]:
    """Merge what the vendors' events say of model, usage and searches, in different places and pieces."""
    merged: dict[str, object] = {}
    usage: dict[str, object] = {}
    for event in events:
        for inner in (event, event.get("message"), event.get("response")):
            if isinstance(inner, dict):
                merged.update({name: inner[name] for name in _OF_ANSWERS if inner.get(name)})
                if isinstance(inner.get("usage"), dict):
                    usage.update({name: value for name, value in inner["usage"].items() if value is not None})
    if usage:
        merged["usage"] = usage
    return merged
