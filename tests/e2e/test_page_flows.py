"""What people do on the page over several steps, and what the page does by itself while they look."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kedge
from tests.e2e.page_data import HOSTILE, fill_days
from tests.e2e.seeing import all_show, counts, has, sees, shows, visitor
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

    from tests.e2e.conftest import PageOf

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


# --- retention ---


def test_a_policy_is_tried_kept_and_removed(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(12):
            store.save("retained", f"step {n}", {"n": n}, tags={"release": ""} if n == 1 else None)
    page.goto("/jobs/retained")
    page.click("text=Retention…")
    shows(page, "main", "has no policy")
    page.fill("#keep_last", "4")
    page.wait_for_selector("#plan >> text=8 checkpoints go")
    page.fill("#keep_tags", "release")
    page.wait_for_selector("#plan >> text=7 checkpoints go")
    page.click("text=Why the others stay")
    shows(page, "#plan", "tag release")
    page.fill("#keep_within", "soon")
    page.wait_for_selector("#plan >> text=not a duration")
    page.fill("#keep_within", "")
    page.wait_for_selector("#plan >> text=7 checkpoints go")
    page.click("button:text-is('Save this policy')")
    shows(page, ".notice", "saved with the job")
    sees(page.locator("#keep_last")).to_have_value("4")
    with kedge.open(known["place"]) as store:
        kept = store.jobs("retained")[0].retention
        assert kept is not None
        assert kedge.RetentionPolicy.from_json(kept) == kedge.RetentionPolicy(keep_last=4, keep_tags=["release"])
    page.goto("/retention")
    sees(page.locator("tr", has_text="retained")).to_contain_text("keep last 4, keep tags release")
    page.goto("/jobs/retained/retention")
    page.click("button:text-is('Remove the policy')")
    shows(page, "main", "has no policy")
    with kedge.open(known["place"]) as store:
        assert store.jobs("retained")[0].retention is None
        assert store.jobs("retained")[0].checkpoints == 12  # nothing was applied


def test_a_hostile_policy_is_text(page: Page) -> None:
    page.goto(f"/jobs/train-resnet/retention?keep_tags={HOSTILE}&keep_last=-1&min_per_level=step%3Dx")
    counts(page, "main script, main img", 0)
    shows(page, "#plan", "is no number")


def test_a_policy_is_applied_once_it_is_confirmed(page_of: PageOf) -> None:
    page, place = page_of(object())
    with kedge.open(place) as store:
        for n in range(6):
            store.save("one", f"step {n}", {"n": n}, pin=n == 0)
            store.save("two", f"step {n}", {"n": n})
    page.goto("/retention")
    page.fill("#keep_last", "2")
    page.wait_for_selector("#plan >> text=7 checkpoints go")
    page.click("text=Delete these now…")
    page.click("#apply >> text=Cancel")
    page.click("text=Delete these now…")
    page.click("#apply button:text-is('Delete now')")
    shows(page, ".notice", "7 checkpoints deleted")
    with kedge.open(place) as store:
        assert [c.seq for c in store.list("one")] == [1, 5, 6]
        assert [c.seq for c in store.list("two")] == [5, 6]
    page.goto("/jobs/one/retention?keep_last=1")
    page.click("text=Delete it now…")
    page.click("#apply button:text-is('Delete now')")
    counts(page, ".commit", 2)


# --- storage ---


def test_storage_shows_growth_as_it_happens_and_what_gc_would_free(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        fill_days(store, {"grows": 50_000, "grows-less": 20_000})
        data = store.save("to-free", "step", {"data": b"x1" * 100_000 + bytes(range(256)) * 400})

    def shows_a_month() -> bool:
        page.goto("/storage")  # each look reads some thousand checkpoints more
        return page.locator(".spans [aria-current]").inner_text() == "month"

    wait_for(shows_a_month, "the oldest checkpoints are not counted")
    has(page, "svg.bars g", at_least=28)
    shows(page, ".legend", "grows")
    sees(page.locator(".card", has_text="Compression")).to_have_text(re.compile(r"\d ?×"))
    page.click(".spans >> text=hour")
    shows(page, ".spans [aria-current]", "hour")
    has(page, "svg.bars g", at_least=1)
    page.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
        store.save("grew-just-now", "step", {"text": "new " * 1000})
        store.delete("to-free", data)
    page.wait_for_selector("td >> text=grew-just-now")
    page.wait_for_selector("#garbage >> text=/[1-9][0-9]* piece/")
    page.click("button:text-is('Collect garbage')")
    page.wait_for_selector("#tasks >> text=freed")
    page.wait_for_selector("#garbage >> text=everything is needed")
    page.click("button:text-is('Verify everything')")
    page.wait_for_selector("#tasks >> text=all sound")


# --- runs ---


class Runner:
    """Runs the pipeline again, as the one in front of the service would."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.heals = False
        self.place = Path()

    def resume_job(self, job: str, state: object) -> None:
        self.calls.append(job)
        self.run(job)

    def run(self, job: str) -> None:
        with (
            kedge.open(self.place) as store,
            kedge.run(job, store=store, progress=False, signals=False) as run,
        ):
            rows = run.step("read", lambda: list(range(20)))
            run.map(self._convert, rows, key=str, on_error="collect")
            if not self.heals and job == "stops":
                run.step("check", self._check)

    def _convert(self, n: int) -> int:
        if n % 9 == 4 and not self.heals:
            raise ValueError(f"row {n} is {HOSTILE}")
        return n

    def _check(self) -> None:
        raise ValueError("rows are missing")


