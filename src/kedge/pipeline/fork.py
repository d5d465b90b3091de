"""A fork: a new run that begins with what another one had finished before some step.

    marker   of what this is a fork; a second fork under the same key is refused
    copies   of the records of finished steps, under the same step keys; they share their bytes
    status   the run exists: paused, and able to go on
    entry    where a worker carried the other run out: one carries out the fork

Killed in between, the same call again goes on: each of these is written once. Without its status it is no run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kedge.errors import Conflict, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, Lease, RunStatus
from kedge.store.request import Request, branch_listed, request_again

from .entries import RECOVERY, Arguments, EntryFacts, inputs_of, queue_job, save_entry, shown_call
from .final_failures import kept_failures
from .history import RunSummary, find_run, find_runs, steps_of
from .inbox import parse_run_key
from .keys import digest_of, show
from .origin import entry_of_run, parameters_of_run, program_of
from .owner import newest_status, save_status, take_lease

_LEASE_S = 30.0
_PAGE = 500
_MARK = "fork"  # the idempotency key of the marker


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What a fork reuses, and what it does again. Steps whose inputs change run again in any case."""

    run: str
    fork: str
    step: str
    reused: Sequence[str]
    again: Sequence[str]
    arguments: Mapping[str, Any]
    queue: str  # whose workers carry it out; "": none
    command: Sequence[str]  # that starts it; (): it is not known

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def plan_fork(
    store: CheckpointManager,
    key: str,
    step: str,
    *,
    new_key: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    new_arguments: Mapping[str, Any] | None = None,
) -> ForkPlan:
    """Changes nothing. Steps are in the order in which they first ended; `step` may also be that of a stage.

    `new_arguments` are those of parameters that the pipeline has got since `key` was started.
    """
    return _plan(store, find_run(store, key), step, new_key, arguments or {}, new_arguments or {})


def _plan(
    store: CheckpointManager,
    run: RunSummary,
    step: str,
    new_key: str | None,
    arguments: Mapping[str, object],
    new_arguments: Mapping[str, object],
) -> ForkPlan:
    key, given = run.key, {**arguments, **new_arguments}
    _check_names(store, run, arguments)
    paths = [show(path) for path in steps_of(store, key)]
    first = next((n for n, path in enumerate(paths) if path == step or path.startswith(f"{step}/")), None)
    if first is None:
        raise NotFound(f"run {key} has no step {step}", hint=f"kedge runs show {key} lists its steps")
    if new_key is None:
        new_key = f"{key[:90]}-fork-{digest_of([key, step, given], 'the arguments').hex()[:8]}"
    queue, command = _carrier(store, run)
    if command:
        command = forked_command(command, key, parse_run_key(new_key), given)
    if given and not queue and not command:
        raise Conflict(
            f"run {key} does not say what it was called with", hint="leave --arg away, and start its program yourself"
        )
    return ForkPlan(key, parse_run_key(new_key), step, paths[:first], paths[first:], given, queue, command)


def plan_forks(
    store: CheckpointManager,
    step: str,
    *,
    prefix: str = "",
    pipeline: str = "",
    status: str = "",
    arguments: Mapping[str, Any] | None = None,
    new_arguments: Mapping[str, Any] | None = None,
) -> Iterator[ForkPlan]:
    """A plan for each run whose key begins with `prefix`, of this pipeline and with this status; "": any.

    Forks are left out, so that the same call again plans the same; so are runs without that step.
    """
    for run in find_runs(store, prefix, pipeline=pipeline, status=status):
        if fork_of(store, run.key) is None:
            with suppress(NotFound):
                yield _plan(store, run, step, None, arguments or {}, new_arguments or {})


def _check_names(store: CheckpointManager, run: RunSummary, arguments: Mapping[str, Any]) -> None:
    """Raise Validation before there is a fork, which would fail as soon as it begins."""
    known = parameters_of_run(store, run.key) if arguments else None
    if known is not None and (unknown := [name for name in arguments if name not in known]):
        raise Validation(
            f"pipeline {run.pipeline} had no parameter {unknown[0]} when run {run.key} was started",
            hint=f"it had: {', '.join(known) or 'none'}; use --new-arg for one that its code has got since",
        )


def _carrier(store: CheckpointManager, run: RunSummary) -> tuple[str, Sequence[str]]:
    """(queue, command), one of which carries a run out."""
    try:
        entry_of_run(store, run.key)
    except NotFound:
        program = program_of(store, run.key)
        return "", () if program is None else program[0]
    return run.queue or RECOVERY, ()


def forked_command(argv: Sequence[str], key: str, new_key: str, arguments: Mapping[str, Any]) -> Sequence[str]:
    """The command of a run for a run under another key; () where it does not say the key."""
    changed = [f"{name}={json.dumps(value)}" for name, value in arguments.items()]
    is_kedge_run = any(word == "run" and ".py:" in argv[n + 1] for n, word in enumerate(argv[:-1]))
    if not is_kedge_run:
        return () if changed or key not in argv else [new_key if word == key else word for word in argv]
    words, rest = [], iter(argv)
    for word in rest:
        option, equals, value = word.partition("=")
        if option not in ("--id", "--arg"):
            words.append(word)
            continue
        value = value if equals else next(rest, "")
        if option == "--arg" and value.partition("=")[0] not in arguments:
            words += ["--arg", value]
    return [*words, "--id", new_key, *(word for pair in changed for word in ("--arg", pair))]


