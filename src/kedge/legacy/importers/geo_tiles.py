"""geo (c): pickles of tile processors and of analyses.

A tile job continues with `run.map(process, tiles, name="tiles", key=tile_id)`. The old system kept no results: None
stands for them. An analysis continues from its newest checkpoint, with
`CheckpointableProcess(process_id="<exp>_<method>")`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.model import RunStatus, mapping_of, number_of

from .common import (
    Document,
    Draft,
    Drafts,
    Finding,
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

FORM = "geo-tiles"
TILES = "tiles"
_TAIL = re.compile(r"[._-]\d{6,}(?:_\d+)?$")
_SUFFIX = re.compile(r"\.(?:pkl|pickle)(?:\.gz)?$")


def kind_of(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    if "completed_tiles" in value and ("total_tiles" in value or "failed_tiles" in value):
        return "tiles"
    return "chunk" if {"checkpoint_id", "analysis_method", "chunk_idx"} <= value.keys() else None


def is_sidecar(document: object) -> bool:
    """The JSON beside a chunk's pickle: it says less than that."""
    return isinstance(document, dict) and {"analysis_method", "chunk_idx"} <= document.keys()


def drafts(values: Sequence[tuple[Document, str, str]], options: Options) -> Drafts:
    """What the pickles of one folder (value, file name, path shown) tell, each job's in the order of time."""
    tiles: dict[str, list[tuple[Document, str]]] = {}
    chunks: dict[str, list[tuple[Document, str]]] = {}
    for value, name, shown in values:
        if kind_of(value) == "tiles":
            stem = _TAIL.sub("", _SUFFIX.sub("", name)) or name
            tiles.setdefault(run_key(stem, options.job_prefix), []).append((value, shown))
        else:
            owner = f"{value.get('experiment_name') or value['checkpoint_id']}_{value['analysis_method']}"
            chunks.setdefault(name_of(owner, most=118, prefix=options.job_prefix), []).append((value, shown))
    for job, of_job in tiles.items():
        yield from _tile_job(job, sorted(of_job, key=lambda pair: _time(pair[0])))
    for job, of_job in chunks.items():
        for value, source in sorted(of_job, key=lambda pair: (_time(pair[0]), number_of(pair[0]["chunk_idx"]))):
            yield _chunk(job, value, source)


def _tile_job(job: str, values: list[tuple[Document, str]]) -> Drafts:
    """Each file adds the tiles that are new in it: the old system forgot earlier ones when it was resumed."""
    done: dict[str, None] = {}
    failed: dict[str, str] = {}
    for value, source in values:
        progress = mapping_of(value.get("tile_progress"))
        new = [tile for tile in dict.fromkeys(_completed(value, progress)) if tile not in done]
        errors = {tile: mapping_of(about).get("error_message") for tile, about in progress.items()}
        failed = {tile: clean(errors.get(tile)) or "it failed" for tile in texts(value.get("failed_tiles"))}
        at = _time(value) or None
        run, facts = OldRun(FORM, source, job), {"time": value.get("timestamp")}
        if new:
            yield Finding(Verdict.LOSSY, source, f"no results were kept of {len(new):,} tiles: None stands for them")
        if new or failed:
            yield run.items(TILES, dict.fromkeys(new), failed, created_us=at, facts=facts)
        done |= dict.fromkeys(new)
        total = number_of(value.get("total_tiles")) or None
        is_whole = total is not None and len(done) >= total
        status = RunStatus.COMPLETED if is_whole else RunStatus.FAILED if failed else RunStatus.PAUSED
        yield run.status(status, value, created_us=at, done=len(done), total=total, facts=facts)


def _completed(value: Document, progress: Document) -> list[str]:
    listed = texts(value.get("completed_tiles"))
    return listed + [tile for tile, about in progress.items() if mapping_of(about).get("status") == "completed"]


def _chunk(job: str, value: Document, source: str) -> Draft:
    """The state of an analysis after a chunk. It holds that of all chunks before, so the newest one is resumed from."""
    done, total = number_of(value["chunk_idx"]) + 1, number_of(value.get("total_chunks")) or None
    return Draft(
        FORM,
        source,
        job,
        step_of(value["analysis_method"]),
        {"state": value, "progress": {"items_done": done, "items_total": total}},
        key=f"chunk:{digest_of_document(value)}",
        id=name_of(value["checkpoint_id"]),
        created_us=_time(value) or None,
        metadata={
            "kind": "process",
            "class": clean(value["analysis_method"]),
            "items_done": done,
            "items_total": total,
            "legacy": legacy(FORM, id=value["checkpoint_id"], experiment=value.get("experiment_name")),
        },
    )


def _time(value: Document) -> int:
    return microseconds(value.get("timestamp")) or 0
