"""Handing a restored state to whoever runs jobs."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from kedge.errors import CheckpointError, Conflict

from .service import Service

_log = logging.getLogger("kedge.server")


class RunnerFailed(CheckpointError, code="runner_failed", http=502):
    """The job runner raised something; the state is restored all the same."""


async def resume(service: Service, job: str, state: object) -> None:
    """Call the runner's `resume_job` once; its refusal is a Conflict, its failure RunnerFailed."""
    resume_job = getattr(service.runner, "resume_job", None)
    if resume_job is None:
        raise Conflict("this service has no job runner", hint="create_app(store, runner=…) gives it one")
    arguments = (job, state) if _takes_state(resume_job) else (job,)
    try:
        answer = await service.in_thread(lambda: resume_job(*arguments))
        if inspect.isawaitable(answer):
            answer = await answer
    except CheckpointError:
        raise
    except Exception as error:
        _log.error("the job runner failed on %s", job, exc_info=error)
        raise RunnerFailed(
            f"the job runner failed to resume {job}: {type(error).__name__}", hint="the service's log tells more"
        ) from error
    if answer is False:
        raise Conflict(f"the job runner refused to resume {job}", hint="it may be running already")


def _takes_state(resume_job: Any) -> bool:
    try:
        inspect.signature(resume_job).bind("job", {})
    except TypeError:
        return False
    except ValueError:
        return True  # a builtin that does not tell
    return True
