"""Find anything, and what queues hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import kedge
from kedge.pipeline.queues import DEAD, Queue
from kedge.pipeline.schedules import find_schedule, schedule
from tests.e2e.page_data import fill_job
from tests.e2e.seeing import all_show, counts, sees, shows
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

    from tests.e2e.conftest import PageOf

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


def test_what_was_typed_last_is_what_is_shown_however_slow_the_answers_are(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for job in ("slow-1", "slow-2", "slow-3"):
            store.save(job, "s", 1)
    held: list[Route] = []
    is_open = False
    page.route("**/?prefix=*", lambda route: route.continue_() if is_open else held.append(route))
    page.goto("/")
    page.evaluate("addEventListener('htmx:config:request', () => { window.asked = (window.asked || 0) + 1; })")
    for number in (1, 2, 3):  # the first is under way, the second waits for it, and the third is the one
        page.fill("#search", f"slow-{number}")
        wait_for(lambda number=number: page.evaluate("window.asked") == number, "it is not asked for")
    wait_for(lambda: page.title() and held, "the first is not under way")
    is_open = True
    for route in held:
        route.continue_()
    counts(page, "#jobs tbody tr", 1)
    shows(page, "#jobs", "slow-3")


def test_a_refresh_that_was_under_way_does_not_undo_a_search(page: Page, known: dict[str, str]) -> None:
    page.goto("/")
    page.wait_for_selector("#live.on")
    held: list[Route] = []
    page.route(re.compile("/$"), lambda route: held.append(route))  # noqa: PLW0108 - it takes no built-in method
    with page.expect_request(re.compile("/$")), kedge.open(known["place"]) as store:
        store.save("sought-meanwhile", "s", 1)
    page.fill("#search", "sought-mean")
    counts(page, "#jobs tbody tr", 1)
    with page.expect_response("**/?prefix=sought-mean"):  # the refresh of what is shown now
        for route in held:
            route.continue_()
    counts(page, "#jobs tbody tr", 1)


def test_kinds_and_statuses_are_told_apart_and_are_in_the_address(page: Page) -> None:
    page.goto("/search")
    page.select_option("#kind", "run")
    page.wait_for_url("**kind=run**")
    shows(page, "#found-jobs", "nightly-tiles")
    all_show(page, "#found-jobs .chip:not([class*=status-])", "run")
    page.select_option("#status", "failed")
    page.wait_for_url("**status=failed**")  # import-orders is on the page before it too
    shows(page, "#found-jobs", "import-orders")
    all_show(page, "#found-jobs .chip[class*=status-]", "failed")
    page.reload()
    sees(page.locator("#status")).to_have_value("failed")
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


def test_activity_is_filtered_and_the_filter_is_in_the_address(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(3):
            store.save("watched-job", f"s{n}", n)
        store.tag(store.list("watched-job")[0].id, seen="")
        store.acting_as("carol").pin(store.list("watched-job")[1].id)
    page.goto("/activity")
    page.fill("[name=job]", "WATCHED")
    page.click("button:text-is('Filter')")
    counts(page, "#events tbody tr", 5)
    page.select_option("[name=action]", "-save")
    counts(page, "#events tbody tr", 2)
    page.fill("[name=actor]", "carol")
    page.click("button:text-is('Filter')")
    counts(page, "#events tbody tr", 1)
    shows(page, "#events tbody tr", "carol", "pin", "watched-job")
    page.reload()
    counts(page, "#events tbody tr", 1)
    page.fill("[name=actor]", "nobody-like-that")
    page.click("button:text-is('Filter')")
    shows(page, "#events", "Nothing found")


def test_a_search_goes_on_by_itself_until_something_is_found(page_of: PageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.server.page.search._LOOK_JOBS", 4)
    page, place = page_of(None)
    with kedge.open(place) as store:
        for n in range(18):
            store.save(f"job{n:02}", "step", n, metadata={"note": "the Needle" if n == 17 else "hay"})
    page.goto("/search")
    page.fill("#words", "needle")
    page.click("button:text-is('Search')")
    shows(page, "#found-checkpoints", "job17", "note: the Needle")
    page.fill("#words", "nowhere")
    page.click("button:text-is('Search')")
    shows(page, "#hits", "Nothing found", "Looked at 18 jobs")


def test_a_long_history_is_previewed_before_it_is_cleaned_up(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        fill_job(store, "long-history", 7000)
    page.goto("/jobs/long-history")
    page.click("text=Clean up…")
    shows(page, "#cleanup-plan", "6,990 checkpoints go", "10 stay")
    page.locator("#keep").fill("40")
    shows(page, "#cleanup-plan", "6,960 checkpoints go")
    page.goto("/jobs/long-history/retention?keep_last=5")
    shows(page, "#plan", "6,995 checkpoints go")
    page.click("text=Why the others stay")
    shows(page, "#plan details", "#7000")
