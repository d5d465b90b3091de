"""Numbers of metadata over the steps of jobs, as charts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kedge
from tests.e2e.seeing import counts, has, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def test_a_job_shows_its_numbers_and_points_lead_to_checkpoints(page: Page) -> None:
    page.goto("/jobs/train-resnet")
    counts(page, ".chart", 2)  # loss and lr
    shows(page, "#chart-loss .extremes", "Lowest", "0.1905 #12")
    has(page, "#chart-loss .dot", at_least=12)
    page.locator("#chart-loss .dot").first.click()
    shows(page, "h1", "#1")
    page.goto("/jobs/train-resnet")
    page.click("#chart-loss .extremes a >> nth=0")
    shows(page, "h1", "epoch 12")
    page.goto("/jobs/weekly-report")
    shows(page, "h1", "weekly-report")
    counts(page, ".chart, #charts", 0)


def test_jobs_are_compared_in_one_chart_and_it_is_in_the_address(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(1, 8):
            store.save("train-again", f"epoch {n}", {"n": n}, metadata={"loss": 2 / n})
    page.goto("/jobs/train-resnet")
    page.click("text=Compare jobs")
    page.fill("#with", "train-again")
    page.click("button:text-is('Add')")
    counts(page, "#chart-loss .line", 2)
    shows(page, "#chart-loss .extremes", "train-again", "train-resnet")
    page.click("nav[aria-label=Number] >> text=loss")
    counts(page, ".chart", 1)
    page.reload()
    counts(page, "#chart-loss .line", 2)
    shows(page, ".command", "kedge plot train-resnet train-again --metric loss")
    page.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
        saved = store.save("train-resnet", "epoch 14", {"n": 14}, metadata={"loss": 0.01})
        shows(page, "#chart-loss .extremes", "0.01 #")
        has(page, "#chart-loss .line", at_least=2)  # still both
        store.delete("train-resnet", saved)  # other tests count them
    page.click("text=train-again ×")
    counts(page, "#chart-loss .line", 1)


def test_a_pointer_reads_values_and_a_click_leads_to_their_checkpoint(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(1, 41):
            store.save("read-here", f"epoch {n}", {"n": n}, metadata={"loss": 40 / n, "tokens": n * n})
            store.save("read-too", f"epoch {n}", {"n": n}, metadata={"loss": 80 / n, "tokens": n})
    page.goto("/jobs/read-here/numbers?with=read-too&metric=loss")
    plot = page.locator("#chart-loss svg").bounding_box()
    assert plot is not None
    at = {"x": plot["width"] * (5 + 19 / 39 * 590) / 600, "y": plot["height"] / 2}  # of the 20th
    page.locator("#chart-loss svg").hover(position=at)
    shows(page, ".readout", "read-here #20 2", "read-too #20 4")
    page.hover("h1")
    counts(page, ".readout", 0)
    page.locator("#chart-loss svg").click(position={**at, "y": plot["height"] - 2})
    page.wait_for_url("**/checkpoints/**")
    shows(page, "h1", "epoch 20")
    shows(page, ".crumbs", "read-here")  # whose line is nearer
    page.go_back()
    page.select_option("[name=over]", "tokens")
    page.wait_for_url("**over=tokens**")
    shows(page, "#chart-loss .ends", "tokens", "1600")
    page.select_option("[name=scale]", "log")
    page.wait_for_url("**scale=log**")
    counts(page, "#chart-loss .line", 2)
    page.click("text=read-too ×")
    page.wait_for_url(lambda url: "over=tokens" in url and "scale=log" in url and "read-too" not in url)
    counts(page, "#other-jobs option[value=read-too]", 1)  # offered


def test_a_logarithmic_scale_is_not_pretended(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        store.save("falls-to-zero", "one", {}, metadata={"lr": 1.0})
        store.save("falls-to-zero", "two", {}, metadata={"lr": 0.0})
    page.goto("/jobs/falls-to-zero/numbers?scale=log")
    shows(page, "#chart-lr", "linear, because it has values of 0 or less")
    page.goto("/jobs/falls-to-zero/at?seq=2")
    shows(page, "h1", "two")
    page.goto("/jobs/falls-to-zero/at?seq=3")
    shows(page, "main", "has no checkpoint #3")


def test_a_job_without_numbers_says_how_they_come(page: Page) -> None:
    page.goto("/jobs/weekly-report/numbers?with=nobody")
    shows(page, ".empty", "No numbers", "metadata=")
