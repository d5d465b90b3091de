"""Two clients of a service, blocking and async; problem documents become the original errors."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from kedge import errors
from kedge.blobs.shelter import give_up_if_abandoned, run, steps, wait_for
from kedge.errors import CheckpointError, Unavailable, Validation
from kedge.store.transfer import SendAgain

from .calls import Call, Endpoints

T = TypeVar("T")

_Asked: TypeAlias = dict[str, Any]  # what httpx takes for a request

_TIMEOUT_S = 120.0
_BINARY = ("application/octet-stream", "application/vnd.kedge.")  # how their media types begin


class _Address:
    """The address of the service, with token and namespace."""

    def __init__(self, url: str, token: str | None, namespace: str | None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port that is not a number, or too large; unbalanced brackets
            raise _no_address(url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _no_address(url)
        if parts.path.rstrip("/").endswith("/api/v1"):
            raise _no_address(url, "give it without the path of the API: http://host:7420")
        host = parts.hostname if ":" not in parts.hostname else f"[{parts.hostname}]"
        self.base = urlunsplit((parts.scheme, host if port is None else f"{host}:{port}", parts.path, "", ""))
        given = token or (unquote(parts.password) if parts.password else None) or os.environ.get("KEDGE_TOKEN")
        self.headers = {"Authorization": f"Bearer {given}"} if given else {}
        self.namespace = namespace

    def request(self, call: Call[Any]) -> _Asked:
        params = {"namespace": self.namespace, **call.params}
        wanted: _Asked = {
            "method": call.method,
            "url": self.base.rstrip("/") + call.path,
            "params": {name: value for name, value in params.items() if value is not None and value != []},
            "headers": {**self.headers, **call.headers},
        }
        if call.body is not None:
            wanted["content"] = json.dumps(call.body, allow_nan=False).encode()
            wanted["headers"]["Content-Type"] = "application/json"
        return wanted

    def binary(self, method: str, path: str, body: bytes | Iterator[bytes] | None) -> _Asked:
        wanted = self.request(Call(method, path, lambda answer: answer))
        if body is not None:
            wanted["content"] = body
            wanted["headers"]["Content-Type"] = "application/octet-stream"
        return wanted


def _no_address(url: str, hint: str = "use http://host:7420") -> Validation:
    shown = re.sub(r"//[^@/]*@", "//", url)  # without its token
    return Validation(f"{shown!r} is not the address of a service", hint=hint)


class Download:
    """The bytes of a response, read in pieces of any size."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._waiting = memoryview(b"")

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self.take_into(memoryview(data))
        return bytes(data)

    def take_into(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            if not self._waiting:
                piece = next(self._pieces, None)
                if piece is None:
                    raise Unavailable("the answer ended too soon", hint="try again")
                self._waiting = memoryview(piece)
            part = self._waiting[: len(target) - filled]
            target[filled : filled + len(part)] = part
            filled, self._waiting = filled + len(part), self._waiting[len(part) :]


class Client(Endpoints):
    """Blocking calls. Thread-safe; close() it, or use it as a context manager."""

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
        is_read = call.method == "GET"
        with _reaching(self._address.base, is_read=is_read):
            answer = self._ask(self._address.request(call), is_read=is_read)
        return _parsed(call.parse, answer)

    def _ask(self, request: _Asked, *, is_read: bool = False) -> httpx.Response:
        """Elsewhere than in the main thread: the connections have locks, and a signal handler may need them."""
        return (wait_for if is_read else run)(self._http.request, **request)

    def exchange(self, path: str, body: bytes) -> bytes:
        """Post bytes; return the bytes of the response."""
        with _reaching(self._address.base):
            answer = self._ask(self._address.binary("POST", path, body), is_read=True)
        if not _is_binary(answer):
            _content(answer)
            raise _no_service("an answer of another kind")
        return answer.content

    def upload(self, path: str, media_type: str, body: Iterator[bytes], parse: Callable[[Any], T]) -> T:
        """Send a body while it is generated; return what `parse` makes of the response's document."""
        request = self._address.binary("POST", path, body)
        request["headers"]["Content-Type"] = media_type
        with _reaching(self._address.base):
            answer = self._ask(request)
        return _parsed(parse, answer)

    @contextmanager
    def download(self, path: str, body: bytes | None = None) -> Iterator[Download]:
        """Read a response of any length as it arrives."""
        request = self._address.binary("GET" if body is None else "POST", path, body)
        with _reaching(self._address.base, is_read=True):
            answer = run(self._begin, request)
            try:
                if not _is_binary(answer):
                    run(answer.read)
                    _content(answer)
                    raise _no_service("an answer of another kind")
                yield Download(steps(answer.iter_bytes(1 << 20)))
            finally:
                run(answer.close)

    def _begin(self, request: _Asked) -> httpx.Response:
        answer = self._http.send(self._http.build_request(**request), stream=True)
        try:
            give_up_if_abandoned()
        except BaseException:
            answer.close()  # else its connection would stay in use
            raise
        return answer

    def again(self) -> Self:
        """A new client of the same service, for a forked child: it cannot use the parent's connections."""
        other = type(self).__new__(type(self))
        other._address = self._address
        other._http = httpx.Client(timeout=_TIMEOUT_S)
        return other

    def close(self) -> None:
        run(self._http.close)

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
        with _reaching(self._address.base, is_read=call.method == "GET"):
            answer = await self._http.request(**self._address.request(call))
        return _parsed(call.parse, answer)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _reaching:  # noqa: N801 - reads as a verb where it is used
    """Turns network errors into Unavailable with one message."""

    def __init__(self, base: str, *, is_read: bool = False) -> None:
        self._base = base
        self._is_read = is_read

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            reason, hint = _why_no_connection(error)
            raise Unavailable(f"cannot reach {self._base}: {reason}", hint=hint) from None
        if isinstance(error, httpx.InvalidURL):
            raise _no_address(self._base) from None
        if isinstance(error, httpx.HTTPError):
            hint = "is the service running there?"
            if not self._is_read:
                hint += " What was sent may have arrived: repeat saves with the same idempotency key"
            raise Unavailable(f"{self._base} does not answer: {type(error).__name__}", hint=hint) from None


def _why_no_connection(error: BaseException) -> tuple[str, str]:
    """Return the reason and the next step; nothing was sent."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message})", "give its authority in $SSL_CERT_FILE"
        if isinstance(cause, ssl.SSLError):
            return "it does not speak TLS", "use http://, or the port where TLS is served"
        if isinstance(cause, socket.gaierror):
            return "there is no host of this name", "check the name"
        if isinstance(cause, ConnectionRefusedError):
            return "the connection was refused", "is the service running there, on this port?"
        cause = cause.__cause__ or cause.__context__
    return str(error) or "no answer in time", "is the service running there?"


def _content(answer: httpx.Response) -> object:
    """The JSON of a response. Raises the error that a problem document stands for."""
    if answer.is_success:
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise _no_service("an answer that is no JSON") from None
    if (elsewhere := answer.headers.get("location")) is not None:
        raise _no_service(f"{answer.status_code}, which leads to {elsewhere[:200]}", answer.status_code)
    try:
        error = error_of(answer.json(), answer.status_code)
    except (ValueError, KeyError, TypeError):
        error = _no_service(str(answer.status_code), answer.status_code)
    raise error


def _parsed(parse: Callable[[object], T], answer: httpx.Response) -> T:
    content = _content(answer)
    try:
        return parse(content)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _no_service("a document of another kind") from None


def _is_binary(answer: httpx.Response) -> bool:
    """Whether it holds bytes, as a service sends them, and is neither a problem nor a page of something else."""
    return answer.is_success and answer.headers.get("content-type", "").startswith(_BINARY)


def _no_service(what: str, status: int = 500) -> CheckpointError:
    hint = "is this a Kedge service? Its address is http://host:7420, without a path"
    return _kind("", status)(f"the service answered {what}", hint=hint)


def error_of(problem: Any, status: int = 500) -> CheckpointError:
    """Return the error that a problem document describes."""
    code, detail, hint = problem["code"], str(problem["detail"]), str(problem["hint"])
    if code == SendAgain.code:
        return SendAgain(digests=[bytes.fromhex(digest) for digest in problem["digests"]])
    return _kind(code, status)(detail, hint=hint)


def _kind(code: str, status: int) -> type[CheckpointError]:
    return _KINDS.get(code) or (Unavailable if status in (408, 502, 503, 504) else CheckpointError)


def _kinds(kind: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield kind
    for subclass in kind.__subclasses__():
        if subclass.__module__ == errors.__name__:
            yield from _kinds(subclass)


_KINDS: Mapping[str, type[CheckpointError]] = {kind.code: kind for kind in _kinds(CheckpointError)}
