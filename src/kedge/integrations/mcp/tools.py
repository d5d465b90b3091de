"""What an agent can do with its own checkpoints. Its jobs have names that begin with a prefix, which it never sees:
whatever name or ID it gives, nothing outside of the prefix is read or written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kedge.codec.json_view import to_json_view
from kedge.errors import NotAllowed, NotFound, TooLarge, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, parse_name

PREFIX = "agent:"
MAX_STATE_BYTES = 1 << 20  # of a state that is restored: an agent has to read it
LISTED, MAX_LISTED = 20, 200
SHOWN_ITEMS, SHOWN_CHARACTERS = 50, 2000
SHOWN_CHANGES = 100

Document = dict[str, object]

_REFERENCE = 'a checkpoint ID, or a job for its newest checkpoint; "plan~1" is the one before it, "plan#3" number 3'
_INSTRUCTIONS = (
    "Save what you would need to go on after a crash: plans, findings, drafts. A job is a named history of "
    "checkpoints; each is durable when save returns, and none is overwritten. list and show look; restore returns a "
    "whole state; fork starts a new job, or goes back in the same one, from any checkpoint."
)


@dataclass(frozen=True, slots=True)
class Argument:
    kind: str  # string, integer, any
    text: str
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    text: str
    call: Callable[..., Document]
    arguments: Mapping[str, Argument]
    is_writing: bool = False


class Checkpoints:
    """The tools of one agent: jobs of one namespace that begin with `prefix`."""

    instructions = _INSTRUCTIONS

    def __init__(self, manager: CheckpointManager, prefix: str = PREFIX, *, is_read_only: bool = False) -> None:
        if prefix:
            parse_name("prefix", prefix)
        self._manager = manager.acting_as("mcp")
        self._prefix = prefix
        self._is_read_only = is_read_only
        self._tools = self._table()

    def describe(self) -> list[Document]:
        return [_described(name, tool) for name, tool in self._tools.items() if not self._is_closed(tool)]

    def has(self, name: str) -> bool:
        return name in self._tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> Document:
        tool = self._tools[name]
        if self._is_closed(tool):
            raise NotAllowed(f"tool {name}: this server is read-only", hint="start kedge mcp with --scope write")
        return tool.call(**_parsed(name, tool, arguments))

    def _is_closed(self, tool: Tool) -> bool:
        return tool.is_writing and self._is_read_only

    def _table(self) -> dict[str, Tool]:
        job = Argument("string", "the name of a job", is_required=True)
        reference = Argument("string", _REFERENCE, is_required=True)
        save = {
            "job": job,
            "state": Argument("any", "what to save: any JSON", is_required=True),
            "step": Argument("string", "what was done, in a few words"),
            "idempotency_key": Argument("string", "the same key saves once, however often it is sent"),
        }
        listing = {
            "job": Argument("string", "its checkpoints, newest first; without it, the jobs"),
            "limit": Argument("integer", f"at most so many, up to {MAX_LISTED}; {LISTED} by default"),
            "before": Argument("integer", "of checkpoints, only those with smaller numbers"),
            "after": Argument("string", "of jobs, only those behind this name"),
        }
        sides = {"old": reference, "new": reference}
        forked = {"checkpoint": reference, "job": Argument("string", "the new job; without it, the checkpoint's own")}
        return {
            "save": Tool("Save a state as the next checkpoint of a job.", self._save, save, is_writing=True),
            "list": Tool("List jobs, or the checkpoints of a job.", self._list, listing),
            "show": Tool("Show a checkpoint; long parts of its state are cut.", self._show, {"checkpoint": reference}),
            "diff": Tool("Show what changed from one checkpoint to another, by path.", self._diff, sides),
            "restore": Tool("Return the whole state of a checkpoint.", self._restore, {"checkpoint": reference}),
            "fork": Tool(
                "Make the state of a checkpoint the newest of a new job, or of its own: to try something else, or to "
                "go back. The history stays.",
                self._fork,
                forked,
                is_writing=True,
            ),
        }

    def _save(self, job: str, state: Any, step: str = "save", idempotency_key: str | None = None) -> Document:
        saved = self._manager.save(self._job(job), step, state, idempotency_key=idempotency_key)
        return self._about(self._manager.get(saved))

    def _list(
        self, job: str | None = None, limit: int = LISTED, before: int | None = None, after: str | None = None
    ) -> Document:
        if not 1 <= limit <= MAX_LISTED:
            raise Validation(f"limit must be from 1 to {MAX_LISTED} (got {limit})")
        if job is not None:
            page = self._manager.list(self._job(job), limit=limit, before=before)
            return {"job": job, "checkpoints": [self._about(checkpoint) for checkpoint in reversed(page)]}
        jobs = self._manager.jobs(self._prefix, limit, None if after is None else self._job(after))
        return {"jobs": [{"job": self._name(entry.name), "checkpoints": entry.checkpoints} for entry in jobs]}

    def _show(self, checkpoint: str) -> Document:
        wanted = self._find(checkpoint)
        view = to_json_view(self._manager.outline(wanted.id), max_items=SHOWN_ITEMS, max_string=SHOWN_CHARACTERS)
        return {**self._about(wanted), "state": _fitting(view, wanted)}

    def _diff(self, old: str, new: str) -> Document:
        before, after = self._find(old), self._find(new)
        diff = self._manager.diff(before.id, after.id).to_json()
        changes: Any = diff["changes"]
        return {
            "old": self._about(before),
            "new": self._about(after),
            "changes": changes[:SHOWN_CHANGES],
            "left_out": len(changes[SHOWN_CHANGES:]) + int(str(diff["left_out"])),
        }

    def _restore(self, checkpoint: str) -> Document:
        wanted = self._find(checkpoint)
        if wanted.size_bytes > MAX_STATE_BYTES:
            raise _too_large(wanted)
        state = self._manager.load(wanted.id)
        if not _is_plain(state):
            raise Validation(
                f"checkpoint {wanted.id} has values that JSON does not have", hint="use show, or kedge restore"
            )
        return {**self._about(wanted), "state": _fitting(state, wanted)}

    def _fork(self, checkpoint: str, job: str | None = None) -> Document:
        wanted = self._find(checkpoint)
        made, _ = self._manager.resume_from(wanted.id, None if job is None else self._job(job))
        return {**self._about(made), "forked_from": wanted.id}

    # Names

    def _job(self, name: str) -> str:
        parse_name("job", name)
        return parse_name("job", f"{self._prefix}{name}")

    def _name(self, job: str) -> str:
        return job.removeprefix(self._prefix)

    def _find(self, reference: str) -> Checkpoint:
        """A checkpoint by its ID, if it is one of ours, else by a reference to one of our jobs."""
        lookups = [partial(self._manager.find, f"{self._prefix}{reference}")]
        if {"#", "~"}.isdisjoint(reference):
            lookups.insert(0, partial(self._manager.get, reference))
        for lookup in lookups:
            try:
                checkpoint = lookup()
            except (NotFound, Validation):
                continue
            if checkpoint.job.startswith(self._prefix):
                return checkpoint
        raise NotFound(f"checkpoint {reference!r} not found", hint="list names jobs and checkpoints")

    def _about(self, checkpoint: Checkpoint) -> Document:
        return {
            "id": checkpoint.id,
            "job": self._name(checkpoint.job),
            "number": checkpoint.seq,
            "step": checkpoint.step,
            "created_at": checkpoint.timestamp,
            "size_bytes": checkpoint.size_bytes,
        }


def _described(name: str, tool: Tool) -> Document:
    properties: Document = {
        argument: {"description": about.text} | ({} if about.kind == "any" else {"type": about.kind})
        for argument, about in tool.arguments.items()
    }
    return {
        "name": name,
        "description": tool.text,
        "inputSchema": {
            "type": "object",
            "properties": properties,
            "required": [argument for argument, about in tool.arguments.items() if about.is_required],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": not tool.is_writing, "destructiveHint": False, "openWorldHint": False},
    }


def _parsed(name: str, tool: Tool, given: Mapping[str, object]) -> Document:
    """The arguments of a call, as the tool describes them."""
    for argument in given:
        if argument not in tool.arguments:
            raise Validation(f"tool {name}: no argument {argument[:100]!r}", hint=f"use {', '.join(tool.arguments)}")
    for argument, about in tool.arguments.items():
        if argument not in given:
            if about.is_required:
                raise Validation(f"tool {name}: {argument} is missing", hint=about.text)
        elif about.kind != "any" and type(given[argument]) is not _KINDS[about.kind]:
            raise Validation(f"tool {name}: {argument} must be a {about.kind}", hint=about.text)
    return dict(given)


_KINDS = {"string": str, "integer": int}


def _is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(type(name) is str and _is_plain(inner) for name, inner in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _fitting(state: object, checkpoint: Checkpoint) -> object:
    if len(json.dumps(state)) > 2 * MAX_STATE_BYTES:
        raise _too_large(checkpoint)
    return state


def _too_large(checkpoint: Checkpoint) -> TooLarge:
    return TooLarge(
        f"checkpoint {checkpoint.id} has {checkpoint.size_bytes:,} bytes, more than fit into an answer",
        hint="save in smaller parts; kedge restore writes all of it to a file",
    )
