"""The service under load, and every operation of its OpenAPI document at length.

Half of the time goes to schemathesis; half to readers and writers that come as fast as they can, those of `wrk` among
them where it is installed, with no 5xx, memory that stays where it is, and in the end a SIGTERM in the middle:
everything that was acknowledged is there.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

import kedge

CLIENTS = 8
CONNECTIONS = 8  # of wrk

_MIXED = """
local count = 0
function request()
  count = count + 1
  if count % 4 == 0 then
    local body = '{"step":"w","state":{"n":' .. count .. ',"t":"' .. string.rep("x", count % 1500) .. '"}}'
    local headers = {["Content-Type"] = "application/json"}
    return wrk.format("POST", "/api/v1/jobs/wrk-" .. count % 7 .. "/checkpoints", headers, body)
  end
  local paths = {"/api/v1/jobs/wrk-1/checkpoints?limit=20", "/api/v1/jobs", "/api/v1/jobs/j0/checkpoints", "/healthz"}
  return wrk.format("GET", paths[math.floor(count / 4) % 4 + 1])
end
"""


def torture(minutes: float, folder: Path) -> dict[str, float]:
    operations = _operations(minutes / 2)
    return {"operations": operations, **_load(minutes / 2, folder)}


def _operations(minutes: float) -> int:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "tests/server/test_openapi.py", "--timeout", "0"]
    environment = {**os.environ, "KEDGE_SCHEMATHESIS_EXAMPLES": str(max(10, int(minutes * 12)))}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])


def _load(minutes: float, folder: Path) -> dict[str, float]:
    from tests.server.test_process import serving

    acknowledged: list[str] = []
    stop = threading.Event()
    answers = {"reads": 0, "writes": 0}

    def work(url: str, seed: int) -> None:
        chance = random.Random(seed)
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                try:
                    if acknowledged and chance.random() < 0.7:
                        one = chance.choice(acknowledged[-500:])
                        path = chance.choice([f"checkpoints/{one}", f"checkpoints/{one}/state", "jobs", "stats"])
                        answer = client.get(f"{url}/api/v1/{path}")
                        answers["reads"] += 1
                    else:
                        body = {"step": "s", "state": {"n": "x" * chance.randrange(2000)}}
                        answer = client.post(f"{url}/api/v1/jobs/j{seed}/checkpoints", json=body)
                        if answer.status_code == 201:
                            acknowledged.append(answer.json()["id"])
                            answers["writes"] += 1
                except httpx.HTTPError:
                    assert stop.is_set(), "the service went away"
                    return
                assert answer.status_code < 500 or stop.is_set(), answer.text

    with serving(folder / "store") as (process, url), ThreadPoolExecutor(CLIENTS + 1) as threads:
        workers = [threads.submit(work, url, seed) for seed in range(CLIENTS)]
        pressed = threads.submit(_press, url, minutes, folder)
        sizes: list[int] = []
        until = time.monotonic() + minutes * 60
        while time.monotonic() < until and not any(worker.done() for worker in workers):
            time.sleep(min(5.0, minutes * 6))  # sleep: between two measurements
            sizes.append(_resident(process.pid))
        answers["of wrk"] = pressed.result()
        stop.set()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        for worker in workers:
            worker.result()
    with kedge.open(folder / "store") as store:
        lost = sum(not store.exists(each) for each in acknowledged)
        assert lost == 0, f"{lost} of {len(acknowledged)} acknowledged saves are gone"
    settled = sizes[len(sizes) // 3 :]
    growth = settled[-1] / settled[0]
    assert growth < 1.3, f"memory grew {growth:.2f} times: {sizes}"
    return {**answers, "lost": lost, "memory MB": settled[-1] / 1e6, "growth %": (growth - 1) * 100}


def _press(url: str, minutes: float, folder: Path) -> int:
    """Requests that `wrk` got answered, all of them well; 0 where it is missing."""
    if shutil.which("wrk") is None:
        return 0
    script = folder / "mixed.lua"
    script.write_text(_MIXED)
    command = [
        "wrk",
        "-t1",
        f"-c{CONNECTIONS}",
        f"-d{max(1, int(minutes * 60))}s",
        "--timeout",
        "60s",
        "-s",
        str(script),
        url,
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "Non-2xx" not in told, told
    assert "Socket errors" not in told, told
    return int(told.split(" requests in")[0].split()[-1])


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
