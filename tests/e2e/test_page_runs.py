"""A run on its page: over time, step by step, item by item, and what can be told to it."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kedge
from tests.e2e.seeing import counts, sees, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.e2e.conftest import PageOf

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def make_staged(place: str) -> None:
    """Two stages, one in the other, and a step that needs three attempts."""
    tries = iter(range(3))

    def fit(rate: float, password: str) -> dict[str, float]:
        if next(tries) < 2:
            raise ValueError("not yet")
        return {"rate": rate, "score": 0.75}

    with kedge.open(place) as store, kedge.run("staged", store=store, progress=False, signals=False) as run:
        with run.stage("prepare"):
            run.step("fetch", lambda: 1)
            with run.stage("clean"):
                run.step("sort", lambda: 2)
        run.step("fit", fit, 0.5, "hunter2", retries=kedge.Retry(times=2, delay_s=0.0))


def test_a_timeline_has_stages_and_is_zoomed(page: Page, known: dict[str, str]) -> None:
    make_staged(known["place"])
    page.goto("/runs/staged")
    sees(page.locator(".steps .what > a")).to_have_text(["prepare", "fetch", "clean", "sort", "fit"])
    sees(page.locator(".steps li").nth(3)).to_have_attribute("data-depth", "2")
    counts(page, ".steps li:last-child .track .failed", 2)  # its attempts
    counts(page, ".ticks text:first-of-type", 1)
    page.click(".steps >> text=clean")  # a stage leads to its own time
    page.wait_for_url("**from=**")
    shows(page, ".steps", "sort")
    page.click(".spans >> text=whole run")
    page.wait_for_url("**from=0.000000**")
    counts(page, ".steps li", 5)
    axis = page.locator(".ticks").bounding_box()
    assert axis is not None
    page.mouse.move(axis["x"] + axis["width"] / 4, axis["y"] + 10)
    page.mouse.down()
    page.mouse.move(axis["x"] + axis["width"] * 3 / 4, axis["y"] + 10)
    page.mouse.up()
    page.wait_for_url(lambda url: float(re.findall(r"from=([\d.]+)", url)[0]) > 0)
    begin, end = (float(re.findall(f"{name}=([\\d.]+)", page.url)[0]) for name in ("from", "to"))
    page.click("[aria-label='Zoom out']")
    page.wait_for_url(lambda url: f"{begin:.6f}" not in url)
    wider = [float(re.findall(f"{name}=(-?[\\d.]+)", page.url)[0]) for name in ("from", "to")]
    assert wider[1] - wider[0] == pytest.approx(2 * (end - begin), rel=0.01)
    page.goto("/runs/staged?from=-20&to=-10")
    shows(page, "#timeline", "Nothing happened then")


def test_a_step_shows_what_it_was_given_what_it_returned_and_each_attempt(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        if store.catalogue.job("staged") is None:
            make_staged(known["place"])
    page.goto("/runs/staged")
    page.click(".steps >> text=fit")
    shows(page, "main", "rate", "0.5", "(not shown)")
    counts(page, "text=hunter2", 0)
    shows(page, "#output", "score", "0.75")
    counts(page, ".steps li.failed", 2)
    page.locator(".steps li.failed summary").last.click()
    shows(page.locator(".steps li.failed").last, "pre", "ValueError: not yet")


def test_a_log_has_levels_and_its_newest_lines_come_first(page: Page, known: dict[str, str]) -> None:
    go_on = threading.Event()

    def work() -> None:
        with (
            kedge.open(known["place"]) as store,
            kedge.run("talks", store=store, progress=False, signals=False) as run,
        ):
            for n in range(60):
                run.log(f"line {n}", n=n)
            run.log("slow disk", level="warning", ms=312)
            go_on.wait(200)
            run.log("disk lost", level="error")
            with pytest.raises(kedge.Validation):
                run.log("x", level="loud")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        page.goto("/runs")
        page.click("a:has-text('talks')")
        page.wait_for_selector("#live.on")
        shows(page, ".log li:first-child", "warning", "slow disk", "ms=312")
        go_on.set()
        shows(page, ".log li:first-child", "error", "disk lost")  # by itself
    finally:
        go_on.set()
        thread.join()
    page.click("text=Older lines")
    shows(page, ".log li:last-child", "line 0")
    page.click(".spans >> text=warning+")
    counts(page, ".log li", 2)
    assert "level=warning" in page.url


class OneByOne:
    """A runner for a map of which three items fail until they are healed."""

    def __init__(self) -> None:
        self.place = Path()
        self.is_healed = False
        self.tried: list[int] = []

    def resume_job(self, job: str, state: object) -> None:
        self.run(job)

    def run(self, job: str) -> None:
        with kedge.open(self.place) as store, kedge.run(job, store=store, progress=False, signals=False) as run:
            run.map(self._convert, range(130), name="convert", key=str, on_error="collect", workers=1)

    def _convert(self, n: int) -> int:
        self.tried.append(n)
        if n % 60 == 7 and not self.is_healed:
            raise ValueError(f"row {n}")
        return 2 * n


def test_one_item_is_found_and_retried_alone(page_of: PageOf) -> None:
    runner = OneByOne()
    page, runner.place = page_of(runner)
    runner.run("orders")
    page.goto("/runs/orders")
    page.fill("[name=item]", "#64")
    page.click("button:text-is('Find')")
    shows(page, "h1", "#64", "done")
    shows(page, ".tree", "128")
    page.go_back()
    page.fill("[name=item]", "no-such-item")
    page.click("button:text-is('Find')")
    shows(page, "main", "has no item no-such-item")
    page.go_back()
    page.locator("svg.cells").click(position={"x": 7.5 * 16, "y": 24})  # the 68th, in the second row
    shows(page, "h1", "67", "failed")
    runner.is_healed, runner.tried = True, []
    page.click("button:text-is('Retry this item')")
    shows(page, ".notice", "convert/67 was tried again")
    counts(page, "svg.cells[aria-label='128 of 130 done, 2 failed']", 1)
    assert runner.tried == [67]
    page.click("button:text-is('Retry all 2 failed items')")
    counts(page, "svg.cells[aria-label='130 of 130 done, 0 failed']", 1)
    assert sorted(runner.tried) == [7, 67, 127]


def wait_for_go(place: str) -> object:
    """What a run gets by the signal "go"; Paused while nobody has sent it. An event loop runs in the test's thread."""

    def work() -> object:
        with kedge.open(place) as store, kedge.run("waits", store=store, progress=False, signals=False) as run:
            return run.signal("go", wait_s=0)

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(work).result()


