"""The page in a real browser, on data made by the real library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kedge
from kedge.server.tokens import ACCESS, Tokens
from tests.e2e.page_data import HOSTILE, RTL, fill_job
from tests.e2e.page_server import served_here
from tests.e2e.seeing import counts, has, sees, shows, visitor
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def test_jobs_are_listed_and_searched_as_one_types(page: Page) -> None:
    page.goto("/")
    shows(page, "#jobs", "train-resnet")
    has(page, "#jobs svg.sparkline", at_least=4)
    page.keyboard.press("/")
    page.keyboard.type("week")
    page.locator("#jobs", has_text="train-resnet").wait_for(state="detached")
    shows(page, "#jobs", "weekly-report")
    page.fill("#search", "nothing-like-it")
    page.wait_for_selector(".empty")


def test_a_history_is_a_graph_with_branches_tags_and_pins(page: Page) -> None:
    page.goto("/jobs/train-resnet")
    counts(page, ".history .commit", 15)
    has(page, ".dot.lane-1", at_least=1)  # a branch
    counts(page, ".dot.pinned", 1)
    shows(page, ".history", "best")
    counts(page, "svg.timeline circle", 15)


def test_a_state_unfolds_level_by_level_and_arrays_are_summarised(page: Page, known: dict[str, str]) -> None:
    page.goto(f"/checkpoints/{known['last']}")
    page.click("summary:has-text('model')")
    page.click("summary:has-text('layer1')")
    page.click("summary:has-text('weight')")
    page.wait_for_selector("svg.histogram")
    shows(page, ".array", "96 × 96")
    page.click("summary:has-text('sample')")
    picture = page.locator("img.thumbnail").last
    picture.wait_for()
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 96
    sees(page.locator(".tree").first).not_to_contain_text("adam", use_inner_text=True)
    page.click("summary:has-text('optimizer')")
    page.wait_for_selector("text=adam")


def test_two_checkpoints_are_compared_with_texts_side_by_side(page: Page) -> None:
    page.goto("/jobs/weekly-report")
    sees(page.locator("[data-needs='2']")).to_be_disabled()
    for box in page.locator("input[name=id]").all():
        box.check()
    page.click("[data-needs='2']")
    shows(page, ".changes", "reviewers/1", "signed")
    has(page, ".text-diff .plus", at_least=2)
    shows(page, ".text-diff", "two were rejected")


def test_pin_tag_branch_and_delete(page: Page, known: dict[str, str]) -> None:
    page.goto(f"/checkpoints/{known['old']}")
    page.click("button:text-is('Pin')")
    shows(page, ".notice", "Pinned.")
    page.click("button:text-is('Delete…')")
    sees(page.locator("#delete button.danger")).to_be_disabled()
    page.keyboard.press("Escape")
    page.click("button:text-is('Unpin')")
    shows(page, ".notice", "Unpinned.")
    page.fill("#tag-name", "reviewed")
    page.fill("#tag-value", "yes")
    page.click("button:text-is('Set')")
    shows(page, ".chips", "reviewed=yes")
    page.click("[aria-label='Remove tag reviewed']")
    shows(page, ".notice", "Tag reviewed removed.")
    page.click("button:text-is('Branch from here…')")
    page.fill("#branch-job", "report-again")
    page.click("#branch button.primary")
    shows(page, ".notice", "newest checkpoint of report-again")
    shows(page, ".crumbs", "report-again")
    page.click("button:text-is('Delete…')")
    page.click("#delete button.danger")
    page.wait_for_url("**/jobs/report-again")
    shows(page, ".notice", "is deleted")


def test_a_value_is_changed_and_the_job_forks_from_it(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        first = store.save("edited", "step", {"lr": [0.1, 0.2], "w": np.ones(3), "t": (1, 2)}, metadata={"loss": 0.5})
        store.save("edited", "later", {})
    page.goto(f"/checkpoints/{first}")
    for path, value, said in (
        ("lr/1", "{", "not JSON"),
        ("lr/7", "1", "nothing to replace"),
        ("t/0", "1", "nothing to"),
    ):
        page.click("text=Branch from here…")
        page.click("text=Change a value")
        page.fill("#branch-path", path)
        page.fill("#branch-value", value)
        page.click("#branch button.primary")
        shows(page, "main", said)
        page.goto(f"/checkpoints/{first}")
    page.click("text=Branch from here…")
    page.click("text=Change a value")
    page.fill("#branch-path", "lr/1")
    page.fill("#branch-value", '{"max": 1}')
    page.click("#branch button.primary")
    shows(page, ".notice", "newest checkpoint of edited")
    with kedge.open(known["place"]) as store:
        made, state = store.load_latest("edited")  # type: ignore[misc]
        assert (made.parent, made.seq, dict(made.metadata)) == (first, 3, {"loss": 0.5, "edited": "lr/1"})
        assert (state["lr"], state["t"], state["w"].tolist()) == ([0.1, {"max": 1}], (1, 2), [1.0, 1.0, 1.0])  # type: ignore[index, union-attr]


def test_cleaning_up_shows_what_goes_before_it_goes(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(12):
            store.save("to-clean", f"step {n}", {"n": n})
    page.goto("/jobs/to-clean")
    page.click("button:text-is('Clean up…')")
    page.wait_for_selector("#cleanup-plan >> text=2 checkpoints go")
    page.locator("#keep").fill("3")
    page.wait_for_selector("#cleanup-plan >> text=9 checkpoints go")
    shows(page, ".going", "step 0")
    page.click("#cleanup button.danger")
    shows(page, ".notice", "9 checkpoints deleted")
    counts(page, ".commit", 3)


def test_several_checkpoints_are_changed_at_once(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(5):
            store.save("in-bulk", f"step {n}", {"n": n})
    page.goto("/jobs/in-bulk")
    sees(page.locator("button:text-is('Pin')")).to_be_disabled()

    def choose(*numbers: int) -> None:
        counts(page, "input[name=id]:checked", 0)
        for n in numbers:
            page.check(f"[aria-label='Choose #{n} step {n - 1}']")

    choose(1, 2, 4)
    shows(page, "#chosen", "3 chosen")
    sees(page.locator("[data-needs='2']")).to_be_disabled()
    page.click("button:text-is('Tag…')")
    page.fill("#chosen-tag", "stage=old")
    page.click("#tag-chosen button.primary")
    shows(page, ".notice", "3 checkpoints tagged stage")
    choose(2)
    page.click("button:text-is('Pin')")
    shows(page, ".notice", "1 checkpoint pinned")
    for numbers, said in (((1, 2), "pinned"), ((1, 4), "2 checkpoints deleted")):
        choose(*numbers)
        page.click("button:text-is('Delete…')")
        page.click("#delete-chosen button.danger")
        shows(page, "main", said)
        page.goto("/jobs/in-bulk")
    with kedge.open(known["place"]) as store:
        left = {c.seq: (dict(c.tags), c.is_pinned) for c in store.list("in-bulk")}
    assert left == {2: ({"stage": "old"}, True), 3: ({}, False), 5: ({}, False)}


def test_a_run_shows_steps_items_and_failures(page: Page) -> None:
    page.goto("/runs")
    shows(page, "#runs", "nightly-tiles", "division by zero")
    page.fill("#search", "night")
    page.locator("#runs", has_text="import-orders").wait_for(state="detached")
    page.click("a:has-text('nightly-tiles')")
    has(page, ".steps li", at_least=3)
    counts(page, "svg.cells[aria-label='56 of 60 done, 4 failed']", 1)
    page.locator(".failure", has_text="tile 5 has no data").locator("a").click()
    shows(page, "h1", "Item 5")
    shows(page, "pre", "ValueError: tile 5 has no data")
    page.go_back()
    page.locator("svg.cells").click(position={"x": 22.5 * 16, "y": 8})  # each item has its place
    shows(page, "h1", "Item 22", "failed")
    shows(page, "pre", "tile 22 has no data")


def test_models_show_money_spent_and_saved_apart(page: Page) -> None:
    page.goto("/models")
    sees(page.locator(".card", has_text="Spent")).to_have_text(re.compile("on 3 paid calls\\s*$"))
    sees(page.locator(".card", has_text="Saved")).to_have_text(re.compile("by 1 cache hit\\s*$"))
    page.click("a:has-text('summarise-again')")
    shows(page, ".facts", "saved")


def test_approvals_are_decided_once_by_runs_and_workflows(page: Page, known: dict[str, str]) -> None:
    page.goto("/approvals")
    shows(page, "#asks", "Publish 214 pages")
    shows(page, "#asks", '"amount": 120')
    page.locator(".ask", has_text="go-live").locator("input[name=comment]").fill("looks good")
    page.locator(".ask", has_text="go-live").locator("button.primary").click()
    shows(page, ".notice", "approved")
    page.locator(".ask", has_text="pay out").locator("button.danger").click()
    page.wait_for_selector(".empty")
    with kedge.open(known["place"]) as store:
        from kedge.pipeline.approval import decision_of

        made = decision_of(store, "publish-site", "go-live")
        assert made is not None
        assert (made.approved, made.comment) == (True, "looks good")


def test_hostile_names_are_text(page: Page, known: dict[str, str]) -> None:
    page.goto("/jobs/odd-names")
    shows(page, ".history", HOSTILE)
    shows(page, ".history", RTL)
    page.goto(f"/checkpoints/{known['odd']}")
    shows(page, "h1", HOSTILE)
    counts(page, "main script, main img[src=x]", 0)
    page.goto("/activity")


def test_what_changes_elsewhere_shows_by_itself(page: Page, known: dict[str, str]) -> None:
    page.goto("/")
    page.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
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
        counts(page, "h1", 1)


def test_narrow_screens_light_and_dark(page: Page, known: dict[str, str]) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for where in (
        "/",
        "/jobs/train-resnet",
        "/jobs/odd-names",
        "/jobs/thread:customer-7",
        "/jobs/container:counter",
        f"/checkpoints/{known['odd']}",
        f"/compare?id={known['old']}&id={known['new']}",
        "/jobs/odd-names/retention?keep_last=1",
        "/retention?keep_last=50",
        "/runs",
        "/jobs/train-resnet/numbers",
        "/search?q=e&kind=job&sort=size",
        "/queues",
        "/runs/nightly-tiles",
        "/runs/import-orders",
        "/runs/import-orders/step?path=convert",
        "/runs/nightly-tiles/fork?step=merge",
        "/runs/nightly-tiles/item?map=tiles/render&item=5",
        "/tokens",
        "/webhooks",
        "/approvals",
        "/models",
        "/storage",
        "/activity",
        "/jobs/no-such-job",
        "/login",
    ):
        page.goto(where)
        too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert too_wide <= 0, where
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert page.evaluate(CONTRAST) == [], (scheme, where)


# Texts whose colour is too near to that of what is behind them (WCAG AA: 4.5 to 1).
CONTRAST = """() => {
  const parse = (text) => {  // rgb() counts to 255, color(srgb …) to 1
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color") ? numbers.map((n, i) => i < 3 ? n * 255 : n) : numbers;
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
      layers.push([r, g, b, alpha]);
      if (alpha === 1) break;
    }
    const over = (under, [r, g, b, a]) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
    return layers.reverse().reduce(over, [255, 255, 255]);
  };
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const wrong = [];
  for (const element of document.querySelectorAll("main *, header *, footer *")) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!element.checkVisibility() || element.closest("svg, :disabled")) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) wrong.push([element.className, element.textContent.slice(0, 40), ratio]);
  }
  return wrong;
}"""


def test_the_keyboard_is_enough(page: Page) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skips the menu
    page.keyboard.press("Tab")
    sees(page.locator("#search")).to_be_focused()
    sees(page.locator("#search")).to_have_css("outline-style", "solid")
    page.goto("/jobs/weekly-report")
    page.locator("input[name=id]").first.focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")  # its name
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    sees(page.locator("#chosen")).to_have_text("#2 and #1 chosen")
    page.locator("[data-needs='2']").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?*")
    page.goto("/jobs/weekly-report")
    page.locator("button:text-is('Clean up…')").focus()
    page.keyboard.press("Enter")
    sees(page.locator("#cleanup")).to_be_visible()
    page.keyboard.press("Escape")
    sees(page.locator("#cleanup")).to_be_hidden()


def test_ten_thousand_checkpoints_and_a_large_state(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        fill_job(store, "many", 10_000)
        large = store.save("large", "state", {"rows": [{"n": n, "text": f"row {n} " * 100} for n in range(50_000)]})
    page.goto("/jobs/many")
    counts(page, ".commit", 50)
    page.locator("#history .more").scroll_into_view_if_needed()
    page.locator(".commit").nth(99).wait_for()
    page.locator(".commit").nth(75).locator("input").check()
    page.wait_for_selector("#live.on")
    top = page.locator(".commit").nth(75).bounding_box()
    with kedge.open(known["place"]) as store:  # what is loaded stays as it is while the job goes on
        store.save("many", "the newest", {"n": 0})
        store.tag(page.locator(".commit").nth(60).locator("input").get_attribute("value") or "", seen="yes")
    page.locator("#rows-newest .commit", has_text="the newest").wait_for(state="attached")
    page.locator(".commit", has_text="seen=yes").wait_for()
    has(page, ".commit", at_least=101)
    sees(page.locator(".commit").nth(76).locator("input")).to_be_checked()
    # The browser scrolls by what came above when it draws the next time.
    wait_for(lambda: page.locator(".commit").nth(76).bounding_box() == top, "what is looked at has moved")
    page.goto(f"/checkpoints/{large}")
    page.click("summary:has-text('rows')")
    page.wait_for_selector("text=The first 100 of 50,000 rows")
    page.click("text=Show as a tree")
    page.wait_for_selector("text=49,900 more")
    counts(page, ".panel > .tree > li > details > div > .tree > li", 101)


def test_with_tokens_one_signs_in(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "store"
    with kedge.open(place) as store:
        store.save("job", "step", {"n": 1})
    with kedge.open(place, namespace=ACCESS) as records:
        _, token = Tokens(records).create("reader", "read", ["default"])
    with served_here(place, None) as where:
        context = visitor(browser, where)
        page = context.new_page()
        page.goto("/jobs/job")
        assert "/login" in page.url
        page.fill("#token", "kd_000000000000_" + "x" * 43)
        page.click("button.primary")
        shows(page, ".notice", "unknown")
        page.fill("#token", token)
        page.click("button.primary")
        page.wait_for_selector("text=Sign out")
        page.goto("/jobs/job")
        counts(page, ".commit", 1)
        counts(page, "text=Clean up", 0)  # it may only read
        cookie: Any = context.cookies()[0]
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.click("text=Sign out")
        page.wait_for_selector("#token")
        page.goto("/")
        assert "/login" in page.url
        context.close()


def test_a_token_is_made_shown_once_and_revoked(browser: Browser, tmp_path: Path) -> None:
    place = tmp_path / "store"
    with kedge.open(place, namespace=ACCESS) as records:
        _, admin = Tokens(records).create("ada", "admin", ["default", "lab"])
    with served_here(place, None) as where:
        context = visitor(browser, where)
        page = context.new_page()
        page.goto("/tokens")
        page.fill("#token", admin)
        page.click("button.primary")
        page.click("text=Create a token…")
        page.fill("#token-name", "ci")
        page.select_option("#token-scope", "write")
        page.fill("#token-days", "7")
        page.click("#create button.primary")
        shows(page, "#made", "it is not shown again")
        text = page.locator("#made code").inner_text()
        row = page.locator("tr", has_text="ci")
        shows(row, "td:nth-child(2)", "write")
        with kedge.open(place, namespace=ACCESS) as records:
            assert Tokens(records).find(text) is not None
        page.goto("/tokens")
        counts(page, "#made", 0)
        row.locator("text=Revoke…").click()
        page.locator(".dialog:popover-open button.danger").click()
        shows(page, ".notice", "ci is revoked")
        shows(row, ".chip", "revoked")
        with kedge.open(place, namespace=ACCESS) as records:
            assert Tokens(records).find(text) is None
        context.close()
