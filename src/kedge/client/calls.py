"""The calls of the API, each described once: its request, and how to parse the response.

`Client` and `AsyncClient` both have all of them as methods; the client determines whether to await.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

from kedge.care.retention import RetentionPolicy
from kedge.model import Checkpoint, Event, EventChain, Job, Lease

if TYPE_CHECKING:
    from .connection import AsyncClient, Client

P = ParamSpec("P")
T = TypeVar("T")
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and how to parse its response."""

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Mapping[str, object] = field(default_factory=dict)
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a listing; `next_cursor` leads to the next, None is the end."""

    items: Sequence[T]
    next_cursor: str | None


class Endpoint(Generic[P, T]):
    """A method of both clients."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, object, T]]: ...
    def __get__(self, client: Any, owner: type) -> object:
        if client is None:
            return self

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._describe(client, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


def _page(key: str, parse: Callable[[Any], T]) -> Callable[[Any], Page[T]]:
    return lambda answer: Page([parse(item) for item in answer[key]], answer["next_cursor"])


_job_page = _page("jobs", Job.from_json)
_checkpoint_page = _page("checkpoints", Checkpoint.from_json)
_event_page = _page("events", Event.from_json)


def _same(answer: Any) -> Any:
    return answer


def _chain(answer: Any) -> EventChain:
    return EventChain(answer["entries"], answer["head"], answer["broken_at"])


def _at(*parts: str) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="") for part in parts)