def test_a_signal_is_sent_from_the_page(page: Page, known: dict[str, str]) -> None:
    with pytest.raises(kedge.Paused):
        wait_for_go(known["place"])
    page.goto("/runs/waits")
    page.click("text=Send a signal…")
    shows(page, "#signal", "It waits for go")
    page.fill("#signal-value", "{wrong")
    page.click("#signal button.primary")
    shows(page, "main", "not JSON")
    page.go_back()
    page.click("text=Send a signal…")
    page.fill("#signal-value", '{"pages": 3}')
    page.click("#signal button.primary")
    shows(page, ".notice", "Signal go was sent")
    assert wait_for_go(known["place"]) == {"pages": 3}


@kedge.pipeline
def price(order: dict[str, int], *, api_key: str) -> dict[str, object]:
    return {"total": order["pieces"] * 7, "lines": ["line"] * 40}


def test_a_run_shows_its_arguments_and_its_result_and_leads_to_the_whole(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        kedge.start(price, {"pieces": 3}, key="priced", store=store, api_key="sk-77").result(timeout_s=600)
        price.at("priced-here", store=store, progress=False, signals=False)({"pieces": 2}, api_key="sk-78")
    page.goto("/runs/priced")
    shows(page, "#arguments", "order", "{'pieces': 3}", "api_key", "(not shown)")
    shows(page, "#result", "total", "21", "… 40 in all")
    counts(page, "text=sk-77", 0)
    page.click("#result >> text=Show the whole")
    page.wait_for_url("**/checkpoints/**")
    page.click("summary:has-text('result')")
    shows(page, ".tree", "total", "21")
    page.goto("/runs/priced-here")
    shows(page, "#result", "total", "14")
    counts(page, "#result a, #arguments a", 0)  # nothing more of them is kept
    page.goto("/runs/nightly-tiles")  # no call of a pipeline
    counts(page, "#result, #arguments", 0)
