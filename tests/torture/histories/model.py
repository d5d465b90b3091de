"""What a store that keeps its promises may have answered, given who asked for what when.

Every operation has a moment at which it was begun and one at which it was answered, on one clock. Between them it took
effect, or not, if the answer never came. So of a checkpoint it is known

    saved     from when its save was answered
    perhaps   from when anything was begun that may delete it
    gone      from when a deletion of it was answered

and every later answer must agree: saved and not perhaps deleted means present, gone means absent.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .history import History, Operation, Seen
from .operations import LEASE_S
from .reading import RETAINED, RETAINED_KEEP

_MAKERS = ("save", "branch")
_SLACK_S = 15.0  # after a server is back: connections that were lost are noticed when they are used


@dataclass(frozen=True, slots=True)
class Problem:
    subject: str  # the checkpoint or job concerned
    what: str


class Model:
    """A history, sorted by what it is about."""

    def __init__(self, history: History) -> None:
        self.history = history
        operations = sorted(history.operations, key=lambda op: op.began)
        self.operations = operations
        self.shown: dict[str, Seen] = {}
        self.makers: dict[str, list[Operation]] = defaultdict(list)  # by ID
        self.unmade: dict[tuple[str, str], list[Operation]] = defaultdict(list)  # refused or in doubt, by job and mark
        self.deletions: dict[str, list[Operation]] = defaultdict(list)  # by ID
        self.sweeps: dict[str, list[tuple[Operation, int]]] = defaultdict(list)  # by job, with what is kept at least
        self.pins: dict[str, list[Operation]] = defaultdict(list)
        self.by_job: dict[str, list[str]] = defaultdict(list)
        for op in operations:
            for shown in op.seen:
                self.shown.setdefault(shown.id, shown)
            self._sort_in(op)
        for checkpoint_id, makers in self.makers.items():
            self.by_job[makers[0].args["job"]].append(checkpoint_id)
        self._numbers = {
            job: self._numbers_of(job) for job in {op.args["job"] for op in operations if "job" in op.args}
        }

    def _sort_in(self, op: Operation) -> None:
        if op.name in _MAKERS:
            if "id" in op.result:
                self.makers[op.result["id"]].append(op)
            else:
                self.unmade[op.args["job"], op.args["mark"]].append(op)
            if op.args["job"] == RETAINED and not op.is_refused:
                self.sweeps[RETAINED].append((op, RETAINED_KEEP))
        elif op.name == "copy_job":
            for checkpoint_id in op.result.get("ids", ()):
                self.makers[checkpoint_id].append(op)
        elif op.name == "delete" and not op.is_refused:
            self.deletions[op.args["id"]].append(op)
        elif op.name in ("apply", "cleanup") and not op.is_refused:
            if "ids" in op.result:
                for checkpoint_id in op.result["ids"]:
                    self.deletions[checkpoint_id].append(op)
            else:
                self.sweeps[op.args["job"]].append((op, op.args["keep"]))
        elif op.name == "pin" and not op.is_refused:
            self.pins[op.args["id"]].append(op)

    def _numbers_of(self, job: str) -> tuple[list[float], list[float]]:
        """When each number may have been given at first, and the highest given by then, those in doubt among them."""
        moments: list[tuple[float, int]] = [
            (min(op.began for op in self.makers[i]), self.shown[i].seq) for i in self.by_job[job] if i in self.shown
        ]
        doubtful = [op.began for (of, _), ops in self.unmade.items() if of == job for op in ops if not op.is_refused]
        doubtful += [self.makers[i][0].began for i in self.by_job[job] if i not in self.shown]
        moments += [(began, 0) for began in doubtful]
        begun, highest, top, unknown = [], [], 0, 0
        for began, number in sorted(moments):
            top, unknown = max(top, number), unknown + (number == 0)
            begun.append(began)
            highest.append(float(top + unknown))
        return begun, highest

    def highest(self, job: str, before: float) -> float:
        begun, highest = self._numbers.get(job, ([], []))
        place = bisect_left(begun, before)
        return highest[place - 1] if place else 0.0

    # What is known of a checkpoint

    def saved(self, checkpoint_id: str) -> float:
        return min((op.ended for op in self.makers[checkpoint_id] if op.is_done), default=math.inf)

    def perhaps(self, checkpoint_id: str) -> float:
        """When the first operation began that may have deleted it."""
        job = self.makers[checkpoint_id][0].args["job"] if self.makers[checkpoint_id] else ""
        shown = self.shown.get(checkpoint_id)
        moments = [op.began for op in self.deletions[checkpoint_id] if not self.is_pinned(checkpoint_id, op)]
        for op, keep in self.sweeps[job]:
            is_old = shown is None or self.highest(job, op.ended) - shown.seq >= keep
            if is_old and not self.is_pinned(checkpoint_id, op):
                moments.append(op.began)
        return min(moments, default=math.inf)

    def gone(self, checkpoint_id: str) -> float:
        return min((op.ended for op in self.deletions[checkpoint_id] if op.is_done), default=math.inf)

    def is_pinned(self, checkpoint_id: str, during: Operation) -> bool:
        """Whether it surely was, for the whole of an operation."""
        pins = self.pins[checkpoint_id]
        return any(
            pin.args["pinned"]
            and pin.ended < during.began
            and pin.is_done
            and not any(not o.args["pinned"] and o.ended > pin.began and o.began < during.ended for o in pins)
            for pin in pins
        )

    def may_be_pinned(self, checkpoint_id: str | None) -> bool:
        """A branch and a copy are pinned as their source is."""
        while checkpoint_id is not None:
            shown = self.shown.get(checkpoint_id)
            if self.pins[checkpoint_id] or (shown and shown.job.startswith("copy-")):
                return True
            checkpoint_id = shown.parent if shown else None
        return False

    def must_have(self, job: str, during: Operation) -> Iterator[str]:
        """The checkpoints of a job that are there whatever the order in which things happened."""
        for checkpoint_id in self.by_job[job]:
            if self.saved(checkpoint_id) < during.began and self.perhaps(checkpoint_id) > during.ended:
                yield checkpoint_id

    def is_outage(self, op: Operation) -> bool:
        return any(start <= op.ended and op.began <= end + _SLACK_S for start, end in self.history.outages)


def problems(history: History) -> list[Problem]:
    """Everything in a history that no store which keeps its promises would have answered."""
    model = Model(history)
    return [
        *(Problem("", text) for text in history.failures),
        *_identities(model),
        *_origins(model),
        *_presence(model),
        *_order(model),
        *_keys(model),
        *_deletions(model),
        *_leases(model),
        *_errors(model),
    ]


def _identities(model: Model) -> Iterator[Problem]:
    """A checkpoint never changes; a number of a job is given once; nothing is ever called damaged."""
    numbers: dict[tuple[str, int], str] = {}
    for op in model.operations:
        for shown in op.seen:
            first = model.shown[shown.id]
            if shown.identity != first.identity:
                yield Problem(shown.id, f"was {first}, then {shown}")
            if shown.status == "corrupted":
                yield Problem(shown.id, f"is called damaged ({op.worker} {op.name})")
            other = numbers.setdefault((shown.job, shown.seq), shown.id)
            if other != shown.id and not model.history.is_deferred:
                yield Problem(shown.id, f"has number {shown.seq} of {shown.job}, as {other} has")


def _origins(model: Model) -> Iterator[Problem]:
    """Everything shown was asked for, once."""
    # What a refused save had written to a pack looks like a lost one to a rebuild (docs/design.md, order of writing).
    is_rebuilt = any(op.name == "rebuild" for op in model.operations)
    strangers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for checkpoint_id, shown in model.shown.items():
        makers = model.makers[checkpoint_id]
        if not makers:
            if not shown.job.startswith("copy-"):
                strangers[shown.job, shown.mark].add(checkpoint_id)
        elif any(op.args["job"] != shown.job or op.args.get("mark", shown.mark) != shown.mark for op in makers):
            yield Problem(checkpoint_id, f"is {shown}, asked for as {makers[0].args}")
        elif len(makers) > 1 and any(op.name == "save" and not op.args.get("key") for op in makers):
            yield Problem(checkpoint_id, f"was given to {len(makers)} saves")
    for (job, mark), ids in strangers.items():
        asked = [op for op in model.unmade[job, mark] if is_rebuilt or not op.is_refused]
        if len(ids) > len(asked) and not any(op.args.get("key") for op in asked):
            yield Problem(min(ids), f"{len(ids)} checkpoints of {job} come from {len(asked)} saves in doubt ({mark})")


def _presence(model: Model) -> Iterator[Problem]:
    """Nothing acknowledged is lost, nothing deleted comes back."""
    for op in model.operations:
        if op.name == "list" and op.is_done:
            present = {shown.id for shown in op.seen}
            for checkpoint_id in model.must_have(op.args["job"], op):
                if checkpoint_id not in present:
                    yield Problem(checkpoint_id, f"was acknowledged and is not in a later listing of {op.worker}")
        elif op.name == "latest" and op.is_done:
            for checkpoint_id in model.must_have(op.args["job"], op):
                shown = model.shown.get(checkpoint_id)
                if op.result["latest"] is None or (shown and shown.seq > op.result["latest"]):
                    yield Problem(checkpoint_id, f"was acknowledged, and {op.worker} got {op.result} as the latest")
        if op.error == "NotFound" or op.result.get("exists") is False:
            named = [i for i in (op.args.get("id"), op.args.get("other")) if i is not None]
            if named and all(model.saved(i) < op.began and model.perhaps(i) > op.ended for i in named):
                yield Problem(named[0], f"was acknowledged and is not found by {op.worker}'s {op.name}")
        shown_ids = {shown.id for shown in op.seen}
        if op.is_done and (op.name in ("load", "restore") or op.result.get("exists")):
            shown_ids.add(op.args["id"])
        for checkpoint_id in shown_ids:
            if model.gone(checkpoint_id) < op.began:
                yield Problem(checkpoint_id, f"was deleted, and shown to {op.worker}'s {op.name} afterwards")


def _order(model: Model) -> Iterator[Problem]:
    """A save that began when another of its job had been acknowledged has a higher number.

    Not so in memory:DIR, which begins behind the newest checkpoint that is left, not behind the newest there ever was.
    """
    if model.history.is_deferred:
        return
    for ids in model.by_job.values():
        known = [i for i in ids if i in model.shown and all(op.name in _MAKERS for op in model.makers[i])]
        asked_once = [
            i for i in known if not model.makers[i][0].args.get("key")
        ]  # a key may be older than who repeats it
        begun = sorted(asked_once, key=lambda i: model.makers[i][0].began)
        ended = sorted(known, key=model.saved)
        place, newest = 0, ""
        for checkpoint_id in begun:
            while place < len(ended) and model.saved(ended[place]) < model.makers[checkpoint_id][0].began:
                if not newest or model.shown[ended[place]].seq > model.shown[newest].seq:
                    newest = ended[place]
                place += 1
            if newest and newest != checkpoint_id and model.shown[newest].seq > model.shown[checkpoint_id].seq:
                yield Problem(checkpoint_id, f"began after {newest} was acknowledged and has a lower number")
    numbered = {(op.worker, op.number): op for op in model.operations}
    for op in model.operations:
        if op.args.get("follows") and op.is_done:
            before = numbered[op.worker, op.args["follows"]]
            first, second = (model.shown.get(o.result.get("id", "")) for o in (before, op))
            if first and second and first.seq > second.seq:
                yield Problem(second.id, f"was given to save_async after {first.id} and has a lower number")


def _keys(model: Model) -> Iterator[Problem]:
    """A key names one checkpoint, until that is deleted."""
    saves: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for op in model.operations:
        if op.name == "save" and op.args.get("key") and op.is_done:
            saves[op.args["job"], op.args["key"]].append(op)
        elif op.name == "by_key" and op.is_done:
            for save in saves[op.args["job"], op.args["key"]]:
                first = save.result["id"]
                is_surely_there = save.ended < op.began and model.perhaps(first) > op.ended
                if is_surely_there and op.result["id"] != first:
                    yield Problem(first, f"has key {op.args['key']}, by which {op.worker} got {op.result['id']}")
    for (_, key), repeated in saves.items():
        for n, op in enumerate(repeated):
            for earlier in repeated[:n]:
                first, second = earlier.result["id"], op.result["id"]
                if first != second and min(model.perhaps(first), model.perhaps(second)) > max(op.ended, earlier.ended):
                    yield Problem(second, f"and {first} were both saved under key {key}")


def _deletions(model: Model) -> Iterator[Problem]:
    """One of several deletions is told that it did it, and none of what is pinned."""
    for checkpoint_id, ops in model.deletions.items():
        successes = [op for op in ops if op.name == "delete" and op.result.get("deleted")]
        if len(successes) > 1 and not model.history.is_deferred:
            yield Problem(checkpoint_id, f"was deleted {len(successes)} times")
        for op in ops:
            is_told = op.result.get("deleted") or checkpoint_id in op.result.get("ids", ())
            if is_told and model.is_pinned(checkpoint_id, op):
                yield Problem(checkpoint_id, f"was pinned, and deleted by {op.worker}'s {op.name}")


def _leases(model: Model) -> Iterator[Problem]:
    """A lease that somebody else has taken over serves nobody; one that has not run out is never refused (I5)."""
    takes = [op for op in model.operations if op.name == "take" and op.is_done]
    for save in (op for op in model.operations if op.name in ("save", "renew") and op.args.get("token")):
        token, job = save.args["token"], save.args["job"]
        for take in takes:
            is_newer = take.args["job"] == job and take.result["token"] > token and take.ended < save.began
            if is_newer and save.is_done:
                yield Problem(job, f"{save.worker} did {save.name} with token {token} after {take.worker} took another")
        if save.error == "LeaseLost" and _is_fresh(model, save):
            yield Problem(job, f"{save.worker} was refused {save.name} with a lease that had not run out")
    fenced = [op for op in model.operations if op.name == "save" and op.args.get("token") and op.is_done]
    known = [(model.shown[op.result["id"]].seq, op) for op in fenced if op.result["id"] in model.shown]
    known.sort(key=lambda pair: pair[0])
    for (_, before), (_, after) in itertools.pairwise(known):
        if before.args["job"] == after.args["job"] and before.args["token"] > after.args["token"]:
            yield Problem(after.result["id"], f"saved with token {after.args['token']} behind one of a newer lease")


def _is_fresh(model: Model, save: Operation) -> bool:
    """Whether its lease was taken or renewed so lately that it cannot have run out."""
    for op in model.operations:
        token = op.result.get("token") if op.name == "take" else op.args.get("token") if op.name == "renew" else None
        is_ours = (op.worker, op.args.get("job"), token) == (save.worker, save.args["job"], save.args["token"])
        if is_ours and op.is_done and op.ended < save.began and save.ended < op.began + 0.8 * LEASE_S:
            return True
    return False


def _errors(model: Model) -> Iterator[Problem]:
    for op in model.operations:
        if op.error and not _is_allowed(model, op):
            yield Problem(op.args.get("id", op.args.get("job", "")), f"{op.worker}'s {op.name}: {op.error}: {op.text}")


def _is_allowed(model: Model, op: Operation) -> bool:
    """Whether this kind of error belongs to what was done and what went on."""
    has_older_key = any(o.args.get("new_key") and o.began < op.ended for o in model.operations)
    if op.error == "StorageError" and op.name == "verify" and has_older_key:
        return True  # it could not look, and says why
    if op.error in ("OutcomeUnknown", "StorageError", "Unavailable"):
        return model.is_outage(op)
    if op.error == "CheckpointError" and op.name in ("gc", "verify"):  # a task of a service that was ended
        return model.is_outage(op)
    if op.name == "rekey":  # one at a time: the others are told so, and to come again
        return op.error in ("Conflict", "LeaseHeld", "LeaseLost", "Validation")
    match op.error:
        case "NotFound":  # `_presence` knows whether it was there; a job may be younger than the operation
            return (
                "id" in op.args
                or op.name == "copy_job"
                or not any(model.saved(i) < op.began for i in model.by_job[op.args.get("job", "")])
            )
        case "LeaseHeld":  # a copier that was killed had its target for itself
            return op.name == "copy_job" or (
                op.name in ("take", "save", "branch") and op.args["job"].startswith("leased")
            )
        case "LeaseLost":
            return op.name in ("save", "renew", "release") and bool(op.args.get("token"))
        case "Conflict":  # a service does one task of a kind at a time
            if op.name in ("gc", "verify"):
                earlier = [other for other in model.operations if other.name == op.name and other.began < op.ended]
                return len(earlier) > 1  # itself, and one that may be going on
            if op.name == "copy_job":  # of a job that has changed since it was copied before
                copies = [o for o in model.operations if o.name == op.name and o.args["job"] == op.args["job"]]
                return any(other is not op and other.began < op.ended for other in copies)
            return op.name == "delete" and model.may_be_pinned(op.args["id"])
        case "Validation":  # whoever has the store open under an older master key is told so
            return has_older_key
    return False
