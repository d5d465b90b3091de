"""How much memory the service takes while many large states come and go at once."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

import kedge

from .harness import Bench, Row, log, mib
from .server import Server, serving

TRANSFERS = 10
LIMIT = 150 << 20
_PIECE = 1 << 20


def memory(bench: Bench) -> list[Row]:
    """Ten uploads, downloads, saves and loads at once: the most that the service holds in its own memory."""
    size = bench.state_bytes
    folder = bench.fresh("transfers")
    random = folder / "random"
    with random.open("wb") as file:
        for _ in range(size // _PIECE + 1):
            file.write(os.urandom(_PIECE))
    shape = (size - (TRANSFERS << 12),)
    states = [np.asarray(np.memmap(random, np.uint8, "r", offset=4096 * n, shape=shape)) for n in range(TRANSFERS)]
    rows = []
    ids: dict[str, list[str]] = {}

    def row(url: Server, what: str, each: Callable[[int], None]) -> None:
        peak = 0
        with ThreadPoolExecutor(TRANSFERS) as pool:
            running = [pool.submit(each, n) for n in range(TRANSFERS)]
            while wait(running, 0.02).not_done:
                peak = max(peak, _own_bytes(url.pid))
            for transfer in running:
                transfer.result()
        log(f"  {what}: {mib(peak)}")
        work_name = f"the service's memory, {TRANSFERS} {what} of {mib(size)} at once"
        rows.append(Row(work_name, [float(peak)], target=LIMIT, kind="limit", show=mib))

    with serving(folder / "uploads", "--max-body", str((size >> 20) + 16)) as url:
        row(url, "uploads", lambda n: _upload(url, f"job-{n}", states[n]))
        with kedge.open(url) as store:
            ids["jobs"] = [store.list(f"job-{n}", limit=1)[0].id for n in range(TRANSFERS)]
        row(url, "downloads", lambda n: _download(url, ids["jobs"][n]))
    with serving(folder / "saves") as url, kedge.open(url) as store:
        row(url, "saves by kedge.open", lambda n: _ignore(store.save(f"job-{n}", "s", {"w": states[n]})))
        row(url, "loads by kedge.open", lambda n: _load(store, f"job-{n}", folder / f"into-{n}", len(states[n])))
    return rows


def _own_bytes(pid: int) -> int:
    """What a process holds in memory of its own. Pages of files that it maps are the kernel's to take back."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _ignore(_: object) -> None:
    pass


def _load(store: kedge.CheckpointManager, job: str, place: Path, size: int) -> None:
    """Into a file, so that ten of them fit into the memory of this process."""
    into = {"w": np.asarray(np.memmap(place, np.uint8, "w+", shape=(size,)))}
    store.load(store.list(job, limit=1)[0].id, into=into)
    place.unlink()


def _upload(url: Server, job: str, state: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="checkpoint"\r\nContent-Type: application/json\r\n\r\n'
    head += b'{"step": "s", "state": {"w": {"$part": "w"}}}\r\n'
    head += b'--x\r\nContent-Disposition: form-data; name="w"; filename="w"\r\n'
    head += b"Content-Type: application/octet-stream\r\n\r\n"
    tail = b"\r\n--x--\r\n"

    def body() -> Iterator[bytes]:
        yield head
        for at in range(0, len(state), _PIECE):
            yield state[at : at + _PIECE].tobytes()
        yield tail

    headers = {"content-type": "multipart/form-data; boundary=x"}
    headers["content-length"] = str(len(head) + len(state) + len(tail))
    _call(url, "POST", f"/api/v1/jobs/{job}/checkpoints", body(), headers, expected=201)


def _download(url: Server, checkpoint: str) -> None:
    _call(url, "GET", f"/api/v1/checkpoints/{checkpoint}/download?path=w", None, {}, expected=200)


def _call(
    url: Server, method: str, path: str, body: Iterator[bytes] | None, headers: dict[str, str], *, expected: int
) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    while answer.readinto(bytearray(_PIECE)):
        pass
    connection.close()
    if answer.status != expected:
        raise RuntimeError(f"{method} {path}: {answer.status}")
