"""Maintenance of a store: gc, verify, retention, repair, rebuild, changes of keys, copies.

`Care` is the interface that a CheckpointManager uses. `local.LocalCare` works on a local store; for a service,
`kedge.client.care.HttpCare` asks the service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kedge.model import Checkpoint

if TYPE_CHECKING:
    from kedge.diff import Diff

    from .gc import GcReport
    from .policies import RetentionPolicy
    from .rebuild import RebuildReport
    from .rekey import RekeyReport
    from .retention import Plan
    from .review import Verdict
    from .verify import VerifyReport

Progress: TypeAlias = Callable[[int, int], None]  # (done, total), in the operation's unit


class Care(Protocol):
    """Operations on a whole job or a whole store. Names and policies are already parsed."""

    def apply(
        self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str, progress: Progress | None
    ) -> Plan:
        """Return what `policy` would delete, in one job or in all; delete it unless `dry_run`."""
        ...

    def review(self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str) -> Iterator[Verdict]:
        """The same, yielded one by one, newest first, in bounded memory."""
        ...

    def set_retention(self, job: str, policy: RetentionPolicy | None, *, actor: str) -> None:
        """Store `policy` with a job, to be applied after its saves."""
        ...

    def after_save(self, saved: Checkpoint, *, actor: str, is_first: bool = False) -> None:
        """Do a bounded part of the work for the job's own policy (I6)."""
        ...

    def diff(self, old_id: str, new_id: str) -> Diff:
        """Return what changed from one checkpoint to another, by path."""
        ...

    def verify(self, job: str | None, *, deep: bool, actor: str, progress: Progress | None) -> VerifyReport:
        """Verify all digests (deep), or only that everything referenced exists."""
        ...

    def condemn(self, checkpoint_id: str, *, actor: str) -> Checkpoint:
        """Read a whole checkpoint, and mark it and its damaged chunks if it is damaged."""
        ...

    def gc(self, *, dry_run: bool, actor: str, progress: Progress | None) -> GcReport:
        """Free the space of deleted checkpoints (I3)."""
        ...

    def stats(self, job: str | None) -> Mapping[str, int]: ...

    def copy_job(self, job: str, new_job: str, *, actor: str) -> list[Checkpoint]:
        """Copy a job's history to a new name, sharing every byte. Raises Conflict if that has another history."""
        ...

    def delete_job(self, job: str, *, even_pinned: bool, actor: str) -> int:
        """Delete all checkpoints of a job and its retention policy; return the number of checkpoints."""
        ...

    def rebuild(self, *, actor: str, progress: Progress | None) -> RebuildReport:
        """Add what the packs know to the index."""
        ...

    def rekey(
        self, new_key: bytes | str | None, *, rewrite: bool, actor: str, progress: Progress | None
    ) -> RekeyReport:
        """Change the master key, or with `rewrite` also the data key (I10)."""
        ...

    @property
    def encryption(self) -> Mapping[str, object] | None:
        """How this namespace is encrypted, without secrets; None if it is plain."""
        ...

    def after_fork(self) -> None: ...

    def close(self) -> None:
        """Finish what saves have left to do."""
        ...
