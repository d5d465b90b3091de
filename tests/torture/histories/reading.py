"""Operations that change nothing, and how a worker finds something to do them to."""

from __future__ import annotations

from typing import Any

import kedge

from . import values
from .worker import Worker

RETAINED = "retained"  # the job whose policy keeps this many
RETAINED_KEEP = 4
KEYS = 4  # idempotency keys of a job
_PARTS = {"small": "numbers", "inline": "blob", "packed": "blob", "tree": "rows", "arrays": "bias"}


def job_of(worker: Worker) -> str:
    own = f"own-{worker.slot}"
    if worker.access.owns_jobs:
        return worker.draw.choice((own, f"other-{worker.slot}"))
    return worker.draw.choice((own, "common-0", "common-0", "common-1", RETAINED, "leased-0"))


def some_of(worker: Worker, job: str | None = None) -> list[kedge.Checkpoint]:
    """Checkpoints of a job, as listed now; [] when the listing was refused."""
    job = job or job_of(worker)
    listed: list[kedge.Checkpoint] = []

    def call() -> dict[str, Any]:
        listed.extend(worker.store.list(job))
        return {"seen": [worker.seen(c) for c in listed]}

    worker.do("list", call, job=job)
    return listed


def one_of(worker: Worker, job: str | None = None) -> kedge.Checkpoint | None:
    listed = some_of(worker, job)
    return worker.draw.choice(listed) if listed else None


def compare(worker: Worker, state: object, checkpoint: kedge.Checkpoint, only: str | None = None) -> None:
    if wrong := values.difference(state, checkpoint, only=only):
        worker.failed(wrong)


def load_by_key(worker: Worker) -> None:
    job, key = job_of(worker), f"key-{worker.draw.randrange(KEYS)}"

    def call() -> dict[str, Any]:
        answer = worker.store.load_by_key(job, key)
        if answer is None:
            return {"id": None}
        compare(worker, answer[1], answer[0])
        return {"id": str(answer[0].id), "seen": [worker.seen(answer[0])]}

    worker.do("by_key", call, job=job, key=key)


def get(worker: Worker) -> None:
    if chosen := one_of(worker):
        worker.do("get", lambda: {"seen": [worker.seen(worker.store.get(chosen.id))]}, id=str(chosen.id))


def exists(worker: Worker) -> None:
    if chosen := one_of(worker):
        worker.do("exists", lambda: {"exists": worker.store.exists(chosen.id)}, id=str(chosen.id))


def load(worker: Worker) -> None:
    if chosen := one_of(worker):

        def call() -> dict[str, Any]:
            compare(worker, worker.store.load(chosen.id), chosen)
            return {}

        worker.do("load", call, id=str(chosen.id))


def load_part(worker: Worker) -> None:
    chosen = one_of(worker)
    part = _PARTS.get(str(chosen.metadata["kind"])) if chosen else None
    if chosen and part:

        def call() -> dict[str, Any]:
            compare(worker, worker.store.load(chosen.id, only=part), chosen, only=part)
            return {}

        worker.do("load", call, id=str(chosen.id), only=part)


def load_latest(worker: Worker) -> None:
    job = job_of(worker)

    def call() -> dict[str, Any]:
        while answer := worker.store.load_latest(job):
            try:
                compare(worker, answer[1], answer[0])
            except kedge.NotFound:
                if worker.store.exists(answer[0].id):
                    raise
                continue  # deleted before its files were read
            return {"latest": answer[0].seq, "seen": [worker.seen(answer[0])]}
        return {"latest": None}

    worker.do("latest", call, job=job)


def restore(worker: Worker) -> None:
    if chosen := one_of(worker):

        def call() -> dict[str, Any]:
            compare(worker, worker.store.restore(chosen.job, chosen.id), chosen)
            return {}

        worker.do("restore", call, id=str(chosen.id))


def diff(worker: Worker) -> None:
    listed = some_of(worker)
    if len(listed) > 1:
        a, b = worker.draw.sample(listed, 2)

        def call() -> dict[str, Any]:
            worker.store.diff(a.id, b.id)
            return {}

        worker.do("diff", call, id=str(a.id), other=str(b.id))


def look(worker: Worker) -> None:
    """Numbers, jobs and events: nothing to compare with, but no error either, and events come in order."""

    def call() -> dict[str, Any]:
        worker.store.stats()
        worker.store.jobs()
        numbers = [event.id for event in worker.store.events(newest=True, limit=50)]
        if numbers != sorted(set(numbers)):
            worker.failed(f"events out of order: {numbers}")
        return {}

    worker.do("look", call)
