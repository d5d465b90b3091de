"""Jobs as what they are: threads as conversations, containers by generations, kinds apart, and keys for all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kedge
from tests.e2e.seeing import all_show, counts, has, sees, shows

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def test_kinds_are_apart_and_in_the_address(page: Page) -> None:
    page.goto("/")
    shows(page, "#jobs", "thread:customer-7", "nightly-tiles")
    sees(page.locator("#jobs")).not_to_contain_text("llm:calls")  # what Kedge keeps for itself
    page.click(".kinds a:text-is('threads')")
    page.wait_for_url("**/?kind=thread")
    all_show(page, "#jobs td.name", "thread:customer-7")
    page.click(".kinds a:text-is('runs')")
    shows(page, "#jobs", "nightly-tiles")
    sees(page.locator("#jobs")).not_to_contain_text("train-resnet")
    page.fill("#search", "pub")
    all_show(page, "#jobs td.name", "publish-site")
    assert page.url.endswith("/?kind=run&prefix=pub")
    page.click("#jobs td.name a")
    page.wait_for_url("**/runs/publish-site")  # its own page
    page.goto("/?kind=internal")
    shows(page, "#jobs", "llm:calls")


def test_a_thread_is_a_conversation_that_goes_on_by_itself(page: Page, known: dict[str, str]) -> None:
    page.goto("/jobs/thread:customer-7")
    counts(page, ".said", 5)
    shows(page, ".by-user", "I want my money back.")
    shows(page, ".call", "find_order", '"customer": 7')
    shows(page, ".by-tool", "A-19")
    shows(page, ".ask-notice", "Refund 120.00 to customer 7?")
    sees(page.locator(".history")).not_to_contain_text("writes")
    page.click("text=show everything")
    shows(page, ".history", "writes")
    page.goto("/jobs/thread:customer-7")
    page.click(".history .commit:last-child a.step")
    page.click("[rel=next]")
    counts(page, ".said", 2)  # as it was then
    with kedge.open(known["place"]) as store:
        store.save("session:sdk", "turn", {"items": [{"role": "user", "content": "hello"}]})
        page.goto("/jobs/session:sdk")
        counts(page, ".said", 1)
        items = [{"role": "user", "content": "hello"}, {"type": "function_call", "name": "greet", "arguments": "{}"}]
        store.save("session:sdk", "turn", {"items": items})
    counts(page, ".said", 2)
    shows(page, ".by-assistant .call", "greet")


def test_generations_of_a_container_say_what_changed(page: Page) -> None:
    page.goto("/jobs/container:counter")
    counts(page, "#generations .steps li", 3)
    shows(page, "#generation-2", "1 started: worker (12)", "memory +5.0 MiB", "left running")
    shows(page, "#generation-3", "memory +1.0 MiB", "ended", "paused for 43.2 ms")
    shows(page, "#generations table", "python3", "/app/worker")
    page.click("#generation-2 a.button")
    shows(page, ".changes", "processes/12")


def test_all_keys_are_shown_and_work(page: Page) -> None:
    page.goto("/jobs/train-resnet")
    page.keyboard.press("?")
    shows(page, "#keys", "search everything")
    page.keyboard.press("?")
    sees(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("x")
    shows(page, "#chosen", "#14 chosen")
    page.keyboard.press("Enter")
    shows(page, "h1", "#14")
    page.keyboard.press("p")
    shows(page, "h1", "#13")
    page.keyboard.press("n")
    shows(page, "h1", "#14")
    page.keyboard.press("2")
    page.wait_for_url("**/runs")
    has(page, "#runs td.name", at_least=4)
