"""What every store answers, here or behind a service: which jobs and checkpoints there are, and who may write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kedge.model import Checkpoint, EventChain, Job, Lease

from .selection import ALL, Selection
from .values import CheckpointIds, Checkpoints, Events, Jobs, Stored, Update


class Catalogue(Protocol):
    """The checkpoints of one namespace: finding them, and changing what may change. Raises only `errors.*`."""

    @property
    def is_encrypted(self) -> bool:
        """Whether what is stored here is sealed, and has other digests than it would elsewhere."""
        ...

    @property
    def row_bytes(self) -> int:
        """Up to this much a row holds well: what is cut small in order to be shared is cut so."""
        ...

    def get(self, checkpoint_id: str) -> Checkpoint:
        """The checkpoint, or NotFound."""
        ...

    def read(self, checkpoint_id: str) -> Stored:
        """The checkpoint and the way to its state, or NotFound."""
        ...

    def changed_jobs(self, after: int, limit: int) -> Sequence[tuple[int, str | None]] | None:
        """Of the last `limit` events above `after`, newest first, the number and the job; no job: it may be any.

        Events of other namespaces count, so that busy ones cost this one nothing; their job is "".

        Whoever has seen all of them has seen every change of a checkpoint so far. None where asking takes as long as
        reading again.
        """
        ...

    def find(self, job: str, keys: Sequence[str] | range) -> dict[str, Stored]:
        """What was saved under these idempotency keys, or in a range of sequence numbers under any; by key.

        Unknown ones are left out. Any number.
        """
        ...

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        """Checkpoints of a job, oldest first; [] for an unknown job. Manifests are not read.

        Paths and values of metadata are bound, never spliced.
        """
        ...

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[Stored]:
        """As `list`, each with the way to its state."""
        ...

    def newest(self, jobs: Sequence[str], tag: tuple[str, str] | None = None) -> Mapping[str, Checkpoint]:
        """By job, the checkpoint with the highest number, of those with this tag; jobs that have none are left out.

        Any number of jobs; in one statement for each few hundred, where nobody is in between.
        """
        ...

    def job(self, name: str) -> Job | None: ...

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        """Jobs by name, from `after` (exclusive) on."""
        ...

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        """Remove these checkpoints; answers those that existed. A pinned one is a Conflict."""
        ...

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        """Change what may change. With an envelope that is stale: RowChanged, KeysChanged."""
        ...

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        """The policy to apply after saves of this job. Creates the job row if there is none."""
        ...

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        """A new lease with a higher token than any before, or LeaseHeld while another one runs (I5).

        Time is the index's own (boot clock, database clock), never the caller's wall clock (I4).
        """
        ...

    def renew_lease(self, lease: Lease) -> None:
        """Extend by its ttl, or LeaseLost when it was released or taken over."""
        ...

    def release_lease(self, lease: Lease) -> None:
        """Give it back; a lost one is ignored, because its job belongs to somebody else now."""
        ...

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        """Events with an ID above `after`, and below `before`: the first `limit` or, with `newest`, the last; in order.

        IDs grow; an event is visible when its change is.
        """
        ...

    def audit(self, until: int | None = None) -> EventChain:
        """Read the log from its beginning to event `until`, or its end, and prove that each entry follows."""
        ...

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Whether there is an event above `after`, by any process; waits for one until `timeout_s` is over."""
        ...
