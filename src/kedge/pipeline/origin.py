"""How a run was started, and so can be started again: the command of its program, or what was submitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from kedge.errors import Conflict, NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, RunStatus

from .entries import RECOVERY, Arguments, Entry, EntryFacts, queue_job
from .history import check_resumable, find_run
from .outcome import what_follows
from .owner import newest_status, status_of


class Command(TypedDict):
    """A program."""

    argv: list[str]
    cwd: str


class StartFacts(TypedDict, total=False):
    """What the state of a run's record says of how it was started."""

    command: Command
    parameters: list[str] | None  # of its pipeline; None: any


def command_of(store: CheckpointManager, key: str) -> tuple[list[str], str]:
    """(arguments, directory) with which the run was last started."""
    summary = find_run(store, key)
    check_resumable(store, summary)
    if (program := program_of(store, key)) is not None:
        return program
    if summary.parent:
        raise Conflict(f"run {key} was started by run {summary.parent}", hint=what_follows(store, summary.parent, ""))
    raise NotFound(f"run {key} does not say how it was started", hint="start its program again by hand")


def program_of(store: CheckpointManager, key: str) -> tuple[list[str], str] | None:
    """(arguments, directory) of the program whose run it is; None if its records do not say."""
    command = _start_of(store, key).get("command")
    return None if command is None else (command["argv"], command["cwd"])


def parameters_of_run(store: CheckpointManager, key: str) -> list[str] | None:
    """Which parameters the pipeline of a run had when it was last started; None: any, or its records do not say."""
    try:
        names = entry_of_run(store, key)[1].get("parameters")
    except NotFound:
        names = _start_of(store, key).get("parameters")
    return names if isinstance(names, list) else None


def _start_of(store: CheckpointManager, key: str) -> StartFacts:
    """What the newest record says that tells how the run's program was started."""
    for record in reversed(store.list(key, tags={"kind": "run"}, limit=1000)):
        state = store.load(record.id)
        command = state.get("command") if isinstance(state, dict) else None
        if isinstance(command, dict):
            argv, cwd = command.get("argv"), command.get("cwd")
            if isinstance(argv, list) and argv and isinstance(cwd, str) and all(isinstance(w, str) for w in argv):
                return StartFacts(command=Command(argv=argv, cwd=cwd), parameters=state.get("parameters"))
    return {}


def entry_of_run(store: CheckpointManager, key: str) -> tuple[EntryFacts, Arguments]:
    """(entry, call) with which a worker began a run."""
    for record in store.list(key, tags={"kind": "run"}, metadata={"has_entry": True}, limit=1):
        state = store.load(record.id)
        return state["entry"], state["call"]
    raise NotFound(f"run {key} does not say what it was called with", hint="submit it again, under another key")


def check_same_run(store: CheckpointManager, key: str, inputs: str) -> None:
    """Raise Conflict if a run was submitted or started with other arguments, also one that has ended."""
    for record in store.list(key, tags={"kind": "run"}, metadata={"has_entry": True}, limit=1):
        state = store.load(record.id, only="entry")
        check_same_call(key, state["entry"], inputs)


def has_ended_since(store: CheckpointManager, entry: Entry, record: Checkpoint) -> bool:
    """Whether the run of an entry, which `record` holds, was cancelled, or completed after the entry was submitted: who
    carried it out died before the entry was deleted. Conflict if it was submitted elsewhere, with other arguments."""
    if (newest := newest_status(store, entry.key)) is None:
        return False
    status = status_of(newest)
    if status is not RunStatus.COMPLETED or not entry.has_ended(newest):
        return status is RunStatus.CANCELLED
    inputs = record.metadata.get("inputs")  # "": a schedule has submitted it
    if isinstance(inputs, str) and inputs and record.job != queue_job(RECOVERY):  # those call what they are called with
        check_same_run(store, entry.key, inputs)
    return True


def check_same_call(key: str, entry: Mapping[str, object], inputs: str) -> None:
    """`inputs` is the digest of what the pipeline is called with now."""
    if entry.get("inputs") not in (inputs, ""):  # "": a schedule has submitted it
        raise Conflict(f"run {key} was called with other arguments", hint="use another key=")
