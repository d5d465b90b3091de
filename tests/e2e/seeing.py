"""What a page shows, sooner or later: a look right behind a click may still meet the page before it.

A click returns when the browser took it. Whether the next page, or the answer to a request, is there by then is the
machine's mood; each of these looks again until it is, and fails when it never comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

_PATIENCE_MS = 60_000


def shows(page: Page | Locator, selector: str, *texts: str) -> None:
    """The first such element shows these texts: what is folded or hidden does not count."""
    from playwright.sync_api import expect

    for text in texts:
        expect(page.locator(selector).first).to_contain_text(text, use_inner_text=True, timeout=_PATIENCE_MS)


def counts(page: Page | Locator, selector: str, number: int) -> None:
    """There are so many of them."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_count(number, timeout=_PATIENCE_MS)


def has(page: Page | Locator, selector: str, at_least: int) -> None:
    """There are so many of them, or more."""
    page.locator(selector).nth(at_least - 1).wait_for(state="attached")