def fork(store: CheckpointManager, plan: ForkPlan) -> None:
    """Make the run that `plan` says. Its workers carry it out at once; a program is for the caller to start."""
    submission = _submission(store, plan) if plan.queue else None
    with take_lease(store, plan.fork, _LEASE_S) as lease:
        newest, job = newest_status(store, plan.fork), store.catalogue.job(plan.fork)
        if job is not None and job.checkpoints and fork_of(store, plan.fork) is None:
            raise Conflict(f"job {plan.fork} exists, and is no fork", hint="choose another key")
        _mark(store, plan, lease)
        if newest is None:
            for record, step_key in _finished(store, plan):
                changes = {"job": plan.fork, "is_pinned": False, "idempotency_key": step_key, "lease": lease}
                describe = partial(_described, changes)
                branch_listed(store.store, record.id, None, describe, actor=store.actor)  # what is gone runs again
            _record(store, plan, lease, submission)
    has_begun = newest is not None and "forked_from" not in newest.metadata
    if submission is None or has_begun or store.list(queue_job(plan.queue), tags={"run": plan.fork}, limit=1):
        return
    save_entry(store, queue_job(plan.queue), *submission)


def _described(changes: Mapping[str, Any], source: Checkpoint, parent: CheckpointId | None) -> Request:
    return request_again(source, parent=parent, **changes)


def fork_of(store: CheckpointManager, key: str) -> tuple[str, str] | None:
    """(run, step) that a run is a fork of; None if it is none."""
    marker = store.get_by_key(key, _MARK)
    return None if marker is None else (str(marker.metadata.get("forked_from")), str(marker.metadata.get("fork_step")))


def _mark(store: CheckpointManager, plan: ForkPlan, lease: Lease) -> None:
    about = {"kind": "fork", "forked_from": plan.run, "fork_step": plan.step}
    state = {**about, "arguments": dict(plan.arguments)}
    level = CheckpointLevel.PIPELINE
    store.save(plan.fork, "fork", state, level=level, metadata=about, lease=lease, idempotency_key=_MARK)


def _finished(store: CheckpointManager, plan: ForkPlan) -> Iterator[tuple[Checkpoint, str]]:
    """The records that the fork reuses, with their keys: results, items of maps, failures that were handled."""
    newest, reused = newest_status(store, plan.run), set(plan.reused)
    failures = set() if newest is None else {record.id for record in kept_failures(store, plan.run, newest).values()}
    after = 0
    while page := store.list(plan.run, after=after, limit=_PAGE):
        keyed = store.catalogue.find(plan.run, range(after + 1, page[-1].seq + 1))
        keys = {stored[0].id: step_key for step_key, stored in keyed.items()}
        after = page[-1].seq
        for record in page:
            kind, path = record.metadata.get("kind"), record.metadata.get("path")
            if not isinstance(path, list) or show(tuple(map(str, path))) not in reused:
                continue
            if kind in ("step", "items") or record.id in failures:
                yield record, keys.get(record.id, f"fork:{record.id}")


def _submission(store: CheckpointManager, plan: ForkPlan) -> tuple[EntryFacts, Arguments]:
    """(entry, call) of the fork."""
    entry, call = entry_of_run(store, plan.run)
    args, kwargs, names = list(call["args"]), dict(call["kwargs"]), call.get("names", [])
    for name, value in plan.arguments.items():
        if name in names:
            args[names.index(name)] = value
        else:
            kwargs[name] = value
    changed: Arguments = {**call, "args": args, "kwargs": kwargs}
    inputs = inputs_of(entry["pipeline"], changed)
    forked: EntryFacts = {
        **entry, "run": plan.fork, "inputs": inputs, "due_at": 0.0, "attempts": 0, "sessions": 0, "group": "",
    }  # fmt: skip
    return forked, changed


def _program(store: CheckpointManager, plan: ForkPlan) -> dict[str, object]:
    program = program_of(store, plan.run)
    if program is None or not plan.command:
        return {}
    command = {"argv": list(plan.command), "cwd": program[1]}
    return {"command": command, "parameters": parameters_of_run(store, plan.run)}


def _record(
    store: CheckpointManager, plan: ForkPlan, lease: Lease, submission: tuple[EntryFacts, Arguments] | None
) -> None:
    source = find_run(store, plan.run)
    metadata: dict[str, object] = {
        "session": source.sessions, "began_at": time.time(), "version": source.version, "pipeline": source.pipeline,
        "forked_from": plan.run, "queue": source.queue,
    }  # fmt: skip
    if submission is None:
        origin = _program(store, plan)
    else:
        origin = {"entry": submission[0], "call": submission[1]}
        metadata |= {"has_entry": True, "given": shown_call(submission[1])}
    save_status(store, lease, RunStatus.PAUSED, origin, metadata)
