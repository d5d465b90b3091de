"""Numbers of this process and of the namespaces it serves, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kedge.llm.bills import Bill
from kedge.manager import CheckpointManager
from kedge.pipeline.history import CALLS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OF_STORE = ("kedge_store_", "kedge_llm_")
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """What happens in this process. Labels never hold names that callers choose."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "kedge_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "kedge_http_seconds", "Time to answer.", ["method", "route"], buckets=_BUCKETS_S, registry=self.registry
        )
        self.in_flight = Gauge("kedge_http_in_flight", "Requests under way.", registry=self.registry)
        self.lease_conflicts = Counter("kedge_lease_conflicts", "Writes refused by a lease.", registry=self.registry)
        self.refused = Counter(
            "kedge_http_refused", "Requests refused at the edge.", ["reason"], registry=self.registry
        )
        self.tasks = Counter("kedge_tasks", "Background tasks ended.", ["kind", "outcome"], registry=self.registry)
        self.gc_freed = Counter("kedge_gc_freed_bytes", "Bytes given back by gc.", registry=self.registry)

        self.worker = ""  # tells the workers of one service apart, whose counts are each their own
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._bills: dict[str, tuple[int, Bill]] = {}

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer. On the way of every request, so the labelled numbers are looked up once."""
        found = self._children.get((method, route, status))
        if found is None:
            found = self.requests.labels(method, route, status), self.latency.labels(method, route)
            self._children[method, route, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def text(self, stores: Iterable[CheckpointManager]) -> bytes:
        """All of it, with the numbers of these namespaces."""
        chosen = list(stores)
        of_stores = CollectorRegistry(auto_describe=False)
        of_stores.register(_OfStores(chosen, {store.namespace: self._bill(store) for store in chosen}))
        return b"".join(generate_latest(_Labelled(each, self.worker)) for each in (self.registry, of_stores))

    def _bill(self, store: CheckpointManager) -> Bill:
        """What LLM calls cost so far; only records since the last look are read."""
        seen, bill = self._bills.get(store.namespace, (0, Bill()))
        while page := store.list(CALLS, after=seen, limit=1000):
            seen = page[-1].seq
            bill = sum((Bill.from_json(record.metadata) for record in page), bill)
        self._bills[store.namespace] = seen, bill
        return bill


class _Labelled(CollectorRegistry):
    """Numbers of one worker of several. What is of the store, all of them say alike."""

    def __init__(self, registry: CollectorRegistry, worker: str) -> None:
        super().__init__(auto_describe=False)
        self._registry_of_one = registry
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry_of_one.collect():
            if self._worker and not metric.name.startswith(_OF_STORE):
                own = {"worker": self._worker}
                metric.samples = [sample._replace(labels={**sample.labels, **own}) for sample in metric.samples]
            yield metric


class _OfStores(Collector):
    def __init__(self, stores: list[CheckpointManager], bills: Mapping[str, Bill]) -> None:
        self._stores = stores
        self._bills = bills

    def collect(self) -> Iterable[Metric]:
        work = {
            "saves": "Checkpoints saved by this process.",
            "saved_bytes": "Bytes of the states saved by this process.",
            "stored_bytes": "Bytes these saves added to the store.",
            "loads": "States loaded by this process.",
            "loaded_bytes": "Bytes of the states loaded by this process.",
        }
        for name, text in work.items():
            counter = CounterMetricFamily(f"kedge_{name}", text, labels=["namespace"])
            for store in self._stores:
                counter.add_metric([store.namespace], store.counters[name])
            yield counter
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
