"""Find anything, and what queues hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kedge
from kedge.pipeline.queues import DEAD, Queue
from kedge.pipeline.schedules import find_schedule, schedule
from tests.e2e.seeing import counts, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


@kedge.pipeline
def nothing(n: int = 0) -> int:
    return n


def test_everything_is_found_by_any_part_of_its_text(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        store.save("finding", "Straße 7", {"n": 1}, tags={"owner": "Grace"}, metadata={"model": {"name": "Small-X"}})
        store.save("finding", "other", {"n": 2})
    for words in ("strasse 7", "STRAßE", "owner=grace", "small-x model"):
        page.goto("/")
        page.keyboard.press("s")
        page.keyboard.type(words)
        page.keyboard.press("Enter")
        if words == "strasse 7":
            shows(page, ".empty", "Nothing found")
            continue
        counts(page, "#found-checkpoints tbody tr", 1)
        shows(page, "#found-checkpoints", "Straße 7", "finding")
    page.goto("/search?q=findin")
    shows(page, "#found-jobs", "finding")
    page.click("#found-jobs a")
    shows(page, "h1", "finding")


def test_kinds_and_statuses_are_told_apart_and_are_in_the_address(page: Page) -> None:
    page.goto("/search")
    page.select_option("#kind", "run")
    shows(page, "#found-jobs", "nightly-tiles")
    assert set(page.locator("#found-jobs .chip:not([class*=status-])").all_inner_texts()) == {"run"}
    page.select_option("#status", "failed")
    shows(page, "#found-jobs", "import-orders")
    assert set(page.locator("#found-jobs .chip[class*=status-]").all_inner_texts()) == {"failed"}
    page.reload()
    assert page.input_value("#status") == "failed"
    page.goto("/search?q=llm")
    counts(page, "#found-jobs", 0)  # what Kedge keeps for itself
    page.goto("/search?q=llm&kind=internal&sort=name")
    shows(page, "#found-jobs tbody", "llm:calls")
    page.goto("/search?tag=best")
    shows(page, "#found-checkpoints", "epoch 9")
    counts(page, "#found-checkpoints tbody tr", 1)


def test_queues_show_what_waits_and_what_was_given_up(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        queue = Queue("tiles", store=store)
        queue.submit(nothing, 1, key="tile-1")
        queue.submit(nothing, 2, key="tile-2")
        (lost,) = [entry for entry in queue.entries() if entry.key == "tile-2"]
        store.tag(lost.id, state=DEAD, note="3 workers died at it")
        schedule(queue, "at-night", nothing, cron="0 3 * * *")
    page.goto("/queues")
    shows(page, "#queue-tiles", "1 ready", "1 dead", "tile-1", "3 workers died at it", "at-night", "0 3 * * *")
    page.click("#queue-tiles button:text-is('Retry')")
    shows(page, ".notice", "tile-2 is in queue tiles again")
    shows(page, "#queue-tiles", "2 ready")
    page.click("#queue-tiles button:text-is('Pause')")
    shows(page, "#queue-tiles", "paused")
    with kedge.open(known["place"]) as store:
        assert find_schedule(store, "tiles", "at-night").is_paused
