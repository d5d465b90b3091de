"""Kedge: one checkpoint system, from a Python dict to a running container.

    import kedge

    with kedge.open("my-store") as store:
        store.save("training", "epoch 3", {"epoch": 3, "weights": weights})
        state = store.restore("training")

The words, used the same way everywhere:

    job          a name you choose; owns an ordered history of checkpoints
    checkpoint   one immutable state of a job, with ID, sequence number, step, level, tags, metadata
    manifest     the encoded state plus references to chunks; chunks are named by BLAKE3 and stored once
    lease        the right to write a job, with a token that is checked in the write's transaction
    run          one execution of a pipeline under a key: a job whose finished steps are checkpoints

    your state ── codec ── chunks ── packs (bytes)          durable first
                     └──── manifest ── index (what exists)  then committed, then acknowledged

What is promised (docs/design.md): an acknowledged save survives kill -9 and power loss; a load returns exactly what
was saved, verified, or raises Corrupted; a state never chooses what code runs when it is loaded: only the `decode` and
`upgrade` functions that the program itself registered do.
"""

from __future__ import annotations

from .version import __version__ as __version__

TYPE_CHECKING = False  # importing typing would cost more than all of this file, which the runtime wrapper starts with

if TYPE_CHECKING:
    import os

    from . import llm as llm
    from .care.retention import RetentionPolicy
    from .codec import register
    from .errors import (
        BudgetExceeded,
        Cancelled,
        CheckpointError,
        Conflict,
        Corrupted,
        Denied,
        IdempotencyConflict,
        InvalidName,
        LeaseHeld,
        LeaseLost,
        NoSpace,
        NotAllowed,
        NotAStore,
        NotFound,
        OutcomeUnknown,
        QueueFull,
        ReadOnly,
        ReplayMiss,
        StepTimeout,
        StorageError,
        TooLarge,
        Unauthorized,
        Unavailable,
        UnsupportedFormat,
        UnsupportedType,
        Validation,
        WorkerDied,
    )
    from .files import File, Tree
    from .integrations.dask import dask
    from .manager import CheckpointManager
    from .model import Checkpoint, CheckpointLevel, CheckpointStatus, Event, Job, Lease, RunStatus
    from .pipeline.approval import Approval, decide
    from .pipeline.background import start
    from .pipeline.declaration import current_run, pipeline, step
    from .pipeline.failure import ItemError, StepFailed
    from .pipeline.inbox import send
    from .pipeline.place import idempotency_key
    from .pipeline.queues import Handle, Queue
    from .pipeline.queues import Queue as queue  # noqa: N813
    from .pipeline.retry import Retry
    from .pipeline.run import Run
    from .pipeline.run import Run as run  # noqa: N813
    from .pipeline.schedules import schedule
    from .pipeline.signals import Paused
    from .pipeline.streams import follow
    from .process.resumable import CheckpointableProcess, CheckpointPolicy, ResumableProcess, checkpoint_on_interval


def open(
    url: str | os.PathLike[str] | None = None,
    *,
    namespace: str = "default",
    create: bool = True,
    key: bytes | str | None = None,
    encrypt_names: bool | None = None,
) -> CheckpointManager:
    """Open a store: a directory (made if new), "file:directory", "memory:", or "postgresql://…" for many machines.

    "files:directory" stores checkpoints as JSON files that people can read; "memory:directory" is written to the
    directory when it is closed.

    With PostgreSQL the bytes are in the database too, or in an object store: "postgresql://…?blobs=s3://bucket/prefix".

    None means $KEDGE_STORE, or else ./.kedge. With create=False, a missing store raises NotFound.

    With a key (32 bytes, what `kedge key new` prints, "file:PATH", "command:PROGRAM …"; None: $KEDGE_KEY or
    $KEDGE_KEY_FILE, if set) everything in the store is encrypted; encrypt_names hides names of jobs and steps too.
    """
    from .manager import CheckpointManager

    return CheckpointManager(url, namespace=namespace, create=create, key=key, encrypt_names=encrypt_names)


__all__ = [
    "Approval",
    "BudgetExceeded",
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "CheckpointLevel",
    "CheckpointManager",
    "CheckpointPolicy",
    "CheckpointStatus",
    "CheckpointableProcess",
    "Conflict",
    "Corrupted",
    "Denied",
    "Event",
    "File",
    "Handle",
    "IdempotencyConflict",
    "InvalidName",
    "ItemError",
    "Job",
    "Lease",
    "LeaseHeld",
    "LeaseLost",
    "NoSpace",
    "NotAStore",
    "NotAllowed",
    "NotFound",
    "OutcomeUnknown",
    "QueueFull",
    "Paused",
    "Queue",
    "ReadOnly",
    "ReplayMiss",
    "ResumableProcess",
    "RetentionPolicy",
    "Retry",
    "Run",
    "RunStatus",
    "StepFailed",
    "StepTimeout",
    "StorageError",
    "TooLarge",
    "Tree",
    "Unauthorized",
    "Unavailable",
    "UnsupportedFormat",
    "UnsupportedType",
    "Validation",
    "WorkerDied",
    "checkpoint_on_interval",
    "current_run",
    "dask",
    "decide",
    "follow",
    "idempotency_key",
    "open",
    "pipeline",
    "queue",
    "register",
    "run",
    "schedule",
    "send",
    "start",
    "step",
]

_HOMES = {
    "codec": ("register",),
    "errors": (
        "BudgetExceeded", "Cancelled", "CheckpointError", "Conflict", "Corrupted", "Denied", "IdempotencyConflict",
        "InvalidName", "LeaseHeld", "LeaseLost", "NoSpace", "NotAStore", "NotAllowed", "NotFound", "OutcomeUnknown",
        "QueueFull", "ReadOnly", "ReplayMiss", "StepTimeout", "StorageError", "TooLarge", "Unauthorized", "Unavailable",
        "UnsupportedFormat", "UnsupportedType", "Validation", "WorkerDied",
    ),
    "files": ("File", "Tree"),
    "integrations.dask": ("dask",),
    "manager": ("CheckpointManager",),
    "model": ("Checkpoint", "CheckpointLevel", "CheckpointStatus", "Event", "Job", "Lease", "RunStatus"),
    "pipeline": (
        "Approval", "Handle", "ItemError", "Paused", "Queue", "Retry", "Run", "StepFailed", "current_run",
        "decide", "follow", "idempotency_key", "pipeline", "queue", "run", "schedule", "send", "start", "step",
    ),
    "process.resumable": ("CheckpointPolicy", "CheckpointableProcess", "ResumableProcess", "checkpoint_on_interval"),
    "care.retention": ("RetentionPolicy",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing Kedge costs next to nothing."""
    if name not in _HOME and name != "llm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "llm":  # a subpackage that is used by its own name
        return import_module(".llm", __name__)
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
