"""Every file of every format, cut at every byte: what is left never counts as whole, and the report names the file."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kedge.legacy.importers import Draft, Finding, Options
from kedge.legacy.importers.common import Thread
from kedge.legacy.importers.directory import read_source
from tests.parts import require

from .writers import artemis, geo, jobs

RESULTS = ("step", "items", "process", "llm", None)  # what a program would go on from; the rest are records about it


def put(folder: Path, name: str, document: Any) -> None:
    (folder / name).write_text(json.dumps(document))


def card(root: Path) -> None:
    stages = {"plan": artemis.stage("plan", 0), "build": artemis.stage("build", 1), "ship": artemis.stage("ship", 2)}
    put(root, "X.json", artemis.card("c", stages, status="completed"))


def card_index(root: Path) -> None:
    put(root, "X_checkpoint.json", artemis.index(1, {"PlanStage": {"ok": [1, 2]}, "BuildStage": {"ok": True, "n": 12}}))


def card_results(root: Path) -> None:
    put(root, "X.json", artemis.results("c", {"plan": "completed", "build": "completed"}))


def card_state(root: Path) -> None:
    put(root, "X_state.json", artemis.state("c", ["plan", "build"]))


def card_attempts(root: Path) -> None:
    put(root, "X_checkpoints.json", artemis.attempts("c", ("plan", "completed"), ("build", "completed")))


def card_sqlite(root: Path) -> None:
    path = root / "X.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA page_size = 512")
    db.close()
    artemis.write_sqlite(path, [artemis.state("c", ["plan"])], artemis.attempts("c", ("plan", "completed")))


def card_costs(root: Path) -> None:
    put(root, "X.json", [artemis.call("c", "plan", 0.25), artemis.call("c", "build", 0.5)])


def card_machine(root: Path) -> None:
    put(root, "X_state.json", artemis.machine("c"))


def job_checkpoint(root: Path) -> None:
    put(root, "X.json", jobs.checkpoint("job_9", "outline", {"n": 12, "done": ["a", "b"], "deep": {"x": [1]}}))


def job_whole(root: Path) -> None:
    put(root, "X.json", jobs.whole_job("job_9"))


def job_state(root: Path) -> None:
    about = {"job_id": "job_9", "workflow_id": "w", "status": "running", "current_step": "draft"}
    steps = {"outline": {"status": "completed", "output": {"n": 12}}}
    put(
        root, "X.json", {"metadata": about, "inputs": {"t": 1}, "steps": steps, "outputs": {"a": [1, 2]}, "context": {}}
    )


def execution(root: Path) -> None:
    waiting = jobs.step("publish", "paused", approval_required=True, approval_status="pending")
    put(root, "X.json", jobs.execution("c1", [jobs.step("draft"), waiting], state="paused"))


def core(root: Path) -> None:
    geo.core(root, "9f0c_merge_1753401600", {"done": [1, 2], "n": {"x": 1}})


def core_without_registry(root: Path) -> None:
    geo.core(root, "9f0c_merge_1753401600", {"done": [1, 2]}, register=False, compressed=False)


def processor(root: Path) -> None:
    state = {"processor_state": {"class": "P", "items_processed": 1}, "processed_items": ["a"], "failed_items": []}
    geo.core(root, "P_1753401600", state, level="step", parent_id=None, metadata={"processor": "P"})


def stages(root: Path) -> None:
    geo.stage(root, "exp", "data_load", 1, shared_data={})
    geo.stage(root, "exp", "resample", 2, shared_data={})


def old_stage(root: Path) -> None:
    put(root, "X.json", {"stage": "load", "timestamp": 1753401600.5, "elapsed_time": 2.5, "data": {"n": 12}})


def tiles(root: Path) -> None:
    (root / "X.pkl").write_bytes(geo.tiles(["tile_0_0", "tile_0_1"], ["tile_1_0"]))


def chunks(root: Path) -> None:
    for place in range(2):
        name, data = geo.chunk("exp", "kmeans", place, 3, {"sum": place})
        (root / f"{name}.pkl").write_bytes(data)


def any_json(root: Path) -> None:
    put(root, "X.json", {"a": 12, "b": [1, 2]})


SOURCES: list[tuple[Callable[[Path], None], str]] = [
    (make, "auto")
    for make in (
        card, card_index, card_results, card_state, card_attempts, card_sqlite, card_costs, card_machine,
        job_checkpoint, job_whole, job_state, execution, core, core_without_registry, processor, stages, old_stage,
        tiles, chunks,
    )
]  # fmt: skip
SOURCES += [(any_json, "json-dir"), (card, "json-dir")]


def cut_everywhere(whole: Path, root: Path) -> dict[str, str]:
    """Copies of a source in `root`, each with one of its files cut at another byte: place → the file.

    A source of one file X is copied beside itself under other names, one of more files into folders.
    """
    files = sorted(p for p in whole.rglob("*") if p.is_file())
    is_single = [p.name[0] for p in files] == ["X"]
    if is_single:
        root.mkdir()
        shutil.copy(files[0], root / f"whole{files[0].name[1:]}")
    else:
        shutil.copytree(whole, root / "whole")
    cuts: dict[str, str] = {}
    for path in files:
        content = path.read_bytes()
        for size in range(0, len(content), 97 if path.suffix == ".db" else 1):
            place = f"cut{len(cuts):05}"
            cuts[place] = str(path.relative_to(whole))
            target = root / f"{place}{path.name[1:]}" if is_single else root / place / cuts[place]
            if not is_single:
                shutil.copytree(whole, root / place, copy_function=os.link)
                target.unlink()
            target.write_bytes(content[:size])
    return cuts


def by_cut(root: Path, form: str) -> dict[str, tuple[list[Draft], list[Finding]]]:
    read: dict[str, tuple[list[Draft], list[Finding]]] = defaultdict(lambda: ([], []))
    for entry in read_source(str(root), Options(form=form)):
        place = re.match("whole|cut[0-9]{5}", entry.source)
        assert place is not None, entry
        read[place[0]][isinstance(entry, Finding)].append(entry)  # type: ignore[arg-type]
    return read


def value_of(draft: Draft, place: str) -> tuple[str, str, object, str]:
    return draft.job.replace(place, ""), draft.step.replace(place, ""), draft.metadata.get("kind"), repr(draft.state)


@pytest.mark.parametrize(("make", "form"), SOURCES, ids=lambda value: getattr(value, "__name__", value))
def test_cut_at_every_byte(tmp_path: Path, make: Callable[[Path], None], form: str) -> None:
    whole = tmp_path / "original"
    whole.mkdir()
    make(whole)
    cuts = cut_everywhere(whole, tmp_path / "cuts")
    read = by_cut(tmp_path / "cuts", form)
    expected = {value_of(draft, "whole") for draft in read["whole"][0]}
    assert len(expected) >= 1
    for place, cut_file in cuts.items():
        drafts, findings = read[place]
        resumable = {value_of(d, place) for d in drafts if not d.job.endswith(":salvaged")}
        partial = [value for value in resumable - expected if value[2] in RESULTS]
        assert not partial, (place, cut_file)
        assert_no_approval_is_lost(drafts)
        assert findings or resumable == expected, (place, cut_file)


@pytest.mark.parametrize("version", ["0.0.66", "0.1.19", "0.2.3"])
def test_threads_cut_at_many_bytes(tmp_path: Path, version: str) -> None:
    """Of a cut database of LangGraph: checkpoints as they were, or a finding."""
    require("module:langgraph.checkpoint.sqlite")
    path = tmp_path / "whole.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA page_size = 512")
        db.executescript((Path(__file__).parent / "data" / f"langgraph-{version}.sql").read_text())

    def read(place: Path) -> tuple[set[str], list[Finding]]:
        found = list(read_source(str(place), Options()))
        threads = {
            repr((t.thread, t.checkpoint, t.metadata, t.parent, t.writes)) for t in found if isinstance(t, Thread)
        }
        return threads, [entry for entry in found if isinstance(entry, Finding)]

    content = path.read_bytes()
    expected, findings = read(path)
    assert expected
    assert not findings
    for size in range(0, len(content), 997):
        (cut := tmp_path / f"cut{size:06}.db").write_bytes(content[:size])
        threads, findings = read(cut)
        assert threads <= expected, size
        assert findings or threads == expected, size


def assert_no_approval_is_lost(drafts: list[Draft]) -> None:
    for draft in drafts:
        if draft.metadata.get("kind") == "execution":
            state: Any = draft.state
            waiting = [s["checkpoint_name"] for s in state["checkpoints"] if s["approval_status"] == "pending"]
            assert state["state"] == "paused"
            assert waiting in (["publish"], ["unknown"])
