"""`python -m tests.e2e.pictures`: the pictures in the documents, taken of the page on a store made by `page_data`."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.e2e.page_data import fill
from tests.e2e.page_server import ARGUMENTS, served
from tests.e2e.seeing import visitor

FOLDER = Path(__file__).parents[2] / "docs" / "images"


def take() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder) / "store"
        known = fill(place, pace_s=0.02)  # before the browser, whose event loop runs in this thread
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        with served(place) as address:
            for name, scheme in (("", "light"), ("-dark", "dark")):
                page = visitor(
                    browser, address, viewport={"width": 1180, "height": 760}, color_scheme=scheme
                ).new_page()
                views = {
                    "jobs": "/",
                    "history": "/jobs/train-resnet",
                    "state": f"/checkpoints/{known['last']}",
                    "compare": f"/compare?id={known['old']}&id={known['new']}",
                    "thread": "/jobs/thread:customer-7",
                    "container": "/jobs/container:counter",
                    "compare-live": f"/compare?id={known['pinned']}&live=train-resnet",
                    "retention": "/jobs/train-resnet/retention?keep_last=5&daily=7&keep_tags=best",
                    "run": "/runs/nightly-tiles",
                    "runs": "/runs",
                    "approvals": "/approvals",
                    "models": "/models",
                    "storage": "/storage",
                    "activity": "/activity",
                }
                for view, where in views.items():
                    if name and view not in ("history", "run", "storage"):
                        continue
                    page.goto(where)
                    if view == "state":
                        for label in ("model", "layer1", "weight", "sample"):
                            page.click(f"summary:has-text('{label}')")
                        page.wait_for_selector("svg.histogram")
                        for n in range(2):
                            page.locator("img.thumbnail").nth(n).evaluate("image => image.decode()")
                    if view == "history":
                        page.wait_for_selector(".charts svg")
                    if view == "storage":
                        page.wait_for_selector("#garbage :not(:text('…'))")
                    tall = page.evaluate("document.querySelector('footer').getBoundingClientRect().bottom")
                    shown = {"x": 0, "y": 0, "width": 1180, "height": min(760, tall)}
                    page.screenshot(path=FOLDER / f"{view}{name}.png", clip=shown)  # type: ignore[arg-type]
                page.close()
        browser.close()


if __name__ == "__main__":
    take()
