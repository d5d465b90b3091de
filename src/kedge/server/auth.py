"""Who asks, and what that allows: one rule per route, stated where the route is.

    Reads, Writes, Administers      annotations of a route's parameter; the route gets an `Access`
    public(router)                  routes that need nobody to be known

`create_app` refuses to start with a route that has neither. Tokens come in the Authorization header; a browser that
signed in sends a session (`sessions`) in a cookie. Without any token in the store, only callers on the same machine are
answered.

A browser sends cookies, and requests to this machine, on behalf of any page. So whatever changes something and comes
without an Authorization header must come from a page of ours: `Origin` and `Sec-Fetch-Site` say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends, Query, Request
from fastapi.openapi.models import HTTPBearer as BearerModel
from fastapi.security.base import SecurityBase
from starlette.responses import Response

from kedge.errors import NotAllowed, Unauthorized, Validation
from kedge.manager import CheckpointManager

from .limits import headers_of
from .schemas import Name
from .service import Service
from .sessions import LIFETIME
from .tokens import Scope, Token

T = TypeVar("T")

_NO_ADDRESS = SplitResult("", "", "", "", "")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# What proxies add: the caller is somebody else, whom we cannot see.
_OF_PROXIES = frozenset({
    b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"forwarded", b"via", b"x-real-ip", b"x-client-ip",
    b"true-client-ip", b"cf-connecting-ip",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody the service knows."""

    actor: str  # as the log of changes names them
    scope: Scope
    namespaces: tuple[str, ...]
    token: Token | None = None

    @staticmethod
    def of(token: Token) -> Caller:
        return Caller(token.name, token.scope, token.namespaces, token)

    @staticmethod
    def local(service: Service) -> Caller:
        """Somebody on the same machine, while there are no tokens."""
        return Caller("local", Scope.ADMIN, (service.namespace,))


@dataclass(frozen=True, slots=True)
class Access:
    """What a route gets: the store of one namespace, in the name of the caller."""

    service: Service
    caller: Caller
    namespace: str

    @property
    def store(self) -> CheckpointManager:
        """For work in threads: opening a namespace for the first time may block."""
        return self.service.manager(self.namespace).acting_as(self.caller.actor)

    async def holds(self) -> bool:
        """Whether the caller would be let in now as well: for answers that go on for long."""
        service, token = self.service, self.caller.token
        if token is None:
            return not await service.were_tokens_made()
        return await service.in_thread(lambda: service.tokens.holds(token))

    async def ask(self, question: Callable[[CheckpointManager], T]) -> T:
        """The answer of the store, from a worker thread."""
        return await self.service.in_thread(lambda: question(self.store))


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