def _json(value: object) -> str:
    """Return a metadata value as a filter takes it: text that would parse as a number, for example, is quoted."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        is_text = isinstance(json.loads(value), list | dict)  # a filter takes these as text
    except ValueError:
        is_text = True
    return value if is_text else json.dumps(value)


def _by_key(answer: Any) -> dict[str, Checkpoint]:
    return {entry["key"]: Checkpoint.from_json(entry["checkpoint"]) for entry in answer["found"]}


def _changed(answer: Any) -> bool:
    return bool(answer["changed"])


class Endpoints:
    """All calls, as methods of both clients."""

    @Endpoint
    def jobs(self, prefix: str = "", limit: int = 50, cursor: str | None = None) -> Call[Page[Job]]:
        """Jobs by name."""
        return Call("GET", _at("jobs"), _job_page, {"prefix": prefix, "limit": limit, "cursor": cursor})

    @Endpoint
    def job(self, job: str) -> Call[Job]:
        """Return one job. Raises NotFound."""
        return Call("GET", _at("jobs", job), Job.from_json)

    @Endpoint
    def checkpoints(
        self,
        job: str,
        *,
        level: str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        order: str = "newest",
        limit: int = 50,
        cursor: str | int | None = None,
    ) -> Call[Page[Checkpoint]]:
        """The checkpoints of a job, without their states."""
        params = {
            "level": level,
            "tag": [f"{name}={value}" for name, value in (tags or {}).items()],
            "metadata": [f"{path}={_json(value)}" for path, value in (metadata or {}).items()],
            "order": order,
            "limit": limit,
            "cursor": cursor,
        }
        return Call("GET", _at("jobs", job, "checkpoints"), _checkpoint_page, params)

    @Endpoint
    def checkpoint(self, checkpoint_id: str) -> Call[Checkpoint]:
        """One checkpoint without its state."""
        return Call("GET", _at("checkpoints", checkpoint_id), Checkpoint.from_json)

    @Endpoint
    def save_json(
        self,
        job: str,
        step: str,
        state: object,
        *,
        level: str = "step",
        parent: str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        pin: bool = False,
        lease: int | None = None,
        idempotency_key: str | None = None,
    ) -> Call[Checkpoint]:
        """Save a state that is plain JSON. `kedge.open(url).save` takes any state."""
        body = {
            "step": step,
            "state": state,
            "level": level,
            "parent": parent,
            "tags": dict(tags or {}),
            "metadata": dict(metadata or {}),
            "pin": pin,
            "lease": lease,
        }
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return Call("POST", _at("jobs", job, "checkpoints"), Checkpoint.from_json, body=body, headers=headers)

    @Endpoint
    def state(self, checkpoint_id: str, path: str = "") -> Call[Any]:
        """The state, or a part of it, as JSON."""
        return Call("GET", _at("checkpoints", checkpoint_id, "state"), lambda answer: answer["state"], {"path": path})

    @Endpoint
    def delete(self, checkpoint_id: str) -> Call[None]:
        """Delete a checkpoint."""
        return Call("DELETE", _at("checkpoints", checkpoint_id), _same)

    @Endpoint
    def tag(self, checkpoint_id: str, tags: Mapping[str, str | None]) -> Call[Checkpoint]:
        """Set tags; None removes one."""
        return Call("PATCH", _at("checkpoints", checkpoint_id, "tags"), Checkpoint.from_json, body={"tags": dict(tags)})

    @Endpoint
    def pin(self, checkpoint_id: str, pinned: bool = True) -> Call[Checkpoint]:
        """Pin a checkpoint, or unpin it."""
        return Call("PUT", _at("checkpoints", checkpoint_id, "pin"), Checkpoint.from_json, body={"pinned": pinned})

    @Endpoint
    def set_status(self, checkpoint_id: str, status: str) -> Call[Checkpoint]:
        """Set the status of a checkpoint."""
        return Call("PUT", _at("checkpoints", checkpoint_id, "status"), Checkpoint.from_json, body={"status": status})

    @Endpoint
    def condemn(self, checkpoint_id: str) -> Call[Checkpoint]:
        """Read a whole checkpoint and mark it if it is damaged."""
        return Call("POST", _at("checkpoints", checkpoint_id, "condemn"), Checkpoint.from_json)

    @Endpoint
    def branch(self, checkpoint_id: str, job: str | None = None, lease: int | None = None) -> Call[Checkpoint]:
        """Make this state the newest of its job, or of another one."""
        body = {"job": job, "lease": lease}
        return Call("POST", _at("checkpoints", checkpoint_id, "branch"), Checkpoint.from_json, body=body)

    @Endpoint
    def delete_job(self, job: str, *, even_pinned: bool = False) -> Call[int]:
        """Delete all checkpoints of a job; return how many."""
        return Call("DELETE", _at("jobs", job), lambda answer: int(answer["deleted"]), {"even_pinned": even_pinned})

    @Endpoint
    def copy(self, job: str, to: str) -> Call[int]:
        """Copy a job's history to a new name; return how many checkpoints it has."""
        return Call("POST", _at("jobs", job, "copy"), lambda answer: int(answer["checkpoints"]), body={"to": to})

    @Endpoint
    def keys(
        self, job: str, keys: Sequence[str] = (), *, after: int | None = None, limit: int | None = None
    ) -> Call[dict[str, Checkpoint]]:
        """Return what was saved under these idempotency keys, or under any after a sequence number."""
        params = {"key": list(keys), "after": after, "limit": limit}
        return Call("GET", _at("jobs", job, "keys"), _by_key, params)

    @Endpoint
    def restore(self, checkpoint_id: str, resume: bool = False) -> Call[Document]:
        """The state as JSON; with `resume`, handed to the service's job runner."""
        return Call("POST", _at("checkpoints", checkpoint_id, "restore"), _same, body={"resume": resume})

    @Endpoint
    def diff(self, old: str, new: str) -> Call[Document]:
        """What changed from one checkpoint to another."""
        return Call("GET", _at("diff"), _same, {"old": old, "new": new})

    @Endpoint
    def retention(self, policy: RetentionPolicy, job: str | None = None, *, dry_run: bool = True) -> Call[Document]:
        """Plan what a policy would delete; with dry_run=False, delete it."""
        body = {"job": job, "policy": json.loads(policy.to_json())}
        return Call("POST", _at("retention", "plan" if dry_run else "apply"), _same, body=body)

    @Endpoint
    def set_retention(self, job: str, policy: RetentionPolicy | None) -> Call[Job]:
        """Set the policy that is applied after each save of a job, or remove it."""
        body = {"policy": None if policy is None else json.loads(policy.to_json())}
        return Call("PUT", _at("jobs", job, "retention"), Job.from_json, body=body)

    @Endpoint
    def runs(self, prefix: str = "", limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
        """Runs by key."""
        return Call("GET", _at("runs"), _page("runs", _same), {"prefix": prefix, "limit": limit, "cursor": cursor})

    @Endpoint
    def run(self, key: str) -> Call[Document]:
        """A run with its steps and log."""
        return Call("GET", _at("runs", key), _same)

    @Endpoint
    def items(self, key: str, limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
        """The items of a run's maps, in batches."""
        return Call("GET", _at("runs", key, "items"), _page("batches", _same), {"limit": limit, "cursor": cursor})

    @Endpoint
    def attempts(self, key: str, limit: int = 50, cursor: str | None = None) -> Call[Page[Checkpoint]]:
        """The failed attempts of a run's steps, each with its error in the metadata."""
        return Call("GET", _at("runs", key, "attempts"), _checkpoint_page, {"limit": limit, "cursor": cursor})

    @Endpoint
    def cancel(self, key: str) -> Call[bool]:
        """Cancel a run; False while its owner still works on a step."""
        return Call("POST", _at("runs", key, "cancel"), lambda answer: bool(answer["cancelled"]))

    @Endpoint
    def signal(self, key: str, name: str, value: object = None) -> Call[str]:
        """Send a value to a run; return the ID of the message."""
        body = {"name": name, "value": value}
        return Call("POST", _at("runs", key, "signals"), lambda answer: str(answer["message"]), body=body)

    @Endpoint
    def approvals(self, limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
        """The pending approvals."""
        return Call("GET", _at("approvals"), _page("approvals", _same), {"limit": limit, "cursor": cursor})

    @Endpoint
    def decide(self, run: str, name: str, approved: bool, comment: str = "") -> Call[Document]:
        """Approve or deny, finally. Raises Conflict if it was decided before."""
        body = {"run": run, "name": name, "approved": approved, "comment": comment}
        return Call("POST", _at("approvals"), _same, body=body)

    @Endpoint
    def executions(self, state: str | None = None, limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
        """Executions by ID."""
        params = {"state": state, "limit": limit, "cursor": cursor}
        return Call("GET", _at("executions"), _page("executions", _same), params)

    @Endpoint
    def execution(self, execution_id: str) -> Call[Document]:
        """A whole execution with its history."""
        return Call("GET", _at("executions", execution_id), _same)

    @Endpoint
    def start_execution(
        self, correlation_id: str, workflow_name: str, initial_data: Document | None = None
    ) -> Call[str]:
        """Start an execution; return its ID."""
        body = {"correlation_id": correlation_id, "workflow_name": workflow_name, "initial_data": initial_data or {}}
        return Call("POST", _at("executions"), lambda answer: str(answer["execution_id"]), body=body)

    @Endpoint
    def add_step(
        self, /, execution_id: str, name: str, agent_id: str, input_data: object = None, **more: object
    ) -> Call[Document]:
        """Start a step of an execution; `more` is approval_required, expires_s, on_denied."""
        body = {"checkpoint_name": name, "agent_id": agent_id, "input_data": input_data, **more}
        return Call("POST", _at("executions", execution_id, "checkpoints"), _same, body=body)

    @Endpoint
    def complete_step(self, execution_id: str, step: str, output: object = None, success: bool = True) -> Call[bool]:
        """Complete a step, given by name or ID; False if it was complete."""
        body = {"checkpoint": step, "output_data": output, "success": success}
        return Call("POST", _at("executions", execution_id, "complete"), _changed, body=body)

    @Endpoint
    def pause_execution(self, execution_id: str) -> Call[bool]:
        """Pause an execution; False if it was paused."""
        return Call("POST", _at("executions", execution_id, "pause"), _changed)

    @Endpoint
    def resume_execution(self, execution_id: str) -> Call[bool]:
        """Resume a paused execution; False if it was running."""
        return Call("POST", _at("executions", execution_id, "resume"), _changed)

    @Endpoint
    def end_execution(self, execution_id: str, success: bool = True) -> Call[bool]:
        """End an execution; False if it had ended."""
        return Call("POST", _at("executions", execution_id, "end"), _changed, body={"success": success})

    @Endpoint
    def llm_stats(self, by: Sequence[str] = ("model",), run: str | None = None) -> Call[Document]:
        """What LLM calls cost and what the cache saved, by model, run or step."""
        return Call("GET", _at("llm", "stats"), _same, {"by": list(by), "run": run})

    @Endpoint
    def containers(self, limit: int = 50, cursor: str | None = None) -> Call[Page[Checkpoint]]:
        """The newest checkpoint of each container."""
        return Call("GET", _at("containers"), _checkpoint_page, {"limit": limit, "cursor": cursor})

    @Endpoint
    def stats(self, job: str | None = None) -> Call[dict[str, int]]:
        """Statistics of the namespace, or of a job."""
        return Call("GET", _at("stats"), _same, {"job": job})

    @Endpoint
    def start_verify(self, job: str | None = None, deep: bool = True) -> Call[Document]:
        """Start to verify; return the task."""
        return Call("POST", _at("verify"), _same, body={"job": job, "deep": deep})

    @Endpoint
    def start_gc(self, *, dry_run: bool = False) -> Call[Document]:
        """Start to collect garbage, or to find out what that would free; return the task."""
        return Call("POST", _at("gc"), _same, {"dry_run": "true"} if dry_run else {})

    @Endpoint
    def task(self, task_id: str) -> Call[Document]:
        """A task and its progress."""
        return Call("GET", _at("tasks", task_id), _same)

    @Endpoint
    def tasks(self) -> Call[list[Document]]:
        """Background tasks, newest first."""
        return Call("GET", _at("tasks"), lambda answer: list(answer["tasks"]))

    @Endpoint
    def audit_log(self, limit: int = 50, cursor: str | int | None = None) -> Call[Page[Event]]:
        """The log of changes, newest first."""
        return Call("GET", _at("audit"), _event_page, {"limit": limit, "cursor": cursor})

    @Endpoint
    def events(self, after: int = 0, limit: int = 100) -> Call[Page[Event]]:
        """The log of changes, oldest first, after an entry."""
        return Call("GET", _at("audit"), _event_page, {"after": after, "limit": limit, "order": "oldest"})

    @Endpoint
    def verify_audit(self, until: int | None = None) -> Call[EventChain]:
        """Verify the hash chain of the log of changes."""
        return Call("GET", _at("audit", "verify"), _chain, {"until": until})

    @Endpoint
    def take_lease(self, job: str, holder: str, ttl_s: float) -> Call[Lease]:
        """Acquire the lease of a job. Raises LeaseHeld while another process holds it."""
        body = {"holder": holder, "ttl_s": ttl_s}
        return Call("POST", _at("jobs", job, "lease"), lambda answer: Lease(**answer), body=body)

    @Endpoint
    def renew_lease(self, lease: Lease) -> Call[None]:
        """Renew a lease."""
        return Call("PUT", _at("jobs", lease.job, "lease"), _same, body={"token": lease.token, "ttl_s": lease.ttl_s})

    @Endpoint
    def release_lease(self, lease: Lease) -> Call[None]:
        """Release a lease."""
        return Call("DELETE", _at("jobs", lease.job, "lease"), _same, {"token": lease.token})

    @Endpoint
    def whoami(self) -> Call[Document]:
        """The caller as the service knows it."""
        return Call("GET", _at("whoami"), _same)
