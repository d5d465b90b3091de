"""Templates, who may see them, and errors as pages."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, quote, unquote, urlencode

from fastapi import Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import HTMLResponse, RedirectResponse, Response

import kedge
from kedge.errors import CheckpointError, NotFound, StorageError, Unauthorized, Validation
from kedge.manager import CheckpointManager
from kedge.model import Job, parse_name
from kedge.server.auth import SAFE_METHODS, Access, Needs, address_in, identify, service_of, session_of
from kedge.server.gate import GatedRoute
from kedge.server.limits import headers_of
from kedge.server.logs import request_id
from kedge.server.problems import without_paths
from kedge.server.tokens import Scope
from kedge.terminal.text import age, count_of, exactly, size

from .graph import draw
from .memory import memory_of

if TYPE_CHECKING:
    from jinja2 import Environment

STATIC = Path(__file__).with_name("static")
NAMESPACE = "kedge_namespace"  # a cookie: which of several namespaces the page shows
NOTICE = "kedge_notice"  # a cookie: what was just done, shown once

_SCRIPT = "vendor/htmx.min.js"
_NAVIGATION = (
    ("/", "Jobs"),
    ("/runs", "Runs"),
    ("/queues", "Queues"),
    ("/approvals", "Approvals"),
    ("/models", "Models"),
    ("/storage", "Storage"),
    ("/activity", "Activity"),
)
_SECTIONS = {"/jobs": "/", "/checkpoints": "/", "/compare": "/", "/executions": "/runs", "/retention": "/storage"}


Number = Annotated[int, Query(ge=0, le=(1 << 53) - 1)]  # of a record, an item, …: what a store can be asked for


class Sees(Needs):
    """The rule of a page: as of a route, but the namespace is that of its address, else of a cookie of ours.

    The namespace of an address, and of the page that a form or a part is on, is never replaced by another one: what
    it holds under the same names is not what was meant.
    """

    def __init__(self, scope: Scope, *, is_bound: bool = True) -> None:
        super().__init__(scope)
        self._is_bound = is_bound  # to the page it is on

    async def __call__(self, request: Request) -> Access:  # type: ignore[override]
        caller = await identify(request)
        service = service_of(request)
        named, of_page = request.query_params.getlist("namespace"), _namespaces_of_page(request)
        is_part = request.method not in SAFE_METHODS or "hx-request" in request.headers
        if meant := [*named, *(of_page if is_part and self._is_bound else ())]:
            return self.admit(caller, meant[0], service)
        chosen = (*of_page, request.cookies.get(NAMESPACE), service.namespace, *caller.namespaces)
        return self.admit(caller, next(namespace for namespace in chosen if namespace in caller.namespaces), service)


def _namespaces_of_page(request: Request) -> list[str]:
    """The namespace in the address of the page that a request comes from."""
    headers = headers_of(request)
    pages = [address_in(headers.get(name, b"")) for name in (b"hx-current-url", b"referer")]
    own = [page.query for page in pages if page.netloc.encode("latin-1") == headers.get(b"host")]
    return [name for query in own for name in parse_qs(query).get("namespace", ())]


Reader = Annotated[Access, Depends(Sees(Scope.READ))]
Anyone = Annotated[Access, Depends(Sees(Scope.READ, is_bound=False))]  # who leaves a page or its namespace
Writer = Annotated[Access, Depends(Sees(Scope.WRITE))]
Administrator = Annotated[Access, Depends(Sees(Scope.ADMIN))]


class PageRoute(GatedRoute):
    """A route for people: what goes wrong is shown, and who is not known is asked to sign in."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                response: Response = await handle(request)
            except Unauthorized as error:
                if session_of(request) or request.method != "GET" or "hx-request" in request.headers:
                    return page(request, None, "login.html", {"problem": error.message, "next": ""}, status=401)
                return see(request, f"/login?next={quote(_here(request))}")
            except CheckpointError as error:
                return error_page(request, error)
            except RequestValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"][1:])
                return error_page(request, Validation(f"{where}: {first['msg']}", hint="go back and choose again"))
            return response

        return shown


async def answer(
    request: Request, access: Access, name: str, facts: Callable[[CheckpointManager], dict[str, Any]]
) -> Response:
    """A page from what the store says; both are made on a worker thread."""

    if _lacks_namespace(request, access):
        address = request.url.include_query_params(namespace=access.namespace)
        return RedirectResponse(f"{address.path}?{address.query}", 303)

    def make() -> Response:
        store = access.store
        seen = store.events(limit=1, newest=True) if "hx-request" not in request.headers else []
        known = facts(store)  # after that: what happens meanwhile is told to the page once more, never too seldom
        return page(request, access, name, {"seen": seen[-1].id if seen else 0, **known})

    return await access.service.in_thread(make)


