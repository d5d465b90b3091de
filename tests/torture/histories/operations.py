"""Everything a worker can ask of a store, each call told before and after."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import kedge

from . import values
from .reading import (
    KEYS,
    RETAINED,
    compare,
    diff,
    exists,
    get,
    job_of,
    load,
    load_by_key,
    load_latest,
    load_part,
    look,
    one_of,
    restore,
)  # fmt: skip
from .worker import Worker, add_key

LEASE_S = 0.3


def choose(worker: Worker) -> None:
    """One operation, or a few that belong together."""
    possible = [operation for operation in _WEIGHTS if _is_possible(worker, operation)]
    weights = [_WEIGHTS[operation] * worker.emphasis(operation.__name__) for operation in possible]
    worker.draw.choices(possible, weights)[0](worker)


def _is_possible(worker: Worker, operation: Callable[[Worker], None]) -> bool:
    access = worker.access
    if operation.__name__ in access.without:
        return False
    if operation in (copy_to, follow_to):  # a copy may have what memory lost, and is right to refuse what came after
        return not access.is_remote and not access.owns_jobs
    if operation is rekey:
        return access.changes_master
    if operation is rewrite:
        return bool(access.keys) and not access.is_remote
    if operation is fenced:
        return not access.owns_jobs
    return True


def _new(worker: Worker) -> tuple[str, int]:
    kinds = [k for k in values.KINDS if k != "files" or worker.access.keeps_files]
    return worker.draw.choice(kinds), worker.draw.randrange(10**9)


# Saving


def save(worker: Worker, lease: kedge.Lease | None = None, job: str | None = None) -> dict[str, Any] | None:
    job = job or job_of(worker)
    kind, seed = _new(worker)
    mark = f"{worker.name}.{seed}"
    state = values.make(kind, seed, worker.scratch)

    def call() -> dict[str, Any]:
        tags = {"worker": worker.name} if worker.draw.random() < 0.3 else None
        about = values.about(kind, seed, mark)
        return {"id": str(worker.store.save(job, f"step {kind}", state, tags=tags, metadata=about, lease=lease))}

    return worker.do("save", call, job=job, mark=mark, token=lease.token if lease else None)


def save_any(worker: Worker) -> None:
    save(worker)


def save_async(worker: Worker) -> None:
    """Several at once; those of one job are numbered in this order."""
    job, pending = job_of(worker), []
    for _ in range(worker.draw.randint(2, 4)):
        kind, seed = _new(worker)
        mark = f"{worker.name}.{seed}"
        state = values.make(kind, seed, worker.scratch)
        number = worker.begin("save", job=job, mark=mark, follows=pending[-1][0] if pending else None)
        try:
            pending.append(
                (number, worker.store.save_async(job, "later", state, metadata=values.about(kind, seed, mark)))
            )
        except Exception as error:
            worker.refused(number, error)
    for number, save_ in pending:
        try:
            worker.end(number, id=str(save_.result()))
        except Exception as error:
            worker.refused(number, error)


def save_keyed(worker: Worker) -> None:
    """The same key always comes with the same request: whoever repeats it gets the first ID."""
    job = job_of(worker)
    key = f"key-{worker.draw.randrange(KEYS)}"
    mark = f"{job}.{key}"
    kind, seed = ("packed" if key == "key-0" else "small"), sum(mark.encode())

    def call() -> dict[str, Any]:
        state = values.make(kind, seed, worker.scratch)
        saved = worker.store.save(job, "keyed", state, metadata=values.about(kind, seed, mark), idempotency_key=key)
        return {"id": str(saved)}

    worker.do("save", call, job=job, mark=mark, key=key)


def branch(worker: Worker) -> None:
    source = one_of(worker)
    if source is None:
        return
    job = source.job if source.job != RETAINED else f"own-{worker.slot}"

    def call() -> dict[str, Any]:
        made, state = worker.store.resume_from(source.id, job)
        compare(worker, state, made)
        return {"id": str(made.id), "seen": [worker.seen(made)]}

    worker.do("branch", call, id=str(source.id), job=job, mark=str(source.metadata["mark"]))


def copy_job(worker: Worker) -> None:
    job = f"own-{worker.slot}"
    new_job = f"copy-{worker.slot}"

    def call() -> dict[str, Any]:
        copies = worker.store.copy(job, new_job)
        return {"ids": [str(c.id) for c in copies], "seen": [worker.seen(c) for c in copies]}

    worker.do("copy_job", call, source=job, job=new_job)


# Changing


def delete(worker: Worker) -> None:
    if chosen := one_of(worker):
        deleted = {"job": chosen.job, "id": str(chosen.id)}
        worker.do("delete", lambda: {"deleted": worker.store.delete(chosen.job, chosen.id)}, **deleted)


def cleanup(worker: Worker) -> None:
    job, keep = job_of(worker), worker.draw.randint(2, 8)
    worker.do("cleanup", lambda: {"count": worker.store.cleanup(job, keep_last=keep)}, job=job, keep=keep)


def retain(worker: Worker) -> None:
    job, keep = job_of(worker), worker.draw.randint(2, 8)

    def call() -> dict[str, Any]:
        plan = worker.store.apply(kedge.RetentionPolicy(keep_last=keep), job=job, dry_run=False)
        return {"ids": [str(c.id) for c in plan.delete]}

    worker.do("apply", call, job=job, keep=keep)


def pin(worker: Worker) -> None:
    if chosen := one_of(worker):
        is_pinned = worker.draw.random() < 0.4
        call = lambda: {"seen": [worker.seen(worker.store.pin(chosen.id, is_pinned))]}  # noqa: E731
        worker.do("pin", call, id=str(chosen.id), pinned=is_pinned)


def tag(worker: Worker) -> None:
    if chosen := one_of(worker):
        value = worker.draw.choice(("a", "b", None))
        worker.do("tag", lambda: {"seen": [worker.seen(worker.store.tag(chosen.id, note=value))]}, id=str(chosen.id))


# Caring


def gc(worker: Worker) -> None:
    def call() -> dict[str, Any]:
        if damaged := worker.store.gc().damaged:
            worker.failed(f"gc calls packs damaged: {damaged}")
        return {}

    worker.do("gc", call)


def verify(worker: Worker) -> None:
    is_deep = worker.draw.random() < 0.7

    def call() -> dict[str, Any]:
        for problem in worker.store.verify(deep=is_deep).problems:
            worker.failed(f"verify: {problem.subject}: {problem.what}")
        return {}

    worker.do("verify", call, deep=is_deep)


def fenced(worker: Worker) -> None:
    """Take a lease, save under it, perhaps too late; now and then renew it, and mostly give it back."""
    job = "leased-0"
    taken: list[kedge.Lease] = []

    def take() -> dict[str, Any]:
        taken.append(worker.store.take_lease(job, worker.name, LEASE_S))
        return {"token": taken[0].token}

    if worker.do("take", take, job=job) is None:
        return
    lease = taken[0]
    for _ in range(worker.draw.randint(1, 3)):
        time.sleep(worker.draw.choice((0, 0, 0.05, 1.2 * LEASE_S)))  # sleep: until the lease may have run out
        if worker.draw.random() < 0.4:
            worker.do("renew", lambda: _nothing(worker.store.renew_lease(lease)), job=job, token=lease.token)
        save(worker, lease, job)
    if worker.draw.random() < 0.8:
        worker.do("release", lambda: _nothing(worker.store.break_lease(lease)), job=job, token=lease.token)


def _nothing(_: None) -> dict[str, Any]:
    return {}


def rekey(worker: Worker) -> None:
    """Another master key; with a rewrite, another data key too."""
    key, rewrites = os.urandom(32), worker.draw.random() < 0.3
    add_key(worker.access.keys, key)
    worker.do("rekey", lambda: _rekeyed(worker, key, rewrites), new_key=True, rewrites=rewrites)


def rewrite(worker: Worker) -> None:
    worker.do("rekey", lambda: _rekeyed(worker, None, True), rewrites=True)


def _rekeyed(worker: Worker, key: bytes | None, rewrites: bool) -> dict[str, Any]:
    if unreadable := worker.store.rekey(key, rewrite=rewrites).unreadable:
        worker.failed(f"rekey calls {unreadable} unreadable")
    return {}


# Other stores


def copy_to(worker: Worker) -> None:
    def call() -> dict[str, Any]:
        with worker.access.open_target() as target:
            if damaged := worker.store.copy_to(target).damaged:
                worker.failed(f"copy_to calls {damaged} damaged")
        return {}

    worker.do("copy_to", call)


def follow_to(worker: Worker) -> None:
    def call() -> dict[str, Any]:
        stop = threading.Event()
        timer = threading.Timer(0.2, stop.set)
        timer.start()
        try:
            with worker.access.open_target() as target:
                worker.store.follow_to(target, stop=stop)
        finally:
            timer.cancel()
        return {}

    worker.do("follow_to", call)


_WEIGHTS: dict[Callable[[Worker], None], float] = {
    save_any: 12,
    save_async: 3,
    save_keyed: 5,
    load_by_key: 2,
    branch: 3,
    copy_job: 0.5,
    get: 2,
    exists: 2,
    load: 6,
    load_part: 3,
    load_latest: 5,
    restore: 2,
    diff: 1,
    look: 2,
    delete: 6,
    cleanup: 1.5,
    retain: 2,
    pin: 2,
    tag: 2,
    gc: 3,
    verify: 3,
    fenced: 2,
    rekey: 0.7,
    rewrite: 2,
    copy_to: 0.7,
    follow_to: 0.4,
}