class Needs(SecurityBase):
    """The rule of a route: the caller has at least this scope, in the namespace meant."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model = BearerModel(description="kedge token create makes one")
        self.scheme_name = "token"

    async def __call__(
        self,
        request: Request,
        namespace: Annotated[
            Name | None, Query(description="The tenant (namespace) to use.", examples=["default"])
        ] = None,
    ) -> Access:
        caller = await identify(request)
        return self.admit(caller, namespace, service_of(request))

    def admit(self, caller: Caller, namespace: str | None, service: Service) -> Access:
        """What the caller gets; NotAllowed where that is nothing."""
        chosen = _namespace(caller, namespace, service.namespace)
        refuse_narrow_scope(caller, self.scope)
        return Access(service, caller, chosen)


Reads = Annotated[Access, Depends(Needs(Scope.READ))]
Writes = Annotated[Access, Depends(Needs(Scope.WRITE))]
Administers = Annotated[Access, Depends(Needs(Scope.ADMIN))]


def public(route: Callable[..., object]) -> Callable[..., object]:
    """Mark a route as one for everybody."""
    route.__dict__["kedge_public"] = True
    return route


def rule_of(route: Any) -> Scope | None:
    """The scope a route needs; None for a public one. TypeError when nobody has decided."""
    rules = {d.call.scope for d in _dependencies(route.dependant) if isinstance(d.call, Needs)}
    if len(rules) == 1:
        return rules.pop()
    if not rules and getattr(route.endpoint, "kedge_public", False):
        return None
    raise TypeError(f"{route.path} needs exactly one of Reads, Writes, Administers, or @public")


def refuse_narrow_scope(caller: Caller, needed: Scope) -> None:
    if not caller.scope.includes(needed):
        raise NotAllowed(f"a token with scope {caller.scope} does not suffice", hint=f"this needs scope {needed}")


def _dependencies(dependant: Any) -> list[Any]:
    return [inner for dependency in dependant.dependencies for inner in (dependency, *_dependencies(dependency))]


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


async def identify(request: Request) -> Caller:
    """Who asks; Unauthorized or NotAllowed when that is nobody we know. Needs the head of a request only."""
    state = request.scope.setdefault("state", {})
    if isinstance(known := state.get("caller"), Caller):  # at the gate
        return known
    service = service_of(request)
    header = headers_of(request).get(b"authorization")
    if header is not None:
        token = await find_token(service, _bearer(header.decode("latin-1")))
        if token is None:
            raise Unauthorized("the token is unknown, expired or revoked", hint="kedge token create makes one")
        caller = Caller.of(token)
    elif (session := session_of(request)) is not None:
        refuse_other_sites(request, has_cookie=True)
        token = await service.in_thread(lambda: service.sessions.find(session))
        if token is None:
            raise Unauthorized("the session is over", hint="sign in again")
        caller = Caller.of(token)
    else:
        refuse_other_sites(request, has_cookie=False)
        caller = await _stranger(request, service)
    state |= {"caller": caller, "actor": caller.actor}
    return caller


async def find_token(service: Service, text: str) -> Token | None:
    is_known, token = service.tokens.recall(text) if service.has_tokens_open else (False, None)
    return token if is_known else await service.in_thread(lambda: service.tokens.find(text))


async def _stranger(request: Request, service: Service) -> Caller:
    if await service.were_tokens_made():
        raise Unauthorized("a token is needed", hint="set $KEDGE_TOKEN, or send it as Authorization: Bearer …")
    if not _is_local(request):
        raise NotAllowed(
            "without tokens this service answers its own machine only", hint="make one with kedge token create"
        )
    return Caller.local(service)


def _bearer(header: str) -> str:
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise Unauthorized("the Authorization header holds no token", hint="send it as Authorization: Bearer …")
    return text.strip()


def _namespace(caller: Caller, wanted: str | None, default: str) -> str:
    if wanted is None:
        if default in caller.namespaces:
            return default
        if len(caller.namespaces) == 1:
            return caller.namespaces[0]
        raise Validation("several namespaces are open to this token", hint="say which: ?namespace=…")
    if wanted not in caller.namespaces:
        raise NotAllowed(f"namespace {wanted} is not open to {caller.actor}", hint="ask for a token for it")
    return wanted


def _is_local(request: Request) -> bool:
    """Whether the caller is on this machine, and no proxy speaks for somebody else."""
    if not _OF_PROXIES.isdisjoint(headers_of(request)) or request.scope["http_version"] == "1.0":
        return False  # nginx speaks HTTP/1.0 and adds nothing unless it is told to
    return request.client is None or is_loopback(request.client.host)  # None: a Unix socket


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_other_sites(request: Request, *, has_cookie: bool) -> None:
    if request.method in SAFE_METHODS:
        return
    headers = headers_of(request)
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    is_ours = origin is not None and address_in(origin).netloc.encode("latin-1") == headers.get(b"host") != b""
    is_other = (site is not None and site not in (b"same-origin", b"none")) or (origin is not None and not is_ours)
    if is_other or (has_cookie and not (is_ours or site == b"same-origin")):
        raise NotAllowed("this request comes from another site's page", hint="use the page of this service")


def address_in(header: bytes) -> SplitResult:
    """The address that a header names; an empty one if it names none: anybody may send anything there."""
    try:
        return urlsplit(header.decode("latin-1"))
    except ValueError:
        return _NO_ADDRESS


def session_of(request: Request) -> str | None:
    """The text of the session that a browser sends."""
    return request.cookies.get(cookie_of(request)) if b"cookie" in headers_of(request) else None


def cookie_of(request: Request) -> str:
    """The cookie's name. Services on other ports or paths of the same host have others, and over HTTPS no other host
    and no page without HTTPS can set it (`__Host-`)."""
    place = re.sub(r"[^A-Za-z0-9]+", "-", f"{request.url.port or ''}{_root(request)}")
    return ("__Host-" if request.url.scheme == "https" else "") + f"kedge-session-{place}"


async def sign_in(request: Request, response: Response, text: str) -> None:
    """Give a browser a session for a token; Unauthorized if nobody has this token. No script sees the cookie, and no
    other site's request carries it."""
    service = service_of(request)
    token = await find_token(service, text)
    if token is None:
        raise Unauthorized("the token is unknown, expired or revoked", hint="kedge token create makes one")
    session = await service.in_thread(lambda: service.sessions.create(token))
    response.set_cookie(cookie_of(request), session, max_age=int(LIFETIME.total_seconds()), **_attributes(request))


async def sign_out(request: Request, response: Response) -> None:
    """End the session, and have the browser forget it."""
    service, session = service_of(request), session_of(request)
    if session is not None:
        await service.in_thread(lambda: service.sessions.end(session))
    response.delete_cookie(cookie_of(request), **_attributes(request))


def _attributes(request: Request) -> dict[str, Any]:
    is_secure = request.url.scheme == "https"
    path = "/" if is_secure else _root(request) or "/"  # as __Host- demands
    return {"path": path, "httponly": True, "samesite": "strict", "secure": is_secure}
