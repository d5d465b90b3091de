"""The page of a run: the runs it started, items that failed."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient

import kedge
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import DEAD
from kedge.pipeline.heartbeat import Heartbeat


@kedge.pipeline
def child(n: int) -> int:
    return 2 * n


def test_a_run_leads_to_the_runs_it_started_and_back(client: TestClient, store: kedge.CheckpointManager) -> None:
    with kedge.run("parent", store=store, progress=False, signals=False) as run:
        handles = [kedge.start(child, n, key=f"child-{n}") for n in range(2)]
        assert [run.result(handle) for handle in handles] == [0, 2]
    page = client.get("/runs/parent").text
    started = page[page.index('id="children"') :]
    assert started.index("/runs/child-0") < started.index("/runs/child-1")
    assert started.count("status-completed") == 2
    assert '<a href="/runs/parent" title="The run that started it">' in client.get("/runs/child-1").text
    assert 'id="children"' not in client.get("/runs/child-1").text


def test_failed_items_of_a_queues_run_are_put_back(client: TestClient, store: kedge.CheckpointManager) -> None:
    tried: list[int] = []

    @kedge.pipeline
    def work() -> None:
        def item(number: int) -> int:
            tried.append(number)
            return 1 // number

        kedge.current_run().map(item, [0, 1], name="items", key=str, workers=1, on_error="collect")

    kedge.queue("q", store=store).submit(work, key="r")
    Worker(store, ["q"], {work.name: work}, lease_s=60).serve(until_empty=True)
    page = client.get("/runs/r").text
    assert 'action="/queues/retry"' in page
    assert "1 item failed, 1 done" in page
    assert "Retry the failed item</button>" in page
    assert "belongs to queue" in client.get("/runs/r/item", params={"map": "items", "item": "0"}).text
    client.post("/queues/retry", data={"queue": "q", "run": "r"}, headers={"Sec-Fetch-Site": "same-origin"})
    Worker(store, ["q"], {work.name: work}, lease_s=60).serve(until_empty=True)
    assert tried == [0, 1, 0]


def test_fields_of_the_log_are_shown_and_anything_else_breaks_nothing(
    client: TestClient, store: kedge.CheckpointManager
) -> None:
    with kedge.run("r", store=store, progress=False, signals=False) as run:
        run.log("hello", region="eu")
    store.save("r", "log", {}, tags={"kind": "log"}, metadata={"kind": "log", "text": "odd", "fields": 5})
    page = client.get("/runs/r").text
    assert "region=eu" in page
    assert "odd" in page


def test_a_run_says_when_it_began_and_how_long_it_took(client: TestClient, store: kedge.CheckpointManager) -> None:
    with kedge.run("nightly", store=store, progress=False) as run:
        run.step("one", lambda: 1)
    shown = client.get("/runs/nightly").text
    assert "<dt>Started</dt>" in shown
    assert "<dt>Took</dt>" in shown


def test_what_was_given_up_leads_to_its_run(client: TestClient, store: kedge.CheckpointManager) -> None:
    @kedge.pipeline
    def fails() -> None:
        raise ValueError("no")

    queue = kedge.queue("q", store=store)
    queue.submit(fails, key="given-up")
    Worker(store, ["q"], {fails.name: fails}, lease_s=60).serve(until_empty=True)
    queue.submit(fails, key="waits")
    shown = client.get("/queues").text
    assert '<a href="/runs/given-up"><bdi>given-up</bdi></a><br><span class="error"><bdi>ValueError: no' in shown
    assert "<bdi>waits</bdi>" in shown
    assert '<a href="/runs/waits">' not in shown


def test_a_run_that_was_given_up_is_retried_on_its_page(client: TestClient, store: kedge.CheckpointManager) -> None:
    tried: list[str] = []

    @kedge.pipeline
    def fails_once() -> None:
        tried.append("once")
        if len(tried) == 1:
            raise ValueError("no")

    kedge.queue("q", store=store).submit(fails_once, key="r")
    Worker(store, ["q"], {fails_once.name: fails_once}, lease_s=60).serve(until_empty=True)
    page = client.get("/runs/r").text
    assert "Given up after 1 failed attempt" in page
    assert '<a href="/queues#queue-q">q</a>' in page
    assert 'action="/queues/retry"' in page
    client.post("/queues/retry", data={"queue": "q", "run": "r"}, headers={"Sec-Fetch-Site": "same-origin"})
    assert 'action="/queues/retry"' not in client.get("/runs/r").text, "it is in the queue already"
    Worker(store, ["q"], {fails_once.name: fails_once}, lease_s=60).serve(until_empty=True)
    assert len(tried) == 2


def test_a_failed_run_that_its_queue_tries_again_says_so(client: TestClient, store: kedge.CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    queue.submit(child, 1, key="r", delay_s=3600, retries=3)
    about = {"kind": "run", "status": "failed", "session": 1, "queue": "q", "error": "ValueError: no"}
    store.save("r", "run failed", {}, tags={"kind": "run"}, metadata=about)
    page = client.get("/runs/r").text
    assert 'A worker of queue <a href="/queues#queue-q">q</a> tries it again (0 failed attempts so far)' in page
    assert 'action="/queues/retry"' not in page
    store.tag(store.list("queue:q")[0].id, state=DEAD)
    page = client.get("/runs/r").text
    assert "tries it again (" not in page
    assert 'action="/queues/retry"' in page


def test_a_run_of_a_queue_that_waits_leads_to_its_page(client: TestClient, store: kedge.CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    queue.submit(child, 1, key="asks", delay_s=3600)
    paused = {"kind": "run", "status": "paused", "session": 1}
    store.save("asks", "run paused", {}, tags={"kind": "run"}, metadata=paused)
    queue.submit(child, 2, key="waits", delay_s=3600)
    shown = client.get("/queues").text
    assert '<a href="/runs/asks"><bdi>asks</bdi></a>' in shown
    assert '<a href="/runs/waits">' not in shown


def test_a_queue_without_workers_says_how_to_start_one(client: TestClient, store: kedge.CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    queue.submit(child, 1, key="r")
    shown = client.get("/queues").text
    assert "No worker takes runs from this queue." in shown
    assert "kedge worker FILE.py --queue q" in shown
    beats = Heartbeat(store, ["q"], 1)
    beats.beat()
    assert "No worker takes runs" not in client.get("/queues").text
    beats.end()
    assert "No worker takes runs" in client.get("/queues").text
    Worker(store, ["q"], {child.name: child}, lease_s=60).serve(until_empty=True)
    assert "No worker takes runs" not in client.get("/queues").text, "nothing waits for one"


def test_failed_items_are_listed_with_their_places(client: TestClient, store: kedge.CheckpointManager) -> None:
    with kedge.run("r", store=store, progress=False, signals=False) as run:
        run.map(lambda n: 1 // n, [1, 0], name="plain", on_error="collect")
        run.map(lambda n: 1 // n, [1, 0], name="keyed", key=lambda n: f"key-{n}", on_error="collect")
    page = client.get("/runs/r").text
    digest = re.findall(r"\b[0-9a-f]{32}\b", page)[0]
    failures = re.findall(r'<li class="failure">.*?</a>', page)
    assert [re.sub("<.*?>", "", failure) for failure in failures] == ["#1 " + digest, "#1 key-0"]


def test_a_queue_shows_its_limits_and_what_comes_next(client: TestClient, store: kedge.CheckpointManager) -> None:
    queue = kedge.queue("many", store=store)
    queue.limit(concurrency=3, rate_per_s=0.5, max_queued=1000)
    for n in range(25):
        queue.submit(child, n, key=f"run-{n}", priority=n % 10)
    queue.submit(child, 99, key="later", delay_s=3600, priority=9)
    for n in range(2):
        queue.submit(child, n, key=f"of-a-{n}", group="a")
    kedge.schedule(queue, "tick", child, 1, every_s=7200)
    page = client.get("/queues").text
    assert "At most 3 at once, 0.5 a second, 1,000 in the queue." in page
    assert "8 more runs wait" in page  # 28, of which 20 are shown
    shown = [name for name in (f"run-{n}" for n in range(25)) if f"<bdi>{name}</bdi>" in page]
    assert {"run-9", "run-19", "run-8"} <= set(shown)
    assert page.index("<bdi>run-9<") < page.index("<bdi>run-19<") < page.index("<bdi>run-8<")
    assert "run-0" not in shown, "low priorities come last"
    assert "every 2 h" in page


def test_what_is_beside_a_queue_is_internal_and_a_queue_leads_to_its_page(
    client: TestClient, store: kedge.CheckpointManager
) -> None:
    queue = kedge.queue("many", store=store)
    queue.limit(concurrency=3)
    queue.submit(child, 1, key="run-1")
    kedge.schedule(queue, "tick", child, 1, every_s=7200)
    for place in ("/", "/search?q=many"):
        page = client.get(place).text
        assert 'href="/queues#queue-many"' in page
        assert "many:limits" not in page
        assert "many:schedules" not in page
    assert "many:limits" in client.get("/?kind=internal").text
    assert 'id="queue-many"' in client.get("/queues").text
