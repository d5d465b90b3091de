"""The page: the store for people, made of HTML from templates, with htmx for what changes in place.

    rendering.py   who may see a page, templates, errors as pages
    views.py       jobs, histories, checkpoints, comparisons, storage, activity, signing in
    running.py     runs, items, approvals
    graph.py, charts.py, states.py, comparing.py    what they draw

Nothing is fetched from elsewhere. static/vendor/ is brought by `./dev assets` and packed into the wheel; without it,
and without scripts at all, everything but unfolding and live updates still works.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from . import running, views
from .rendering import STATIC


class _Files(StaticFiles):
    """Their addresses change with their content, so that they may be kept for good."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


def add_page(app: FastAPI) -> None:
    app.include_router(views.router)
    app.include_router(running.router)
    app.mount("/static", _Files(directory=STATIC), name="static")
