"""A store worth looking at, made by the real library: for the browser tests and the pictures in the documents."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import kedge
from kedge.ports import NewCheckpoint
from kedge.process.workflow import Workflows

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
RTL = "מחיר סופי \u202e gnp.exe"
REPORT = "\n".join(f"{n}. The pipeline read {n * 120} rows and kept {n * 117}." for n in range(1, 40))


def fill(place: Path, *, pace_s: float = 0.0) -> dict[str, str]:
    """Fill a store; answers the IDs the tests look for. With a pace, as if it had taken days: for pictures."""
    known: dict[str, str] = {}
    with kedge.open(place) as store:
        if pace_s:
            fill_days(store, {"nightly-backup": 52_000_000, "sensor-archive": 21_000_000, "agent-threads": 9_000_000})
        with _long_ago(days=4) if pace_s else nullcontext():
            known |= _training(store)
            known |= _reports(store)
        store.save(
            "odd-names", HOSTILE, {HOSTILE: HOSTILE, "text": RTL}, tags={"label": HOSTILE}, metadata={"note": HOSTILE}
        )
        store.save("odd-names", RTL, {"right to left": RTL})
        known["odd"] = store.list("odd-names")[0].id
        store.save("odd-names", "long " * 200, {"k" * 500: "v" * 5000})
        _runs(store, pace_s)
        _threads(store)
        _containers(store)
        workflows = Workflows(store)
        execution = workflows.start_workflow_execution("order-77", "refund")
        workflows.create_checkpoint(execution, "pay out", "billing", {"amount": 120}, approval_required=True)
        known["execution"] = execution
    return known


def _threads(store: kedge.CheckpointManager) -> None:
    """A thread of an agent that calls a tool, then asks a person."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import interrupt

    from kedge.integrations.langgraph import KedgeSaver

    def look_up(_: MessagesState) -> dict[str, Any]:
        wanted = {"name": "find_order", "args": {"customer": 7, "open": True}, "id": "call_1"}
        return {"messages": [AIMessage("Let me look that up.", tool_calls=[wanted])]}

    def find_order(_: MessagesState) -> dict[str, Any]:
        return {"messages": [ToolMessage('{"order": "A-19", "paid": 120.0}', tool_call_id="call_1", name="find_order")]}

    def answer(_: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("Order A-19 was paid and not sent.\n\n- paid: 120.00\n- since: 9 days")]}

    def refund(_: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"Refunded: {interrupt('Refund 120.00 to customer 7?')}")]}

    graph = StateGraph(MessagesState).add_sequence([look_up, find_order, answer, refund]).add_edge(START, "look_up")
    agent = graph.compile(checkpointer=KedgeSaver(store))
    asked = [SystemMessage("You are a clerk. Be brief."), HumanMessage("Where is my order?\nI want my money back.")]
    agent.invoke({"messages": asked}, {"configurable": {"thread_id": "customer-7"}})


def _containers(store: kedge.CheckpointManager) -> None:
    """Three generations, as containers/snapshot.py lays them out, without their trees."""
    counter = {"name": "python3", "executable": "/usr/bin/python3", "parent": 0, "state": "alive", "threads": 1}
    worker = {"name": "worker", "executable": "/app/worker", "parent": 1, "state": "alive", "threads": 4}
    for n in range(3):
        processes = {"1": {**counter, "memory_bytes": (9 + n) << 20, "open_files": {"3": "file /data/out.log"}}}
        if n:
            processes["12"] = {**worker, "memory_bytes": 4 << 20, "open_files": {}}
        spec = {"process": {"args": ["python3", "counter.py"]}}
        memory_bytes = sum(int(str(each["memory_bytes"])) for each in processes.values())
        metadata = {"kind": "container", "id": "c0ffee42", "runtime": "runc", "network": "own", "is_running": n < 2}
        metadata |= {"paused_ms": 41.2 + n, "rootfs": "overlay", "processes": len(processes)}
        state = {"kind": "container", "spec": spec, "processes": processes, "host": {"kernel": "6.12.5"}}
        store.save("container:counter", "counter", state, metadata={**metadata, "memory_bytes": memory_bytes})


def fill_job(store: kedge.CheckpointManager, job: str, count: int) -> None:
    """A long history, in one transaction."""
    first = store.save(job, "step 1", {"n": 1})
    index = store.store.index
    template = replace(NewCheckpoint.of(*index.read(first)), job=job)
    own = zlib.crc32(job.encode())  # other jobs have other IDs, as long as those of a save
    records = [
        replace(template, id=f"step-1_{1_700_000_000 + n}_{own ^ n:08x}", created_us=template.created_us + n)
        for n in range(1, count)
    ]
    index.commit(records, actor="test")


def fill_days(store: kedge.CheckpointManager, jobs: dict[str, int], days: int = 28) -> None:
    """Histories that grew over days: name → bytes a day, more towards the end."""
    index = store.store.index
    for job, bytes_a_day in jobs.items():
        first = store.save(job, "day", {"n": 0})
        template = replace(NewCheckpoint.of(*index.read(first)), job=job)
        records = []
        for n in range(days):
            size = int(bytes_a_day * (0.4 + n / days) * (1 + 0.5 * math.sin(n * 1.7)))
            created = template.created_us - (days - n) * 86_400_000_000
            identity: Any = f"{job}.day_{created // 1_000_000}_{n:08x}"
            sizes = {"size_bytes": 3 * size, "stored_bytes": size}
            records.append(replace(template, id=identity, created_us=created, **sizes))
        index.commit(records, actor="test")


