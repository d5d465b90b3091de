"""The calls of the API, each described once: what is sent, and what the answer means.

`Client` and `AsyncClient` both have all of them as methods; which one is asked decides whether to await.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload
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
    """One request, and how to read its answer."""

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Mapping[str, object] = field(default_factory=dict)
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of what there is; `next_cursor` leads on, None is the end."""

    items: Sequence[T]
    next_cursor: str | None


class Endpoint(Generic[P, T]):
    """A method of both clients."""

    def __init__(self, describe: Callable[P, Call[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._describe(*args, **kwargs))

        call.__doc__ = self.__doc__
        return call


def _page(key: str, one: Callable[[Any], T]) -> Callable[[Any], Page[T]]:
    return lambda answer: Page([one(each) for each in answer[key]], answer["next_cursor"])


_checkpoint_page = _page("checkpoints", Checkpoint.from_json)


def _same(answer: Any) -> Any:
    return answer


def _nothing(_: Any) -> None:
    return None


def _at(*parts: str) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="") for part in parts)


# Jobs and checkpoints


def _jobs(prefix: str = "", limit: int = 50, cursor: str | None = None) -> Call[Page[Job]]:
    """Jobs by name."""
    return Call("GET", _at("jobs"), _page("jobs", Job.from_json), {"prefix": prefix, "limit": limit, "cursor": cursor})


def _job(job: str) -> Call[Job]:
    """One job; NotFound when there is none."""
    return Call("GET", _at("jobs", job), Job.from_json)


