"""geo (b): a JSON file for each stage of an experiment. The files themselves say which stages are done."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence

from kedge.model import RunStatus, mapping_of

from .common import (
    MOST_PATHS,
    Document,
    Draft,
    Drafts,
    Finding,
    Options,
    Verdict,
    clean,
    digest_of_document,
    microseconds,
    placeholders,
)
from .runs import OldRun, run_key

FORM = "geo-stages"


def kind_of(document: object) -> str | None:
    if not isinstance(document, dict) or not isinstance(document.get("stage"), str):
        return None
    if "experiment_id" in document and ({"shared_data", "stage_results"} & document.keys()):
        return "stage"
    return "old stage" if {"elapsed_time", "data"} <= document.keys() else None


def time_of(document: Document) -> int:
    return microseconds(document.get("timestamp")) or 0


def drafts(documents: Sequence[tuple[Document, str]], folder: str, options: Options, cut: frozenset[str]) -> Drafts:
    """The run of each experiment whose stage files lie in one folder, in the order of their times."""
    experiments: dict[str, list[tuple[Document, str]]] = {}
    for document, source in documents:
        owner = document.get("experiment_id") or os.path.basename(folder) or "experiment"
        experiments.setdefault(run_key(owner, options.job_prefix), []).append((document, source))
    for job, stages in experiments.items():
        stages.sort(key=lambda pair: time_of(pair[0]))
        done: dict[str, bool] = {}
        for document, source in stages:
            done[document["stage"]] = yield from _stage(document, OldRun(FORM, source, job), is_cut=source in cut)
        newest, source = stages[-1]
        yield OldRun(FORM, source, job).status(
            RunStatus.PAUSED if all(done.values()) else RunStatus.FAILED,
            {**newest, "completed_stages": [stage for stage, is_done in done.items() if is_done]},
            created_us=time_of(newest) or None,
            done=sum(done.values()),
            facts={
                "id": newest.get("experiment_id"),
                "experiment": mapping_of(newest.get("metadata")).get("experiment_name"),
                "time": newest.get("timestamp"),
            },
        )


def _stage(document: Document, run: OldRun, *, is_cut: bool) -> Generator[Draft | Finding, None, bool]:
    """Yield the drafts of one stage; return whether it is done. Its result is its own entry in stage_results."""
    stage = document["stage"]
    results = mapping_of(document.get("stage_results"))
    result = results[stage] if stage in results else document.get("data", document)
    lost = list(placeholders(document))
    if lost:
        why = "the old system kept only the names of these objects"
        yield Finding(Verdict.LOSSY, run.source, why, tuple(lost[:MOST_PATHS]))
    is_done = not is_cut and mapping_of(result).get("success") is not False
    error = None if is_done else clean(mapping_of(result).get("error")) or "it failed"
    if is_cut:
        error = "its file is cut off"
        yield Finding(
            Verdict.CORRUPTED, run.source, f"the file is cut off; stage {clean(stage)} will run again", tuple(document)
        )
    elif is_done and any(placeholders(result)):
        is_done, error = False, "its result holds objects that were never stored"
        yield Finding(Verdict.LOSSY, run.source, f"{error}: stage {clean(stage)} will run again")
    yield run.step(
        stage,
        result,
        record=document,
        created_us=time_of(document) or None,
        seconds=document.get("elapsed_time"),
        error=error,
        key=digest_of_document(document),
        facts={"lossy": lost[:MOST_PATHS] or None},
    )
    return is_done
