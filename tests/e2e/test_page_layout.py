"""How pages are laid out: one line of menu on every screen, and chart points that the table below names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kedge
from kedge.server.tokens import ACCESS, Tokens
from tests.e2e.page_server import served_here
from tests.e2e.seeing import counts, visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.requires("chromium"), pytest.mark.xdist_group("page")]


def test_the_menu_of_an_admin_has_one_line_on_every_screen(browser: Browser, tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", {"n": 1})
    with kedge.open(tmp_path / "store", namespace=ACCESS) as records:
        _, admin = Tokens(records).create("ada", "admin", ["default", "a-namespace-with-a-longer-name"])
    with served_here(tmp_path / "store", None) as where:
        context = visitor(browser, where)
        page = context.new_page()
        page.goto("/")
        page.fill("#token", admin)
        page.click("button.primary")
        page.wait_for_selector("text=Sign out")
        for width in (1920, 1440, 1312, 1280, 1088, 1024, 820, 736, 390, 320):
            page.set_viewport_size({"width": width, "height": 800})
            lines = page.locator(".top nav a, .who > a").evaluate_all(
                "links => [...new Set(links.map(link => Math.round(link.getBoundingClientRect().bottom / 8)))]"
            )
            assert len(lines) <= 2, f"{width} px: the menu has more than one line"  # the badge makes one taller
            tall = page.locator(".top").evaluate("header => header.getBoundingClientRect().height")
            assert tall < 110, f"{width} px: the header is {tall} px tall"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{width} px: it overflows"
        context.close()


def test_of_many_points_those_are_marked_that_the_table_names(page: Page, known: dict[str, str]) -> None:
    with kedge.open(known["place"]) as store:
        for n in range(1, 101):
            for metric_of in ("many-points", "many-more"):
                store.save(metric_of, f"epoch {n}", {}, metadata={"loss": abs(50.5 - n), "lr": 1.0 / n, "a": n, "b": n})
    page.goto("/jobs/many-points/numbers?with=many-more")
    counts(page, "#chart-lr .line", 2)
    counts(page, "#chart-lr .dot", 2 * 2)  # the highest is the first, the lowest the newest
    with kedge.open(known["place"]) as store:
        for job in ("many-points", "many-more"):
            store.delete_job(job)
