"""Comparisons with pictures, saved views and money over time, by clicking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kedge
from kedge.pipeline.fork import fork_of
from tests.e2e.seeing import counts, has, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def test_pictures_are_compared_side_by_side_and_paths_filtered(page: Page, known: dict[str, str]) -> None:
    page.goto(f"/compare?id={known['first']}&id={known['last']}")
    shows(page, "#facts", "loss", "1.7193", "0.1905")
    picture = page.locator("li", has_text="model/sample").locator("img")
    counts(page.locator("li", has_text="model/sample"), "img", 3)
    for n in range(3):
        picture.nth(n).scroll_into_view_if_needed()
        assert picture.nth(n).evaluate("image => image.decode().then(() => image.naturalWidth)") == 96
    page.keyboard.press("/")
    page.keyboard.type("optimizer")
    page.keyboard.press("Enter")
    page.wait_for_url("**only=optimizer**")
    counts(page, ".changes li", 1)


def test_a_view_is_saved_and_found_again(page: Page) -> None:
    page.goto("/search?q=epoch&sort=name")
    page.click("text=Save this view…")
    page.fill("#view-name", "All epochs")
    page.click("#save-view button.primary")
    shows(page, ".notice", "The view All epochs is saved")
    page.goto("/search")
    page.click("#views a")
    page.wait_for_url("**/search?q=epoch&sort=name")
    page.goto("/search")
    page.click("[aria-label='Delete view All epochs']")
    shows(page, ".notice", "deleted")
    counts(page, "#views", 0)


def test_money_over_time(page: Page) -> None:
    page.goto("/models")
    has(page, "svg.bars rect", at_least=1)
    page.click(".spans a:text-is('week')")
    page.wait_for_url("**/models?span=week")
    has(page, "svg.bars rect", at_least=1)
    shows(page, ".legend", "gpt-4o-mini")


def test_a_run_is_forked_from_a_step_with_its_plan_first(page: Page, known: dict[str, str]) -> None:
    page.goto("/runs/nightly-tiles")
    page.click("#step-merge a")
    page.click("text=Fork from here…")
    shows(page, "#reused", "download")
    shows(page, "#ran", "merge")
    page.fill("#arguments", "[1]")
    page.click("text=Show the plan")
    shows(page, ".notice.bad", "must be a JSON object")
    page.fill("#arguments", "")
    page.fill("#new-key", "tiles-again")
    page.click("text=Show the plan")
    page.wait_for_url("**new_key=tiles-again**")
    page.click("text=Make the fork")
    page.wait_for_url("**/runs/tiles-again")
    shows(page, ".notice", "the fork of nightly-tiles from merge")
    shows(page, "h1", "paused")
    with kedge.open(known["place"]) as store:
        assert fork_of(store, "tiles-again") == ("nightly-tiles", "merge")
