"""What is known of runs from their records alone: for `kedge runs`, without the code of the pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from kedge.errors import Cancelled, Conflict, Denied, NotFound
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, LOG_LEVELS, Checkpoint, Job, RunStatus, list_of, mapping_of, number_of, text_of

from .approval import APPROVAL, decision_of
from .final_failures import asked_again, kept_failures
from .items import MapItems, maps_of
from .keys import show
from .outcome import what_follows
from .owner import job_pages, newest_status, newest_statuses, status_of, take_lease

CALLS = "llm:calls"  # the job of records about LLM calls
FIRST_TIME = "it was not finished yet"  # why most steps ran
_PAGE = 500

if TYPE_CHECKING:
    from kedge.llm.bills import Bill


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as its newest status record tells it."""

    key: str
    status: RunStatus
    pipeline: str | None
    version: str
    sessions: int
    steps_run: int  # in the last session
    steps_reused: int
    error: str
    updated_at: datetime
    waiting: Sequence[Mapping[str, str]]  # each an `account.Waiting`; decided ones say so until the run goes on
    is_denied: bool
    progress: Mapping[str, int | None] | None  # {"done": …, "total": …}
    queue: str  # whose workers carry it out; "": none
    parent: str  # the run that started it; "": none

    @property
    def is_abandoned(self) -> bool:
        """Its process is gone: it resumes at once."""
        return self.status is RunStatus.ABANDONED

    def to_json(self) -> dict[str, object]:
        facts = {name: getattr(self, name) for name in (*self.__slots__, "is_abandoned")}
        return {**facts, "status": str(self.status), "updated_at": self.updated_at.isoformat()}


