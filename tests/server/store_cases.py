"""What a manager and what builds on it answer: each case is asked of a directory and of the same one behind a service.

A case is a function of an open manager and an empty folder; what it returns, or raises, is what is compared. `covers`
names the public methods of `CheckpointManager` that it is about.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

import kedge
from kedge import codec
from kedge.model import Lease, RunStatus
from kedge.pipeline import approval, cancellation, history, inbox
from kedge.pipeline.consumer import Worker
from kedge.pipeline.fork import fork, plan_fork
from kedge.process.workflow import Workflows
from kedge.store import Save
from kedge.store.request import parse_request

Case = Callable[[kedge.CheckpointManager, Path], Any]
CASES: dict[str, Case] = {}
COVERED: dict[str, set[str]] = {}  # by public name: the cases about it


def covers(*names: str) -> Callable[[Case], Case]:
    def note(case: Case) -> Case:
        CASES[case.__name__] = case
        for name in names:
            COVERED.setdefault(name, set()).add(case.__name__)
        return case

    return note


def attempt(action: Callable[[], Any]) -> Any:
    """Its result, or the error as the caller sees it."""
    try:
        return action()
    except kedge.CheckpointError as error:
        return [type(error).__name__, error.message, error.hint]


def some(store: kedge.CheckpointManager, count: int = 4, job: str = "j") -> list[str]:
    """IDs of that many checkpoints, of which every other one is even."""
    return [
        store.save(job, f"s{n}", {"n": n}, tags={"even": str(n % 2 == 0)}, metadata={"n": n}, idempotency_key=f"k{n}")
        for n in range(count)
    ]


# --- saving and loading ---


@covers("save", "get", "load", "exists")
def every_option_of_a_save(store: kedge.CheckpointManager, _: Path) -> Any:
    first = store.save("j", "first", None)
    saved = store.save(
        "j", "s", {"t": (1, 2)}, level="stage", parent=first, tags={"a": "b"}, metadata={"x": [1, {"y": None}]},
        pin=True, idempotency_key="k", schema_version="2.1",
    )  # fmt: skip
    again = store.save("j", "s", {"t": (1, 2)}, level="stage", idempotency_key="k")
    return store.get(saved), store.load(saved), again == saved, store.exists(saved), store.exists("x_1_00000000")


@covers("save", "load")
def states_come_back_as_they_were(store: kedge.CheckpointManager, folder: Path) -> Any:
    (folder / "a").mkdir()
    (folder / "a" / "file").write_bytes(b"x" * 300_000)
    state = {
        "big": np.arange(200_000.0),
        7: {1, 2},
        "when": datetime(2026, 1, 1, tzinfo=UTC),
        "bytes": bytearray(b"ab" * 50_000),
        "tree": kedge.Tree(folder / "a"),
        "text": "t" * 100_000,
    }
    saved = store.save("j", "s", state)
    target = np.zeros(200_000)
    loaded: Any = store.load(saved)
    into: Any = store.load(saved, only="big", into={"big": target})
    loaded["tree"].restore_to(folder / "b")
    files = [path.name for path in (folder / "b").iterdir()]
    return store.get(saved), {**loaded, "tree": files}, float(target.sum()), into["big"] is target


@covers("load")
def parts_of_a_state(store: kedge.CheckpointManager, _: Path) -> Any:
    saved = store.save("j", "s", {"a": {"b": [1, 2]}, "c": np.ones(9)})
    wanted: Sequence[Any] = ("a/b", ["a", "c"], "nothing", "a/b/9")
    return [attempt(lambda only=only: store.load(saved, only=only)) for only in wanted]  # type: ignore[misc]


@covers("load", "find")
def checkpoints_by_reference(store: kedge.CheckpointManager, _: Path) -> Any:
    some(store)
    return [
        attempt(lambda text=text: (store.find(text), store.load(text)))  # type: ignore[misc]
        for text in ("j", "j#2", "j~1", "j~9", "j#9", "nothing", "a b", "")
    ]


@covers("load")
def a_mapped_load(store: kedge.CheckpointManager, _: Path) -> Any:
    saved = store.save("j", "s", {"big": np.arange(200_000.0)})
    return attempt(lambda: float(store.load(saved, mapped=True)["big"].sum()))


@covers("load")
def a_load_to_a_device(store: kedge.CheckpointManager, _: Path) -> Any:
    saved = store.save("j", "s", {"big": np.arange(200_000.0)})
    return attempt(lambda: float(store.load(saved, device="cpu")["big"].sum()))


@covers("save")
def refused_saves_change_nothing(store: kedge.CheckpointManager, _: Path) -> Any:
    store.save("j", "s", 1, idempotency_key="k")
    refused: Sequence[Callable[[], Any]] = (
        lambda: store.save("a b", "s", 1),
        lambda: store.save("j", "x" * 2000, 1),
        lambda: store.save("j", "s", {"x": object()}),
        lambda: store.save("j", "s", 2, idempotency_key="k"),
        lambda: store.save("j", "s", 1, parent="none_1_00000000"),
        lambda: store.save("j", "s", 1, level="nothing"),
        lambda: store.save("j", "s", 1, tags={"a b": "c"}),
        lambda: store.save("j", "s", 1, tags={"a": "b" * 2000}),
        lambda: store.save("j", "s", 1, metadata={"a": object()}),
        lambda: store.save("j", "s", 1, idempotency_key=""),
        lambda: store.save("j", "s", 1, lease=Lease("j", 77, "nobody", 1.0)),
        lambda: store.get("none_1_00000000"),
        lambda: store.load("none_1_00000000"),
    )
    return [attempt(action) for action in refused], len(store.list("j"))


@covers("save_many")
def many_saves(store: kedge.CheckpointManager, _: Path) -> Any:
    saves = [
        Save(parse_request("j", f"s{n}", "step", idempotency_key=key), codec.encode({"n": n}))
        for n, key in enumerate(("a", None, "a", "c"))
    ]
    return store.save_many(saves), store.list("j")


@covers("save_request", "commit")
def parsed_saves(store: kedge.CheckpointManager, _: Path) -> Any:
    saved = store.save_request(parse_request("j", "s", "step"), {"n": 1})
    made = store.commit(parse_request("j", "t", "step"), codec.encode({"n": 2}))
    return store.get(saved), made, store.load(made.id)


@covers("save_async", "drain")
def saves_in_the_background(store: kedge.CheckpointManager, _: Path) -> Any:
    pending = [store.save_async("j", f"s{n}", {"n": n}) for n in range(3)]
    store.drain()
    return [store.load(each.result()) for each in pending]


@covers("counters", "watch", "on_close")
def what_a_manager_counts_and_tells(store: kedge.CheckpointManager, _: Path) -> Any:
    told: list[Any] = []
    store.watch(lambda what, checkpoint: told.append((what, checkpoint.step)))
    store.on_close(lambda: told.append("closed"))
    saved = store.save("j", "s", 1)
    store.load(saved)
    return told, {name: count for name, count in store.counters.items() if not name.endswith("_s")}


@covers("load_latest", "restore", "load_by_key", "get_by_key", "read_ahead", "load_stored")
def what_was_saved_last_or_under_a_key(store: kedge.CheckpointManager, _: Path) -> Any:
    ids = some(store)
    ahead = {key: (checkpoint, read()) for key, (checkpoint, read) in store.read_ahead("j", 1, 2).items()}
    return (
        [attempt(lambda job=job: store.load_latest(job)) for job in ("j", "nothing")],  # type: ignore[misc]
        store.load_latest("j", level="stage"),
        [attempt(lambda at=at: store.restore("j", at)) for at in (None, ids[1], "none_1_00000000")],  # type: ignore[misc]
        attempt(lambda: store.restore("nothing")),
        [(store.get_by_key("j", key), store.load_by_key("j", key)) for key in ("k2", "none")],
        store.load_stored(store.catalogue.read(ids[2])),
        ahead,
    )


@covers("list", "walk")
def lists(store: kedge.CheckpointManager, _: Path) -> Any:
    ids = some(store, 6)
    store.save("j", "stage", 0, level="stage", metadata={"text": "7"})
    store.save("j", "quoted", 0, metadata={"text": '"a"'})
    options: Sequence[dict[str, Any]] = (
        {}, {"limit": 2}, {"limit": 0}, {"before": ids[3]}, {"after": 2, "limit": 2}, {"after": ids[1], "before": 5},
        {"level": "stage"}, {"tags": {"even": "True"}, "limit": 2}, {"tags": {"even": "no"}}, {"metadata": {"n": 3}},
        {"metadata": {"n": "3"}}, {"metadata": {"text": "7"}}, {"metadata": {"text": '"a"'}}, {"limit": -1},
        {"before": "none_1_00000000"}, {"level": "odd"}, {"tags": {"a b": ""}},
    )  # fmt: skip
    return [
        (
            attempt(lambda given=given: store.list("j", **given)),  # type: ignore[misc]
            attempt(lambda given=given: list(store.walk("j", **{k: v for k, v in given.items() if k != "limit"}))),  # type: ignore[misc]
        )
        for given in options
    ]


@covers("jobs")
def all_jobs(store: kedge.CheckpointManager, _: Path) -> Any:
    for job in ("b", "a", "a:1", "c"):
        store.save(job, "s", {"job": job})
    given: Sequence[dict[str, Any]] = ({}, {"prefix": "a"}, {"limit": 2}, {"after": "a:1", "limit": 1}, {"limit": -1})
    return [attempt(lambda each=each: store.jobs(**each)) for each in given]  # type: ignore[misc]


@covers("outline", "diff")
def what_is_inside(store: kedge.CheckpointManager, _: Path) -> Any:
    first = store.save("j", "s", {"a": [1, 2], "w": np.ones(5000), "text": "a\nb"})
    second = store.save("j", "s", {"a": [1, 3], "w": np.zeros(5000), "new": None})
    diff = store.diff(first, second)
    counts = diff.added, diff.changed, diff.removed, [(str(change.kind), change.path) for change in diff.changes]
    return store.outline(first), counts, attempt(lambda: store.diff(first, "none_1_00000000"))


@covers("diff")
def values_of_a_diff(store: kedge.CheckpointManager, _: Path) -> Any:
    first, second = (store.save("j", "s", {"w": np.full(5000, n)}) for n in range(2))
    return [(change.old, change.new, change.detail) for change in store.diff(first, second).changes]


# --- changes ---


@covers("tag", "pin", "set_status", "condemn")
def what_may_change(store: kedge.CheckpointManager, _: Path) -> Any:
    one, two = some(store, 2)
    return (
        store.tag(one, a="1", even=None),
        attempt(lambda: store.tag(one, **{"a b": "1"})),
        attempt(lambda: store.tag("none_1_00000000", a="1")),
        store.pin(one),
        store.pin(one, pinned=False),
        store.set_status(two, "corrupted"),
        store.load_latest("j"),
        store.set_status(two, "valid"),
        attempt(lambda: store.set_status(two, "odd")),
        store.condemn(two),
    )


@covers("delete", "delete_job", "cleanup")
def what_is_deleted(store: kedge.CheckpointManager, _: Path) -> Any:
    ids = some(store, 6)
    store.pin(ids[0])
    return (
        attempt(lambda: store.delete("j", ids[0])),
        store.delete("j", ids[1]),
        store.delete("j", ids[1]),
        attempt(lambda: store.delete("other", ids[2])),
        attempt(lambda: store.load(ids[1])),
        store.cleanup("j", 2),
        attempt(lambda: store.cleanup("j", 0)),
        store.list("j"),
        attempt(lambda: store.delete_job("j")),
        store.delete_job("j", even_pinned=True),
        attempt(lambda: store.delete_job("j")),
        store.jobs(),
    )


@covers("resume_from", "copy")
def branches_and_copies(store: kedge.CheckpointManager, _: Path) -> Any:
    ids = some(store, 3)
    return (
        store.resume_from(ids[0]),
        store.resume_from(ids[1], "branch"),
        attempt(lambda: store.resume_from("none_1_00000000")),
        store.copy("j", "copied"),
        store.copy("j", "copied"),
        attempt(lambda: store.copy("j", "branch")),
        attempt(lambda: store.copy("nothing", "x")),
        store.jobs(),
    )


@covers("lease", "take_lease", "renew_lease", "break_lease", "begin")
def leases(store: kedge.CheckpointManager, _: Path) -> Any:
    with store.lease("j") as lease:
        held = store.save("j", "s", 1, lease=lease)
        refused = attempt(lambda: store.take_lease("j", "somebody", 5.0))
    taken = store.take_lease("j", "me", 30.0)
    store.renew_lease(taken)
    stale = attempt(lambda: store.save("j", "s", 2, lease=lease))
    others = store.take_lease("others", "somebody", 30.0)  # the first of its job, as `first` is
    first = store.take_lease("mine", "me", 30.0)
    foreign = [
        attempt(lambda: store.save("others", "s", 2, lease=first)),
        attempt(lambda: store.resume_from(held, "others", lease=first)),
    ]
    assert others.token == first.token
    assert [error[0] for error in foreign] == ["Validation"] * 2, foreign
    store.break_lease(taken)
    lost = attempt(lambda: store.renew_lease(taken))
    free = store.take_lease("j", "you", 30.0)
    request = replace(parse_request("new", "first", "step"), lease=Lease("new", 1, "me", 30.0))
    with attempt(lambda: store.begin(request, {"n": 1})):
        begun = store.list("new")
    return held is not None, refused[0], taken.token, stale[0], lost[0], free.token, begun


# --- care ---


@covers("apply", "review", "set_retention")
def retention(store: kedge.CheckpointManager, _: Path) -> Any:
    some(store, 6)
    policy = kedge.RetentionPolicy(keep_last=2, keep_tags=["even=True"])
    planned = store.apply(policy, job="j")
    reviewed = list(store.review(policy, job="j"))
    of_all = store.apply(kedge.RetentionPolicy(keep_last=1))
    done = store.apply(policy, job="j", dry_run=False)
    store.set_retention("j", kedge.RetentionPolicy(keep_last=1))
    store.save("j", "after", 1)
    kept = store.list("j")
    store.set_retention("j", None)
    return planned, reviewed, of_all, done, kept, [job.retention for job in store.jobs()]


@covers("set_retention")
def a_policy_for_a_job_that_is_not_there_yet(store: kedge.CheckpointManager, _: Path) -> Any:
    return attempt(lambda: store.set_retention("later", kedge.RetentionPolicy(keep_last=1)))


@covers("verify", "gc", "stats")
def care(store: kedge.CheckpointManager, _: Path) -> Any:
    saved = [store.save("j", "s", {"w": np.full(100_000, n)}) for n in range(3)]
    store.delete("j", saved[0])
    checked = store.verify(), store.verify("j", deep=False), attempt(lambda: store.verify("nothing"))
    planned, done = store.gc(dry_run=True), store.gc()
    names = ("jobs", "checkpoints", "size_bytes")
    return (
        checked,
        planned.chunks_deleted,
        done.chunks_deleted,
        [store.stats(job)[n] for job in (None, "j") for n in names],
    )


@covers("rebuild")
def a_rebuilt_index(store: kedge.CheckpointManager, _: Path) -> Any:
    some(store, 1)
    return attempt(lambda: store.rebuild().added)


@covers("rekey", "encryption")
def keys(store: kedge.CheckpointManager, _: Path) -> Any:
    return attempt(lambda: store.rekey(b"k" * 32)), attempt(lambda: store.encryption)


@covers("events", "audit")
def the_log_of_changes(store: kedge.CheckpointManager, _: Path) -> Any:
    ids = some(store, 3)
    store.acting_as("anna").pin(ids[0])
    events = [
        store.events(),
        store.events(1, 1),
        store.events(limit=2, newest=True),
        store.events(newest=True, before=3),
    ]
    shown = [[(event.id, event.action, event.job) for event in page] for page in events]
    return shown, store.audit().entries, store.audit(2).entries, store.events(99, wait_s=0.01)


@covers("acting_as")
def who_did_it(store: kedge.CheckpointManager, _: Path) -> Any:
    store.acting_as("anna").save("j", "s", 1)
    return [event.actor for event in store.events()]


@covers("copy_to", "follow_to", "close")
def copies_to_another_store(store: kedge.CheckpointManager, folder: Path) -> Any:
    some(store, 3)
    with kedge.open(folder / "target") as target:
        report = store.copy_to(target)
        again = store.copy_to(target, job="j", since=datetime.now(UTC) - timedelta(days=1))
        same = [(a.id, a.seq, a.tags, a.size_bytes) for a in target.list("j")] == [
            (a.id, a.seq, a.tags, a.size_bytes) for a in store.list("j")
        ]
        back = target.copy_to(store)
    return (report.checkpoints, again.checkpoints, back.checkpoints), same


@covers("follow_to")
def a_copy_that_follows(store: kedge.CheckpointManager, folder: Path) -> Any:
    stop = threading.Event()
    some(store, 2)
    with kedge.open(folder / "target") as target:
        done = attempt(lambda: store.follow_to(target, stop=stop, changed=lambda _: stop.set()))
        return done, len(target.list("j"))


@covers("aio")
def coroutines(store: kedge.CheckpointManager, _: Path) -> Any:
    async def talk() -> Any:
        saved = await store.aio.save("j", "s", {"n": 1})
        return await store.aio.load(saved), await store.aio.list("j"), [c async for c in store.aio.walk("j")]

    return asyncio.run(talk())


@covers("store", "catalogue", "place", "close")
def a_manager_that_was_closed(store: kedge.CheckpointManager, _: Path) -> Any:
    is_shown = store.place in repr(store)
    assert store.store.catalogue is store.catalogue
    store.close()
    return is_shown, attempt(lambda: store.save("j", "s", 1))[0], store.close()


# --- what builds on it ---


@kedge.pipeline(name="double")
def double(n: int) -> int:
    return int(kedge.current_run().step("double", lambda: 2 * n))


@covers()
def a_run_that_fails_and_is_resumed(store: kedge.CheckpointManager, _: Path) -> Any:
    tried: list[str] = []

    def flaky() -> int:
        tried.append("flaky")
        if len(tried) < 3:
            raise ValueError("not yet")
        return 3

    def session() -> Any:
        with kedge.run("r", store=store, progress=False, signals=False) as run:
            with run.stage("one"):
                first = run.step("first", lambda: tried.append("first"))
            run.log("came here", level="warning", place=1)
            items = run.map(lambda n: 1 // n, [0, 1, 2], name="items", key=str, workers=1, on_error="collect")
            return first, run.step("flaky", flaky), len(items)

    outcomes = []
    for _session in range(2):
        try:
            outcomes.append(session())
        except ValueError as error:
            outcomes.append(str(error))
    summary = history.find_run(store, "r")
    return (
        outcomes, tried, summary.status, summary.sessions,
        [(e.path, e.verdict, e.attempts) for e in history.explain(store, "r")],
        [line.metadata["text"] for line in history.logs_of(store, "r")], [run.key for run in history.find_runs(store)],
    )  # fmt: skip


@covers()
def approvals_signals_and_cancellation(store: kedge.CheckpointManager, _: Path) -> Any:
    def session() -> Any:
        with kedge.run("r", store=store, progress=False, signals=False) as run:
            return run.approval("go", prompt="Go?", wait_s=0).approved, run.signal("value", wait_s=0)

    outcomes: list[Any] = []
    for step in ("asked", "signalled", "done"):
        try:
            outcomes.append(session())
        except SystemExit:
            outcomes.append(("paused", [a.name for a in approval.pending_approvals(store, "r")]))
        if step == "asked":
            approval.decide(store, "r", "go", True, actor="anna", comment="fine")
        elif step == "signalled":
            inbox.send(store, "r", "value", {"n": 7})
    twice = attempt(lambda: approval.decide(store, "r", "go", False, actor="ben"))
    ended = attempt(lambda: cancellation.cancel(store, "r"))
    return outcomes, twice, ended, history.find_run(store, "r").status


@covers()
def queues_and_workers(store: kedge.CheckpointManager, _: Path) -> Any:
    queue = kedge.queue("q", store=store)
    handles = [queue.submit(double, n, key=f"r{n}", priority=n) for n in range(3)]
    duplicate = attempt(lambda: queue.submit(double, 5, key="r1"))
    Worker(store, ["q"], {"double": double}, lease_s=60).serve(until_empty=True)
    left = [entry.key for entry in queue.entries()]
    return [handle.result(timeout_s=600) for handle in handles], type(duplicate).__name__, left


@covers()
def a_child_in_the_background_and_a_fork(store: kedge.CheckpointManager, _: Path) -> Any:
    with kedge.run("parent", store=store, progress=False, signals=False) as run:
        result = run.result(kedge.start(double, 4, key="child"))
        run.step("after", lambda: result + 1)
    plan = plan_fork(store, "parent", "after", new_key="again")
    fork(store, plan)
    status = history.find_run(store, "again").status
    return result, plan.reused, plan.again, status == RunStatus.PAUSED, history.children_of(store, "parent")


@covers()
def workflows(store: kedge.CheckpointManager, _: Path) -> Any:
    made = Workflows(store)
    execution = made.start_workflow_execution("order-1", "orders", global_data={"n": 1})
    step = made.create_checkpoint(execution, "pay", "agent", {"sum": 7}, approval_required=True)
    approval.decide(store, execution, "pay", True, actor="anna")
    done = made.complete_checkpoint(execution, step, {"paid": True})
    ended = made.end_workflow_execution(execution)
    document = made.get_execution(execution)
    return done, ended, document["state"], [(c["checkpoint_name"], c["output_data"]) for c in document["checkpoints"]]


class Summing(kedge.CheckpointableProcess):
    total = 0

    def get_state(self) -> Any:
        return {"total": self.total}

    def restore_state(self, state: Any) -> None:
        self.total = state["total"]

    def work(self, count: int, stop_at: int) -> int:
        for item in range(self.items_done, count):
            if item == stop_at:
                raise ValueError("stopped")
            self.total += item
            self.update_progress(1, total=count)
            self.auto_checkpoint()
        return self.total


@covers()
def objects_that_save_themselves(store: kedge.CheckpointManager, _: Path) -> Any:
    policy = kedge.CheckpointPolicy(interval_items=2, interval_memory_mb=None)
    outcomes: list[Any] = []
    for stop_at in (5, -1):
        process = Summing(process_id="sum", store=store, checkpoint_policy=policy)
        try:
            outcomes.append(process.run(8, stop_at))
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


@covers()
def sessions_of_agents(store: kedge.CheckpointManager, _: Path) -> Any:
    from kedge.integrations.sessions import KedgeSession

    async def talk() -> Any:
        session = KedgeSession("customer", store)
        await session.add_items([{"role": "user", "content": str(n)} for n in range(3)])
        popped = await session.pop_item()
        kept = await session.get_items(limit=1)
        await session.clear_session()
        return popped, kept, await session.get_items()

    return asyncio.run(talk()), [c.step for c in store.list("session:customer")]


@covers()
def agents_of_langgraph(store: kedge.CheckpointManager, _: Path) -> Any:
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import Command, interrupt

    from kedge.integrations.langgraph import KedgeSaver

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"{len(state['messages'])}: {interrupt('really?')}", id="a")]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    agent = graph.compile(checkpointer=KedgeSaver(store))
    config: Any = {"configurable": {"thread_id": "t"}}
    agent.invoke({"messages": [HumanMessage("hi", id="h")]}, config)
    asked = [each.value for task in agent.get_state(config).tasks for each in task.interrupts]
    agent.invoke(Command(resume="yes"), config)
    past = [(state.metadata or {}).get("step") for state in agent.get_state_history(config)]
    said = [message.content for message in agent.get_state(config).values["messages"]]
    KedgeSaver(store).delete_thread("t")
    return asked, said, past, agent.get_state(config).values
