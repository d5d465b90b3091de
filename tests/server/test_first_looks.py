"""What the first requests to a service would wait for is done before them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kedge

_LOOKS = """
import asyncio, gc, json, os, sys, threading
from dataclasses import asdict

import httpx

from kedge.server.process import Settings, make_app
from tests.waiting import wait_for_async

os.environ["KEDGE_SERVE"] = json.dumps(asdict(Settings(sys.argv[1])))

def compile_late(*arguments, **options):
    raise AssertionError("a request compiles a template")

async def main():
    frozen = gc.get_freeze_count() + 10_000
    app = make_app()
    async with app.router.lifespan_context(app):
        names = lambda: [thread.name for thread in threading.enumerate()]
        await wait_for_async(lambda: "kedge-prepare" not in names(), "the service is never prepared")
        assert gc.get_freeze_count() > frozen, "each collection looks through all modules"
        import jinja2
        jinja2.Environment.compile = compile_late
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            for page in sys.argv[2:]:
                (await client.get(page, headers={"accept": "text/html"})).raise_for_status()

asyncio.run(main())
"""


def test_the_first_look_at_a_page_compiles_nothing(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        saved = store.save("job", "step", {"n": 1})
    pages = ["/", "/runs", "/search", "/jobs/job", f"/checkpoints/{saved}", "/storage", "/models", "/queues"]
    command = [sys.executable, "-c", _LOOKS, str(tmp_path / "store"), *pages]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
