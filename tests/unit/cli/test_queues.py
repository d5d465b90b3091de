"""`kedge queue`: what queues hold, their limits, and what was given up."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

from pathlib import Path

import kedge
from kedge.pipeline.consumer import Worker
from tests.unit.cli.test_app import Run, answer, run, store  # noqa: F401 - fixtures


@kedge.pipeline
def work(number: int) -> int:
    if number == 2:
        raise ValueError("no luck")
    return number


def test_a_queue_is_listed_limited_and_retried(run: Run, store: Path) -> None:
    with kedge.open(store) as opened:
        queue = kedge.queue("q", store=opened)
        queue.submit(work, 1, key="one", group="tenant")
        queue.submit(work, 2, key="two")
    listed = answer(run("queue", "list", "q", "--json"))["entries"]
    assert [(entry["key"], entry["state"], entry["group"]) for entry in listed] == [
        ("one", "ready5", "tenant"),
        ("two", "ready5", ""),
    ]
    assert (
        "limits of queue q: concurrency 2, rate_per_s 0.5"
        in run("queue", "limit", "q", "--concurrency", "2", "--rate", "0.5").stdout
    )
    assert answer(run("queue", "limit", "q", "--max-queued", "1", "--json")) == {
        "queue": "q", "concurrency": None, "rate_per_s": None, "max_queued": 1,
    }  # fmt: skip
    with kedge.open(store) as opened:
        Worker(opened, ["q"], {"work": work}).serve(until_empty=True)
    assert [entry["note"] for entry in answer(run("queue", "list", "q", "--dead", "--json"))["entries"]] == [
        "ValueError: no luck"
    ]
    run("queue", "retry", "q", "two")
    assert [entry["state"] for entry in answer(run("queue", "list", "q", "--json"))["entries"]] == ["ready5"]
