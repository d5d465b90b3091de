"""The service: pages out of a long history, one look-up, and durable saves, each against what it rests on."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import kedge

from .harness import Bench, Cost, Missing, Row, interleave, log, milliseconds, per_second
from .history import _filled
from .small_saves import PAYLOAD_BYTES, cost_of

SMALL, LARGE = 100, 1_000_000
CLIENTS = 16
LOOKS = 400

_BARE = """
import json, sys
from fastapi import FastAPI
import uvicorn
app = FastAPI()
document = json.loads(sys.argv[2])
@app.get("/{name}")
async def look(name: str) -> dict:
    return document
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
"""

# What a POST costs that stores nothing: uvicorn with its quickest parts reads the JSON and answers.
_NOTHING_STORED = """
import json, sys
import uvicorn
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body, is_whole = b"", False
    while not is_whole:
        message = await receive()
        body += message.get("body", b"")
        is_whole = not message.get("more_body")
    answer = json.dumps({"step": json.loads(body)["step"]}).encode() if body else b"{}"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, http="httptools", lifespan="off")
"""

# What somebody writes by hand: FastAPI and a table in SQLite, one durable INSERT for each POST.
_BY_HAND = """
import os, sqlite3, sys, threading
from fastapi import FastAPI
from pydantic import BaseModel
import uvicorn
class Save(BaseModel):
    step: str
    state: dict[str, object]
app, here = FastAPI(), threading.local()
def connection():
    if not hasattr(here, "connection"):
        here.connection = sqlite3.connect(sys.argv[2], timeout=60, isolation_level=None)
        here.connection.execute("PRAGMA journal_mode = WAL")
        here.connection.execute("PRAGMA synchronous = FULL")
    return here.connection
connection().execute("CREATE TABLE states (seq INTEGER PRIMARY KEY, id TEXT UNIQUE, job TEXT, state TEXT)")
connection().execute("CREATE INDEX latest ON states (job, seq)")
@app.get("/x")
def look() -> dict:
    return {}
@app.post("/api/v1/jobs/{job}/checkpoints", status_code=201)
def save(job: str, body: Save) -> dict:
    name = os.urandom(8).hex()
    row = name, job, body.model_dump_json()
    connection().execute("INSERT INTO states (id, job, state) VALUES (?, ?, ?)", row)
    return {"id": name}
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
"""

_POST = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local thread = 0
function setup(t) t:set("id", thread); thread = thread + 1 end
function request()
  return wrk.format(nil, "/api/v1/jobs/job-" .. math.random(1, 16) .. "/checkpoints", nil, BODY)
end
"""


class Server(str):
    """Its URL, and its process."""

    pid: int

    def cpu_s(self) -> float:
        """What it and its workers have used so far."""
        workers = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        used = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in (self.pid, *workers)]
        return sum(int(ticks) for each in used for ticks in each) / os.sysconf("SC_CLK_TCK")