def test_all_that_failed_is_retried_with_a_button(page_of: PageOf) -> None:
    runner = Runner()
    page, runner.place = page_of(runner)
    runner.run("orders")
    with pytest.raises(ValueError, match="rows are missing"):
        runner.run("stops")
    page.goto("/runs/orders")
    shows(page, ".resume", "2 items failed, 18 done")
    page.locator(".failure a").first.click()
    shows(page, ".notice.bad", HOSTILE)
    page.go_back()
    runner.heals = True
    page.click("button:text-is('Retry all 2 failed items')")
    shows(page, ".notice", "was resumed")
    counts(page, "svg.cells[aria-label='20 of 20 done, 0 failed']", 1)
    counts(page, "svg.cells path", 1)
    counts(page, ".resume", 0)
    page.goto("/runs/stops")
    shows(page, ".resume", "check ValueError: rows are missing")
    page.click(".steps >> text=Traceback")
    shows(page, ".steps pre", "rows are missing")
    page.click("button:text-is('Resume and retry all 2 failed items')")
    page.wait_for_selector("h1 >> text=completed")
    assert runner.calls == ["orders", "stops"]


def test_a_checkpoint_is_restored_downloaded_and_its_job_copied(page_of: PageOf) -> None:
    class Takes:
        calls: list[tuple[str, object]] = []  # noqa: RUF012 - of this test

        def resume_job(self, job: str, state: object) -> None:
            self.calls.append((job, state))

    page, place = page_of(Takes())
    with kedge.open(place) as store:
        first = store.save("job", "one", {"n": 1})
        store.save("job", "two", {"n": 2})
    page.goto(f"/checkpoints/{first}")
    page.click("text=Restore…")
    shows(page, "#restore", f"kedge restore job {first} --store http://")
    page.click("#restore button.primary")
    shows(page, ".notice", "was resumed from here")
    assert Takes.calls == [("job", {"n": 1})]
    page.click("text=Download…")
    with page.expect_download() as loaded:
        page.click("text=Everything, as JSON")
    assert '"n":1' in loaded.value.path().read_text().replace(" ", "")
    page.goto("/jobs/job")
    page.click("text=Copy…")
    page.fill("#new-job", "job-2")
    page.click("#copy button.primary")
    page.wait_for_url("**/jobs/job-2")
    counts(page, ".commit", 2)
    with kedge.open(place) as store:
        assert store.restore("job-2") == {"n": 2}


def test_a_refusal_of_the_runner_is_told(page_of: PageOf) -> None:
    class Refuses(Runner):
        def resume_job(self, job: str, state: object) -> bool:  # type: ignore[override]
            return False

    runner = Refuses()
    page, runner.place = page_of(runner)
    runner.run("orders")
    page.goto("/runs/orders")
    page.click("button:text-is('Retry all 2 failed items')")
    shows(page, "main", "refused to resume orders")


def test_without_a_runner_the_command_is_there_to_be_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.clock.install()
    page.goto("/runs/import-orders")
    shows(page, ".resume", "convert")
    page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))  # "Copied" is there until the clock goes on
    page.click(".resume >> text=Copy")
    page.wait_for_selector(".resume >> text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == (
        f"kedge runs resume import-orders --store {page.url.partition('/runs')[0]}"
    )
    page.clock.run_for(2000)
    page.wait_for_selector(".resume button:text-is('Copy')")


