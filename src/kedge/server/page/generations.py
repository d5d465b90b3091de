"""The checkpoints of a container, a pod or a process as generations: what each holds, and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.errors import Corrupted
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, number_of
from kedge.terminal.text import count_of, size

from .states import Outlines

_SHOWN = 25
_NAMED = 4  # processes that began or ended


@dataclass(frozen=True, slots=True)
class Process:
    pid: str
    name: str
    executable: str
    threads: int
    memory_bytes: int
    files: int  # that it had open
    depth: int  # below its parents


@dataclass(frozen=True, slots=True)
class Generation:
    """`changes` is in words; `before` the checkpoint that it is compared with."""

    checkpoint: Checkpoint
    before: Checkpoint | None
    paused: str
    memory_bytes: int
    processes: int
    is_running: bool | None  # whether it was left running; None: not known
    changes: Sequence[str]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Generations:
    rows: Sequence[Generation]
    older: int | None  # the number below which there are more
    processes: Sequence[Process]  # of the newest shown
    facts: Sequence[tuple[str, str]]
    restore: str  # the command


def generations_of(
    store: CheckpointManager, outlines: Outlines, job: str, before: int | None = None
) -> Generations | None:
    """Newest first. None for a job that only begins with the same word."""
    listed = store.list(job, limit=_SHOWN + 1, before=before)[::-1]
    if not listed or listed[0].metadata.get("kind") not in ("container", "process"):
        return None
    states = [_state_of(store, outlines, checkpoint) for checkpoint in listed]
    rows = [
        _generation(checkpoint, states[n], listed[n + 1] if n + 1 < len(listed) else None, [*states, {}][n + 1])
        for n, checkpoint in enumerate(listed[:_SHOWN])
    ]
    older = listed[_SHOWN - 1].seq if len(listed) > _SHOWN else None
    kind, name = str(listed[0].metadata["kind"]), job.partition(":")[2]
    return Generations(
        rows, older, _tree(_processes(states[0])), _facts(listed[0], states[0]), f"kedge {kind} restore {name}"
    )


def _state_of(store: CheckpointManager, outlines: Outlines, checkpoint: Checkpoint) -> Mapping[str, object]:
    try:
        state = outlines.open(store, checkpoint.id).outline
    except Corrupted:
        return {}
    return state if isinstance(state, Mapping) else {}


def _generation(
    checkpoint: Checkpoint, state: Mapping[str, object], before: Checkpoint | None, earlier: Mapping[str, object]
) -> Generation:
    metadata = checkpoint.metadata
    paused, running = metadata.get("paused_ms"), metadata.get("is_running")
    return Generation(
        checkpoint,
        before,
        f"{paused:,.1f} ms" if isinstance(paused, int | float) else "",
        number_of(metadata.get("memory_bytes")),
        number_of(metadata.get("processes")),
        running if isinstance(running, bool) else None,
        _changes(checkpoint, state, before, earlier) if before is not None and earlier else (),
        "" if state else "its state cannot be read",
    )


def _changes(
    checkpoint: Checkpoint, state: Mapping[str, object], before: Checkpoint | None, earlier: Mapping[str, object]
) -> list[str]:
    now, then = _processes(state), _processes(earlier)
    began = [f"{facts['name']} ({pid})" for pid, facts in now.items() if not _is_same(facts, then.get(pid))]
    ended = [f"{facts['name']} ({pid})" for pid, facts in then.items() if not _is_same(facts, now.get(pid))]
    named = (("started", began), ("ended", ended))
    changes = [f"{len(names)} {word}: {_some(names)}" for word, names in named if names]
    if grown := _memory(now) - _memory(then):
        changes.append(f"memory {'+' if grown > 0 else '−'}{size(abs(grown))}")
    for name, label in (("id", "container"), ("runtime", "runtime"), ("network", "network")):
        was = before.metadata.get(name) if before is not None else None
        if was is not None and was != checkpoint.metadata.get(name):
            changes.append(f"{label} {was} → {checkpoint.metadata.get(name)}")
    hosts = [facts.get("host") for facts in (earlier, state)]
    kernels = [str(host.get("kernel", "")) for host in hosts if isinstance(host, Mapping)]
    if len(set(kernels)) > 1:
        changes.append(f"kernel {' → '.join(kernels)}")
    return changes


def _memory(processes: Mapping[str, Mapping[str, object]]) -> int:
    return sum(number_of(facts.get("memory_bytes")) for facts in processes.values())


def _is_same(process: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    return other is not None and process.get("executable") == other.get("executable")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _processes(state: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    given = state.get("processes")
    if not isinstance(given, Mapping):
        return {}
    return {str(pid): {"name": "?", **facts} for pid, facts in given.items() if isinstance(facts, Mapping)}


def _tree(processes: Mapping[str, Mapping[str, object]]) -> list[Process]:
    """Each below its parent."""
    below: dict[str, list[str]] = {}
    for pid, facts in processes.items():
        parent = str(facts.get("parent"))
        below.setdefault(parent if parent in processes and parent != pid else "", []).append(pid)
    made: list[Process] = []
    waiting = [(pid, 0) for pid in reversed(below.get("", []))]
    while waiting:
        pid, depth = waiting.pop()
        facts = processes[pid]
        files = facts.get("open_files")
        made.append(
            Process(
                pid,
                str(facts["name"]),
                str(facts.get("executable", "")),
                number_of(facts.get("threads")),
                number_of(facts.get("memory_bytes")),
                len(files) if isinstance(files, Mapping) else 0,
                min(depth, 6),
            )
        )
        waiting += [(child, depth + 1) for child in reversed(below.get(pid, []))]
    return made


def _facts(newest: Checkpoint, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    spec, host, pod = state.get("spec"), state.get("host"), newest.metadata.get("pod")
    process = spec.get("process") if isinstance(spec, Mapping) else None
    arguments = process.get("args") if isinstance(process, Mapping) else None
    sockets, files = newest.metadata.get("sockets"), str(newest.metadata.get("rootfs"))
    facts = [
        ("ID", str(newest.metadata.get("id", ""))[:24]),
        ("Command", " ".join(map(str, arguments))[:200] if isinstance(arguments, list | tuple) else ""),
        ("Runtime", str(newest.metadata.get("runtime", ""))),
        ("Network", str(newest.metadata.get("network", ""))),
        ("Pod", "/".join(map(str, pod.values()))[:200] if isinstance(pod, Mapping) else str(pod or "")),
        ("Kernel", str(host.get("kernel", "")) if isinstance(host, Mapping) else ""),
        ("Files", {"overlay": "what it changed", "directory": "all of them"}.get(files, "")),
        ("Not saved", count_of(len(sockets), "socket") if isinstance(sockets, list) and sockets else ""),
    ]
    return [(label, text) for label, text in facts if text]
