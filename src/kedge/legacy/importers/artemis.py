"""artemis: pipeline cards, in the four forms their files took, and in SQLite.

A card becomes a run under its card ID: each stage that is done is a finished step, each failed one an attempt, and the
old document itself is the state of the run's status record, so that `kedge export --format artemis` gives it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kedge.llm.bills import Bill, Charge
from kedge.llm.pricing import Tokens
from kedge.model import CheckpointLevel, RunStatus, list_of, mapping_of, number_of, text_of
from kedge.pipeline.history import CALLS

from .common import (
    Document,
    Draft,
    Drafts,
    Finding,
    Fragment,
    Options,
    Verdict,
    clean,
    digest_of_document,
    legacy,
    microseconds,
    name_of,
    step_of,
    texts,
)
from .runs import OldRun, run_key

FORM = "artemis"
MACHINE = ":state-machine"  # ends the name of a job beside that of the card: it holds no results
_CALL = {"model", "tokens_input", "tokens_output", "cost", "stage", "card_id"}

_STATUS = {
    "active": RunStatus.PAUSED,
    "paused": RunStatus.PAUSED,
    "resumed": RunStatus.PAUSED,
    "running": RunStatus.PAUSED,  # no process of Kedge works on it
    "in_progress": RunStatus.PAUSED,
    "completed": RunStatus.COMPLETED,
    "failed": RunStatus.FAILED,
}


def kind_of(document: object) -> str | None:
    """Which of the forms a document has."""
    if _is_costs(document):
        return "costs"
    if isinstance(document, dict) and {"card_id", "state", "stages", "health_status"} <= document.keys():
        return "machine"
    if isinstance(document, list):
        is_stages = bool(document) and all(
            isinstance(e, dict) and {"card_id", "stage_name", "status"} <= e.keys() for e in document
        )
        return "stages" if is_stages else None
    if not isinstance(document, dict):
        return None
    keys = document.keys()
    if "card_id" in keys and "checkpoint_id" in keys and {"stage_checkpoints", "completed_stages"} & keys:
        return "card" if "stage_checkpoints" in keys or "stage_results" not in keys else "results"
    if "card_id" in keys and "checkpoint_id" in keys and "stage_results" in keys:
        return "results"
    if "last_completed_stage" in keys and "results" in keys:
        return "index"
    if "card_id" in keys and "stage_results" in keys:
        return "state"
    return None


def time_of(document: Any) -> int:
    """When a document was last written, for their order."""
    if isinstance(document, list):
        names = ("completed_at", "started_at", "timestamp")
        return max((next((at for n in names if (at := microseconds(e.get(n)))), 0) for e in document), default=0)
    for name in ("updated_at", "timestamp", "created_at"):
        if at := microseconds(document.get(name)):
            return at
    return 0


def drafts(document: Any, name: str, source: str, options: Options, cut: Fragment | None = None) -> Drafts:
    """The checkpoints of one document; `name` is that of its file, in which one form hides the card."""
    kind = kind_of(document)
    if cut is not None:
        document, lost = _whole_stages(document, cut.open_at)
        if not _has_records(kind, document):
            yield Finding(Verdict.CORRUPTED, source, "the file is cut off; nothing of it can be used")
            return
        why = "the file is cut off; stages whose record is whole are imported, the others will run again"
        yield Finding(Verdict.CORRUPTED, source, why, tuple(map(clean, lost)))
    if kind in ("stages", "costs", "machine"):
        yield from _beside(kind, document, source, options)
        return
    card = document.get("card_id") if kind != "index" else name.removesuffix(".json").removesuffix("_checkpoint")
    run = OldRun(FORM, source, run_key(card, options.job_prefix), number_of(document.get("resume_count")) + 1)
    read = {"card": _from_card, "results": _from_results, "index": _from_index, "state": _from_state}[str(kind)]
    stages = list(read(document, run))
    yield from stages
    old_status = document.get("status", "active")
    status = _STATUS.get(text_of(old_status), RunStatus.PAUSED)
    if cut is not None and status is RunStatus.COMPLETED:
        status = RunStatus.PAUSED
    yield run.status(
        status,
        document,
        id=None if document.get("checkpoint_id") is None else name_of(document["checkpoint_id"]),
        created_us=time_of(document) or None,
        done=sum(isinstance(entry, Draft) and entry.metadata["kind"] == "step" for entry in stages),
        total=number_of(document.get("total_stages")) or None,
        error=clean(document.get("error") or mapping_of(document.get("metadata")).get("failure_reason")),
        facts={
            "kind": kind,
            "id": document.get("checkpoint_id"),
            "job": card,
            "status": old_status,
            "created_at": document.get("created_at"),
        },
    )


def _has_records(kind: str | None, document: Any) -> bool:
    """Whether a cut document still says anything of work that was done; that of a state machine is whole or nothing."""
    if isinstance(document, list):
        return bool(document)
    return kind != "machine" and any(document.get(word) for word in _RECORDS)


def _beside(kind: str, document: Any, source: str, options: Options) -> Drafts:
    """What is no card: attempts at stages, calls of models, what the state machine saw."""
    if kind == "stages":
        yield from _stage_list(document, source, options)
    elif kind == "costs":
        yield from (_call(entry, source, options.job_prefix) for entry in document)
    else:
        yield _machine(document, source, options.job_prefix)


_RECORDS = ("stage_checkpoints", "stage_results", "results")
_LISTS = ("completed_stages", "skipped_stages", "failed_stages", "stages_completed")


def _whole_stages(document: Any, open_at: tuple[str | int, ...]) -> tuple[object, list[str]]:
    """A cut document without the stages whose record is not whole, and the names of these as far as they are known."""
    if isinstance(document, list):
        torn = mapping_of(document[-1]) if open_at else {}
        return (document[:-1] if open_at else document), [
            str(n) for n in (torn.get("stage_name"), torn.get("stage")) if n
        ]
    records = {word: dict(mapping_of(document[word])) for word in _RECORDS if word in document}
    lost: dict[str, None] = {}
    if len(open_at) > 1 and open_at[0] in records:
        records[str(open_at[0])].pop(str(open_at[1]), None)
        lost[str(open_at[1])] = None
    whole = {name for record in records.values() for name in record}
    lists = {word: texts(document[word]) for word in _LISTS if isinstance(document.get(word), list)}
    lost |= dict.fromkeys(name for names in lists.values() for name in names if name not in whole)
    whole_lists = {word: [name for name in names if name in whole] for word, names in lists.items()}
    return {**document, **records, **whole_lists}, list(lost)


def _from_card(document: Document, run: OldRun) -> Drafts:
    stages = mapping_of(document.get("stage_checkpoints"))
    yield from _unrecorded(document, stages, run)
    for name, stage in sorted(stages.items(), key=lambda pair: _end_of(pair[1])):
        yield from _stage(name, mapping_of(stage), run)


def _from_results(document: Document, run: OldRun) -> Drafts:
    results = mapping_of(document.get("stage_results"))
    yield from _unrecorded(document, results, run)
    for name, entry in sorted(results.items(), key=lambda pair: _end_of(pair[1])):
        stage = entry if isinstance(entry, dict) else {"result": entry}
        if "status" not in stage:
            is_done = name in texts(document.get("completed_stages"))
            stage = {"status": "completed" if is_done else "failed", **stage}
        yield from _stage(name, stage, run)


def _from_index(document: Document, run: OldRun) -> Drafts:
    results = mapping_of(document.get("results"))
    last = number_of(document.get("last_completed_stage"), -1)
    at = microseconds(document.get("timestamp"))
    for place, (name, result) in enumerate(results.items()):
        if place <= last and mapping_of(result).get("success") is not False:
            yield run.step(name, result, created_us=at)
    if last + 1 > len(results):
        lost = f"{last + 1} stages were done, and only {len(results)} of them have a name"
        yield Finding(Verdict.LOSSY, run.source, lost, (f"results[{len(results)}:{last + 1}]",))


def _from_state(document: Document, run: OldRun) -> Drafts:
    results = mapping_of(document.get("stage_results"))
    at = time_of(document) or None
    for name in dict.fromkeys(texts(document.get("stages_completed"))):
        if name not in results:
            yield Finding(Verdict.LOSSY, run.source, f"stage {clean(name)} is done, but its result was not kept")
        yield run.step(name, results.get(name), created_us=at)


def _stage_list(entries: list[Document], source: str, options: Options) -> Drafts:
    """The array of stage attempts of cards. A stage that was only started is not imported."""
    cards: dict[str, list[Document]] = {}
    for entry in entries:
        cards.setdefault(run_key(entry["card_id"], options.job_prefix), []).append(entry)
    for job, stages in cards.items():
        run = OldRun(FORM, source, job)
        done = 0
        for entry in sorted(stages, key=_end_of):
            at = microseconds(entry.get("completed_at") or entry.get("started_at"))
            if entry["status"] in ("completed", "failed"):
                error = None if entry["status"] == "completed" else clean(entry.get("error")) or "it failed"
                done += error is None
                yield run.step(str(entry["stage_name"]), entry.get("result"), record=entry, created_us=at, error=error)
        yield run.status(
            RunStatus.FAILED if stages[-1]["status"] == "failed" else RunStatus.PAUSED,
            {"card_id": stages[0]["card_id"], "stages": stages},
            created_us=time_of(stages) or None,
            done=done,
            facts={"kind": "stages", "job": stages[0]["card_id"]},
        )


def _unrecorded(document: Document, recorded: Mapping[str, object], run: OldRun) -> Iterator[Draft | Finding]:
    """Stages that a list says are done and nothing else tells of."""
    at = time_of(document) or None
    for word in ("completed", "skipped"):
        for name in dict.fromkeys(texts(document.get(f"{word}_stages"))):
            if name in recorded:
                continue
            if word == "completed":
                yield Finding(Verdict.LOSSY, run.source, f"stage {clean(name)} is done, but its result was not kept")
            yield run.step(name, None, record={"status": word}, created_us=at)


def _stage(name: str, stage: Document, run: OldRun) -> Iterator[Draft]:
    at = _end_of(stage) or None
    for entry in list_of(stage.get("llm_responses")):
        if answer := run.answer(name, mapping_of(entry), at):
            yield answer
    status = stage.get("status", "completed")
    if status not in ("completed", "skipped", "failed"):
        return  # pending, in progress: it runs again
    yield run.step(
        name,
        stage.get("result", stage),
        record=stage,
        created_us=at,
        attempts=number_of(stage.get("retry_count")) + 1,
        seconds=stage.get("duration_seconds"),
        error=None if status != "failed" else clean(stage.get("error_message") or stage.get("error")) or "it failed",
        key=digest_of_document([name, stage]),
        facts={"status": status},
    )


def _end_of(stage: object) -> int:
    fields = mapping_of(stage)
    for name in ("end_time", "completed_at", "start_time", "started_at", "timestamp"):
        if at := microseconds(fields.get(name)):
            return at
    return 0


# The files beside the cards: what models cost, and what the state machine watched.


def _is_costs(document: object) -> bool:
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(e, dict) and e.keys() >= _CALL for e in document)
    )


def _call(entry: Document, source: str, prefix: str) -> Draft:
    """A paid call, in the books of the store: `kedge llm costs` counts it to the card's run and stage."""
    run, model, stage = (
        run_key(entry["card_id"], prefix),
        clean(entry["model"], 200) or "unknown",
        clean(entry["stage"]),
    )
    cost = entry["cost"]
    is_price = isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < 1e9
    tokens = Tokens(number_of(entry["tokens_input"]), number_of(entry["tokens_output"]))
    bill = Bill().add(Charge(model, tokens, Decimal(str(cost)) if is_price else None, False, run, stage))
    key = digest_of_document(entry)
    return Draft(
        FORM,
        source,
        CALLS,
        model,
        {},
        key=key,
        created_us=microseconds(entry.get("timestamp")),
        level=CheckpointLevel.SUBSTEP,
        tags={"run": run},
        metadata={
            "model": model, "run": run, "step": stage, **bill.to_json(),
            "legacy": legacy(FORM, kind="call", provider=entry.get("provider"), purpose=entry.get("purpose")),
        },
        found_by=f"import:{key}",
    )  # fmt: skip


def _machine(document: Document, source: str, prefix: str) -> Draft:
    """What the state machine had seen, beside the card: a stage that it saw completed has its result there."""
    at: Any = document.get("timestamp")
    return Draft(
        FORM,
        source,
        run_key(document["card_id"], prefix)[:108] + MACHINE,
        step_of(document["state"], "state"),
        document,
        key=digest_of_document(document),
        created_us=microseconds(at),
        metadata={"legacy": legacy(FORM, kind="machine", job=document["card_id"], time=at)},
    )