@dataclass(slots=True)
class StepHistory:
    """All records of one path, oldest first."""

    path: tuple[str, ...]
    results: list[Checkpoint] = field(default_factory=list)
    failures: list[Checkpoint] = field(default_factory=list)
    items: int = 0
    failed_items: int = 0

    @property
    def is_map(self) -> bool:
        """Its records are of items, perhaps of failed ones only; it has no result of its own."""
        return not self.results and (self.items > 0 or not self.failures)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a step in the newest session, and why."""

    path: str
    verdict: str  # ran, reused, failed, kept, stale
    reason: str
    checkpoint: str | None
    seconds: float | None
    attempts: int

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def find_runs(
    store: CheckpointManager,
    prefix: str = "",
    limit: int | None = None,
    *,
    pipeline: str = "",
    status: str = "",
    most_jobs: int | None = None,
) -> Iterator[RunSummary]:
    """Runs by key, of this pipeline and with this status; "": any. At most `most_jobs` are looked at."""
    yield from islice(_runs_of(store, job_pages(store, prefix, most_jobs), pipeline, status), limit)


def _runs_of(
    store: CheckpointManager, pages: Iterable[Sequence[Job]], pipeline: str, status: str
) -> Iterator[RunSummary]:
    """Statuses are read by the page; nothing more is read of runs that are not wanted."""
    for page in pages:
        newest = newest_statuses(store, [job.name for job in page])
        for job in page:
            record = newest.get(job.name)  # None: a job that is no run
            if record is None or status not in ("", status_of(record)):
                continue
            if pipeline in ("", text_of(record.metadata.get("pipeline"))):
                yield _summary(store, record, job.updated_at)


def run_of(store: CheckpointManager, job: str) -> RunSummary | None:
    """The run a job is; None for a job that is none."""
    newest = newest_status(store, job)
    return None if newest is None else _summary(store, newest, newest.created_at)


def find_run(store: CheckpointManager, key: str) -> RunSummary:
    run = run_of(store, key)
    if run is None:
        raise NotFound(f"there is no run {key}", hint="kedge runs list shows the runs")
    return run


def _summary(store: CheckpointManager, newest: Checkpoint, updated_at: datetime) -> RunSummary:
    about = newest.metadata
    return RunSummary(
        newest.job,
        status_of(newest),
        text_of(about.get("pipeline")) or None,
        text_of(about.get("version")),
        number_of(about.get("session")),
        number_of(about.get("ran")),
        number_of(about.get("reused")),
        text_of(about.get("error")),
        updated_at,
        [
            _with_decision(store, newest.job, waiting)
            for waiting in list_of(about.get("waiting"))
            if _is_made_of(waiting, str)
        ],
        about.get("is_denied") is True,
        progress if _is_made_of(progress := about.get("progress"), int | None) else None,  # type: ignore[arg-type]
        text_of(about.get("queue")),
        text_of(about.get("parent")),
    )


def _with_decision(store: CheckpointManager, job: str, waiting: Mapping[str, str]) -> Mapping[str, str]:
    """An entry of `waiting`, with the decision that the run has not followed yet."""
    decision = decision_of(store, job, waiting.get("name", "")) if waiting.get("for") == APPROVAL else None
    if decision is None:
        return waiting
    facts = {"decision": decision.word, "actor": decision.actor, "decided_at": decision.decided_at}
    return {**waiting, **facts, "comment": decision.comment}


def steps_of(store: CheckpointManager, key: str) -> dict[tuple[str, ...], StepHistory]:
    """The records of every step, by path, in the order in which the paths first appeared."""
    steps: dict[tuple[str, ...], StepHistory] = {}
    after = 0
    while page := store.list(key, after=after, limit=_PAGE):
        after = page[-1].seq
        for checkpoint in page:
            about = checkpoint.metadata
            kind, path = about.get("kind"), about.get("path")
            if not isinstance(path, list) or kind not in ("step", "attempt", "items"):
                continue
            history = steps.setdefault(tuple(map(str, path)), StepHistory(tuple(map(str, path))))
            if kind == "step":
                history.results.append(checkpoint)
            elif kind == "attempt":
                history.failures.append(checkpoint)
            else:
                history.items += number_of(about.get("items"))
                history.failed_items += number_of(about.get("failed"))
        if len(page) < _PAGE:
            break
    return steps


def logs_of(
    store: CheckpointManager, key: str, limit: int = 20, *, level: str = "", before: int | None = None
) -> list[Checkpoint]:
    """The newest lines of `run.log`, oldest first; of `level` and above, and before the number `before`."""
    tags = {"kind": "log"}
    if not level:
        return store.list(key, tags=tags, limit=limit, before=before)
    lines = [
        line
        for severity in LOG_LEVELS[LOG_LEVELS.index(level) :]
        for line in store.list(key, tags=tags, metadata={"level": severity}, limit=limit, before=before)
    ]
    return sorted(lines, key=lambda line: line.seq)[-limit:]


def bills_of(store: CheckpointManager, key: str) -> dict[str, Bill]:
    """What LLM calls cost in all sessions of a run, by step with all that is inside it; "" is the whole run."""
    if not store.list(CALLS, tags={"run": key}, limit=1):
        return {}
    from kedge.llm.bills import Bill, totals

    bills: dict[str, Bill] = {}
    for (step,), bill in totals(store, run=key, by=("step",)).items():
        path = step.split("/") if step else []
        for length in range(len(path) + 1):
            part = "/".join(path[:length])
            bills[part] = bills.get(part, Bill()) + bill
    return bills


def explain(
    store: CheckpointManager,
    key: str,
    steps: Mapping[tuple[str, ...], StepHistory] | None = None,
    maps: Sequence[MapItems] | None = None,
) -> list[Explanation]:
    """For each step why it ran, was reused, or is stale in the newest session; `steps` and `maps` if they were read."""
    session = find_run(store, key).sessions
    ran, reused, has_ended = _session_lists(store, key, session)
    newest = newest_status(store, key)
    failure_ids = set() if newest is None else {record.id for record in kept_failures(store, key, newest).values()}
    steps = steps_of(store, key) if steps is None else steps
    map_paths = {show(path) for path, history in steps.items() if history.is_map}
    has_failures = any(history.failed_items for history in steps.values())
    if maps is None:
        maps = maps_of(store, key) if has_failures else ()
    failing = {items.path: len(items.failed) for items in maps}
    whole = reused | (map_paths & ran.keys())  # what is inside them, and was not asked for, was not needed
    explanations = []
    for path, history in steps.items():
        text = show(path)
        ran.pop(text, None)
        if text in map_paths:
            failed = f", {failing[text]:,} failed" if failing.get(text) else ""
            plural = "item" if history.items == 1 else "items"
            explanations.append(Explanation(text, "map", f"{history.items:,} {plural} done{failed}", None, None, 0))
            continue
        outer = next((part for n in range(1, len(path)) if (part := show(path[:n])) in whole), "")
        explanations.append(_explain_step(text, history, session, text in reused, has_ended, outer, failure_ids))
    explanations += [Explanation(text, "ran", "its result is never kept", None, None, 1) for text in ran]
    return explanations


def _explain_step(
    path: str,
    history: StepHistory,
    session: int,
    is_reused: bool,
    has_ended: bool,
    outer: str,
    failure_ids: Collection[str],
) -> Explanation:
    """`outer` is a step that was reused, or a map, that contains this one; `failure_ids` name the kept failures."""
    newest = history.results[-1] if history.results else None
    failures = [f for f in history.failures if f.metadata.get("session") == session]
    is_kept = bool(history.failures) and history.failures[-1].id in failure_ids
    if newest is None or (failures and failures[-1].seq > newest.seq and not is_reused) or is_kept:
        last = history.failures[-1]
        again = "it runs again when the run is resumed"
        if is_kept:
            again = "the failure is kept, because the pipeline handled it; --retry-failed tries it again"
        return Explanation(
            path,
            "failed",
            f"{last.metadata.get('error')}; {again}",
            last.id,
            None,
            number_of(last.metadata.get("attempt")),
        )
    about = newest.metadata
    seconds = about.get("seconds")
    facts: Any = (newest.id, seconds if isinstance(seconds, float | int) else None, number_of(about.get("attempts")))
    made_in = number_of(about.get("session"))
    if made_in == session:
        return Explanation(path, "ran", _why(history.results, history.failures), *facts)
    if is_reused:
        return Explanation(path, "reused", f"finished in session {made_in}; inputs and version are the same", *facts)
    if outer:
        return Explanation(
            path, "reused", f"finished in session {made_in}, inside {outer}, which needed no more", *facts
        )
    if has_ended:
        return Explanation(path, "stale", f"finished in session {made_in}; the newest one did not ask for it", *facts)
    return Explanation(path, "kept", f"finished in session {made_in}; the newest one has not come to it", *facts)


def _why(results: Sequence[Checkpoint], failures: Sequence[Checkpoint]) -> str:
    """Why the newest result had to be made."""
    if len(results) == 1:
        times = "once" if len(failures) == 1 else f"{len(failures)} times"
        return f"it had failed {times}" if failures else FIRST_TIME
    now, before = results[-1].metadata, results[-2].metadata
    reasons = []
    if now.get("version") != before.get("version"):
        reasons.append(f"version {_shown(before)} became {_shown(now)}")
    new, old = (mapping_of(about.get("inputs")) for about in (now, before))
    if changed := [name for name in new if name in old and new[name] != old[name]]:
        reasons.append(f"changed: {', '.join(changed)}")
    if added := [name for name in new if name not in old]:
        reasons.append(f"new: {', '.join(added)}")
    if gone := [name for name in old if name not in new]:
        reasons.append(f"gone: {', '.join(gone)}")
    return "; ".join(reasons) or "its earlier result was deleted"


def _session_lists(store: CheckpointManager, key: str, session: int) -> tuple[dict[str, None], set[str], bool]:
    """What the session ran and reused, and whether it came to an end; killed ones leave nothing."""
    newest = newest_status(store, key)
    assert newest is not None  # nosec B101 # find_run has raised
    if newest.metadata.get("status") == RunStatus.RUNNING:
        return {}, set(), False
    state = mapping_of(store.load(newest.id))
    ran, reused = ([name for name in list_of(state.get(part)) if isinstance(name, str)] for part in ("ran", "reused"))
    return dict.fromkeys(ran), set(reused), newest.metadata.get("status") != "paused"


def children_of(store: CheckpointManager, key: str) -> list[str]:
    """The keys of the runs that a run has started, in that order."""
    started = store.list(key, tags={"kind": "child"})
    return list(dict.fromkeys(record.tags["run"] for record in started if "run" in record.tags))


def check_own_program(store: CheckpointManager, run: RunSummary) -> None:
    """Raise Conflict for a run of a queue: whoever starts its program again starts a worker for all of the queue."""
    if run.queue:
        raise Conflict(f"run {run.key} belongs to queue {run.queue}", hint=what_follows(store, run.key, run.queue))


def check_resumable(store: CheckpointManager, run: RunSummary) -> None:
    """Raise what keeps a run from being resumed. A completed one may have items that failed: those run again."""
    if run.status is RunStatus.UNREADABLE:
        raise Conflict(f"run {run.key} cannot be read: its newest record says no status", hint="delete that record")
    if run.is_denied:
        raise Denied(f"run {run.key}: {run.error}", hint="a denial is final; use another key to start anew")
    if run.status is RunStatus.CANCELLED:
        raise Cancelled(f"run {run.key} was cancelled", hint="use another key to start anew")
    check_own_program(store, run)
    check_unfinished(store, run)


def check_unfinished(store: CheckpointManager, run: RunSummary) -> None:
    """Raise Conflict for a completed run with nothing left to do: no failed item, no failure asked for again."""
    if run.status is not RunStatus.COMPLETED or any(items.failed for items in maps_of(store, run.key)):
        return
    newest = newest_status(store, run.key)
    if newest is None or not asked_again(store, run.key, since=newest.created_at):
        hint = "there is nothing to resume; a new key starts anew"
        if newest is not None and kept_failures(store, run.key, newest):
            hint = "--retry-failed runs the steps whose failure it handled; a new key starts anew"
        raise Conflict(f"run {run.key} already completed on {run.updated_at:%Y-%m-%d %H:%M} UTC", hint=hint)


def delete_run(store: CheckpointManager, key: str, *, ttl_s: float = 30.0) -> int:
    """Delete all records of a run and the messages to it; answers how many. LeaseHeld while somebody works on it.

    What its steps returned is lost: a run under the same key starts anew.
    """
    find_run(store, key)
    with take_lease(store, key, ttl_s):
        records = [*store.walk(key + INBOX_SUFFIX), *store.walk(key)]
        if pinned := next((record for record in records if record.is_pinned), None):
            raise Conflict(f"{pinned.id} of run {key} is pinned", hint=f"unpin it: kedge pin {pinned.id} --off")
        for start in range(0, len(records), _PAGE):
            store.catalogue.delete([record.id for record in records[start : start + _PAGE]], actor=store.actor)
    return len(records)


def _shown(about: Mapping[str, object]) -> str:
    return repr(str(about.get("version", "/")).strip("/")) if about.get("version") != "/" else "none"


def _is_made_of(value: object, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, kind) for part in value.values())
