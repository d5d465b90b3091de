"""What keeps a store healthy: gc, verify, retention, repair, rebuild, changes of keys, copies.

`Care` is what a CheckpointManager asks for. `local.LocalCare` does it on a store of this machine; behind a service
(`kedge.client.care.HttpCare`) the service does it.
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

Progress: TypeAlias = Callable[[int, int], None]  # (done, total), in the unit the operation names


class Care(Protocol):
    """Operations on a whole job or a whole store. Names and policies are parsed already."""

    def apply(
        self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str, progress: Progress | None
    ) -> Plan:
        """What `policy` would delete, in one job or in all; without `dry_run`, done."""
        ...

    def review(self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str) -> Iterator[Verdict]:
        """The same one by one, newest first, in bounded memory."""
        ...

    def set_retention(self, job: str, policy: RetentionPolicy | None, *, actor: str) -> None:
        """Apply `policy` to a job by itself, after its saves."""
        ...

    def after_save(self, saved: Checkpoint, *, actor: str, is_first: bool = False) -> None:
        """Do a bounded part of what the job's own policy asks for (I6)."""
        ...

    def diff(self, old_id: str, new_id: str) -> Diff:
        """What changed from one checkpoint to another, by path."""
        ...

    def verify(self, job: str | None, *, deep: bool, actor: str, progress: Progress | None) -> VerifyReport:
        """Check digests of everything (deep), or that everything named exists."""
        ...

    def condemn(self, checkpoint_id: str, *, actor: str) -> Checkpoint:
        """Read all of a checkpoint and mark it, and its damaged chunks, if it is damaged."""
        ...

    def gc(self, *, dry_run: bool, actor: str, progress: Progress | None) -> GcReport:
        """Give back the space of deleted checkpoints (I3)."""
        ...

    def stats(self, job: str | None) -> Mapping[str, int]: ...

    def copy_job(self, job: str, new_job: str, *, actor: str) -> list[Checkpoint]:
        """Copy a job's history to a new name, sharing every byte; Conflict if that has a history of its own."""
        ...

    def delete_job(self, job: str, *, even_pinned: bool, actor: str) -> int:
        """Delete all checkpoints of a job and its retention policy; return how many."""
        ...

    def rebuild(self, *, actor: str, progress: Progress | None) -> RebuildReport:
        """Add to the index what the packs know."""
        ...

    def rekey(
        self, new_key: bytes | str | None, *, rewrite: bool, actor: str, progress: Progress | None
    ) -> RekeyReport:
        """Change the master key, or with `rewrite` the data key too (I10)."""
        ...

    @property
    def encryption(self) -> Mapping[str, object] | None:
        """How this namespace is encrypted, without secrets; None if it is plain."""
        ...

    def after_fork(self) -> None: ...

    def close(self) -> None:
        """Finish what saves have left to be done."""
        ...