def test_steps_appear_as_a_run_goes_on(page: Page, known: dict[str, str]) -> None:
    go_on = [threading.Event() for _ in range(2)]

    def work() -> None:
        with (
            kedge.open(known["place"]) as store,
            kedge.run("goes-on", store=store, progress=False, signals=False) as run,
        ):
            run.step("first", lambda: 1)
            go_on[0].wait(200)
            run.step("second", lambda: 2)
            go_on[1].wait(200)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        page.goto("/runs")
        page.wait_for_selector("a:has-text('goes-on')")
        page.click("a:has-text('goes-on')")
        page.wait_for_selector(".steps >> text=first")
        page.wait_for_selector("#working")
        page.wait_for_selector("#live.on")
        go_on[0].set()
        page.wait_for_selector(".steps >> text=second")
        go_on[1].set()
        page.wait_for_selector("h1 >> text=completed")
        counts(page, "#working", 0)
        counts(page, ".steps svg.track rect", 2)
    finally:
        for event in go_on:
            event.set()
        thread.join()


def say(place: str, run: str, text: str) -> None:
    """Something happens to a run that has ended: a page of it refreshes."""
    with kedge.open(place) as store, store.lease(run) as lease:
        store.save(run, "log", "", tags={"kind": "log"}, metadata={"kind": "log", "text": text}, lease=lease)


@pytest.mark.parametrize("moment", ["before", "while it comes", "after"])
def test_what_is_unfolded_stays_so_while_the_page_follows(page: Page, known: dict[str, str], moment: str) -> None:
    """Unfolded before the page asks for what is new, while the answer is under way, or when it has come."""
    run = "import-orders"
    page.goto(f"/runs/{run}")
    page.wait_for_selector("#live.on")
    part = page.locator(".steps details").last
    if moment == "before":
        part.locator("summary").click()
        say(known["place"], run, f"said {moment}")
    elif moment == "while it comes":
        held: list[Route] = []
        is_open = False
        page.route(f"**/runs/{run}", lambda route: route.continue_() if is_open else held.append(route))
        with page.expect_request(f"**/runs/{run}"):
            say(known["place"], run, f"said {moment}")
        part.locator("summary").click()
        is_open = True
        for route in held:
            route.continue_()
    else:
        say(known["place"], run, f"said {moment}")
    page.wait_for_selector(f".log >> text=said {moment}")
    if moment == "after":
        part.locator("summary").click()
        say(known["place"], run, "said at last")
        page.wait_for_selector(".log >> text=said at last")
    shows(part, "pre", "Error")


# --- comparing ---


