"""The page in a real browser, on data made by the real library."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from tests.e2e.page_data import HOSTILE, RTL, fill, fill_job

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


@contextmanager
def served(place: Path, *arguments: str) -> Iterator[str]:
    """`holdfast serve` on a free port; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "holdfast", "serve", "--store", str(place), "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/healthz", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the service ended"
                assert time.monotonic() < until, "the service does not answer"
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, known: dict[str, str]) -> Iterator[str]:
    place = tmp_path_factory.mktemp("page") / "store"
    known |= fill(place) | {"place": str(place)}
    with served(place) as where:
        yield where


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    context = browser.new_context(base_url=address, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    found = context.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    found.on("dialog", lambda dialog: problems.append(f"a dialog says {dialog.message}"))
    yield found
    context.close()
    assert [text for text in problems if "status of 4" not in text] == []


def test_jobs_are_listed_and_searched_as_one_types(page: Page) -> None:
    page.goto("/")
    assert "train-resnet" in page.inner_text("#jobs")
    assert page.locator("#jobs svg.sparkline").count() > 3
    page.keyboard.press("/")
    page.keyboard.type("week")
    page.locator("#jobs", has_text="train-resnet").wait_for(state="detached")
    assert "weekly-report" in page.inner_text("#jobs")
    page.fill("#search", "nothing-like-it")
    page.wait_for_selector(".empty")


def test_a_history_is_a_graph_with_branches_tags_and_pins(page: Page) -> None:
    page.goto("/jobs/train-resnet")
    assert page.locator(".history .commit").count() == 15
    assert page.locator(".dot.lane-1").count() >= 1  # a branch
    assert page.locator(".dot.pinned").count() == 1
    assert "best" in page.inner_text(".history")
    assert page.locator("svg.timeline circle").count() == 15


def test_a_state_unfolds_level_by_level_and_arrays_are_summarised(page: Page, known: dict[str, str]) -> None:
    page.goto(f"/checkpoints/{known['last']}")
    page.click("summary:has-text('model')")
    page.click("summary:has-text('layer1')")
    page.click("summary:has-text('weight')")
    page.wait_for_selector("svg.histogram")
    assert "96 × 96" in page.inner_text(".array")
    page.click("summary:has-text('sample')")
    picture = page.locator("img.thumbnail").last
    picture.wait_for()
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 96
    assert "adam" not in page.inner_text(".tree")
    page.click("summary:has-text('optimizer')")
    page.wait_for_selector("text=adam")


def test_two_checkpoints_are_compared_with_texts_side_by_side(page: Page) -> None:
    page.goto("/jobs/weekly-report")
    assert page.locator("[data-needs-two]").is_disabled()
    for box in page.locator("input[name=id]").all():
        box.check()
    page.click("[data-needs-two]")
    text = page.inner_text(".changes")
    assert "reviewers/1" in text
    assert "signed" in text
    assert page.locator(".text-diff .plus").count() >= 2
    assert "two were rejected" in page.inner_text(".text-diff")


def test_pin_tag_branch_and_delete(page: Page, known: dict[str, str]) -> None:
    page.goto(f"/checkpoints/{known['old']}")
    page.click("button:text-is('Pin')")
    assert "Pinned." in page.inner_text(".notice")
    page.click("button:text-is('Delete…')")
    assert page.locator("#delete button.danger").is_disabled()
    page.keyboard.press("Escape")
    page.click("button:text-is('Unpin')")
    page.fill("#tag-name", "reviewed")
    page.fill("#tag-value", "yes")
    page.click("button:text-is('Set')")
    assert "reviewed=yes" in page.inner_text(".chips")
    page.click("button:text-is('Branch from here…')")
    page.fill("#branch-job", "report-again")
    page.click("#branch button.primary")
    assert page.inner_text(".crumbs").endswith("report-again")
    page.click("button:text-is('Delete…')")
    page.click("#delete button.danger")
    assert page.url.endswith("/jobs/report-again")
    assert "is deleted" in page.inner_text(".notice")


def test_cleaning_up_shows_what_goes_before_it_goes(page: Page, known: dict[str, str]) -> None:
    with holdfast.open(known["place"]) as store:
        for n in range(12):
            store.save("to-clean", f"step {n}", {"n": n})
    page.goto("/jobs/to-clean")
    page.click("button:text-is('Clean up…')")
    page.wait_for_selector("#cleanup-plan >> text=2 checkpoints go")
    page.locator("#keep").fill("3")
    page.wait_for_selector("#cleanup-plan >> text=9 checkpoints go")
    assert "step 0" in page.inner_text(".going")
    page.click("#cleanup button.danger")
    assert "9 checkpoints deleted" in page.inner_text(".notice")
    assert page.locator(".commit").count() == 3


def test_a_policy_is_previewed(page: Page, known: dict[str, str]) -> None:
    with holdfast.open(known["place"]) as store:
        for n in range(6):
            store.save("retained", f"step {n}", {"n": n})
        store.set_retention("retained", holdfast.RetentionPolicy(keep_last=4, keep_tags=["release"]))
    page.goto("/jobs/retained")
    assert "keep last 4, keep tags release" in page.inner_text(".facts")
    page.click("button:text-is('Retention…')")
    page.wait_for_selector("#retention >> text=2 checkpoints go")
    assert "step 0" in page.inner_text("#retention .going")


def test_a_run_shows_steps_items_and_failures(page: Page) -> None:
    page.goto("/runs")
    text = page.inner_text("#runs")
    assert "nightly-tiles" in text
    assert "division by zero" in text
    page.click("a:has-text('nightly-tiles')")
    assert page.locator(".steps li").count() >= 3
    assert page.locator(".cell.failed").count() == 4
    assert page.locator(".cell.done").count() == 56
    page.locator("details:has-text('tile 5 has no data') summary").first.click()
    assert "ValueError" in page.inner_text(".grid ~ details pre")


def test_models_show_money_spent_and_saved_apart(page: Page) -> None:
    page.goto("/models")
    assert page.locator(".card", has_text="Spent").inner_text().splitlines()[-1] == "on 3 calls"
    assert page.locator(".card", has_text="Saved").inner_text().splitlines()[-1] == "by 1 answer from the store"
    page.click("a:has-text('summarise-again')")
    assert "saved" in page.inner_text(".facts")


def test_approvals_are_decided_once_by_runs_and_workflows(page: Page, known: dict[str, str]) -> None:
    page.goto("/approvals")
    assert "Publish 214 pages" in page.inner_text("#asks")
    page.locator(".ask", has_text="go-live").locator("input[name=comment]").fill("looks good")
    page.locator(".ask", has_text="go-live").locator("button.primary").click()
    assert "approved" in page.inner_text(".notice")
    page.locator(".ask", has_text="pay out").locator("button.danger").click()
    page.wait_for_selector(".empty")
    with holdfast.open(known["place"]) as store:
        from holdfast.pipeline.waiting import decision_of

        made = decision_of(store, "publish-site", "go-live")
        assert made is not None
        assert (made.approved, made.comment) == (True, "looks good")


def test_hostile_names_are_text(page: Page, known: dict[str, str]) -> None:
    page.goto("/jobs/odd-names")
    assert HOSTILE in page.inner_text(".history")
    assert RTL in page.inner_text(".history")
    page.goto(f"/checkpoints/{known['odd']}")
    assert HOSTILE in page.inner_text("h1")
    assert page.locator("main script, main img[src=x]").count() == 0
    page.goto("/activity")


def test_storage_says_what_grew_and_gc_runs_in_the_background(page: Page) -> None:
    page.goto("/storage")
    assert "train-resnet" in page.inner_text("main")
    page.click("button:text-is('Collect garbage')")
    page.wait_for_selector("text=completed")


def test_what_changes_elsewhere_shows_by_itself(page: Page, known: dict[str, str]) -> None:
    page.goto("/")
    page.wait_for_selector("#live.on")
    with holdfast.open(known["place"]) as store:
        store.save("arrives-later", "one", 1)
    page.wait_for_selector("a:has-text('arrives-later')")


def test_the_description_of_the_api_is_one_click_away(page: Page) -> None:
    page.goto("/")
    with page.expect_navigation() as went:
        page.click("footer a")
    assert went.value.json()["openapi"].startswith("3.")


def test_wrong_addresses_say_so(page: Page) -> None:
    for wrong in ("/jobs/no-such-job", "/checkpoints/nothing_1_00000000", "/runs/none", "/checkpoints/..%2e%2e"):
        response = page.goto(wrong)
        assert response is not None
        assert response.status in (404, 422), wrong
        assert page.locator("h1").count() == 1


def test_a_narrow_dark_screen_with_the_keyboard_alone(browser: Browser, address: str) -> None:
    context = browser.new_context(base_url=address, viewport={"width": 380, "height": 800}, color_scheme="dark")
    page = context.new_page()
    for where in (
        "/",
        "/jobs/train-resnet",
        "/runs",
        "/storage",
        "/approvals",
        "/models",
        "/activity",
        "/jobs/odd-names",
    ):
        page.goto(where)
        too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert too_wide <= 0, where
    page.goto("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skips the menu
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "search"
    context.close()


def test_ten_thousand_checkpoints_and_a_large_state(page: Page, known: dict[str, str]) -> None:
    with holdfast.open(known["place"]) as store:
        fill_job(store, "many", 10_000)
        large = store.save("large", "state", {"rows": [{"n": n, "text": f"row {n} " * 8} for n in range(300_000)]})
    page.goto("/jobs/many")
    assert page.locator(".commit").count() == 100
    page.locator(".history .more").scroll_into_view_if_needed()
    page.locator(".commit").nth(199).wait_for()
    page.goto(f"/checkpoints/{large}")
    page.click("summary:has-text('rows')")
    page.wait_for_selector("text=299,900 more")
    assert page.locator(".panel > .tree > li > details > .tree > li").count() == 101


def test_with_tokens_one_signs_in(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "store"
    with holdfast.open(place) as store:
        store.save("job", "step", {"n": 1})
    token = _token(place, "reader", "read")
    with served(place) as where:
        context = browser.new_context(base_url=where)
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.goto("/jobs/job")
        assert "/login" in page.url
        page.fill("#token", "hf_000000000000_" + "x" * 43)
        page.click("button.primary")
        assert "unknown" in page.inner_text(".notice")
        page.fill("#token", token)
        page.click("button.primary")
        page.goto("/jobs/job")
        assert page.locator(".commit").count() == 1
        assert page.locator("text=Clean up").count() == 0  # it may only read
        cookie: Any = context.cookies()[0]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.click("text=Sign out")
        page.goto("/")
        assert "/login" in page.url
        context.close()


def _token(place: Path, name: str, scope: str) -> str:
    command = [sys.executable, "-m", "holdfast", "token", "create", name, "--scope", scope, "--json"]
    made = subprocess.run([*command, "--store", str(place)], check=True, capture_output=True, text=True)
    return str(json.loads(made.stdout)["token"])
