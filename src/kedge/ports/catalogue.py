"""What every store can be asked, local or behind a service: which jobs and checkpoints exist, who may write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kedge.model import Checkpoint, EventChain, Job, Lease

from .selection import ALL, Selection
from .values import CheckpointIds, Checkpoints, Events, Jobs, Stored, Update


class Catalogue(Protocol):
    """The checkpoints of one namespace: find them, and change their mutable fields. Raises only `errors.*`."""

    @property
    def is_encrypted(self) -> bool:
        """Whether stored bytes are encrypted, and so have other digests than elsewhere."""
        ...

    @property
    def row_bytes(self) -> int:
        """The largest piece that suits an index row. Shared content that is cut small is cut to this size."""
        ...

    def get(self, checkpoint_id: str) -> Checkpoint:
        """Return the checkpoint. Raises NotFound."""
        ...

    def read(self, checkpoint_id: str) -> Stored:
        """Return the checkpoint and its manifest, which leads to its state. Raises NotFound."""
        ...

    def changed_jobs(self, after: int, limit: int) -> Sequence[tuple[int, str | None]] | None:
        """Return (number, job) of the last `limit` events above `after`, newest first; job None: any job.

        Events of other namespaces count, so that busy ones cost this one nothing; their job is "". A caller who has
        seen all of these events has seen every change of a checkpoint so far. None if asking takes as long as reading
        again.
        """
        ...

    def find(self, job: str, keys: Sequence[str] | range) -> dict[str, Stored]:
        """Return, by key, what was saved under these idempotency keys, or under any in a range of sequence numbers.

        Unknown keys are left out. Any number of keys.
        """
        ...

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        """Return checkpoints of a job, oldest first; [] for an unknown job. Manifests are not read.

        Metadata paths and values are bound as parameters, never spliced into SQL.
        """
        ...

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[Stored]:
        """As `list`, each with its manifest."""
        ...

    def newest(self, jobs: Sequence[str], tag: tuple[str, str] | None = None) -> Mapping[str, Checkpoint]:
        """Return for each job its newest checkpoint with this tag; jobs that have none are left out.

        Any number of jobs. A local index needs one statement for each few hundred.
        """
        ...

    def job(self, name: str) -> Job | None: ...

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        """Return jobs by name, starting after `after`."""
        ...

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        """Delete these checkpoints and return the IDs that existed. Raises Conflict for a pinned one."""
        ...

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        """Change mutable fields. Raises RowChanged or KeysChanged if `update.envelope` is stale."""
        ...

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        """Set the policy to apply after saves of this job. Creates the job row if there is none."""
        ...

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        """Acquire a lease with a higher token than any before. Raises LeaseHeld while another one is valid (I5).

        Time is the index's own (boot clock, database clock), never the caller's wall clock (I4).
        """
        ...

    def renew_lease(self, lease: Lease) -> None:
        """Renew for the full `ttl_s`. Raises LeaseLost if the lease was released or taken over."""
        ...

    def release_lease(self, lease: Lease) -> None:
        """Release the lease. One that was lost is ignored, because the job has another owner now."""
        ...

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        """Return events in order, above `after` and below `before`: the first `limit`, or the last with `newest`.

        IDs grow; an event becomes visible together with its change.
        """
        ...

    def audit(self, until: int | None = None) -> EventChain:
        """Verify the hash chain of the log, from its beginning to event `until` or its end."""
        ...

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for an event above `after`, by any process. Return whether there is one."""
        ...