def test_a_checkpoint_is_compared_with_a_job_as_it_goes_on(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        store.save("live-job", "one", {"n": 1, "text": "a long text\n" * 30})
    page.goto("/jobs/live-job")
    page.locator("input[name=id]").check()
    page.click("text=Compare with the newest, live")
    shows(page, "#comparison", "This is the newest checkpoint")
    page.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
        store.save("live-job", "two", {"n": 2, "text": "a long text\n" * 29 + "another\n"})
    page.wait_for_selector(".changes >> text=another")
    counts(page, ".text-diff .plus", 1)
    page.click("text=Compare with a live job…")
    page.fill("#live-job", "train-resnet")
    page.click("#other button.primary")
    shows(page, ".sides", "newest of train-resnet, live")
    page.goto(f"/checkpoints/{known['old']}")
    page.click("text=Compare…")
    page.click("text=With the newest of this job, live")
    shows(page, ".sides", "newest of weekly-report")


def test_a_new_branch_is_drawn_through_what_was_loaded(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        ids = [store.save("long", f"step {n}", {"n": n}) for n in range(130)]
    page.goto("/jobs/long")
    for loaded in (49, 99):
        page.locator(".history .commit").nth(loaded).scroll_into_view_if_needed()
    page.locator(".history .commit").nth(129).wait_for()
    page.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
        store.save("long", "tried again", {"n": -1}, parent=ids[10])
        store.save("long", "went on", {"n": 130}, parent=ids[-1])
    page.wait_for_selector("#rows-newest >> text=went on")
    page.locator("#rows-31 .line.lane-1").first.wait_for(state="attached")
    counts(page, ".commit", 132)
    counts(page, f"[id='c-{ids[10]}'] .line.lane-1", 1)  # where it branches off
    counts(page, f"[id='c-{ids[9]}'] .line.lane-1", 0)


# --- when something is wrong, or missing ---


def test_what_cannot_be_loaded_says_so_where_it_would_be(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        gone = store.save("goes", "step", {"inside": {"a": {"b": {"c": list(range(300))}}}})
    page.goto(f"/checkpoints/{gone}")
    with kedge.open(known["place"]) as store:
        store.delete("goes", gone)
    page.click("summary:has-text('inside')")
    page.wait_for_selector(".tree .notice.bad >> text=not found")
    page.goto("/jobs/goes")
    shows(page, "#history", "no checkpoints left")
    page.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
        store.save("goes", "comes again", 1)
    page.wait_for_selector(".commit >> text=comes again")


def test_a_service_that_does_not_answer_is_told(page_of: PageOf) -> None:
    page, place = page_of(object())
    for where in ("/", "/runs", "/approvals", "/models", "/storage", "/activity"):
        page.goto(where)
        counts(page, ".empty", 1)
    with kedge.open(place) as store:
        saved = store.save("job", "step", {"inside": {"deep": {"n": list(range(300))}}})
    page.goto(f"/checkpoints/{saved}")
    page.route("**/level*", lambda route: route.abort())
    page.click("summary:has-text('inside')")
    page.wait_for_selector(".alarm >> text=does not answer")
    shows(page, ".tree", "could not be loaded")


def test_it_is_usable_without_scripts(browser: Browser, address: str, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(51):
            store.save("plain", f"step {n}", {"n": n})
    context = visitor(browser, address, java_script_enabled=False)
    page = context.new_page()
    page.goto("/jobs/plain")
    page.click("text=Older")
    counts(page, ".commit", 1)
    page.goto("/jobs/plain/retention")
    page.fill("#keep_last", "49")
    page.click("button:text-is('Preview')")
    shows(page, "#plan", "2 checkpoints go")
    page.goto("/jobs/weekly-report")
    for box in page.locator("input[name=id]").all():
        box.check()
    page.click("[data-needs='2']")
    has(page, ".changes li", at_least=4)
    context.close()


# --- many tabs, and addresses that others can open ---


def test_tabs_share_one_connection(page: Page, known: dict[str, str]) -> None:
    """A browser has six connections to a service: eight streams of events would leave none for anything else."""
    tabs = [page, *(page.context.new_page() for _ in range(7))]
    for tab in tabs:
        tab.goto("/")
        tab.wait_for_selector("#live.on")
    with kedge.open(known["place"]) as store:
        store.save("seen-in-all-tabs", "s", 1)
    for tab in tabs:
        tab.bring_to_front()
        shows(tab, "#jobs", "seen-in-all-tabs")
    for tab in tabs[:-1]:
        tab.close()
    with kedge.open(known["place"]) as store:
        store.save("seen-in-the-last-tab", "s", 1)
    shows(tabs[-1], "#jobs", "seen-in-the-last-tab")
    tabs[-1].goto("/?prefix=seen-in")  # a page that joins late misses nothing
    counts(tabs[-1], "#jobs tbody tr", 2)


def test_a_search_is_in_the_address(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        store.save("addressed-job", "s", 1)
    page.goto("/")
    page.fill("#search", "addressed-j")
    counts(page, "#jobs tbody tr", 1)
    assert page.evaluate("location.search") == "?prefix=addressed-j"
    page.reload()
    sees(page.locator("#search")).to_have_value("addressed-j")
    counts(page, "#jobs tbody tr", 1)
    page.fill("#search", "")
    page.wait_for_url(re.compile(r"/$"))


def test_what_is_done_before_the_scripts_came_is_done_by_them(page: Page, known: dict[str, str]) -> None:
    """A field that is typed into, and a part that is unfolded, while a slow network still brings htmx."""
    held: list[Route] = []
    page.route("**/vendor/htmx*", lambda route: held.append(route))  # noqa: PLW0108 - playwright marks it
    page.goto("/?kind=run", wait_until="commit")
    shows(page, "#jobs", "nightly-tiles")
    page.fill("#search", "pub")
    wait_for(lambda: page.evaluate("1") and held, "the page asks for no script")
    held.pop().continue_()
    all_show(page, "#jobs td.name", "publish-site")
    page.goto(f"/checkpoints/{known['last']}", wait_until="commit")
    page.click("summary:has-text('optimizer')")
    wait_for(lambda: page.evaluate("1") and held, "the page asks for no script")
    held.pop().continue_()
    shows(page, "details:has-text('optimizer') .tree", "adam")
