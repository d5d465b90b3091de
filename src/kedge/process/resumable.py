"""Objects that can be resumed: a state to save, a policy when to save it, and signals that save and stop.

class Resample(CheckpointableProcess):
    def get_state(self): return {"rows": self.rows}
    def restore_state(self, state): self.rows = state["rows"]

    def work(self, items):
        for item in items[self.items_done:]:
            self.rows.append(resample(item))
            self.update_progress(1, total=len(items))
            self.auto_checkpoint()

with Resample(process_id="resample-7", store="my-store") as process:    # restores what was saved last
    process.work(items)
"""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, ParamSpec, Self, TypeVar

from kedge.care.retention import RetentionPolicy
from kedge.errors import Conflict, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, Lease, parse_choice, parse_name
from kedge.pipeline.owner import take_lease
from kedge.pipeline.signals import Paused, Signals
from kedge.store.background import PendingSave

P = ParamSpec("P")
R = TypeVar("R")

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:@+-]+")


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When a process saves itself and what it keeps. A limit of None never asks for a checkpoint, or deletes one.

    `validate_on_save` and `verify_on_load` control the process's own validator; digests are always verified.
    """

    interval_items: int | None = 100
    interval_seconds: float | None = 300.0
    interval_memory_mb: float | None = 500.0  # growth since the last checkpoint
    max_checkpoints: int = 5
    max_age_hours: float | None = 24.0  # of those, relative to the newest one (see `retention`)
    keep_per_level: Mapping[str, int] = field(default_factory=dict)  # a minimum for each level
    keep_failed_checkpoints: bool = True
    validate_on_save: bool = True
    verify_on_load: bool = True
    auto_cleanup: bool = True
    async_save: bool = False

    def __post_init__(self) -> None:
        for name in ("interval_items", "interval_seconds", "interval_memory_mb", "max_age_hours"):
            _check_positive(name, getattr(self, name), whole=name == "interval_items")
        if self.max_checkpoints is None:
            raise Validation(
                "max_checkpoints must be at least 1 (got None)", hint="keep at least 1; auto_cleanup=False keeps all"
            )
        _check_positive("max_checkpoints", self.max_checkpoints, whole=True)
        for name in (f.name for f in fields(self) if f.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise Validation(f"{name} must be True or False (got {getattr(self, name)!r})")
        for level, count in self.keep_per_level.items():
            parse_choice(CheckpointLevel, level)
            _check_positive(f"keep_per_level[{level!r}]", count, whole=True)
        try:
            self.retention()
        except OverflowError as error:
            raise Validation(
                f"max_age_hours is too large (got {self.max_age_hours!r})", hint="use None for no end"
            ) from error

    def should_checkpoint_by_items(self, items: int) -> bool:
        """Return whether so many items since the last checkpoint require another one."""
        return self.interval_items is not None and items >= self.interval_items

    def should_checkpoint_by_time(self, seconds: float) -> bool:
        return self.interval_seconds is not None and seconds >= self.interval_seconds

    def should_checkpoint_by_memory(self, growth_mb: float) -> bool:
        return self.interval_memory_mb is not None and growth_mb >= self.interval_memory_mb

    def retention(self) -> list[RetentionPolicy]:
        """Return policies that must all keep a checkpoint: the newest ones, as far as they are young enough."""
        common: dict[str, Any] = {
            "min_per_level": dict(self.keep_per_level) or None,
            "keep_tags": ["failed"] if self.keep_failed_checkpoints else (),
        }
        policies = [RetentionPolicy(keep_last=self.max_checkpoints, **common)]
        if self.max_age_hours is not None:
            policies.append(RetentionPolicy(keep_within=timedelta(hours=self.max_age_hours), **common))
        return policies


class ResumableProcess(ABC):
    """The methods an object needs to be resumed."""

    @abstractmethod
    def get_state(self) -> Any:
        """Return everything needed to resume, as any value that the codec supports."""

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """Resume from what `get_state` returned."""

    @abstractmethod
    def get_progress(self) -> Mapping[str, object]:
        """Return the progress."""

    def can_resume_from(self, state: object) -> bool:
        """Return whether a state can be used. An unusable one is an error when it is loaded, never skipped silently."""
        return True


class CheckpointableProcess(ResumableProcess):
    """A resumable object that saves itself. Used as a context manager it is the only writer of its checkpoints.

    `process_id` is the job: give the same one to resume. `checkpoint_validator` is called with each state before it is
    saved and after it is loaded, and raises if it is wrong. All errors are raised; nothing is swallowed.
    """

    def __init__(
        self,
        checkpoint_policy: CheckpointPolicy | None = None,
        checkpoint_validator: Callable[[object], object] | None = None,
        process_id: str | None = None,
        *,
        store: CheckpointManager | str | os.PathLike[str] | None = None,
        grace_s: float = 30.0,
        ttl_s: float = 30.0,
    ) -> None:
        self._policy = checkpoint_policy or CheckpointPolicy()
        self._validate = checkpoint_validator
        self._process_id = parse_name("process ID", process_id or _NOT_IN_NAMES.sub("-", type(self).__name__))
        self._given = store
        self._store: CheckpointManager | None = store if isinstance(store, CheckpointManager) else None
        self._signals = Signals(grace_s)
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._stack: ExitStack | None = None
        self._pending: PendingSave[CheckpointId] | None = None
        self._newest: dict[str, object] = {}
        self.items_done = 0
        self.items_total: int | None = None
        self._begin_interval()

    # Overridden by subclasses

    def get_progress(self) -> Mapping[str, object]:
        return {
            "items_done": self.items_done,
            "items_total": self.items_total,
            "percent": self.get_progress_percentage(),
        }

    # Properties

    @property
    def process_id(self) -> str:
        return self._process_id

    @property
    def checkpoint_interval(self) -> int | None:
        return self._policy.interval_items

    @property
    def checkpoint_metadata(self) -> Mapping[str, object]:
        """Facts about the newest checkpoint saved or loaded here; empty if there is none."""
        return dict(self._newest)

    @property
    def store(self) -> CheckpointManager:
        if self._store is None:
            self._store = CheckpointManager(self._given if not isinstance(self._given, CheckpointManager) else None)
        return self._store

    # Saving and loading

    def save_checkpoint(
        self,
        level: CheckpointLevel | str = CheckpointLevel.STEP,
        data: object = None,
        description: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Save `data`, or the process's own state, with its progress; durable when this returns, unless async_save.

        With async_save the state is copied now and becomes durable in the background; the ID is that of the save
        before, or "" the first time, and an error is raised by the next save.
        """
        level = parse_choice(CheckpointLevel, level)
        state = self.get_state() if data is None else data
        if self._validate is not None and self._policy.validate_on_save:
            self._validate(state)
        metadata = {"kind": "process", "class": type(self).__name__, "description": description, **self._counts()}
        step = description or f"{self._process_id} {self.items_done}"
        whole = {"state": state, "progress": self._counts()}
        options: dict[str, Any] = {"level": level, "tags": tags, "metadata": metadata, "lease": self._lease}
        if self._policy.async_save:
            saved = self.flush()
            self._pending = self.store.save_async(self._process_id, step[:1024], whole, **options)
        else:
            saved = self.store.save(self._process_id, step[:1024], whole, **options)
            self._newest = {"checkpoint_id": saved, "level": str(level), **metadata}
        self._begin_interval()
        if self._policy.auto_cleanup:
            self.cleanup_checkpoints()
        return saved

    def flush(self) -> str:
        """Wait until the save in progress is durable. Return its ID, or that of the newest one, or ""."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._newest = {"checkpoint_id": pending.result()}
        return str(self._newest.get("checkpoint_id", ""))

    def load_checkpoint(self, checkpoint_id: str | None = None) -> Any:
        """Restore a checkpoint, by default the newest, and answer its state; None when there is none yet.

        What was done before counts: the progress continues from that of the checkpoint. States saved when the process
        failed may be in the middle of an item: they are kept for looking at, and restored only by their ID.
        """
        checkpoint = self._newest_usable() if checkpoint_id is None else self.store.get(checkpoint_id)
        if checkpoint is None:
            return None
        whole = self.store.load(checkpoint.id)
        if not isinstance(whole, Mapping) or "state" not in whole or checkpoint.metadata.get("kind") != "process":
            raise Conflict(
                f"checkpoint {checkpoint.id} was not saved by a process",
                hint="use another process ID, or load it by hand",
            )
        state = whole["state"]
        if self._validate is not None and self._policy.verify_on_load:
            self._validate(state)
        if not self.can_resume_from(state):
            raise Conflict(
                f"{type(self).__name__} cannot resume from checkpoint {checkpoint.id}",
                hint="load an older one by its ID, or start anew under another process ID",
            )
        self.restore_state(state)
        progress: Any = whole.get("progress") or {}
        self.items_done, self.items_total = progress.get("items_done", 0), progress.get("items_total")
        self._newest = {"checkpoint_id": checkpoint.id, "level": str(checkpoint.level), **checkpoint.metadata}
        self._begin_interval()
        return state

    def _newest_usable(self) -> Checkpoint | None:
        page = self.store.list(self._process_id, limit=20)
        while page:
            for checkpoint in reversed(page):
                if "failed" not in checkpoint.tags and checkpoint.status is not CheckpointStatus.CORRUPTED:
                    return checkpoint
            page = self.store.list(self._process_id, limit=20, before=page[0].seq)
        return None

    # When

    def update_progress(self, items: int = 1, total: int | None = None) -> None:
        """Add completed items, of `total` in all."""
        if isinstance(items, bool) or not isinstance(items, int) or items < 0:
            raise Validation(
                f"items must be a whole number from 0 on (got {items!r})",
                hint="use the number of items done since the last call",
            )
        self.items_done += items
        self._items_since += items
        if total is not None:
            self.items_total = total

    def get_progress_percentage(self) -> float:
        """Return the percentage from 0.00 to 100.00; 0.0 while the total is unknown."""
        return round(min(100.0, 100 * self.items_done / self.items_total), 2) if self.items_total else 0.0

    def should_checkpoint(self) -> bool:
        return (
            self._policy.should_checkpoint_by_items(self._items_since)
            or self._policy.should_checkpoint_by_time(time.monotonic() - self._saved_at)
            or self._policy.should_checkpoint_by_memory(_memory_mb() - self._memory_mb)
        )

    def auto_checkpoint(self, force: bool = False) -> str | None:
        """Save between two items if one is due or a signal requests it. Stop or wait if a signal requests that."""
        signals = self._signals
        is_asked, signals.is_asked_to_record = signals.is_asked_to_record, False
        saved = None
        if force or is_asked or signals.stopping or self.should_checkpoint():
            saved = self.save_checkpoint(description="auto")
        while signals.must_wait():
            time.sleep(0.05)
        if signals.stopping:
            self.flush()
            raise Paused(signals.stopping)
        return saved

    def get_checkpoint_info(self) -> dict[str, object]:
        newest = self.store.list(self._process_id, limit=1)
        return {
            "process_id": self._process_id,
            "checkpoints": self.store.stats(self._process_id)["checkpoints"] if newest else 0,
            "newest": newest[-1].id if newest else None,
            "items_since": self._items_since,
            "seconds_since": time.monotonic() - self._saved_at,
            **self.get_progress(),
        }

    def cleanup_checkpoints(self) -> int:
        """Delete what the policy does not keep; return how many."""
        reviews = (
            self.store.review(policy, job=self._process_id, dry_run=False) for policy in self._policy.retention()
        )
        return sum(not verdict.reasons for verdicts in reviews for verdict in verdicts)

    def _begin_interval(self) -> None:
        self._items_since = 0
        self._saved_at = time.monotonic()
        self._memory_mb = _memory_mb()

    def _counts(self) -> dict[str, object]:
        return {"items_done": self.items_done, "items_total": self.items_total}

    # Life

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not isinstance(self._given, CheckpointManager):
                stack.enter_context(self.store)
            self._lease = stack.enter_context(take_lease(self.store, self._process_id, self._ttl_s))
            self._signals.install()
            stack.callback(self._signals.restore)
            self.load_checkpoint()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._stack is not None  # nosec B101 # entered
        with self._stack:
            self._signals.disarm()
            if isinstance(error, Paused):
                how = "what it saved last is kept: start it again to go on"
                sys.stderr.write(f"kedge: {self._process_id} stops ({error}); {how}\n")
            elif isinstance(error, Exception) and self._policy.keep_failed_checkpoints and self._lease is not None:
                try:
                    self.save_checkpoint(description="failed", tags={"failed": type(error).__name__})
                except Exception as failure:  # noqa: BLE001 - the first error is the one to raise
                    error.add_note(f"Its state could not be saved: {failure}")
            elif error is None and self._items_since:
                self.save_checkpoint(description="end")
            self.flush()
        self._stack = self._lease = None
        if not isinstance(self._given, CheckpointManager):
            self._store = None


def checkpoint_on_interval(items: int = 100, seconds: float = 300.0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method of a CheckpointableProcess count one item per call, and save after so many, or so much time."""
    policy = CheckpointPolicy(interval_items=items, interval_seconds=seconds, interval_memory_mb=None)

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            process = args[0] if args else None
            if not isinstance(process, CheckpointableProcess):
                raise Validation(
                    f"{method.__qualname__} is not a method of a CheckpointableProcess",
                    hint="derive its class from kedge.CheckpointableProcess",
                )
            result = method(*args, **kwargs)
            process.update_progress(1)
            is_due = policy.should_checkpoint_by_items(process._items_since) or policy.should_checkpoint_by_time(
                time.monotonic() - process._saved_at
            )
            process.auto_checkpoint(force=is_due)
            return result

        return call

    return decorate


def _check_positive(name: str, value: object, *, whole: bool) -> None:
    if value is None:
        return
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:  # type: ignore[operator]
        raise Validation(f"{name} must be a number above 0 (got {value!r})")


def _memory_mb() -> float:
    """Return this process's memory in use."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0