def _lacks_namespace(request: Request, access: Access) -> bool:
    """Whether the address of a whole page would show another namespace to somebody else."""
    is_page = request.method == "GET" and "hx-request" not in request.headers
    return is_page and len(access.caller.namespaces) > 1 and "namespace" not in request.query_params


def page(request: Request, access: Access | None, name: str, facts: dict[str, Any], *, status: int = 200) -> Response:
    root = request.scope.get("root_path", "")
    is_whole = "hx-request" not in request.headers
    address = f"{request.url.scheme}://{request.url.netloc}{root}"
    tenant = f" --namespace {access.namespace}" if access and access.namespace != "default" else ""
    shared: dict[str, object] = {
        "root": root,
        "script": _SCRIPT if _mark(_SCRIPT) else None,
        "static": lambda path: f"{root}/static/{path}?{_mark(path)}",
        "here": _section(request.scope["path"].removeprefix(root)),
        "here_url": _here(request),
        "navigation": _NAVIGATION,
        "version": kedge.__version__,
        "signed_in": access is not None,
        "has_login": session_of(request) is not None,
        "namespace": access.namespace if access else "",
        "address": address,
        "shell_options": f" --store {shlex.quote(address)}{tenant}",
        "namespaces": access.caller.namespaces if access else (),
        "may_write": access is not None and access.caller.scope.includes(Scope.WRITE),
        "may_admin": access is not None and access.caller.scope.includes(Scope.ADMIN),
        "has_runner": access is not None and access.service.runner is not None,
        "pending": memory_of(request).pending_count(access) if access and is_whole and "roll" not in facts else 0,
        "notice": unquote(request.cookies.get(NOTICE, ""))[:400] if is_whole else "",
        "seen": 0,  # the newest event that the page shows
    }
    if "roll" in facts:
        shared["pending"] = len(facts["roll"].approvals)
    text = _templates().get_template(name).render({**shared, **facts})
    response = HTMLResponse(text, status)
    if is_whole and NOTICE in request.cookies:
        response.delete_cookie(NOTICE, path=root or "/", httponly=True, samesite="strict")
    return response


def error_page(request: Request, error: CheckpointError) -> Response:
    is_storage = isinstance(error, StorageError)
    facts = {
        "title": {404: "Not found", 403: "Not allowed", 409: "That cannot be done now", 422: "That is not valid"}.get(
            error.http_status, "Something is wrong"
        ),
        "message": without_paths(error.message) if is_storage else error.message,
        "hint": without_paths(error.hint) if is_storage else error.hint,
        "request_id": request_id.get(),
    }
    # Inside of a page that is shown, only what is wrong; htmx says "partial" where it asked for a piece of one.
    name = "problem.html" if request.headers.get("hx-request-type") == "partial" else "error.html"
    return page(request, None, name, {**facts, "signed_in": error.http_status != 403}, status=error.http_status)


def see(request: Request, address: str, notice: str = "") -> Response:
    """Go there next; the notice is shown on top, once."""
    root = request.scope.get("root_path", "")
    response = RedirectResponse(root + address, 303)
    if notice:
        response.set_cookie(NOTICE, quote(notice[:400]), max_age=30, path=root or "/", httponly=True, samesite="strict")
    return response


def linked(request: Request, changes: Mapping[str, object]) -> str:
    """The address that is shown, with other parameters; None removes one."""
    wanted = [(name, value) for name, value in request.query_params.multi_items() if name not in changes]
    wanted += [(name, str(value)) for name, value in changes.items() if value is not None]
    return "?" + urlencode(wanted)


def _here(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def _section(path: str) -> str:
    """The entry of the menu that a page belongs to."""
    first = "/" + path.strip("/").partition("/")[0]
    return _SECTIONS.get(first, first)


def prepare() -> None:
    """Compile all templates: whoever looks at a page first does not wait for it."""
    templates = _templates()
    for name in templates.list_templates():
        templates.get_template(name)


_making = Lock()  # one look, or `prepare`, makes them for all


def _templates() -> Environment:
    with _making:
        return _made_templates()


@cache
def _made_templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # programs that serve nothing go without it

    made = Environment(
        loader=PackageLoader("kedge.server.page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    made.globals.update(
        moment_of=_moment_of, age=age, exactly=exactly, size=size, count_of=count_of, draw=draw, quoted=shlex.quote
    )
    made.filters["urlencode"] = lambda text: quote(str(text), safe="")
    return made


def _moment_of(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@cache
def _mark(path: str) -> str:
    """What makes the address of a file new when the file is: browsers may keep it for good. "" if it is missing."""
    file = STATIC / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def pretty(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def find_job(store: CheckpointManager, name: str) -> Job:
    job = store.catalogue.job(parse_name("job", name))  # also one that has no checkpoints left
    if job is None:
        raise NotFound(f"there is no job {name}", hint="it may have been misspelt; the list of jobs shows all")
    return job
