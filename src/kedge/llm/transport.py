"""Clients for the vendors' SDKs that never pay twice: `OpenAI(http_client=kedge.llm.http_client())`.

They are ordinary httpx2 or httpx clients, sync or async, whose transport checks the cache before it sends. It sends
through a second ordinary client, so that proxies, certificates and limits are those of httpx.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache as once
from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import Any

from kedge.errors import CheckpointError, Validation
from kedge.manager import CheckpointManager

from .budget import Budget
from .cache import Cache
from .exchange import Hit, Policy, Recorder, Streamed, drive, drive_async, exchange
from .keys import is_call

LIBRARIES = ("httpx2", "httpx")
SDK_HEADER = "x-stainless-lang"  # sent by the vendors' SDKs, including OpenAI's and Anthropic's
TIMEOUT_S, CONNECT_S = 600.0, 5.0  # as in the vendors' own clients

StoreLike = CheckpointManager | str | PathLike[str] | None


def http_client(
    mode: str = "record",
    *,
    store: StoreLike = None,
    ttl_s: float | None = None,
    budget: Budget | None = None,
    library: str | None = None,
    timeout: Any = None,
    **options: Any,
) -> Any:
    """Return an httpx2.Client (or httpx.Client) for a vendor's SDK, passed as `http_client=`.

        record    answer from the store, or make the call and cache its response
        replay    answer only from the store; raises ReplayMiss for a request that was never recorded
        refresh   always make the call, and replace the cached response
        off       do not use the cache

    Responses older than `ttl_s` are requested again. Raises BudgetExceeded instead of making a call that could cost
    more than is left of `budget`. `library` is "httpx2" or "httpx"; by default, the first that is installed. Other
    options are those of the library's client (proxy, verify, limits, …).
    """
    return _client("Client", Policy(mode, ttl_s, budget), store, library, timeout, options)


def async_http_client(
    mode: str = "record",
    *,
    store: StoreLike = None,
    ttl_s: float | None = None,
    budget: Budget | None = None,
    library: str | None = None,
    timeout: Any = None,
    **options: Any,
) -> Any:
    """The same for asyncio: an httpx2.AsyncClient or httpx.AsyncClient. The event loop never waits for the store."""
    return _client("AsyncClient", Policy(mode, ttl_s, budget), store, library, timeout, options)


def _client(
    kind: str, policy: Policy, store: StoreLike, library: str | None, timeout: Any, options: dict[str, Any]
) -> Any:
    module = _library(library)
    limit = module.Timeout(TIMEOUT_S, connect=CONNECT_S) if timeout is None else timeout
    if policy.mode == "off":
        return getattr(module, kind)(timeout=limit, follow_redirects=True, **options)
    parts = _parts(module)
    with ExitStack() as owned:
        opened = store if isinstance(store, CheckpointManager) else owned.enter_context(CheckpointManager(store))
        sender = getattr(module, kind)(**options)
        transport = parts[kind](parts, module, Cache.of(opened), policy, sender, owned.pop_all())
    return getattr(module, kind)(transport=transport, timeout=limit, follow_redirects=True)


def _library(name: str | None) -> ModuleType:
    if name is not None and name not in LIBRARIES:
        raise Validation(f"library={name!r}", hint=f"use one of: {', '.join(LIBRARIES)}")
    for candidate in LIBRARIES if name is None else (name,):
        try:
            return import_module(candidate)
        except ModuleNotFoundError:
            continue
    raise Validation(
        f"{name or 'httpx2'} is not installed", hint="pip install httpx2, or a vendor's SDK, which brings it"
    )


def _encodings(wanted: str, ours: str) -> str:
    """Return what is wanted of the compressions that the library can undo; "identity" if that is none."""
    names = {name.strip() for name in ours.split(",")}
    both = [name.strip() for name in wanted.split(",") if name.partition(";")[0].strip().lower() in names]
    return ", ".join(both) or "identity"


class _Common:
    """The common part of both kinds of transport."""

    def __init__(
        self,
        parts: dict[str, type[Any]],
        library: ModuleType,
        cache: Cache,
        policy: Policy,
        sender: Any,
        owned: ExitStack,
    ) -> None:
        self._parts = parts
        self._library = library
        self._cache = cache
        self._policy = policy
        self._sender = sender
        self._owned = owned

    def _exchange(self, request: Any, body: bytes) -> Generator[Any, object, object]:
        if body:  # its answer is read here
            wanted, ours = (whose.headers.get("accept-encoding", "") for whose in (request, self._sender))
            request.headers["accept-encoding"] = _encodings(wanted, ours)
        return exchange(self._cache, self._policy, request.method, str(request.url), body)

    def _answer(self, result: Any, response: Any, kind: str) -> Any:
        """Return the response for the caller."""
        if isinstance(result, Hit):
            return self._library.Response(200, headers=dict(result.headers), content=result.body)
        if isinstance(result, Streamed):
            response.stream = self._parts[kind](self._library, response, result.recorder)
        return response

    def _refusal(self, request: Any, error: CheckpointError) -> Any:
        """Raise the error to the user.

        The vendors' SDKs take any exception of a client for a lost connection, and repeat the call. So they get a
        response that raises it when they check its status.
        """
        if SDK_HEADER not in request.headers:
            raise error
        response = self._parts["refusal"](503)
        response.error = error
        return response

    def _close(self) -> None:
        with self._owned:
            self._cache.settle()


class _Transport(_Common):
    def handle_request(self, request: Any) -> Any:
        body = request.read() if is_call(request.method, request.url.path) else b""
        response: Any = None

        def send() -> Any:
            nonlocal response
            response = self._sender.send(request, stream=True, auth=None)
            return response

        def read() -> bytes:
            nonlocal response
            content: bytes = response.read()
            response = _unread(self._library, response)
            return content

        try:
            result = drive(self._exchange(request, body), send, read)
        except CheckpointError as error:
            return self._refusal(request, error)
        return self._answer(result, response, "stream")

    def close(self) -> None:
        self._sender.close()
        self._close()


class _AsyncTransport(_Common):
    async def handle_async_request(self, request: Any) -> Any:
        body = await request.aread() if is_call(request.method, request.url.path) else b""
        response: Any = None

        async def send() -> Any:
            nonlocal response
            response = await self._sender.send(request, stream=True, auth=None)
            return response

        async def read() -> bytes:
            nonlocal response
            content: bytes = await response.aread()
            response = _unread(self._library, response)
            return content

        try:
            result = await drive_async(self._exchange(request, body), send, read)
        except CheckpointError as error:
            return self._refusal(request, error)
        return self._answer(result, response, "async stream")

    async def aclose(self) -> None:
        from anyio.to_thread import run_sync

        await self._sender.aclose()
        await run_sync(self._close)


class _Recording:
    """A response's stream on its way to the reader; its content is recorded when it is closed."""

    def __init__(self, library: ModuleType, response: Any, recorder: Recorder) -> None:
        self._library = library
        self._stream = response.stream
        self._headers = response.headers
        self._recorder = recorder
        self._pieces: list[bytes] = []
        self._is_open = True
        weakref.finalize(self, recorder.forget)  # one dropped without being closed keeps nobody waiting

    def _record(self) -> None:
        if self._is_open:
            self._is_open = False
            self._recorder.record_stream(self._headers, self._decoded())

    def _decoded(self) -> bytes:
        raw = b"".join(self._pieces)
        try:
            return bytes(self._library.Response(200, headers=self._headers, content=raw).content)
        except self._library.DecodingError:
            return b""  # compressed and truncated


