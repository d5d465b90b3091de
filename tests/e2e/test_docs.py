"""The documentation site: complete, self-contained, without broken links, and readable in a browser."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import click
import pytest

from tests.e2e.seeing import sees, visitor
from tests.parts import require
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".dev" / "site"
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
NOT_LOADED = {"canonical", "prev", "next", "alternate"}  # links of a page that a browser does not fetch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("docs"),
    pytest.mark.requires("chromium", "module:playwright", "module:zensical"),
]


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    """Every page of the site by its address, as it was built just now."""
    require("module:zensical")
    require("module:fastapi")
    subprocess.run([sys.executable, "tools/docs"], cwd=ROOT, check=True, capture_output=True, timeout=280)
    return {"/" + str(path.relative_to(SITE)): Page(path.read_text()) for path in sorted(SITE.rglob("*.html"))}


class Page(HTMLParser):
    """The links, anchors and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := known.get(name))}
        if tag == "a" and (target := known.get("href")):
            self.links.append(target)
        for name in ("src", "href"):
            target = known.get(name)
            if target and (tag, name) in LOADED and known.get("rel") not in NOT_LOADED:
                self.loaded.append(target)


def test_nothing_comes_from_elsewhere(pages: dict[str, Page]) -> None:
    assert len(pages) > 20
    foreign = {
        (address, target) for address, page in pages.items() for target in page.loaded if urlsplit(target).netloc
    }
    assert foreign == set()
    for style in SITE.rglob("*.css"):
        assert "url(http" not in style.read_text()
        assert "@import" not in style.read_text()


def test_no_link_is_broken(pages: dict[str, Page]) -> None:
    broken = []
    for address, page in pages.items():
        if address == "/404.html":
            continue
        for target in [*page.links, *page.loaded]:
            if urlsplit(target).scheme or urlsplit(target).netloc:
                continue
            place, anchor = urldefrag(urljoin(address, target))
            path = unquote(place) + ("index.html" if place.endswith("/") else "")
            if not (SITE / path.lstrip("/")).is_file() or (anchor and anchor not in pages[path].anchors):
                broken.append(f"{address}: {target}")
    assert broken == []


def test_the_reference_is_complete(pages: dict[str, Page]) -> None:
    import kedge
    from kedge import errors
    from kedge.cli.app import NAMES, cli

    api = (SITE / "reference" / "api" / "index.html").read_text()
    missing = [name for name in kedge.__all__ if f"kedge.{name}" not in api and not hasattr(errors, name)]
    assert missing == []
    commands = pages["/reference/commands/index.html"]
    assert {f"kedge-{name}" for name in NAMES} <= commands.anchors
    for name in NAMES:
        command = cli.get_command(click.Context(cli), name)
        if isinstance(command, click.Group):
            inner = command.list_commands(click.Context(command))
            assert {f"kedge-{name}-{one}" for one in inner} <= commands.anchors


@pytest.fixture
def address(pages: dict[str, Page]) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_it_reads_well_in_a_browser(pages: dict[str, Page], address: str, browser: Browser) -> None:
    """No page is wider than its window, on a desk and on a telephone, and no line of code is cut off."""
    context = visitor(browser, address)
    page = context.new_page()
    problems: list[str] = []
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith(address) else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 800})
        for name in pages:
            page.goto(name)
            wide, cut = page.evaluate(
                """() => [document.documentElement.scrollWidth - window.innerWidth,
                [...document.querySelectorAll("pre > code")].filter(c => c.scrollWidth > c.clientWidth + 1).length]"""
            )
            if wide > 1 or cut:
                problems.append(f"{name} at {width}: {wide} px too wide, {cut} blocks cut off")
    context.close()
    assert problems == []


def test_search_and_dark_mode(address: str, browser: Browser) -> None:
    context = visitor(browser, address, color_scheme="dark")
    page = context.new_page()
    page.goto("/")
    sees(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    words = page.locator("dialog[aria-label=Search] input").first

    def is_open() -> bool:  # it listens to keys a moment after the page has come
        page.keyboard.press("Control+k")
        return words.is_visible()

    wait_for(is_open, "the keys do not open the search")
    words.fill("idempotency")
    page.wait_for_selector("text=Idempotency keys")
    context.close()
