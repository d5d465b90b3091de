"""The service: a store behind HTTP, for programs and for people.

    create_app(store)    an ASGI application with page, API and OpenAPI; mount it, or run `kedge serve`
    /api/v1/…            everything, typed (routes/)
    /api/checkpoints     the five routes of the older jobs service, as they were (routes/older.py)

A request goes   edge (limits, request ID, log, metrics) → Needs (who, scope, namespace) → route → a worker thread
that asks the store. Nothing blocks the event loop; what a route may not do fails before its body is read.
Metadata and small saves are asked for most: those that wait at the same time share a thread and a commit (batches).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedge.errors import missing_extra

if TYPE_CHECKING:
    from .app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> object:
    """`create_app`, brought in when it is used: tokens are made where FastAPI may be missing."""
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .app import create_app
    except ModuleNotFoundError as error:
        raise missing_extra("the service", "server", error) from error
    return create_app
