"""What a page shows, sooner or later: a look right behind a click may still meet the page before it.

A click returns when the browser took it. Whether the next page, or the answer to a request, is there by then is the
machine's mood; each of these looks again until it is, and fails when it never comes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, LocatorAssertions, Page

_PATIENCE_MS = 60_000


def visitor(browser: Browser, base_url: str, **options: Any) -> BrowserContext:
    """Somebody without cookies, who waits as long as these do."""
    context = browser.new_context(base_url=base_url, **options)
    context.set_default_timeout(_PATIENCE_MS)
    return context


def sees(element: Locator) -> LocatorAssertions:
    """What is expected of it, as long as it may take."""
    from playwright.sync_api import expect

    expect.set_options(timeout=_PATIENCE_MS)
    return expect(element)


def shows(page: Page | Locator, selector: str, *texts: str) -> None:
    """The first such element shows these texts: what is folded or hidden does not count."""
    for text in texts:
        sees(page.locator(selector).first).to_contain_text(text, use_inner_text=True)


def counts(page: Page | Locator, selector: str, number: int) -> None:
    """There are so many of them."""
    sees(page.locator(selector)).to_have_count(number)


def all_show(page: Page | Locator, selector: str, text: str) -> None:
    """There are some of them, and none shows anything else."""
    elements = page.locator(selector)
    sees(elements.first).to_have_text(text)
    sees(elements.filter(has_not_text=re.compile(rf"^\s*{re.escape(text)}\s*$"))).to_have_count(0)


def has(page: Page | Locator, selector: str, at_least: int) -> None:
    """There are so many of them, or more."""
    page.locator(selector).nth(at_least - 1).wait_for(state="attached")
