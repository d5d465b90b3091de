"""The methods of a CheckpointManager that find and load checkpoints. They parse, then ask the store."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kedge import codec
from kedge.blobs.shelter import Turns
from kedge.errors import Conflict, Corrupted, NotFound, Validation
from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus, parse_choice, parse_limit, parse_name
from kedge.ports import NEWEST, NEWEST_INTACT, Catalogue, Checkpoints, Jobs, Selection, are_texts, pages, wanted_tags

from . import Store, Stored, knows
from .background import BackgroundSaves
from .reference import resolve
from .streams import deleted_while_read

_PAGE = 1000  # checkpoints per read


@dataclass(slots=True)
class Session:
    """What a manager and its views share."""

    store: Store
    background: BackgroundSaves = field(default_factory=BackgroundSaves)
    turns: Turns = field(default_factory=Turns)
    counters: Counter[str] = field(default_factory=Counter)
    watchers: list[Callable[[str, Checkpoint], None]] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)
    is_closed: bool = False


class ReadingManager:
    """The half of `CheckpointManager` that changes nothing; never instantiated alone."""

    _session: Session

    @property
    def store(self) -> Store:
        """Return the store of this object. Raises Conflict once it is closed."""
        self._check_open()
        return self._session.store

    @store.setter
    def store(self, store: Store) -> None:
        self._session.store = store

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue of this store, which takes names unparsed: for programs built on it."""
        return self.store.catalogue

    @property
    def counters(self) -> Counter[str]:
        """Numbers and bytes of saves and loads by this object and its views."""
        return self._session.counters

    def _check_open(self) -> None:
        if self._session.is_closed:
            raise Conflict(f"{self!r} is closed", hint="open it again with kedge.open()")

    # Finding

    def list(
        self,
        job_id: str,
        *,
        level: CheckpointLevel | str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: str | int | None = None,
        after: str | int | None = None,
    ) -> Checkpoints:
        """Return checkpoints of a job, oldest first, without their states; [] for an unknown job.

        `limit` returns the newest ones; page backwards with `before=` the first of the last page (its ID or seq).
        `metadata` filters by JSON paths, such as {"model.name": "small"}.
        """
        return self.catalogue.list(job_id, self._selection(job_id, level, tags, metadata, limit, before, after))

    def walk(
        self,
        job_id: str,
        *,
        level: CheckpointLevel | str | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        before: str | int | None = None,
        after: str | int | None = None,
    ) -> Iterator[Checkpoint]:
        """Yield the checkpoints that `list` returns, oldest first, in memory that does not grow with the history.

        Reads page by page: includes what is saved meanwhile, and omits what is deleted before its page is read.
        """
        wanted = self._selection(job_id, level, tags, metadata, None, before, after)
        for page in pages(self.catalogue.list, job_id, _PAGE, wanted):
            yield from page

    def _selection(
        self,
        job_id: str,
        level: CheckpointLevel | str | None,
        tags: Mapping[str, str] | None,
        metadata: Mapping[str, object] | None,
        limit: int | None,
        before: str | int | None,
        after: str | int | None,
    ) -> Selection:
        """Parse the arguments of `list`; raises before anything is listed."""
        parse_name("job", job_id)
        return Selection(
            level=None if level is None else parse_choice(CheckpointLevel, level),
            tags=wanted_tags(tags),
            metadata={} if metadata is None else metadata,
            limit=limit,
            before=self._in_job(job_id, before).seq if isinstance(before, str) else before,
            after=self._in_job(job_id, after).seq if isinstance(after, str) else after,
        )

    def get(self, checkpoint_id: str) -> Checkpoint:
        """Return the checkpoint without its state. Raises NotFound."""
        return self.catalogue.get(parse_name("checkpoint ID", checkpoint_id))

    def find(self, reference: str) -> Checkpoint:
        """Return the checkpoint named by an ID, JOB (its newest), JOB#7, or any of these with ~1 for the one before."""
        return resolve(self.catalogue, reference)

    def exists(self, checkpoint_id: str) -> bool:
        """Return whether there is a checkpoint with this ID."""
        return knows(self.catalogue, parse_name("checkpoint ID", checkpoint_id))

    def jobs(self, prefix: str = "", limit: int | None = None, after: str | None = None) -> Jobs:
        """Return jobs by name; page with `after=` the last name. Omits jobs whose checkpoints are all deleted."""
        if not isinstance(prefix, str) or not isinstance(after, str | None):
            raise Validation(f"prefix={prefix!r}, after={after!r}", hint="use the beginning of a job's name")
        wanted, start, jobs = parse_limit(limit), after or "", []
        while page := self.catalogue.jobs(prefix, wanted, start):
            jobs += [job for job in page if job.checkpoints or job.retention]
            if wanted is None or len(page) < wanted or len(jobs) >= wanted:
                break
            start = page[-1].name
        return jobs if wanted is None else jobs[:wanted]

    # Loading

    def load(
        self,
        checkpoint_id: str,
        *,
        only: str | Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: object = None,
    ) -> Any:
        """Return a checkpoint's state, verified (I2). Takes its ID, or anything that `find` accepts, such as a job.

        `only` is one or several globs over '/'-joined paths ("model/layer3/*"); the rest is neither read nor returned.
        `into` is a state of the same shape whose arrays and tensors, on any device, are filled in place. `mapped`
        returns read-only arrays over the store's files, which take no memory if chunks are uncompressed. Tensors, which
        torch cannot protect, are then writable; changes stay in this process. `device` is where tensors go ("cuda:1"),
        chunk by chunk, without a copy of the state in main memory.
        """
        while True:
            stored = self._read(checkpoint_id)
            try:
                return self.load_stored(stored, only=only, into=into, mapped=mapped, device=device)
            except NotFound:
                if stored[0].id == checkpoint_id or self.exists(stored[0].id):
                    raise
                # deleted while it was loaded: the job's newest is another one now

    def _read(self, reference: str) -> Stored:
        if not isinstance(reference, str) or {"#", "~"}.isdisjoint(reference):
            try:
                return self.catalogue.read(parse_name("checkpoint ID", reference))
            except NotFound:
                pass  # perhaps a job's name
        while True:
            meant = self.find(reference)
            try:
                return self.catalogue.read(meant.id)
            except NotFound:
                if self.exists(meant.id):
                    raise

    def load_latest(
        self, job_id: str, *, level: CheckpointLevel | str | None = None, into: object = None, device: object = None
    ) -> tuple[Checkpoint, Any] | None:
        """Return a job's newest checkpoint and its state; None if there is none. `into`, `device`: as for `load`.

        Skips checkpoints that verify found damaged, with a warning; raises Corrupted if all are.
        """
        wanted = None if level is None else parse_choice(CheckpointLevel, level)
        while True:
            stored = self._newest(parse_name("job", job_id), wanted)
            if stored is None:
                # All of them in one read: a checkpoint saved since then is not damaged, and the next round finds it.
                history = self.catalogue.list(job_id, Selection(level=wanted))
                if not history:
                    return None
                if all(checkpoint.status is CheckpointStatus.CORRUPTED for checkpoint in history):
                    raise Corrupted(
                        f"every checkpoint of job {job_id} is marked as damaged, such as {history[-1].id}",
                        hint="run kedge check; put lost files back, or load one by its ID to see what is wrong",
                    )
                continue
            try:
                return stored[0], self.load_stored(stored, into=into, device=device)
            except NotFound:
                if self.exists(stored[0].id):
                    raise
                # deleted while it was loaded: another one is the newest now

    def _newest(self, job: str, level: CheckpointLevel | None) -> Stored | None:
        """Return the newest intact checkpoint, usually the newest. Warns if it skips a damaged one."""
        with suppress(Corrupted):  # perhaps of one marked as damaged, which is skipped
            for stored in self.catalogue.list_stored(job, NEWEST if level is None else replace(NEWEST, level=level)):
                if stored[0].status is not CheckpointStatus.CORRUPTED:
                    return stored
        for stored in self.catalogue.list_stored(job, replace(NEWEST_INTACT, level=level)):
            self._warn_of_newer(stored[0], level)
            return stored
        return None

    def _warn_of_newer(self, checkpoint: Checkpoint, level: CheckpointLevel | None) -> None:
        newer = self.catalogue.list(checkpoint.job, Selection(level=level, limit=1, after=checkpoint.seq))
        if newer and newer[0].status is CheckpointStatus.CORRUPTED:
            older = f"{checkpoint.id} of job {checkpoint.job}"
            warnings.warn(f"checkpoint {newer[0].id}, newer than {older}, is damaged and passed over", stacklevel=4)

    def load_by_key(self, job_id: str, idempotency_key: str) -> tuple[Checkpoint, object] | None:
        """Return the checkpoint saved under an idempotency key, and its state; None if there is none."""
        job, keys = parse_name("job", job_id), (idempotency_key,)
        while (stored := self.catalogue.find(job, keys).get(idempotency_key)) is not None:
            try:
                return stored[0], self.load_stored(stored)
            except NotFound:
                if self.exists(stored[0].id):
                    raise
                # deleted while it was loaded: another one may have its key now
        return None

    def read_ahead(
        self, job_id: str, after: int, limit: int = 64
    ) -> dict[str, tuple[Checkpoint, Callable[[], object]]]:
        """Return what was saved under idempotency keys after number `after`; call a value to load its state."""
        ahead = self.catalogue.find(parse_name("job", job_id), range(after + 1, after + 1 + limit))
        return {key: (stored[0], partial(self.load_stored, stored)) for key, stored in ahead.items()}

    def get_by_key(self, job_id: str, idempotency_key: str) -> Checkpoint | None:
        """Return the checkpoint saved under an idempotency key, without its state; None if there is none."""
        stored = self.catalogue.find(parse_name("job", job_id), (idempotency_key,)).get(idempotency_key)
        return None if stored is None else stored[0]

    def restore(self, job_id: str, checkpoint_id: str | None = None) -> Any:
        """Return the state of a job's checkpoint, the newest by default. Raises NotFound (a FileNotFoundError)."""
        if checkpoint_id is None:
            latest = self.load_latest(job_id)
            if latest is None:
                raise NotFound(f"job {job_id} has no checkpoint", hint="kedge jobs shows which jobs exist")
            return latest[1]
        self._in_job(job_id, checkpoint_id)
        return self.load(checkpoint_id)

    def outline(self, checkpoint_id: str) -> object:
        """Return the state with summaries in place of arrays and buffers, which are not read."""
        stored = self.catalogue.read(parse_name("checkpoint ID", checkpoint_id))
        try:
            return codec.outline(self.store.tree(stored))
        except Corrupted:
            self._check_exists(stored[0])
            raise

    def load_stored(
        self,
        stored: Stored,
        *,
        only: str | Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: object = None,
    ) -> Any:
        """Return the state of a checkpoint that was read from the store before."""
        store = self.store
        patterns = [only] if isinstance(only, str) else only
        if patterns is not None and (not patterns or not are_texts(patterns)):
            raise Validation(f"only={only!r}", hint='use paths, with * where any name fits: "model/*"')
        if into is not None and (patterns is not None or mapped or device is not None):
            raise Validation("into= excludes only=, mapped= and device=", hint="give a smaller state to into= instead")
        if mapped and device is not None:
            raise Validation("mapped= excludes device=", hint="what is mapped stays in main memory")
        place = None if device is None else codec.parse_device(device)
        try:
            state = store.load(stored, only=patterns, into=into, mapped=mapped, device=place)
        except Corrupted:
            self._check_exists(stored[0])
            raise
        counters = self._session.counters
        counters["loads"] += 1
        counters["loaded_bytes"] += stored[0].size_bytes
        return state

    def _check_exists(self, checkpoint: Checkpoint) -> None:
        """Raise NotFound if the checkpoint was deleted meanwhile: then missing chunks are not damage."""
        if not self.exists(checkpoint.id):
            raise deleted_while_read(checkpoint.id) from None

    def _in_job(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        checkpoint = self.get(checkpoint_id)
        if checkpoint.job != parse_name("job", job_id):
            raise NotFound(
                f"checkpoint {checkpoint_id} not found in job {job_id}", hint=f"it belongs to job {checkpoint.job}"
            )
        return checkpoint
