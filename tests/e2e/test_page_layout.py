"""How pages are laid out: one line of menu on every screen, and chart points that the table below names."""

from __future__ import annotations

from collections.abc import Iterator
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


LONG = "a-long-name-that-somebody-made-of-all-parameters-" + "lr0.001-bs256-wd0.01-" * 3


@pytest.fixture
def long_names(page: Page, known: dict[str, str]) -> Iterator[Page]:
    """A page of a store in which a job, its steps, tags and metadata have names as long as they may be."""
    with kedge.open(known["place"]) as store:
        for n in range(3):
            metadata = {"loss": 1 / (n + 1), "another metadata key that is long " * 4: float(n)}
            tags = {"best-" + "t" * 100: "value-" + "z" * 100}
            store.save(LONG, f"epoch {n} " + "x" * 150, {"n": n}, metadata=metadata, tags=tags, pin=True)
    yield page
    with kedge.open(known["place"]) as store:
        store.delete_job(LONG, even_pinned=True)


def test_beside_long_names_nothing_is_cut_or_moved_aside(long_names: Page) -> None:
    page = long_names
    page.goto(f"/jobs/{LONG}")
    pinned = page.locator(".commit .chip.pin")
    counts(page, ".commit .chip.pin", 3)
    assert pinned.evaluate_all("chips => chips.every(chip => chip.scrollWidth <= chip.clientWidth)"), "pinned is cut"
    page.goto(f"/jobs/{LONG}/numbers")
    assert page.locator("select[name=over]").evaluate("list => list.getBoundingClientRect().width") <= 340
    page.goto(f"/jobs/{LONG}")
    page.click(".commit:nth-child(2) a.step")
    page.wait_for_selector("[rel=prev]")
    beside = page.locator(".steps-beside").evaluate("links => links.getBoundingClientRect().bottom")
    head = page.locator(".head").evaluate("head => head.getBoundingClientRect().top")
    assert head >= beside, "the links to the checkpoints beside it lie over its actions"
    tag = page.locator("form.chips .chip.tag")
    assert tag.evaluate("chip => chip.scrollWidth <= chip.clientWidth"), "the button that removes the tag is cut off"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fields_are_told_from_what_they_lie_on(browser: Browser, address: str, scheme: str) -> None:
    """Their edges have 3:1 of contrast with what is around them, as WCAG 1.4.11 wants."""
    context = visitor(browser, address, color_scheme=scheme)
    page = context.new_page()
    fields = {
        "/storage": "#search, .everywhere input",
        "/retention": "#keep_last",
        "/search": ".filters select",
    }
    for where, field in fields.items():
        page.goto(where)
        ratio = page.locator(field).first.evaluate(
            """field => {
              const light = colour => {
                const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
                const [r, g, b] = parts.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const style = getComputedStyle(field);
              const [a, b] = [light(style.borderTopColor), light(style.backgroundColor)].sort((x, y) => y - x);
              return (a + 0.05) / (b + 0.05);
            }"""
        )
        assert ratio >= 3, f"{where}: {ratio:.2f}"
    context.close()
