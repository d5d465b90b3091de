"""One service for all tests of the page, and a browser for each module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kedge
from tests.e2e.page_server import ARGUMENTS, served, served_here
from tests.e2e.seeing import visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")  # no longer: its event loop runs in this thread
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def known() -> dict[str, str]:
    """What the store of the tests holds: `place`, and IDs by what they are."""
    return {}


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory, known: dict[str, str]) -> Iterator[str]:
    from tests.e2e.page_data import fill

    place = tmp_path_factory.mktemp("page") / "store"
    with ThreadPoolExecutor(1) as thread:  # in this one Chromium's event loop may run, and runs refuse to wait there
        known |= thread.submit(fill, place).result() | {"place": str(place)}
    with served(place) as where:
        yield where


class PageOf:
    """Opens a page of an application with this runner; answers it and the place of its store."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._browser, self._place = browser, folder / "store"
        self.ends: list[Any] = []

    def __call__(self, runner: object) -> tuple[Page, Path]:
        kedge.open(self._place).close()
        serving = served_here(self._place, runner)
        self.ends.append(lambda: serving.__exit__(None, None, None))
        context = visitor(self._browser, serving.__enter__())
        self.ends.append(context.close)
        return context.new_page(), self._place


@pytest.fixture
def page_of(browser: Browser, tmp_path: Path) -> Iterator[PageOf]:
    made = PageOf(browser, tmp_path)
    yield made
    for end in reversed(made.ends):
        end()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    context = visitor(browser, address, viewport={"width": 1280, "height": 900})
    found = context.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    found.on("dialog", lambda dialog: problems.append(f"a dialog says {dialog.message}"))
    yield found
    context.close()
    assert [text for text in problems if "status of 4" not in text] == []
