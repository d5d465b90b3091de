"""The store: how a state becomes a durable checkpoint, and comes back verified.

`Store` is the one door. Two classes stand behind it: `local.LocalStore`, an index and blobs that this process writes
itself, and `kedge.client.store.HttpStore`, the same behind a service. Whoever saves or loads uses nothing else; what
keeps a store healthy (`kedge.care`) needs a local one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kedge.errors import Validation
from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus, EventChain, Job, Lease
from kedge.ports import CheckpointIds, Checkpoints, Events, Jobs, Outcomes

if TYPE_CHECKING:
    from kedge.chunks import StoredStream, Target
    from kedge.codec import Encoded

    from .adoption import Exported, Moved, ReadChunks
    from .received import Received
    from .request import Request
    from .rope import PartedTree

Stored: TypeAlias = tuple[Checkpoint, bytes]
"""A checkpoint and what its store needs to find its state: a manifest where the index is at hand, else nothing."""

Save: TypeAlias = "tuple[Request, Encoded, str]"  # with its actor


class Store(Protocol):
    """One namespace of a store. Thread-safe; survives fork. Raises only `errors.*`."""

    @property
    def row_bytes(self) -> int:
        """What is cut small in order to be shared is cut to pieces of this size."""
        ...

    # Saving

    def save(self, request: Request, encoded: Encoded | PartedTree | Received, *, actor: str) -> Checkpoint:
        """Make the encoded state durable and acknowledge it by returning its checkpoint (I1)."""
        ...

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        """`save` of each on its own: its checkpoint, or what it raises. Small ones may share one commit (I1)."""
        ...

    def branch(self, source: Stored, request: Request, *, actor: str) -> Checkpoint:
        """Save the state of `source` again as `request` says; nothing is copied, both share their chunks."""
        ...

    # Finding

    def get(self, checkpoint_id: str) -> Checkpoint:
        """The checkpoint, or NotFound."""
        ...

    def knows(self, checkpoint_id: str) -> bool:
        """Whether the checkpoint exists, damaged or not."""
        ...

    def read(self, checkpoint_id: str) -> Stored:
        """The checkpoint and the way to its state, or NotFound."""
        ...

    def latest(self, job: str, level: CheckpointLevel | None = None) -> Stored | None:
        """The checkpoint with the highest sequence number that is not corrupted (I4)."""
        ...

    def find(self, job: str, keys: Sequence[str]) -> dict[str, Stored]:
        """What was saved under these idempotency keys; unknown keys are left out."""
        ...

    def find_next(self, job: str, after: int, limit: int) -> dict[str, Stored]:
        """As `find`, of those among the `limit` sequence numbers above `after` that were saved under a key."""
        ...

    def list(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Checkpoints:
        """Checkpoints of a job, oldest first; the newest `limit` below `before`, or the oldest above `after`."""
        ...

    def list_stored(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, Sequence[str]] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Sequence[Stored]:
        """As `list`, each with the way to its state. `tags`: for each name the values that are wanted, at most 500."""
        ...

    def job(self, name: str) -> Job | None: ...

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        """Jobs by name, from `after` (exclusive) on."""
        ...

    # Loading

    def load(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: str | None = None,
    ) -> object:
        """The state, each byte verified on the way (I2); with `only`, just the branches that match."""
        ...

    def tree(self, stored: Stored) -> bytes:
        """The encoded tree of the state, without its buffers."""
        ...

    def buffers(self, stored: Stored, ordinals: Sequence[int] | None = None) -> Mapping[int, Target | StoredStream]:
        """Buffers of the state by ordinal, all by default; large sources stay in the store until they are read."""
        ...

    def pieces(self, stored: Stored, ordinal: int) -> Iterator[memoryview]:
        """The bytes of one buffer, chunk by chunk, each verified (I2)."""
        ...

    # Changing

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        """Remove these checkpoints; answers those that existed. A pinned one is a Conflict."""
        ...

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        """Change what may change. Tags are merged; a value of None removes the tag."""
        ...

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        """The policy to apply after saves of this job."""
        ...

    # Leases and the log of changes

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        """A new lease with a higher token than any before, or LeaseHeld while another one runs (I5)."""
        ...

    def renew_lease(self, lease: Lease) -> None:
        """Extend by its ttl, or LeaseLost when it was released or taken over."""
        ...

    def release_lease(self, lease: Lease) -> None:
        """Give it back; a lost one is ignored."""
        ...

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        """Events with an ID above `after`, and below `before`: the first `limit` or, with `newest`, the last."""
        ...

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Whether there is an event above `after`; waits for one until `timeout_s` is over."""
        ...

    def audit(self, until: int | None = None) -> EventChain:
        """Read the log of changes from its beginning and prove that each entry follows from those before it."""
        ...

    # From and to other stores (`kedge.care.copy`)

    @property
    def is_encrypted(self) -> bool:
        """Whether what is stored here is sealed, and has other digests than it would elsewhere."""
        ...

    def stored_bytes(self) -> int:
        """What all checkpoints take."""
        ...

    def export(self, checkpoint_id: str) -> Exported:
        """The checkpoint as another store can take it; Corrupted where its manifest is damaged."""
        ...

    def read_chunks(self, digests: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Chunks by their digests, verified by them (I2)."""
        ...

    def adopt(self, exported: Sequence[Exported], read: ReadChunks, *, actor: str, moved: Moved) -> Checkpoints:
        """Save checkpoints of another store as they are there: one, or several that have no chunks.

        `read` gives the chunks that are not here. Answers what has their IDs here now.
        """
        ...

    # Life

    def after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent."""
        ...

    def close(self) -> None: ...


def not_over_http(what: str, hint: str = "use the store itself, where the service runs") -> Validation:
    """The refusal of what needs the store itself."""
    return Validation(f"{what} is not available over HTTP", hint=hint)
