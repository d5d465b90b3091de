"""Two ways to a service, one that waits and one to await; and its problems as the errors they were."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from kedge import errors
from kedge.codec.wire import Frame, read_frame
from kedge.errors import CheckpointError, Unavailable, Validation

from .calls import Call, Endpoints

T = TypeVar("T")

_TIMEOUT_S = 120.0
_MOST_BYTES = 1 << 40


class _Address:
    """Where the service is, and how to introduce oneself."""

    def __init__(self, url: str, token: str | None, namespace: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Validation(f"{url!r} is not the address of a service", hint="use http://host:7420")
        host = parts.hostname if ":" not in parts.hostname else f"[{parts.hostname}]"
        self.base = urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path, "", ""))
        given = token or (unquote(parts.password) if parts.password else None) or os.environ.get("KEDGE_TOKEN")
        self.headers = {"Authorization": f"Bearer {given}"} if given else {}
        self.namespace = namespace

    def request(self, call: Call[Any]) -> dict[str, Any]:
        params = {"namespace": self.namespace, **call.params}
        wanted: dict[str, Any] = {
            "method": call.method,
            "url": self.base.rstrip("/") + call.path,
            "params": {name: value for name, value in params.items() if value is not None and value != []},
            "headers": {**self.headers, **call.headers},
        }
        if call.body is not None:
            wanted["content"] = json.dumps(call.body, allow_nan=False).encode()
            wanted["headers"]["Content-Type"] = "application/json"
        return wanted


class Client(Endpoints):
    """Calls that wait for their answers. Thread-safe; close() it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        namespace: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._address = _Address(url, token, namespace)
        self._http = httpx.Client(timeout=_TIMEOUT_S, transport=transport, trust_env=transport is None)

    def send(self, call: Call[T]) -> T:
        with _reaching(self._address.base):
            answer = self._http.request(**self._address.request(call))
        return call.parse(_content(answer))

    def upload(self, call: Call[T], state: Iterable[bytes | memoryview], size_bytes: int) -> T:
        """Send a call whose body goes with a whole encoded state (`wire`), piece by piece."""
        request = self._address.request(call)
        boundary = os.urandom(16).hex()
        head = _part(boundary, "checkpoint", "application/json") + request.pop("content") + b"\r\n"
        head += _part(boundary, "state", "application/octet-stream", file_name="state")
        tail = f"\r\n--{boundary}--\r\n".encode()

        def body() -> Iterator[bytes]:
            yield head
            yield from map(bytes, state)
            yield tail

        request["headers"] |= {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + size_bytes + len(tail)),
        }
        with _reaching(self._address.base):
            answer = self._http.request(**request, content=body())
        return call.parse(_content(answer))

    def download(self, call: Call[Any]) -> Frame:
        """A whole encoded state, or some of its buffers, straight into the memory it will stay in."""
        with _reaching(self._address.base), self._http.stream(**self._address.request(call)) as answer:
            if answer.status_code >= 400:
                answer.read()
                _content(answer)
            pieces = answer.iter_bytes(1 << 20)
            waiting = memoryview(b"")

            def read_into(target: memoryview) -> None:
                nonlocal waiting
                filled = 0
                while filled < len(target):
                    if not waiting:
                        piece = next(pieces, None)
                        if piece is None:
                            raise Unavailable("the state ended too soon", hint="load it again")
                        waiting = memoryview(piece)
                    part = waiting[: len(target) - filled]
                    target[filled : filled + len(part)] = part
                    filled, waiting = filled + len(part), waiting[len(part) :]

            return read_frame(read_into, most_bytes=_MOST_BYTES)

    def again(self) -> Self:
        """Another one to the same service; for a forked child, to whom connections of the parent are of no use."""
        other = type(self).__new__(type(self))
        other._address = self._address
        other._http = httpx.Client(timeout=_TIMEOUT_S)
        return other

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Endpoints):
    """The same calls, to be awaited."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        namespace: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._address = _Address(url, token, namespace)
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, transport=transport, trust_env=transport is None)

    async def send(self, call: Call[T]) -> T:
        with _reaching(self._address.base):
            answer = await self._http.request(**self._address.request(call))
        return call.parse(_content(answer))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _reaching:  # noqa: N801 - reads as a verb where it is used
    """What the network does wrong is Unavailable."""

    def __init__(self, base: str) -> None:
        self._base = base

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.HTTPError):
            raise Unavailable(
                f"{self._base} does not answer: {type(error).__name__}",
                hint="is the service running there? What was sent may have arrived: repeat saves with the same "
                "idempotency key",
            ) from error


def _part(boundary: str, name: str, kind: str, *, file_name: str | None = None) -> bytes:
    named = f'; filename="{file_name}"' if file_name else ""
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{named}\r\nContent-Type: {kind}\r\n\r\n'
    return head.encode()


def _content(answer: httpx.Response) -> Any:
    """The JSON of an answer; its problem as the error it was on the other side."""
    if answer.status_code < 400:
        return answer.json() if answer.content else None
    try:
        told = answer.json()
        code, detail, hint = told["code"], told["detail"], told["hint"]
    except (ValueError, KeyError, TypeError):
        code, detail, hint = "", f"the service answered {answer.status_code}", "is this a Kedge service?"
    kind = _KINDS.get(code) or (Unavailable if answer.status_code in (408, 502, 503, 504) else CheckpointError)
    raise kind(str(detail), hint=str(hint))


def _kinds(kind: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _kinds(each)


_KINDS: Mapping[str, type[CheckpointError]] = {kind.code: kind for kind in _kinds(CheckpointError)}