class _Stream(_Recording):
    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._pieces.append(piece)
            yield piece

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._record()


class _AsyncStream(_Recording):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._pieces.append(piece)
            yield piece

    async def aclose(self) -> None:
        from anyio import CancelScope
        from anyio.to_thread import run_sync

        try:
            await self._stream.aclose()
        finally:
            with CancelScope(shield=True):  # a task cancelled while it closes a complete answer has paid for it
                await run_sync(self._record)


class _Refusal:
    error: CheckpointError

    @property
    def is_success(self) -> bool:
        raise self.error

    def raise_for_status(self) -> Any:
        raise self.error


@once
def _parts(library: ModuleType) -> dict[str, type[Any]]:
    """Return our classes, derived from the library's own."""
    kinds: dict[str, tuple[Callable[..., Any], type[Any]]] = {
        "Client": (_Transport, library.BaseTransport),
        "AsyncClient": (_AsyncTransport, library.AsyncBaseTransport),
        "stream": (_Stream, library.SyncByteStream),
        "async stream": (_AsyncStream, library.AsyncByteStream),
        "refusal": (_Refusal, library.Response),
    }
    return {name: type(name, bases, {}) for name, bases in kinds.items()}  # type: ignore[arg-type]


def _unread(library: ModuleType, response: Any) -> Any:
    """Return a response that was read as an unread one, for the outer client."""
    headers = [(n, v) for n, v in response.headers.multi_items() if n not in ("content-encoding", "content-length")]
    fresh = library.Response(response.status_code, headers=headers, content=response.content)
    fresh.extensions.update(response.extensions)
    return fresh
