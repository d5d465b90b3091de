"""What a store acknowledged, as its users heard it, and the check that all of it is still true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import kedge

from .states import make, same


class Violation(AssertionError):
    """The store broke a promise."""


@contextmanager
def unrefused(when: str) -> Iterator[None]:
    """Nothing here has a reason to fail, so an error of the store is a broken promise, too."""
    try:
        yield
    except (Violation, kedge.CheckpointError) as error:
        raise Violation(f"{when}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Saved:
    job: str
    kind: str
    seed: int


@dataclass
class Ledger:
    """Fed with what children report; survives them."""

    saved: dict[str, Saved] = field(default_factory=dict)
    deleting: set[str] = field(default_factory=set)  # asked for: may or may not have happened
    deleted: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    tags: dict[str, str | None] = field(default_factory=dict)  # the note of a checkpoint; None: it is being changed
    keys: set[int] = field(default_factory=set)  # under which of its keys an encrypted store may be
    until: float = math.inf  # what is acknowledged later on the monotonic clock does not count

    def note(self, message: tuple[object, ...], moment: float = 0) -> None:
        what, *rest = message
        if moment > self.until and what in ("saved", "deleted"):
            return
        self.counts[str(what)] = self.counts.get(str(what), 0) + 1
        match what, *rest:
            case "saved", str(checkpoint), str(job), str(kind), int(seed):
                if checkpoint in self.saved:
                    raise Violation(f"ID {checkpoint} was given to two saves")
                self.saved[checkpoint] = Saved(job, kind, seed)
            case "deleting", str(checkpoint):
                self.deleting.add(checkpoint)
            case "deleted", str(checkpoint):
                self.deleted.add(checkpoint)
            case "tagging", str(checkpoint):
                self.tags[checkpoint] = None
            case "tagged", str(checkpoint), str(note):
                self.tags[checkpoint] = note
            case "rekeying", int(key):
                self.keys.add(key)
            case "rekeyed", int(key):
                self.keys = {key}
            case "failed", str(text):
                self.failures.append(text)

    @property
    def kept(self) -> dict[str, Saved]:
        """What must be there."""
        return {i: saved for i, saved in self.saved.items() if i not in self.deleting}

    def check(self, store: kedge.CheckpointManager, *, deep: bool = True) -> int:
        """Raise Violation unless every promise holds; answers how many states were loaded and compared.

        - what was acknowledged and not deleted loads, exactly
        - what was acknowledged as deleted is gone
        - what nobody heard of is whole or absent
        - sequence numbers grow; the store finds nothing wrong with itself
        """
        seen = look(store, deep=deep)
        self.compare(seen)
        return len(seen.present)

    def compare(self, seen: Seen) -> None:
        """Raise Violation unless what was seen in a store is all that was promised."""
        problems = list(seen.problems)
        lost = sorted(self.kept.keys() - seen.present.keys())
        problems += [f"acknowledged and lost: {i} {self.saved[i]}" for i in lost]
        problems += [f"deleted and back again: {i}" for i in sorted(self.deleted & seen.present.keys())]
        for checkpoint, note in self.tags.items():
            if note is not None and seen.present.get(checkpoint, note) != note:
                problems.append(f"tagged {note}, but says {seen.present[checkpoint]}: {checkpoint}")
        if problems:
            more = f"\n… and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise Violation("\n".join(problems[:20]) + more)


@dataclass(frozen=True)
class Seen:
    """What is in a store, all of it loaded and compared."""

    present: Mapping[str, str | None]  # its checkpoints, with their notes
    problems: tuple[str, ...]


def look(store: kedge.CheckpointManager, *, deep: bool = True) -> Seen:
    """Load everything; `deep`: let the store look as well."""
    problems: list[str] = []
    present: dict[str, kedge.Checkpoint] = {}
    for job in store.jobs():
        listed = store.list(job.name)
        numbers = [c.seq for c in listed]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > job.last_seq):
            problems.append(f"job {job.name}: sequence numbers {numbers}, last {job.last_seq}")
        if len(listed) != job.checkpoints:
            problems.append(f"job {job.name} counts {job.checkpoints} checkpoints, has {len(listed)}")
        present.update((c.id, c) for c in listed)
    for checkpoint in present.values():
        problems.extend(_damage(store, checkpoint))
    if deep and not (report := store.verify(deep=True)).is_ok:
        problems.extend(f"verify: {p.subject}: {p.what}" for p in report.problems)
    return Seen({i: c.tags.get("note") for i, c in present.items()}, tuple(problems))


def _damage(store: kedge.CheckpointManager, checkpoint: kedge.Checkpoint) -> list[str]:
    about = checkpoint.metadata
    try:
        state = store.load(checkpoint.id)
    except kedge.CheckpointError as error:
        return [f"cannot be loaded: {checkpoint.id} {dict(about)}: {error}"]
    if not same(state, make(str(about["kind"]), int(str(about["seed"])))):
        return [f"loads as something else: {checkpoint.id} {dict(about)}"]
    return []


def about(kind: str, seed: int) -> Mapping[str, object]:
    """The metadata every save of these tests carries, so that whatever a store holds can be checked."""
    return {"kind": kind, "seed": seed}
