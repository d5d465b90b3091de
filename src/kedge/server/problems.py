"""Errors as problem details (RFC 9457): a code, a hint and the request's ID; never a stack trace or a path.

The older routes answer {"detail": …} alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kedge.errors import CheckpointError, InvalidName, LeaseHeld, LeaseLost, StorageError
from kedge.model import parse_name

from .logs import request_id
from .schemas import NAME_PATTERN

OLDER_PREFIX = "/api/checkpoints"
MEDIA_TYPE = "application/problem+json"

_log = logging.getLogger("kedge.server")
_PATH = re.compile(r"(?<![\w:/])(?:file:)?/(?:[^\s/:;,'\"]+/)*[^\s/:;,'\"]+")
_CODES = {404: "not_found", 405: "method_not_allowed", 400: "invalid", 415: "unsupported_media_type"}


def problem(
    status: int,
    code: str,
    detail: str,
    hint: str = "",
    *,
    headers: Mapping[str, str] | None = None,
    errors: list[dict[str, Any]] | None = None,
    is_older: bool = False,
) -> Response:
    body: dict[str, Any] = {"detail": detail}
    if not is_older:
        body = {
            "type": f"urn:kedge:problem:{code}",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "detail": detail,
            "code": code,
            "hint": hint,
            "request_id": request_id.get(),
        }
        if errors:
            body["errors"] = errors
    elif errors:
        body["detail"] = errors
    media_type = "application/json" if is_older else MEDIA_TYPE
    return Response(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), status, headers, media_type)


def without_paths(text: str) -> str:
    """A message for strangers: where the store lies is none of their business."""
    return _PATH.sub("the store", text)


def add_handlers(app: FastAPI) -> None:
    for kind in (CheckpointError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer_to)


async def answer_to(request: Request, error: Exception) -> Response:
    """The answer to an error of a route."""
    if isinstance(error, RequestValidationError):
        return _of_validation(request, error)
    if isinstance(error, HTTPException):
        return _of_starlette(request, error)
    assert isinstance(error, CheckpointError)
    if isinstance(error, LeaseHeld | LeaseLost):
        request.app.state.service.metrics.lease_conflicts.inc()
    if isinstance(error, StorageError):
        request.app.state.service.note_trouble(error)
    return of_error(error, is_older=_is_older(request))


def of_error(error: CheckpointError, *, is_older: bool = False) -> Response:
    headers = {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="kedge"'
    if error.http_status in (503, 507):
        headers["Retry-After"] = "1"
    if isinstance(error, StorageError):
        _log.error("storage: %s", error)
    detail = without_paths(error.message) if isinstance(error, StorageError) else error.message
    hint = without_paths(error.hint) if isinstance(error, StorageError) else error.hint
    return problem(error.http_status, error.code, detail, hint, headers=headers, is_older=is_older)


def _of_validation(request: Request, error: RequestValidationError) -> Response:
    if not _is_older(request) and (name := _invalid_name(error)) is not None:
        return of_error(name)
    # What was sent is not repeated: it may be huge, or not be JSON at all.
    errors = [
        {"type": str(fault["type"]), "loc": [str(part) for part in fault["loc"]], "msg": str(fault["msg"])}
        for fault in error.errors()[:20]
    ]
    first = errors[0] if errors else {"loc": [], "msg": "invalid"}
    where = ".".join(first["loc"])
    return problem(
        422,
        "invalid",
        f"{where}: {first['msg']}"[:500],
        "the OpenAPI document at /openapi.json says what is taken",
        errors=errors,
        is_older=_is_older(request),
    )


def _invalid_name(error: RequestValidationError) -> InvalidName | None:
    """What the first thing that is wrong is, if it is a name."""
    first: dict[str, Any] = next(iter(error.errors()), {})
    if first.get("ctx", {}).get("pattern") != NAME_PATTERN:
        return None
    try:
        parse_name(str(first["loc"][-1]).replace("_", " "), first["input"])
    except InvalidName as invalid:
        return invalid
    return None


def _of_starlette(request: Request, error: HTTPException) -> Response:
    code = _CODES.get(error.status_code, "invalid" if error.status_code < 500 else "error")
    detail = "not found: the service has nothing at this address" if error.status_code == 404 else str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    hint = "see /openapi.json"
    if error.status_code == 404:
        hint += "; as --store, give the service's address without a path, or with its --path-prefix only"
    return problem(error.status_code, code, detail, hint, headers=headers, is_older=_is_older(request))


def _methods(request: Request) -> list[str]:
    """Of all routes with this path; the router itself names those of one. Names in a path go before what fits any."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    methods: dict[int, set[str]] = {}
    for route in iter_route_contexts(request.app.routes):
        regex = getattr(route, "path_regex", None)
        if regex is not None and regex.match(path):
            methods.setdefault(regex.groups, set()).update(route.methods or ())
    return sorted(methods[min(methods)]) if methods else []


def of_surprise(error: Exception) -> Response:
    """A defect of ours: the log has the trace, the caller gets the ID to find it by."""
    _log.error("unexpected: %s", type(error).__name__, exc_info=error)
    return problem(500, "unexpected", "this should not have happened", "please report it with the request ID")


def _is_older(request: Request) -> bool:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return bool(path == OLDER_PREFIX or path.startswith(OLDER_PREFIX + "/"))