def _training(store: kedge.CheckpointManager) -> dict[str, str]:
    """A model that learns, with a branch tried from the middle."""
    draw = np.random.default_rng(7)
    weights = draw.normal(size=(96, 96)).astype("float32")
    y, x = np.mgrid[0:96, 0:96]
    ids: list[str] = []
    for epoch in range(1, 13):
        weights[epoch % 96] += draw.normal(scale=0.1, size=96).astype("float32")
        picture = (127 + 127 * np.sin(x / (4 + epoch)) * np.cos(y / 9)).astype("uint8")
        state: dict[str, Any] = {
            "epoch": epoch,
            "loss": round(2.1 * math.exp(-epoch / 5), 4),
            "optimizer": {"name": "adam", "lr": 0.001 / epoch, "betas": (0.9, 0.999)},
            "model": {"layer1": {"weight": weights.copy(), "bias": np.zeros(96, "float32")}, "sample": picture},
            "history": [round(2.1 * math.exp(-e / 5), 4) for e in range(1, epoch + 1)],
            "done": {"train": True, "validate": epoch % 3 == 0},
        }
        ids.append(
            store.save(
                "train-resnet",
                f"epoch {epoch}",
                state,
                metadata={"loss": state["loss"], "lr": state["optimizer"]["lr"]},
                tags={"best": ""} if epoch == 9 else None,
                pin=epoch == 9,
            )
        )
    branch, state = store.resume_from(ids[6])
    store.save("train-resnet", "lower learning rate", {**state, "lr": 1e-5}, parent=branch.id)  # type: ignore[dict-item]
    store.save("train-resnet", "epoch 13", {"epoch": 13, "loss": 0.1502}, parent=ids[-1])
    return {"first": ids[0], "last": ids[-1], "pinned": ids[8]}


def _reports(store: kedge.CheckpointManager) -> dict[str, str]:
    old = store.save("weekly-report", "draft", {"title": "Week 46", "body": REPORT, "reviewers": ["ada"], "pages": 4})
    body = REPORT.replace("kept 1170.", "kept 1,168, two were rejected.") + "\n40. Signed off."
    new = store.save(
        "weekly-report",
        "final",
        {"title": "Week 46, final", "body": body, "reviewers": ["ada", "grace"], "signed": True},
    )
    return {"old": old, "new": new}


def _double(n: int) -> int:
    if n % 17 == 5:
        raise ValueError(f"tile {n} has no data")
    return 2 * n


@contextmanager
def _long_ago(days: float) -> Iterator[None]:
    """A clock that begins so long ago and goes on by minutes whenever it is asked."""
    at = time.time_ns() - int(days * 86_400e9)

    def tick() -> int:
        nonlocal at
        at += 1_800_000_000_000 + at % 7 * 400_000_000_000
        return at

    with mock.patch("time.time_ns", tick):
        yield


def _runs(store: kedge.CheckpointManager, pace_s: float) -> None:
    def rows_read(count: int) -> list[int]:
        time.sleep(8 * pace_s)  # sleep: the pace, for pictures
        return list(range(count))

    def tile(n: int) -> int:
        time.sleep(pace_s)  # sleep: the pace, for pictures
        return _double(n)

    def merge(count: int) -> dict[str, int]:
        time.sleep(12 * pace_s)  # sleep: the pace, for pictures
        return {"tiles": count}

    with kedge.run("nightly-tiles", store=store, progress=False) as run:
        rows = run.step("download", rows_read, 60)
        with run.stage("tiles"):
            run.map(tile, rows, name="render", key=str, on_error="collect")
        run.step("merge", merge, 60)
        run.log("merged 60 tiles")
    for _ in range(2):  # the second time all answers are found
        with kedge.run("summarise-mail", store=store, progress=False) as run:
            for n in range(3):
                messages = [{"role": "user", "content": f"Summarise mail {n}."}]
                run.llm(f"mail {n}", _model, model="gpt-4o-mini", messages=messages)
    with kedge.run("summarise-again", store=store, progress=False) as run:
        run.llm("mail", _model, model="gpt-4o-mini", messages=[{"role": "user", "content": "Summarise mail 1."}])
    with suppress(SystemExit), kedge.run("publish-site", store=store, progress=False) as run:  # it pauses by leaving
        run.step("build", lambda: "site.tar")
        run.approval("go-live", prompt="Publish 214 pages to the public site?", wait_s=0)
    with suppress(ZeroDivisionError), kedge.run("import-orders", store=store, progress=False) as run:
        run.step("read", lambda: 812)
        run.step("convert", _broken)


def _model(model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    usage = {"prompt_tokens": 1200, "completion_tokens": 150, "total_tokens": 1350}
    return {"model": model, "choices": [{"message": {"role": "assistant", "content": "Short."}}], "usage": usage}


def _broken() -> None:
    raise ZeroDivisionError("division by zero in row 44")
