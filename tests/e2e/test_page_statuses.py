"""Runs and executions of workflows are shown as what they are, by the same word wherever they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import kedge
from kedge.pipeline.approval import decide_once, pending_approvals
from kedge.pipeline.cancellation import cancel
from kedge.process.workflow import Workflows
from tests.e2e.seeing import all_show, counts, sees, shows, visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def waiting_run(store: kedge.CheckpointManager, key: str) -> None:
    with pytest.raises(kedge.CheckpointError), kedge.run(key, store=store, progress=False) as run:
        run.approval("go", wait_s=0)


def test_a_cancelled_run_is_cancelled_everywhere(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        waiting_run(store, "stopped-early")
        assert cancel(store, "stopped-early")
    for address in (
        "/?prefix=stopped-early",
        "/runs?prefix=stopped-early",
        "/runs/stopped-early",
        "/jobs/stopped-early",
    ):
        page.goto(address)
        all_show(page, ".chip[class*=status-]", "cancelled")
    page.goto("/runs/stopped-early")
    counts(page, "main button:has-text('Cancel')", 0)
    counts(page, ".resume, .ask", 0)  # nothing waits, nothing goes on
    counts(page, ".notice.bad, .error", 0)  # and nothing failed


def test_a_run_that_was_told_to_stop_says_so(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store, kedge.run("stops-soon", store=store, progress=False, signals=False):
        page.goto("/runs/stops-soon")
        page.click("text=Cancel the run…")
        page.click("#cancel button.danger")
        shows(page, ".notice", "stops before its next step")
        page.goto("/runs/stops-soon")
        shows(page, "h1", "running")
        shows(page, "#run .notice", "It was told to stop")
        counts(page, "main button:has-text('Cancel')", 0)


def test_a_run_at_work_counts_the_steps_it_has_finished(page: Page, known: dict[str, str]) -> None:
    with (
        kedge.open(known["place"]) as store,
        kedge.run("counts-steps", store=store, progress=False, signals=False) as run,
    ):
        for n in range(3):
            run.step(f"step {n}", abs, n)
        page.goto("/runs/counts-steps")
        shows(page, ".facts div:has(dt:text-is('Steps run, last session'))", "3")
        page.goto("/runs?prefix=counts-steps")
        shows(page, "#runs tbody tr", "running")
        sees(page.locator("#runs tbody td.number").first).to_have_text("")  # nobody has counted them yet
    page.goto("/runs?prefix=counts-steps")
    sees(page.locator("#runs tbody td.number").first).to_have_text("3")


def test_an_execution_is_one_wherever_it_is_shown(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        workflows = Workflows(store)
        execution = workflows.start_workflow_execution("order-78", "refund-78")
        workflows.create_checkpoint(execution, "pay out", "billing", approval_required=True)
        (asked,) = pending_approvals(store, execution)
        decide_once(store, asked, True, "ada", "")  # and nobody has followed the decision yet
    page.goto(f"/?prefix={execution}")
    shows(page, ".chip[class*=status-]", "running")
    page.goto(f"/executions/{execution}")
    shows(page, "h1 .chip", "running")
    page.goto(f"/jobs/{execution}")
    page.click("text=Workflow")
    shows(page, "h1", "refund-78", "running")


def test_without_an_answer_a_dialog_offers_no_action(browser: Browser, address: str, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(12):
            store.save("not-counted", f"step {n}", {"n": n})
    context = visitor(browser, address)
    page = context.new_page()
    page.route("**/jobs/not-counted/cleanup**", lambda route: route.abort())
    page.goto("/jobs/not-counted")
    page.click("button:text-is('Clean up…')")
    shows(page, "#cleanup-plan", "could not be loaded")
    counts(page, "#cleanup button.danger", 0)
    page.unroute("**/jobs/not-counted/cleanup**")
    page.locator("#keep").fill("3")
    shows(page, "#cleanup-plan", "9 checkpoints go")
    page.click("#cleanup button.danger")
    shows(page, ".notice", "9 checkpoints deleted")
    context.close()


def test_a_download_that_is_refused_says_why(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        saved = store.save("has-dates", "one", {"when": np.array(["2026-11-19"], "datetime64[us]")})
    page.goto(f"/checkpoints/{saved}")
    page.click("button:text-is('Download…')")
    page.click("#download a:has-text('.safetensors')")
    shows(page, "body", "when is a", "download it as .npz")
    with kedge.open(known["place"]) as store:
        store.delete("has-dates", saved)
