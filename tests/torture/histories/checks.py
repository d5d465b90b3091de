"""What is asked of a store when nobody is at work: everything is looked at, and it must be what the history says."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import kedge
from tests.torture.ledger import Violation

from . import values
from .history import History, Listener
from .places import Place

_numbers = itertools.count(1)
_MOST_LINES = 60


class Examiner:
    """Reads all of a store as one more worker, so that what it sees is part of the history."""

    def __init__(self, place: Place, history: History) -> None:
        self._place = place
        self._history = history
        self._listener = Listener(history, "examiner")
        self._is_encrypted = bool(place.direct.keys)
        self.loaded = 0

    def examine(self) -> None:
        """List and load everything, verify every byte, follow the chain of events."""
        with self._place.direct.open() as store:
            present = self._list_all(store)
            for checkpoint in present:
                self._load(store, checkpoint)
            report = store.verify(deep=True)
            self._fail(f"verify: {p.subject}: {p.what}" for p in report.problems)
            if (chain := store.audit()).broken_at is not None:
                self._fail([f"the chain of events is broken at {chain.broken_at}"])
            if self._place.kind != "memory":  # whose directory knows only what a copy brought
                self._events(store)
        self._one_key_fits()

    def _list_all(self, store: kedge.CheckpointManager) -> list[kedge.Checkpoint]:
        present: list[kedge.Checkpoint] = []
        asked = {op.args["job"] for op in self._history.operations if "job" in op.args}
        counts = {job.name: job.checkpoints for job in store.jobs()}
        for job in sorted(asked | counts.keys()):
            began, listed = time.monotonic(), store.list(job)
            shown = [values.seen(c, is_encrypted=self._is_encrypted) for c in listed]
            self._note("list", began, {"job": job}, {"seen": shown})
            if counts.get(job, 0) != len(listed):
                self._fail([f"job {job} counts {counts.get(job, 0)} checkpoints and lists {len(listed)}"])
            present += listed
        return present

    def _note(self, name: str, began: float, args: dict[str, object], result: dict[str, object]) -> None:
        number = next(_numbers)
        self._listener.note(("begin", number, name, args), began)
        self._listener.note(("end", number, result), time.monotonic())

    def _load(self, store: kedge.CheckpointManager, checkpoint: kedge.Checkpoint) -> None:
        try:
            state = store.load(checkpoint.id)
            wrong = values.difference(state, checkpoint)
        except kedge.CheckpointError as error:
            wrong = f"{checkpoint.id} of {checkpoint.job} cannot be loaded: {type(error).__name__}: {error}"
        self._fail([wrong] if wrong else [])
        self.loaded += 1

    def _events(self, store: kedge.CheckpointManager) -> None:
        """Everything that was acknowledged is in the log, in order."""
        logged: set[str | None] = set()
        position = 0
        while page := store.events(position, 1000):
            numbers = [event.id for event in page]
            if numbers != sorted(set(numbers)) or numbers[0] <= position:
                self._fail([f"events out of order: {numbers}"])
            logged.update(event.checkpoint for event in page if event.action == "save")
            position = numbers[-1]
        acknowledged = {op.result["id"] for op in self._history.operations if op.name == "save" and op.is_done}
        self._fail(f"{lost} was acknowledged and is not in the log of events" for lost in acknowledged - logged)

    def _one_key_fits(self) -> None:
        from .worker import read_keys

        access, fitting = self._place.direct, 0
        for key in read_keys(access.keys) if access.keys else []:
            try:
                kedge.open(access.url, key=key, create=False).close()
                fitting += 1
            except kedge.Validation:
                continue
        if access.keys and fitting != 1:
            self._fail([f"{fitting} master keys open the store"])

    def _fail(self, texts: Iterable[str]) -> None:
        self._history.failures.extend(f"examiner: {text}" for text in texts)

    # Only when all is quiet

    def rebuild(self) -> None:
        """On a store that is well this adds at most saves that were refused or are in doubt.

        Of those gc may have removed a part: they are marked as damaged then, and deleted by whoever looks.
        """
        if self._place.kind == "memory":
            return
        began = time.monotonic()
        with self._place.direct.open() as store:
            report = store.rebuild()
            for partial in report.corrupted:
                store.delete(store.get(partial).job, partial)
        self._note("rebuild", began, {}, {})
        acknowledged = {op.result.get("id") for op in self._history.operations if op.name == "save" and op.is_done}
        self._fail(f"rebuild calls {i} damaged" for i in acknowledged.intersection(report.corrupted))

    def repair(self) -> None:
        if self._place.directory is None or self._place.kind == "memory":
            return
        access = self._place.direct
        command = [sys.executable, "-m", "kedge", "check", "--repair", "--store", access.url]
        key = [] if not access.keys else ["--key", f"file:{self._current_key()}"]
        done = subprocess.run([*command, *key], capture_output=True, text=True)
        if done.returncode:
            self._fail([f"check --repair ended with {done.returncode}: {done.stdout}{done.stderr}"])

    def _current_key(self) -> Path:
        with self._place.direct.open() as store:
            key = store.key_source
        assert isinstance(key, bytes)
        path = Path(self._place.direct.scratch, "current-key")
        path.write_text(key.hex())
        return path

    def mirror(self) -> None:
        """A last copy makes the target the same as the source."""
        access = self._place.direct
        with access.open() as source, access.open_target() as target:
            report = source.copy_to(target, mirror=True)
            for job in source.jobs():
                ours, theirs = (
                    [(c.id, c.seq, c.parent, c.size_bytes) for c in s.list(job.name)] for s in (source, target)
                )
                if ours != theirs:
                    self._fail([f"{job.name} of the copy differs: {set(ours) ^ set(theirs)} ({report})"])
            for job in target.jobs():
                for checkpoint in target.list(job.name):
                    self._load(target, checkpoint)
            self._fail(f"verify of the copy: {p.subject}: {p.what}" for p in target.verify().problems)

    def empty(self) -> None:
        """All deleted, gc gives every byte back, except of writers on other machines that may still live."""
        with self._place.direct.open() as store:
            for job in store.jobs():
                for checkpoint in store.list(job.name):
                    store.pin(checkpoint.id, False)
                    store.delete(job.name, checkpoint.id)
        with self._place.direct.open() as store:
            store.gc()
            store.gc()
            numbers = store.stats()
        # A service keeps records of its tasks, in a namespace of its own.
        wanted = ["checkpoints", "chunks"] + (["packs"] if self._place.kind in ("dir", "files") else [])
        if any(numbers[name] for name in wanted):
            self._fail([f"after everything was deleted: {dict(numbers)}"])


def raise_problems(history: History, label: str) -> None:
    """Raise Violation with what is wrong, and what happened to what is concerned."""
    from .model import problems

    wrong = problems(history)
    if not wrong:
        return
    lines = [label, *(f"- {p.subject}: {p.what}" if p.subject else f"- {p.what}" for p in wrong[:12])]
    if len(wrong) > 12:
        lines.append(f"… and {len(wrong) - 12} more")
    subjects = dict.fromkeys(p.subject for p in wrong if p.subject)
    for subject in list(subjects)[:2]:
        told = history.outline(subject)
        more = [f"… and {len(told) - _MOST_LINES} more"] if len(told) > _MOST_LINES else []
        lines += ["", f"history of {subject}:", *told[:_MOST_LINES], *more]
    raise Violation("\n".join(lines))
