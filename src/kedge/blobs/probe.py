"""What an object store really does: whether conditional writes work, its speed, its clock.

Writes a few objects under `<prefix>/probe/` and removes them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from obstore import delete, get, get_range, head, put
from obstore import list as list_objects
from obstore.exceptions import AlreadyExistsError

from .objects import ObjectBlobs

_RACES = 3
_SMALL = 8
_LARGE_BYTES = 4 << 20
_LARGE = 4


@dataclass(frozen=True, slots=True)
class Probe:
    problems: tuple[str, ...]  # promises that the store breaks
    put_s: float  # a small object; median of several
    get_s: float
    write_rate: float  # bytes per second, several at once
    read_rate: float
    skew_s: float  # how far the store's clock is ahead of ours


def probe(blobs: ObjectBlobs) -> Probe:
    """Test an object store. Raises what the adapter raises if the store cannot be used at all."""
    folder = f"{blobs.root}probe/{os.urandom(8).hex()}"
    paths: list[str] = []

    def name(of: str) -> str:
        paths.append(f"{folder}/{of}")
        return paths[-1]

    with blobs.translated("probe", folder):
        try:
            problems = [*_conditional(blobs, name), *_visible(blobs, folder, name)]
            put_s, get_s, skew_s = _small(blobs, name)
            write_rate, read_rate = _large(blobs, name)
        finally:
            for path in paths:
                try:
                    delete(blobs.store, path)
                except FileNotFoundError:
                    pass
    return Probe(tuple(problems), put_s, get_s, write_rate, read_rate, skew_s)


def _conditional(blobs: ObjectBlobs, name: Callable[[str], str]) -> list[str]:
    """Let two writers create the same object: one of them must be refused."""
    problems: list[str] = []
    for race in range(_RACES):
        path = name(f"race-{race}")
        barrier = threading.Barrier(2)

        def create(content: bytes, path: str = path, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                put(blobs.store, path, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(create, (b"one", b"two")))
        if sum(won) != 1:
            problems.append(
                f"{sum(won)} of two writers were told that they had created the same object: it ignores preconditions "
                "(If-None-Match)"
            )
            break
        if bytes(get(blobs.store, path).bytes()) != (b"one" if won[0] else b"two"):
            problems.append("the writer that was refused has overwritten the other")
            break
    return problems


def _visible(blobs: ObjectBlobs, folder: str, name: Callable[[str], str]) -> list[str]:
    path = name("visible")
    put(blobs.store, path, bytes(range(200)), use_multipart=False)
    problems = []
    if path not in [meta["path"] for page in list_objects(blobs.store, folder + "/") for meta in page]:
        problems.append("an object that was written is not listed at once")
    if bytes(get_range(blobs.store, path, start=50, length=20)) != bytes(range(50, 70)):
        problems.append("reading a part of an object gives something else")
    delete(blobs.store, path)
    try:
        head(blobs.store, path)
        problems.append("an object that was deleted is still there")
    except FileNotFoundError:
        pass
    return problems


def _small(blobs: ObjectBlobs, name: Callable[[str], str]) -> tuple[float, float, float]:
    puts, gets = [], []
    skew_s = 0.0
    for n in range(_SMALL):
        path = name(f"small-{n}")
        began, clock = time.perf_counter(), time.time()
        put(blobs.store, path, os.urandom(1024), use_multipart=False)
        puts.append(time.perf_counter() - began)
        skew_s = head(blobs.store, path)["last_modified"].timestamp() - clock
        began = time.perf_counter()
        get(blobs.store, path).bytes()
        gets.append(time.perf_counter() - began)
    return sorted(puts)[_SMALL // 2], sorted(gets)[_SMALL // 2], skew_s


def _large(blobs: ObjectBlobs, name: Callable[[str], str]) -> tuple[float, float]:
    paths = [name(f"large-{n}") for n in range(_LARGE)]
    data = os.urandom(_LARGE_BYTES)
    with ThreadPoolExecutor(_LARGE) as pool:
        began = time.perf_counter()
        list(pool.map(lambda path: put(blobs.store, path, data, use_multipart=False), paths))
        written = time.perf_counter()
        list(pool.map(lambda path: get(blobs.store, path).bytes(), paths))
        done = time.perf_counter()
    size = _LARGE * _LARGE_BYTES
    return size / (written - began), size / (done - written)
