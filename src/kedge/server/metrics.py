"""Numbers of the service and of the namespaces it serves, in Prometheus' text form.

The workers of one service share a directory (`SHARED`, which prometheus_client reads when it is imported): each counts
in a file there, and whichever is asked answers the sum. What a worker counted stays when it ends.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from kedge.llm.bills import Bill
from kedge.manager import CheckpointManager
from kedge.pipeline.history import CALLS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHARED = "PROMETHEUS_MULTIPROC_DIR"
_WORK = {
    "saves": "Checkpoints saved.",
    "saved_bytes": "Bytes of the states saved.",
    "stored_bytes": "Bytes these saves added to the store.",
    "loads": "States loaded.",
    "loaded_bytes": "Bytes of the states loaded.",
}
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """What happens in this service. Labels hold no names that callers choose but those of namespaces."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "kedge_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "kedge_http_seconds", "Time to answer.", ["method", "route"], buckets=_BUCKETS_S, registry=self.registry
        )
        self.in_flight = Gauge(
            "kedge_http_in_flight", "Requests under way.", registry=self.registry, multiprocess_mode="livesum"
        )
        self.lease_conflicts = Counter("kedge_lease_conflicts", "Writes refused by a lease.", registry=self.registry)
        self.refused = Counter(
            "kedge_http_refused", "Requests refused at the edge.", ["reason"], registry=self.registry
        )
        self.tasks = Counter("kedge_tasks", "Background tasks ended.", ["kind", "outcome"], registry=self.registry)
        self.gc_freed = Counter("kedge_gc_freed_bytes", "Bytes given back by gc.", registry=self.registry)
        self._work = {
            name: Counter(f"kedge_{name}", text, ["namespace"], registry=self.registry) for name, text in _WORK.items()
        }
        self._shared = os.environ.get(SHARED)
        self._counted: dict[tuple[str, str], int] = {}  # of the work of each namespace
        self._lock = Lock()
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._bills: dict[str, tuple[int, Bill]] = {}

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer. On the way of every request, so the labelled numbers are looked up once."""
        pair = self._children.get((method, route, status))
        if pair is None:
            pair = self.requests.labels(method, route, status), self.latency.labels(method, route)
            self._children[method, route, status] = pair
        pair[0].inc()
        pair[1].observe(seconds)

    @property
    def is_shared(self) -> bool:
        """Whether others answer for this process too: then its work is to be counted when it is done."""
        return self._shared is not None

    def count_work(self, stores: Iterable[CheckpointManager]) -> None:
        """Take over what these managers have counted since the last time."""
        with self._lock:
            for store in stores:
                for name, counter in self._work.items():
                    count, before = store.counters[name], self._counted.get((store.namespace, name), 0)
                    if count != before:
                        counter.labels(store.namespace).inc(count - before)
                        self._counted[store.namespace, name] = count

    def text(self, stores: Iterable[CheckpointManager]) -> bytes:
        """All of it, with the numbers of these namespaces."""
        chosen = list(stores)
        self.count_work(chosen)
        own = self.registry if self._shared is None else _of_all_workers(self._shared)
        of_stores = CollectorRegistry(auto_describe=False)
        of_stores.register(_OfStores(chosen, {store.namespace: self._bill(store) for store in chosen}))
        visible = _Visible(own, {store.namespace for store in chosen})
        return generate_latest(visible) + generate_latest(of_stores)

    def _bill(self, store: CheckpointManager) -> Bill:
        """What LLM calls cost so far; only records since the last look are read."""
        seen, bill = self._bills.get(store.namespace, (0, Bill()))
        while page := store.list(CALLS, after=seen, limit=1000):
            seen = page[-1].seq
            bill = sum((Bill.from_json(record.metadata) for record in page), bill)
        self._bills[store.namespace] = seen, bill
        return bill


def _of_all_workers(directory: str) -> CollectorRegistry:
    for file in Path(directory).glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(pid, directory)  # type: ignore[no-untyped-call] # its requests ended with it
    registry = CollectorRegistry(auto_describe=False)
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    return registry


class _Visible(CollectorRegistry):
    """Without the numbers of namespaces that the caller may not see."""

    def __init__(self, registry: CollectorRegistry, namespaces: Collection[str]) -> None:
        super().__init__(auto_describe=False)
        self._all = registry
        self._namespaces = namespaces

    def collect(self) -> Iterable[Metric]:
        for metric in self._all.collect():
            metric.samples = [s for s in metric.samples if s.labels.get("namespace", "") in ("", *self._namespaces)]
            yield metric


class _OfStores(Collector):
    def __init__(self, stores: list[CheckpointManager], bills: Mapping[str, Bill]) -> None:
        self._stores = stores
        self._bills = bills

    def collect(self) -> Iterable[Metric]:
        totals = {store.namespace: store.stats() for store in self._stores}
        for name in ("jobs", "checkpoints", "size_bytes", "stored_bytes", "chunks", "packs", "pack_bytes"):
            gauge = GaugeMetricFamily(f"kedge_store_{name}", f"{name} of the namespace.", labels=["namespace"])
            for namespace, numbers in totals.items():
                gauge.add_metric([namespace], numbers.get(name, 0))
            yield gauge
        ratio = GaugeMetricFamily(
            "kedge_store_dedup_ratio", "Bytes of all states over bytes they added.", labels=["namespace"]
        )
        for namespace, numbers in totals.items():
            ratio.add_metric([namespace], numbers["size_bytes"] / max(numbers["stored_bytes"], 1))
        yield ratio
        for name, text in (("spent", "Paid for LLM calls."), ("saved", "Not paid, because the answer was cached.")):
            money = GaugeMetricFamily(f"kedge_llm_{name}_dollars", text, labels=["namespace"])
            for namespace, bill in self._bills.items():
                money.add_metric([namespace], float(getattr(bill, name)))
            yield money
