"""A store whose S3 server is behind a proxy that loses, delays, spoils and refuses: nothing lost, no false conflict."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

import kedge
from kedge.blobs.backoff import Backoff
from kedge.errors import Corrupted
from tests.servers.fault_proxy import HARSH, fault_proxy

from .ledger import Violation, unrefused


def through_faults(
    database: str, s3: str, *, runs: int, seconds: float = 1e9, seed: int = 1, faults: tuple[str, ...] = HARSH
) -> dict[str, float]:
    """Save, load and compare, delete, gc, through the proxy; at the end everything is read without it."""
    draw = random.Random(f"s3 {seed}")
    common = np.random.default_rng(seed).integers(0, 256, 1 << 20, dtype="u1")
    url = f"{database}&blobs=s3://kedge/faults-{os.urandom(4).hex()}"
    kept: dict[str, Any] = {}
    spoilt = done = 0
    end = time.monotonic() + seconds
    before = os.environ["AWS_ENDPOINT_URL"]
    with fault_proxy(s3, rate=0.25, seed=seed, faults=faults) as (address, proxy):
        os.environ["AWS_ENDPOINT_URL"] = address
        try:
            with unrefused("through the proxy"), kedge.open(url) as store:
                blobs: Any = store.store.blobs
                blobs.backoff = Backoff(attempts=60, first_s=0.002, most_s=0.05)
                while done < runs and time.monotonic() < end:
                    done += 1
                    state = {"n": done, "own": np.frombuffer(draw.randbytes(150_000), "u1"), "common": common}
                    saved = store.save("job", f"run {done}", state)
                    spoilt += _compare(store, saved, state)
                    kept[saved] = state
                    if done % 20 == 0:
                        for gone in draw.sample(sorted(kept), 5):
                            store.delete("job", gone)
                            del kept[gone]
                        store.gc()
        finally:
            os.environ["AWS_ENDPOINT_URL"] = before
    with unrefused("without the proxy"), kedge.open(url) as store:
        if sorted(kept) != sorted(c.id for c in store.list("job")):
            raise Violation("what is there is not what was saved")
        for saved, state in kept.items():
            if _compare(store, saved, state):
                raise Violation(f"{saved} is damaged in the store itself")
        report = store.verify()
        if not report.is_ok:
            raise Violation(f"{report.problems}")
    struck = {fault: proxy.struck[fault] for fault in faults}
    return {"runs": done, "lost": 0, "false conflicts": 0, "spoilt answers noticed": spoilt, **struck}


def _compare(store: kedge.CheckpointManager, saved: str, state: Any) -> int:
    """Load until it comes through unspoilt; never anything else than what was saved. Answers how often it did not."""
    for attempt in range(30):
        try:
            found: Any = store.load(saved)
        except Corrupted:
            continue
        if found["n"] != state["n"] or any(not np.array_equal(found[k], state[k]) for k in ("own", "common")):
            raise Violation(f"{saved} came back as something else")
        return attempt
    raise Violation(f"{saved} cannot be loaded")


def torture(minutes: float, folder: Path) -> dict[str, float]:
    from tests.servers.postgres import postgres_cluster
    from tests.servers.s3 import environment, s3_server

    with postgres_cluster() as cluster, s3_server(folder) as address:
        os.environ.update(environment(address))
        return through_faults(
            cluster.url("postgres"), address, runs=1000, seconds=minutes * 60, seed=time.time_ns() % 10**6
        )