def pages(bench: Bench) -> list[Row]:
    """A page of 50 out of a million checkpoints, and out of a hundred: the slowest of a hundred requests."""
    large = bench.rows or (LARGE // 10 if bench.quick else LARGE)
    for name, count in (("pages-small", SMALL), ("pages-large", large)):
        _filled(bench, name, count).close()
    samples: dict[str, list[float]] = {"small": [], "large": []}
    with (
        serving(bench.workspace / "pages-small" / "store") as small,
        serving(bench.workspace / "pages-large" / "store") as big,
        httpx.Client() as client,
    ):
        path = "/api/v1/jobs/job/checkpoints?limit=50"
        for _ in range(bench.rounds):
            times: dict[str, list[float]] = {"small": [], "large": []}
            for _ in range(LOOKS):
                for side, url in (("small", small), ("large", big)):
                    began = time.perf_counter()
                    client.get(url + path).raise_for_status()
                    times[side].append(time.perf_counter() - began)
            for side, taken in times.items():
                samples[side].append(statistics.quantiles(taken, n=100)[98])
    work = f"page of 50 of {large:,} checkpoints, p99"
    return [Row(work, samples["large"], f"of {SMALL}", samples["small"], 5.0, "share", milliseconds)]


def start(bench: Bench) -> list[Row]:
    """From the start of `kedge serve` until it says that it is ready."""
    samples: list[float] = []
    for n in range(bench.rounds):
        began = time.perf_counter()
        with serving(bench.fresh(f"start-{n}") / "store"):
            samples.append(time.perf_counter() - began)
    return [Row("kedge serve, until it answers", samples, target=2.0, kind="limit")]


def look_ups(bench: Bench) -> list[Row]:
    """GET of one checkpoint's metadata against a bare FastAPI route that returns the same JSON; one worker each."""
    _need_wrk()
    place = bench.fresh("look-ups") / "store"
    with kedge.open(place) as store:
        saved = store.save("job", "step", {"payload": os.urandom(PAYLOAD_BYTES)})
    with serving(place) as ours:
        path = f"/api/v1/checkpoints/{saved}"
        document = httpx.get(ours + path).text
        with _process([sys.executable, "-c", _BARE, "{port}", document], "/x") as bare:
            samples = interleave(
                bench.rounds,
                {
                    "kedge": lambda: _wrk(ours, path, bench, clients=8),
                    "bare": lambda: _wrk(bare, "/x", bench, clients=8),
                },
            )
    return [Row("GET metadata", samples["kedge"], "bare FastAPI", samples["bare"], 0.5, show=per_second)]


def durable_posts(bench: Bench) -> list[Row]:
    """Durable POSTs of 1 KB by 16 clients against the store's own group commit by 16 threads."""
    _need_wrk()
    folder = bench.fresh("posts")
    duration_s = 1.0 if bench.quick else 3.0
    script = _posts(folder)
    rows = []
    with kedge.open(folder / "own") as manager:
        for workers in (1, 2):
            with serving(folder / f"store-{workers}", "--workers", str(workers)) as url:
                samples = interleave(
                    bench.rounds,
                    {
                        "kedge": lambda url=url: _wrk(url, "", bench, clients=CLIENTS, script=script),  # type: ignore[misc]
                        "store": lambda: cost_of(
                            lambda n: lambda _: manager.save(f"job-{n}", "step", {"payload": "x" * PAYLOAD_BYTES}),
                            CLIENTS,
                            duration_s,
                        ),
                    },
                )
            work = f"durable POST of 1 KB, {CLIENTS} clients, {workers} worker{'s' if workers > 1 else ''}"
            rows.append(Row(work, samples["kedge"], "group commit", samples["store"], 0.8, show=per_second))
    return rows


def posts_by_hand(bench: Bench) -> list[Row]:
    """The same POSTs against a service that somebody writes by hand, and against one that stores nothing."""
    _need_wrk()
    folder = bench.fresh("posts-by-hand")
    script = _posts(folder)
    by_hand = [sys.executable, "-c", _BY_HAND, "{port}", str(folder / "by-hand.sqlite")]
    bare = [sys.executable, "-c", _NOTHING_STORED, "{port}"]
    with (
        serving(folder / "store") as url,
        _process(by_hand, "/x") as hand,
        _process(bare, "/") as nothing,
    ):
        servers = {"kedge": url, "hand": hand, "nothing": nothing}
        sides = {
            name: lambda server=server: _wrk(server, "", bench, clients=CLIENTS, script=script)  # type: ignore[misc]
            for name, server in servers.items()
        }
        samples = interleave(bench.rounds, sides)
    work = f"durable POST of 1 KB, {CLIENTS} clients"
    return [
        Row(work, samples["kedge"], "FastAPI with SQLite FULL", samples["hand"], show=per_second),
        Row(work, samples["kedge"], "uvicorn alone, nothing stored", samples["nothing"], show=per_second),
    ]


def _posts(folder: Path) -> Path:
    """The script for wrk."""
    body = '{"step":"step","state":{"payload":"' + "x" * PAYLOAD_BYTES + '"}}'
    script = folder / "post.lua"
    script.write_text(_POST.replace("BODY", f"'{body}'"))
    return script


def _need_wrk() -> None:
    if shutil.which("wrk") is None:
        raise Missing("wrk is not installed")


def _wrk(server: Server, path: str, bench: Bench, *, clients: int, script: Path | None = None) -> Cost:
    """Seconds per request, on the clock and of the server's CPU time."""
    seconds = 1 if bench.quick else 3
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", *(["-s", str(script)] if script else []), server + path]
    before_s = server.cpu_s()
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rate, count = re.search(r"Requests/sec:\s+([\d.]+)", told), re.search(r"(\d+) requests in", told)
    if rate is None or count is None or "Non-2xx" in told or "Socket errors" in told:
        raise RuntimeError(told)
    cost = Cost(1 / float(rate[1]))
    cost.cpu_s = (server.cpu_s() - before_s) / int(count[1])
    return cost


@contextmanager
def serving(place: Path, *arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "kedge", "serve", "--store", str(place), "--port", "{port}"]
    with _process([*command, "--log-level", "warning", *arguments], "/readyz") as url:
        yield url


@contextmanager
def _process(command: list[str], path: str) -> Iterator[Server]:
    """A server on a free port, once it answers; its URL."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = subprocess.Popen([word.replace("{port}", port) for word in command], stderr=subprocess.DEVNULL)
    try:
        url = Server(f"http://127.0.0.1:{port}")
        url.pid = process.pid
        for _ in range(600):
            try:
                if httpx.get(url + path).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.05)
        else:
            raise RuntimeError(f"{command[:4]} does not answer")
        log(f"  {url}")
        yield url
    finally:
        process.terminate()
        process.wait()
