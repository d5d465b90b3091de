"""Entries: what was submitted to a queue, and where it is.

A queue is the job `queue:<name>`. What is submitted is an entry: a checkpoint with the pipeline's name and arguments.
Its tag `state` says where it is, and is all that workers search by, so that no look costs more than what it finds (I6):

    ready0 … ready9    to be taken, higher priorities first, in the order of submission
    delayed            to be taken from `due_at` on
    held               waits for its turn in its group (`groups`)
    running            a worker has it: it holds the lease of the run, and all that the run writes is fenced by it (I5)
    dead               given up, to be looked at; `Queue.retry` makes it ready again

An entry is deleted when its run has ended, after the end of the run is durable. The run itself stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NotRequired, TypedDict, cast

from kedge.errors import InvalidName, NotFound, did_you_mean
from kedge.manager import CheckpointManager
from kedge.model import QUEUE_PREFIX, Checkpoint, parse_name
from kedge.ports import Provided
from kedge.store.request import parse_request

from .inbox import is_run_key
from .keys import arguments, digest_of, parameters_of, previews
from .telemetry import trace_here

READY, DELAYED, HELD, RUNNING, DEAD = "ready", "delayed", "held", "running", "dead"
STATES = (READY, DELAYED, HELD, RUNNING, DEAD)
PRIORITIES = range(10)
RECOVERY = "recovery"  # the queue of runs that nobody submitted, and that are taken over when their process dies
_RESERVED = ("schedules", "limits", "rate", "workers")  # what Kedge keeps beside a queue; also place-0, place-1, …
_MOST_NAMES = 100  # of queues, among which one of a similar name is looked for
_MOST_CHARACTERS = 112  # of a name: so much that the names of all jobs beside it are valid
_FIELDS = {"run": str, "pipeline": str, "priority": int, "due_at": float, "attempts": int, "retries": int}


class Arguments(TypedDict):
    """What a pipeline is called with: the state of an entry."""

    args: list[object]
    kwargs: dict[str, object]
    names: list[str]  # of args
    parameters: list[str] | None  # of the pipeline; None: any


class ScheduleFacts(TypedDict):
    """When a schedule is due, in the metadata of its entry."""

    name: str
    queue: str
    cron: str
    every_s: float
    zone: str
    catch_up: str
    jitter_s: float
    retries: int
    takes_moment: bool


class EntryFacts(TypedDict):
    """The metadata of an entry."""

    run: str
    pipeline: str
    inputs: str
    priority: int
    due_at: float
    attempts: int
    retries: int
    group: str
    trace: NotRequired[Mapping[str, str]]
    schedule: NotRequired[ScheduleFacts]
    sessions: NotRequired[int]


def facts_of(record: Checkpoint) -> EntryFacts:
    """What `new_entry` wrote."""
    return cast(EntryFacts, record.metadata)


def ready(priority: int) -> str:
    return f"{READY}{priority}"


def _reserved_part(name: str) -> str:
    """What Kedge keeps beside a queue, such as its limits, is called NAME:part; "" for any other name."""
    _, colon, part = name.rpartition(":")
    return part if colon and (part in _RESERVED or part.startswith("place-")) else ""


def queue_of(job: str) -> str:
    """The name of the queue that a job belongs to."""
    name = job.removeprefix(QUEUE_PREFIX)
    part = _reserved_part(name)
    return name.removesuffix(f":{part}") if part else name


def queue_job(name: str) -> str:
    if part := _reserved_part(name):
        raise InvalidName(f"queue {name!r}: names that end in :{part} are reserved", hint="use another name")
    if len(parse_name("queue", name)) > _MOST_CHARACTERS:
        raise InvalidName(f"queue {name[:60]}… has too long a name", hint=f"use at most {_MOST_CHARACTERS} characters")
    return QUEUE_PREFIX + name


def schedule_job(name: str) -> str:
    """The job that holds the schedules of a queue."""
    return queue_job(name) + ":schedules"


def limits_job(name: str) -> str:
    """The job that holds the limits of a queue."""
    return queue_job(name) + ":limits"


def workers_job() -> str:
    """The job that holds the records of workers, beside the queue that all of them work for."""
    return queue_job(RECOVERY) + ":workers"


def check_queue(store: CheckpointManager, name: str) -> None:
    """Raise NotFound if nothing was ever submitted to a queue, and it has no schedule and no limits."""
    if any(store.catalogue.job(job) is not None for job in (queue_job(name), schedule_job(name), limits_job(name))):
        return
    known = dict.fromkeys(queue_of(job.name) for job in store.jobs(QUEUE_PREFIX, _MOST_NAMES))
    known.pop(RECOVERY, None)
    some = f"there are: {', '.join(islice(known, 5))}" if known else "no queue of this store holds anything now"
    raise NotFound(f"there is no queue {name}", hint=did_you_mean(name, known) or some)


@dataclass(frozen=True, slots=True)
class Entry:
    """What was submitted, and where it is."""

    id: str
    seq: int
    key: str  # of the run
    pipeline: str
    state: str  # ready, delayed, held, running or dead
    priority: int
    due_at: float
    attempts: int  # that failed
    retries: int
    takeovers: int  # of workers that died at it
    note: str  # why it is dead
    group: str  # whose runs go one after another; "": none
    sessions: int  # that the run had when it was submitted: completed ones are submitted again

    @classmethod
    def of(cls, record: Checkpoint) -> Entry | None:
        """None for a record that is no entry: anybody who may save can write one, and it disturbs nobody."""
        about: Mapping[str, Any] = record.metadata
        tags = record.tags
        takeovers = tags.get("takeovers", "0")
        if about.get("kind") != "entry" or not takeovers.isdecimal():
            return None
        if not all(isinstance(about.get(name), kind) for name, kind in _FIELDS.items()):
            return None
        key, pipeline, priority, due_at, attempts, retries = (about[name] for name in _FIELDS)
        if not is_run_key(key):
            return None
        return cls(
            record.id, record.seq, key, pipeline, _shown(tags.get("state", "")), priority, due_at,
            int(failed) if (failed := tags.get("attempts", "")).isdecimal() else attempts, retries,
            int(takeovers), tags.get("note", ""), group if isinstance(group := about.get("group"), str) else "",
            sessions if isinstance(sessions := about.get("sessions"), int) else 0,
        )  # fmt: skip

    def has_ended(self, newest: Checkpoint) -> bool:
        """Whether the run, whose newest status record this is, ended after the entry was submitted."""
        session = newest.metadata.get("session")
        return isinstance(session, int) and session > self.sessions

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def _shown(state: str) -> str:
    """The state without the priority that workers search by."""
    return READY if state.startswith(READY) else state


def entries_of(records: Iterable[Checkpoint]) -> Iterator[Entry]:
    return (entry for record in records if (entry := Entry.of(record)) is not None)


def new_entry(
    run: str,
    pipeline: str,
    inputs: str = "",
    *,
    priority: int = 5,
    due_at: float = 0.0,
    retries: int = 0,
    group: str = "",
) -> EntryFacts:
    """The metadata of an entry; `inputs` is the digest of what the pipeline is called with."""
    facts: EntryFacts = {
        "run": run, "pipeline": pipeline, "inputs": inputs, "priority": priority, "due_at": due_at, "attempts": 0,
        "retries": retries, "group": group,
    }  # fmt: skip
    if trace := trace_here():
        facts["trace"] = trace
    return facts


def call_of(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments:
    """What an entry calls its pipeline with; forks change arguments by their names."""
    return {
        "args": list(args), "kwargs": dict(kwargs), "names": list(arguments(function, tuple(args), {})),
        "parameters": parameters_of(function),
    }  # fmt: skip


def shown_call(call: Arguments) -> dict[str, str]:
    """The arguments of a call in a few words, for people, without credentials."""
    names = call.get("names", ())
    positional = {(names[n] if n < len(names) else f"argument {n + 1}"): value for n, value in enumerate(call["args"])}
    named = {**positional, **call["kwargs"]}
    return previews(named) if named else {}


def inputs_of(pipeline: str, call: Arguments) -> str:
    """The digest of what a pipeline is called with: a key stands for one call."""
    return digest_of([pipeline, call["args"], call["kwargs"]], f"pipeline {pipeline}").hex()


def save_entry(
    store: CheckpointManager,
    job: str,
    entry: EntryFacts,
    call: object,
    *,
    after: str = "",
    tags: Mapping[str, str] | None = None,
    state: str | None = None,
    provided: Provided | None = None,
) -> str:
    """Make an entry durable, once, and answer its ID: `after` is the ID of the one it replaces, NotFound if that and
    what has replaced it are gone. Unmet if what it is `provided` with is not so."""
    if state is None:
        state = DELAYED if entry["due_at"] > time.time() else ready(entry["priority"])
    request = parse_request(
        job,
        entry["pipeline"],
        "pipeline",
        parent=after or None,
        tags={"state": state, "run": entry["run"], **(tags or {})},
        metadata={**entry, "kind": "entry"},
        idempotency_key=after_key(after) if after else None,
    )
    return store.save_request(replace(request, provided=provided), call)


def drop_entry(store: CheckpointManager, entry_id: str) -> None:
    """Delete an entry; nothing happens if somebody did before."""
    store.catalogue.delete([entry_id], actor=store.actor)


def drop_replaced(store: CheckpointManager, record: Checkpoint) -> None:
    """Delete the entry that this one has replaced, if who did that has not come so far. Before this one is deleted: its
    key is free then, and the entry must not be replaced once more."""
    if record.parent is not None:
        for older in store.list(record.job, tags={"run": record.tags.get("run", "")}, before=record.seq):
            if older.id == record.parent:
                drop_entry(store, older.id)


def after_key(entry_id: str) -> str:
    """The idempotency key of the entry that takes the place of another."""
    return f"after:{entry_id}"
