"""The methods of a CheckpointManager for maintenance: retention, copies, gc, verify, keys. They parse, then ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from kedge.errors import Conflict, NotFound, Validation
from kedge.model import Checkpoint, parse_name, to_us
from kedge.ports import Checkpoints, Selection
from kedge.store.methods import ReadingManager
from kedge.urls import directory_of

from . import Care, Progress
from .policies import RetentionPolicy

if TYPE_CHECKING:
    from kedge.diff import Diff

    from .copy import Copying, CopyReport
    from .gc import GcReport
    from .rebuild import RebuildReport
    from .rekey import RekeyReport
    from .retention import Plan
    from .review import Verdict
    from .verify import VerifyReport


class CaringManager(ReadingManager):
    """The maintenance methods of `CheckpointManager`; never instantiated alone."""

    url: str
    namespace: str
    actor: str
    key_source: bytes | str | None
    _caring: Care

    @property
    def _care(self) -> Care:
        self._check_open()
        return self._caring

    def drain(self) -> None:
        """Wait for background saves."""
        raise NotImplementedError

    def condemn(self, checkpoint_id: str) -> Checkpoint:
        """Read a checkpoint that a load found damaged. If it is, mark it and its damaged chunks.

        The next save writes those chunks again. An intact checkpoint is not marked: see the status of the returned one.
        Raises StorageError if it cannot be read at the moment. `verify` does the same for a job or the whole store.
        """
        return self._care.condemn(parse_name("checkpoint ID", checkpoint_id), actor=self.actor)

    def copy(self, job: str, new_job: str) -> Checkpoints:
        """Copy a job's history to a new name, sharing every byte. Safe to repeat after an interruption.

        Raises Conflict if `new_job` has checkpoints that are not copies of `job`, LeaseHeld while somebody else writes
        it.
        """
        parse_name("job", new_job)
        if job == new_job:
            raise Conflict(f"job {job} cannot be copied onto itself", hint="choose another name")
        if not self.catalogue.list(parse_name("job", job), Selection(limit=1)):
            raise NotFound(f"job {job} has no checkpoint", hint="kedge jobs shows which jobs exist")
        return self._care.copy_job(job, new_job, actor=self.actor)

    def delete_job(self, job: str, *, even_pinned: bool = False) -> int:
        """Delete all checkpoints of a job and its retention policy; return the number of checkpoints.

        Raises LeaseHeld if another process holds the job's lease. If a checkpoint is pinned, raises Conflict and
        deletes nothing, unless `even_pinned`. `gc` frees the space. Sequence numbers are not reused.
        """
        return self._care.delete_job(parse_name("job", job), even_pinned=even_pinned, actor=self.actor)

    def copy_to(
        self,
        target: CaringManager,
        *,
        job: str | None = None,
        since: datetime | None = None,
        mirror: bool = False,
        progress: Progress | None = None,
    ) -> CopyReport:
        """Copy to another store, of any kind: all jobs or one, everything or what was saved `since`.

        IDs, numbers, parents, tags, pins, times and keys are preserved. Only chunks that `target` lacks are
        transferred, and each is verified. After an interruption, run it again. With `mirror`, checkpoints deleted here
        are deleted there, too.
        """
        return self._copying(target, job, since, mirror).copy(progress)

    def follow_to(
        self,
        target: CaringManager,
        *,
        stop: threading.Event,
        job: str | None = None,
        since: datetime | None = None,
        mirror: bool = False,
        changed: Callable[[CopyReport], None] = lambda _: None,
        progress: Progress | None = None,
    ) -> None:
        """Like `copy_to`, then copy every change until `stop` is set; `changed` is called after each round.

        `target` stores the position, so that the next call continues there instead of comparing everything.
        """
        from .follow import Following

        Following(self._copying(target, job, since, mirror)).run(stop=stop, changed=changed, progress=progress)

    def _copying(self, target: object, job: str | None, since: datetime | None, mirror: bool) -> Copying:
        from .copy import Copying

        if not isinstance(target, CaringManager):
            raise Validation(f"{target!r} is not an open store", hint="open it with kedge.open(url)")
        if target.store is self.store or _same_place(self, target):
            raise Conflict(f"{self!r} cannot be copied to itself", hint="give another store as the target")
        if since is not None and (not isinstance(since, datetime) or since.tzinfo is None):
            raise Validation(
                f"since must be a datetime with a time zone (got {since!r})",
                hint="such as datetime.now(UTC) - timedelta(1)",
            )
        return Copying(
            self.store,
            target.store,
            job=None if job is None else parse_name("job", job),
            since_us=None if since is None else to_us(since),
            mirror=mirror,
            actor=self.actor,
        )

    # Retention

    def cleanup(self, job_id: str, keep_last: int = 10) -> int:
        """Delete all but the newest `keep_last` checkpoints of a job, and pinned ones. Return how many were deleted."""
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise Validation(f"keep_last={keep_last!r} keeps nothing", hint="use a whole number of at least 1")
        policy = RetentionPolicy(keep_last=keep_last)
        return sum(not verdict.reasons for verdict in self.review(policy, job=job_id, dry_run=False))

    def apply(
        self, policy: RetentionPolicy, *, job: str | None = None, dry_run: bool = True, progress: Progress | None = None
    ) -> Plan:
        """Plan what `policy` would delete, in one job or in all; with dry_run=False, delete it.

        The plan contains every checkpoint; for long histories use `review`.
        """
        _check_policy(policy)
        name = None if job is None else parse_name("job", job)
        return self._care.apply(policy, name, dry_run=dry_run, actor=self.actor, progress=progress)

    def review(self, policy: RetentionPolicy, *, job: str | None = None, dry_run: bool = True) -> Iterator[Verdict]:
        """Yield each checkpoint of a job, or of all jobs, with the reasons why `policy` keeps it, newest first.

        One without a reason is deleted. With dry_run=False it is deleted before it is returned; those you do not
        iterate over stay. Memory use does not grow with the history.
        """
        _check_policy(policy)
        name = None if job is None else parse_name("job", job)
        return self._care.review(policy, name, dry_run=dry_run, actor=self.actor)

    def set_retention(self, job_id: str, policy: RetentionPolicy | None) -> None:
        """Store `policy` with a job and apply it after each save; None removes it.

        Each save does a bounded part of the work (I6), so a long history shrinks over the next saves; `cleanup` does it
        at once.
        """
        if policy is not None:
            _check_policy(policy)
        self._care.set_retention(parse_name("job", job_id), policy, actor=self.actor)

    # Caring for the store

    def diff(self, a: str, b: str) -> Diff:
        """Compare two checkpoints: what changed from `a` to `b`, by path."""
        return self._care.diff(parse_name("checkpoint ID", a), parse_name("checkpoint ID", b))

    def verify(self, job: str | None = None, deep: bool = True, *, progress: Progress | None = None) -> VerifyReport:
        """Verify the digests of all data (deep), or only that all data exists (quick). See `kedge check`."""
        wanted = None if job is None else parse_name("job", job)
        if wanted is not None and self.catalogue.job(wanted) is None:
            raise NotFound(f"job {wanted} not found", hint="kedge jobs shows which jobs exist")
        return self._care.verify(wanted, deep=deep, actor=self.actor, progress=progress)

    def gc(self, *, dry_run: bool = False, progress: Progress | None = None) -> GcReport:
        """Free the space of deleted checkpoints. Safe while others read and write, also in other processes (I3).

        With `dry_run`, only report what would be freed.
        """
        return self._care.gc(dry_run=dry_run, actor=self.actor, progress=progress)

    def rebuild(self, *, progress: Progress | None = None) -> RebuildReport:
        """Rebuild the index from the packs, after it was lost or restored from an old backup, in every namespace.

        Existing entries are not changed. Stop all programs that save first. See `kedge rebuild`.
        """
        return self._care.rebuild(actor=self.actor, progress=progress)

    def rekey(
        self, new_key: bytes | str | None = None, *, rewrite: bool = False, progress: Progress | None = None
    ) -> RekeyReport:
        """Change the keys of this namespace: the master key to `new_key`, without rewriting data.

        With `rewrite`, for leaked keys, also change the data key, by encrypting every checkpoint again. Continues after
        an interruption. Raises LeaseHeld, and changes nothing, during another change of these keys.
        """
        if new_key is None and not rewrite:
            raise Validation("no new key was given", hint="give new_key=, rewrite=True, or both")
        if rewrite:
            self.drain()
        report = self._care.rekey(new_key, rewrite=rewrite, actor=self.actor, progress=progress)
        if new_key is not None:
            self.key_source = new_key
        return report

    @property
    def encryption(self) -> Mapping[str, object] | None:
        """How this namespace is encrypted: the IDs of its keys, and whether names are hidden; None if it is plain."""
        return self._care.encryption

    def stats(self, job: str | None = None) -> Mapping[str, int]:
        """Return statistics of the store, or of one job."""
        return self._care.stats(None if job is None else parse_name("job", job))


def _same_place(mine: CaringManager, other: CaringManager) -> bool:
    """Return whether both use the same namespace of the same store, as far as their URLs tell."""
    here, there = directory_of(mine.url), directory_of(other.url)
    is_same = mine.url == other.url != "memory:" if here is None or there is None else here.resolve() == there.resolve()
    return is_same and mine.namespace == other.namespace


def _check_policy(policy: object) -> None:
    if not isinstance(policy, RetentionPolicy):
        raise Validation(f"{policy!r} is not a RetentionPolicy", hint="use RetentionPolicy(keep_last=10), for example")
