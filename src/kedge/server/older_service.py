"""The older jobs service under its own names: an application whose five routes work on `kedge.legacy.jobs`.

    from kedge.server.older_service import create_app, set_checkpoint_manager, set_executor

Corrected: it answers other machines, and other host names, only as `kedge.server.create_app` does.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.legacy.jobs import CheckpointManager

from . import app
from .limits import LOOPBACK_NAMES
from .problems import OLDER_PREFIX

__all__ = ["create_app", "get_checkpoint_manager", "get_executor", "router", "set_checkpoint_manager", "set_executor"]

_manager: CheckpointManager | None = None
_executor: object = None


def set_checkpoint_manager(manager: CheckpointManager | None) -> None:
    """What applications made from now on, and those already made, work on."""
    global _manager
    _manager = manager


def set_executor(executor: object) -> None:
    """What a restore with `resume` calls: anything with `resume_job(job_id)`."""
    global _executor
    _executor = executor


def get_checkpoint_manager() -> CheckpointManager:
    """The one that was set, else one in $CHECKPOINT_DIR or .checkpoints."""
    if _manager is None:
        set_checkpoint_manager(CheckpointManager(os.environ.get("CHECKPOINT_DIR", ".checkpoints")))
    assert _manager is not None
    return _manager


def get_executor() -> Any:
    return _executor


class _Runner:
    """Hands a job to the executor as the older service did: by its ID alone."""

    def resume_job(self, job_id: str) -> object:
        return get_executor().resume_job(job_id)


class _Application:
    """An ASGI application on the manager that is set when a request comes: that may be set after this is made."""

    def __init__(self, allow_hosts: Collection[str]) -> None:
        self._allow_hosts = allow_hosts
        self._made: tuple[CheckpointManager, FastAPI] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        manager = get_checkpoint_manager()
        if self._made is None or self._made[0] is not manager:
            self._made = manager, app.create_app(manager.store, _Runner(), allow_hosts=self._allow_hosts)
        await self._made[1](scope, receive, send)


def create_app(executor: object = None, allow_hosts: Collection[str] = LOOPBACK_NAMES) -> ASGIApp:
    if executor is not None:
        set_executor(executor)
    return _Application(allow_hosts)


router = APIRouter()  # for `include_router` of an application that is not ours: the five routes and nothing else
for _path in (OLDER_PREFIX, f"{OLDER_PREFIX}/{{rest:path}}"):
    router.routes.append(Route(_path, _Application(LOOPBACK_NAMES), include_in_schema=False))