def _checkpoints(
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


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _checkpoint(checkpoint_id: str) -> Call[Checkpoint]:
    """One checkpoint without its state."""
    return Call("GET", _at("checkpoints", checkpoint_id), Checkpoint.from_json)


def _save_json(
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


def _state(checkpoint_id: str, path: str = "") -> Call[Any]:
    """The state, or a part of it, as JSON."""
    return Call("GET", _at("checkpoints", checkpoint_id, "state"), lambda answer: answer["state"], {"path": path})


def _delete(checkpoint_id: str) -> Call[None]:
    """Delete a checkpoint."""
    return Call("DELETE", _at("checkpoints", checkpoint_id), _nothing)


def _tag(checkpoint_id: str, tags: Mapping[str, str | None]) -> Call[Checkpoint]:
    """Set tags; None removes one."""
    return Call("PATCH", _at("checkpoints", checkpoint_id, "tags"), Checkpoint.from_json, body={"tags": dict(tags)})


def _pin(checkpoint_id: str, pinned: bool = True) -> Call[Checkpoint]:
    """Keep a checkpoint from every cleanup, or let go of it."""
    return Call("PUT", _at("checkpoints", checkpoint_id, "pin"), Checkpoint.from_json, body={"pinned": pinned})


def _set_status(checkpoint_id: str, status: str) -> Call[Checkpoint]:
    """Mark a checkpoint."""
    return Call("PUT", _at("checkpoints", checkpoint_id, "status"), Checkpoint.from_json, body={"status": status})


def _condemn(checkpoint_id: str) -> Call[Checkpoint]:
    """Read all of a checkpoint and mark it if it is damaged."""
    return Call("POST", _at("checkpoints", checkpoint_id, "condemn"), Checkpoint.from_json)


def _branch(checkpoint_id: str, job: str | None = None, lease: int | None = None) -> Call[Checkpoint]:
    """Make this state the newest of its job, or of another one."""
    body = {"job": job, "lease": lease}
    return Call("POST", _at("checkpoints", checkpoint_id, "branch"), Checkpoint.from_json, body=body)


def _delete_job(job: str, *, even_pinned: bool = False) -> Call[int]:
    """Delete all checkpoints of a job; tells how many."""
    params = {"even_pinned": "true"} if even_pinned else {}
    return Call("DELETE", _at("jobs", job), lambda answer: int(answer["deleted"]), params)


def _copy(job: str, to: str) -> Call[int]:
    """Copy a job's history to a new name; how many checkpoints it has."""
    return Call("POST", _at("jobs", job, "copy"), lambda answer: int(answer["checkpoints"]), body={"to": to})


def _keys(
    job: str, keys: Sequence[str] = (), *, after: int | None = None, limit: int | None = None
) -> Call[dict[str, Checkpoint]]:
    """What was saved under these idempotency keys, or under any behind a sequence number."""
    params = {"key": list(keys), "after": after, "limit": limit}
    return Call("GET", _at("jobs", job, "keys"), _by_key, params)


def _by_key(answer: Any) -> dict[str, Checkpoint]:
    return {each["key"]: Checkpoint.from_json(each["checkpoint"]) for each in answer["found"]}


def _restore(checkpoint_id: str, resume: bool = False) -> Call[Document]:
    """The state as JSON; with `resume`, handed to the service's job runner."""
    return Call("POST", _at("checkpoints", checkpoint_id, "restore"), _same, body={"resume": resume})


def _diff(old: str, new: str) -> Call[Document]:
    """What changed from one checkpoint to another."""
    return Call("GET", _at("diff"), _same, {"old": old, "new": new})


# Retention


def _retention(policy: RetentionPolicy, job: str | None = None, *, dry_run: bool = True) -> Call[Document]:
    """What a policy would delete; with dry_run=False, done."""
    body = {"job": job, "policy": json.loads(policy.to_json())}
    return Call("POST", _at("retention", "plan" if dry_run else "apply"), _same, body=body)


def _set_retention(job: str, policy: RetentionPolicy | None) -> Call[Job]:
    """The policy that is applied after saves of a job."""
    body = {"policy": None if policy is None else json.loads(policy.to_json())}
    return Call("PUT", _at("jobs", job, "retention"), Job.from_json, body=body)


# Runs, executions, approvals


def _runs(prefix: str = "", limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
    """Runs by key."""
    return Call("GET", _at("runs"), _page("runs", _same), {"prefix": prefix, "limit": limit, "cursor": cursor})


def _run(key: str) -> Call[Document]:
    """A run with its steps and log."""
    return Call("GET", _at("runs", key), _same)


def _items(key: str, limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
    """The items of a run's maps, in batches."""
    return Call("GET", _at("runs", key, "items"), _page("batches", _same), {"limit": limit, "cursor": cursor})


def _attempts(key: str, limit: int = 50, cursor: str | None = None) -> Call[Page[Checkpoint]]:
    """The failed attempts of a run's steps; the metadata of each tells the error."""
    return Call("GET", _at("runs", key, "attempts"), _checkpoint_page, {"limit": limit, "cursor": cursor})


def _cancel(key: str) -> Call[bool]:
    """End a run; False while its owner still works on a step."""
    return Call("POST", _at("runs", key, "cancel"), lambda answer: bool(answer["cancelled"]))


def _signal(key: str, name: str, value: object = None) -> Call[str]:
    """Send a value to a run; the ID of the message."""
    body = {"name": name, "value": value}
    return Call("POST", _at("runs", key, "signals"), lambda answer: str(answer["message"]), body=body)


def _approvals(limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
    """What waits for a decision."""
    return Call("GET", _at("approvals"), _page("approvals", _same), {"limit": limit, "cursor": cursor})


def _decide(run: str, name: str, approved: bool, comment: str = "") -> Call[Document]:
    """Approve or deny, for good; Conflict when it was decided."""
    body = {"run": run, "name": name, "approved": approved, "comment": comment}
    return Call("POST", _at("approvals"), _same, body=body)


def _executions(state: str | None = None, limit: int = 50, cursor: str | None = None) -> Call[Page[Document]]:
    """Executions by ID."""
    params = {"state": state, "limit": limit, "cursor": cursor}
    return Call("GET", _at("executions"), _page("executions", _same), params)


def _execution(execution_id: str) -> Call[Document]:
    """A whole execution with its history."""
    return Call("GET", _at("executions", execution_id), _same)


def _start_execution(correlation_id: str, workflow_name: str, initial_data: Document | None = None) -> Call[str]:
    """Begin an execution; its ID."""
    body = {"correlation_id": correlation_id, "workflow_name": workflow_name, "initial_data": initial_data or {}}
    return Call("POST", _at("executions"), lambda answer: str(answer["execution_id"]), body=body)


def _add_step(execution_id: str, name: str, agent_id: str, input_data: object = None, **more: object) -> Call[Document]:
    """Begin a step of an execution; `more` is approval_required, expires_s, on_denied."""
    body = {"checkpoint_name": name, "agent_id": agent_id, "input_data": input_data, **more}
    return Call("POST", _at("executions", execution_id, "checkpoints"), _same, body=body)


def _complete_step(execution_id: str, step: str, output: object = None, success: bool = True) -> Call[bool]:
    """End a step, known by its name or ID; False when it had ended."""
    body = {"checkpoint": step, "output_data": output, "success": success}
    return Call("POST", _at("executions", execution_id, "complete"), _changed, body=body)


def _pause_execution(execution_id: str) -> Call[bool]:
    """Pause an execution; False when it was so already."""
    return Call("POST", _at("executions", execution_id, "pause"), _changed)


def _resume_execution(execution_id: str) -> Call[bool]:
    """Go on with a paused execution; False when it was going on."""
    return Call("POST", _at("executions", execution_id, "resume"), _changed)


def _end_execution(execution_id: str, success: bool = True) -> Call[bool]:
    """End an execution; False when it had ended."""
    return Call("POST", _at("executions", execution_id, "end"), _changed, body={"success": success})


def _changed(answer: Any) -> bool:
    return bool(answer["changed"])


# The store


def _llm_stats(by: Sequence[str] = ("model",), run: str | None = None) -> Call[Document]:
    """What calls of models cost and what the cache saved, by model, run or step."""
    return Call("GET", _at("llm", "stats"), _same, {"by": list(by), "run": run})


def _containers(limit: int = 50, cursor: str | None = None) -> Call[Page[Checkpoint]]:
    """The newest checkpoint of each container."""
    return Call("GET", _at("containers"), _checkpoint_page, {"limit": limit, "cursor": cursor})


def _stats(job: str | None = None) -> Call[dict[str, int]]:
    """Numbers of the namespace, or of a job."""
    return Call("GET", _at("stats"), _same, {"job": job})


def _start_verify(job: str | None = None, deep: bool = True) -> Call[Document]:
    """Begin to verify; the task."""
    return Call("POST", _at("verify"), _same, body={"job": job, "deep": deep})


def _start_gc(*, dry_run: bool = False) -> Call[Document]:
    """Begin to collect garbage, or only to find out what that would free; the task."""
    return Call("POST", _at("gc"), _same, {"dry_run": "true"} if dry_run else {})


def _task(task_id: str) -> Call[Document]:
    """How far a task is."""
    return Call("GET", _at("tasks", task_id), _same)


def _tasks() -> Call[list[Document]]:
    """Background tasks, newest first."""
    return Call("GET", _at("tasks"), lambda answer: list(answer["tasks"]))


def _audit_log(limit: int = 50, cursor: str | int | None = None) -> Call[Page[Event]]:
    """The log of changes, newest first."""
    return Call("GET", _at("audit"), _page("events", Event.from_json), {"limit": limit, "cursor": cursor})


def _events(after: int = 0, limit: int = 100) -> Call[Page[Event]]:
    """The log of changes from behind an entry on."""
    params = {"after": after, "limit": limit}
    return Call("GET", _at("audit"), _page("events", Event.from_json), {**params, "order": "oldest"})


def _verify_audit(until: int | None = None) -> Call[EventChain]:
    """Whether the log of changes is whole."""

    def parse(answer: Any) -> EventChain:
        return EventChain(answer["entries"], answer["head"], answer["broken_at"])

    return Call("GET", _at("audit", "verify"), parse, {"until": until})


def _take_lease(job: str, holder: str, ttl_s: float) -> Call[Lease]:
    """The right to write a job; LeaseHeld while another has it."""
    body = {"holder": holder, "ttl_s": ttl_s}
    return Call("POST", _at("jobs", job, "lease"), lambda answer: Lease(**answer), body=body)


def _renew_lease(lease: Lease) -> Call[None]:
    """Extend a lease."""
    return Call("PUT", _at("jobs", lease.job, "lease"), _nothing, body={"token": lease.token, "ttl_s": lease.ttl_s})


def _release_lease(lease: Lease) -> Call[None]:
    """Give a lease back."""
    return Call("DELETE", _at("jobs", lease.job, "lease"), _nothing, {"token": lease.token})


def _whoami() -> Call[Document]:
    """Who the service takes the caller for."""
    return Call("GET", _at("whoami"), _same)


class Endpoints:
    """All calls, as methods."""

    jobs = Endpoint(_jobs)
    job = Endpoint(_job)
    checkpoints = Endpoint(_checkpoints)
    checkpoint = Endpoint(_checkpoint)
    save_json = Endpoint(_save_json)
    state = Endpoint(_state)
    delete = Endpoint(_delete)
    tag = Endpoint(_tag)
    pin = Endpoint(_pin)
    set_status = Endpoint(_set_status)
    condemn = Endpoint(_condemn)
    branch = Endpoint(_branch)
    copy = Endpoint(_copy)
    delete_job = Endpoint(_delete_job)
    keys = Endpoint(_keys)
    restore = Endpoint(_restore)
    diff = Endpoint(_diff)
    retention = Endpoint(_retention)
    set_retention = Endpoint(_set_retention)
    runs = Endpoint(_runs)
    run = Endpoint(_run)
    items = Endpoint(_items)
    attempts = Endpoint(_attempts)
    cancel = Endpoint(_cancel)
    signal = Endpoint(_signal)
    approvals = Endpoint(_approvals)
    decide = Endpoint(_decide)
    executions = Endpoint(_executions)
    execution = Endpoint(_execution)
    start_execution = Endpoint(_start_execution)
    add_step = Endpoint(_add_step)
    complete_step = Endpoint(_complete_step)
    pause_execution = Endpoint(_pause_execution)
    resume_execution = Endpoint(_resume_execution)
    end_execution = Endpoint(_end_execution)
    llm_stats = Endpoint(_llm_stats)
    containers = Endpoint(_containers)
    stats = Endpoint(_stats)
    start_verify = Endpoint(_start_verify)
    start_gc = Endpoint(_start_gc)
    task = Endpoint(_task)
    tasks = Endpoint(_tasks)
    audit_log = Endpoint(_audit_log)
    events = Endpoint(_events)
    verify_audit = Endpoint(_verify_audit)
    take_lease = Endpoint(_take_lease)
    renew_lease = Endpoint(_renew_lease)
    release_lease = Endpoint(_release_lease)
    whoami = Endpoint(_whoami)
