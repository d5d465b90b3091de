"""The Indexed Job of examples/kubernetes without a cluster: what its controller and kubelets do, done here.

Each pod is a process in a network namespace of its own, which reaches nothing but the database, with the command and
environment of the manifest and the index that an Indexed Job gives it. Pods are killed; as `restartPolicy: Never` and
`backoffLimitPerIndex` say, another one takes the index, until it ends well or the limit is reached.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import kedge
from tests.servers.postgres import Cluster, postgres_cluster

from .ledger import Violation
from .partitions import Host, joined_hosts

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes"
LEASE_S = 6.0  # a pod that stands still for so long has lost its item, too


def manifest() -> Any:
    return yaml.safe_load((EXAMPLE / "job.yaml").read_text())


class Pod:
    """One try of one index."""

    def __init__(self, job: Any, index: int, host: Host, log: Path, app: Path) -> None:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        secret = {"store": host.url, "database": host.url}
        environment = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
        for entry in container["env"]:
            source = entry.get("valueFrom")
            environment[entry["name"]] = secret[source["secretKeyRef"]["key"]] if source else entry["value"]
        # Of an image we have only what it would hold: this Python, and the example in /app.
        environment |= {"ITEM_LEASE_S": str(LEASE_S), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = [re.sub("^/app/", f"{app}/", word) for word in container["command"]]
        self.index = index
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", host.name, *command], env=environment, stdout=out, stderr=out, cwd="/"
            )


def run_job(
    cluster: Cluster,
    folder: Path,
    *,
    pods: int,
    items: int,
    kills: int,
    seed: int = 1,
    seconds: float = 600,
    app: Path = EXAMPLE,
    go: Path | None = None,
) -> dict[str, float]:
    """The Job with so many indexes, from its table to its end; so many of its pods are killed at work.

    `go`: what its items wait for (see `held`); it is there once all pods were at work at a time, and all are killed
    that are to be.
    """
    draw = random.Random(seed)
    job = manifest()
    job["spec"] |= {"completions": pods, "parallelism": pods}
    with joined_hosts(cluster, pods) as hosts:
        database = cluster.empty_database(hosts[0].url)
        fill = [sys.executable, str(EXAMPLE / "items.py"), "fill", str(items)]
        subprocess.run(fill, check=True, env={**os.environ, "KEDGE_STORE": database})
        started, killed = _control(job, hosts, folder, kills, draw, time.monotonic() + seconds, app, go)
        lines = [line for log in folder.glob("pod-*.log") for line in log.read_text().splitlines()]
        begun = Counter(line.split()[2] for line in lines if line.endswith(" begun"))
        with kedge.open(database) as store:
            kept = {found.name: found.checkpoints for found in store.jobs("item-")}
            if kept != {f"item-{n:06}": 1 for n in range(items)}:
                raise Violation(f"not each item once: {kept}")
            makers = {str(store.list(name)[0].metadata["by"]) for name in kept}
            if not store.verify().is_ok:
                raise Violation("the store is damaged")
    again = sum(begun.values()) - items
    if again > killed:
        raise Violation(f"{again} items were done again, though only {killed} pods were killed")
    return {
        "pods": pods, "started": started, "killed": killed, "items": items, "done again": again,
        "pods that kept items": len(makers), "kept twice": 0, "lost": 0,
    }  # fmt: skip


def _control(
    job: Any, hosts: list[Host], folder: Path, kills: int, draw: random.Random, end: float, app: Path, go: Path | None
) -> tuple[int, int]:
    """What the Job's controller does; answers how many pods it started, and how many were killed."""
    failures: Counter[int] = Counter()

    def log_of(index: int) -> Path:
        return folder / f"pod-{index}.log"

    running = [Pod(job, index, host, log_of(index), app) for index, host in enumerate(hosts)]
    started, killed, wanted = len(running), 0, len(hosts)
    try:
        while running:
            if time.monotonic() > end:
                raise Violation(f"the Job does not end: {failures}")
            time.sleep(0.01)  # sleep: between two looks
            said = sum(log.read_bytes().count(b"\n") for log in folder.glob("pod-*.log"))
            if said >= wanted and killed < kills:
                draw.choice(running).process.kill()
                killed, wanted = killed + 1, said + (1 if go else 5)  # when its heir is at work, or some items later
            elif said >= wanted and go:
                go.touch()
            for pod in [pod for pod in running if pod.process.poll() is not None]:
                running.remove(pod)
                if pod.process.returncode == 0:
                    continue
                failures[pod.index] += 1
                if failures[pod.index] > job["spec"]["backoffLimitPerIndex"]:
                    raise Violation(f"index {pod.index} failed for good: {log_of(pod.index).read_text()}")
                running.append(Pod(job, pod.index, hosts[pod.index], log_of(pod.index), app))
                started += 1
    finally:
        for pod in running:
            pod.process.kill()
            pod.process.wait()
    return started, killed


CARELESS = {"(secs => %s)": "(secs => %s * 0)", "store.load_latest(name) is None": "True"}
"""Its safeguards taken out: items are not set aside, nor is it looked whether they are done."""


def held(folder: Path, go: Path, changes: Mapping[str, str] = {}) -> Path:
    """The example with these changes, whose items wait for a file: no pod does them all before another begins."""
    takes = 'time.sleep(float(os.environ.get("ITEM_TAKES_S", "0.1")))'  # sleep: the one of the example
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.02)"  # sleep: between two looks
    text = (EXAMPLE / "items.py").read_text()
    for part, instead in {takes: waits, **changes}.items():
        if part not in text:
            raise AssertionError(f"the example has no {part} any more")
        text = text.replace(part, instead)
    (folder / "items.py").write_text(text)
    return folder


def torture(minutes: float, folder: Path) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    with postgres_cluster() as cluster:
        return run_job(cluster, folder, pods=10, items=1000, kills=100, seed=time.time_ns(), seconds=minutes * 60)
