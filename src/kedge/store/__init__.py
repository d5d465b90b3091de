"""The store: how a state becomes a durable checkpoint, and comes back verified.

`Store` is the one door. Two classes stand behind it: `local.LocalStore`, an index and blobs that this process writes
itself, and `kedge.client.store.HttpStore`, the same behind a service. Whoever saves or loads uses nothing else; what
keeps a store healthy (`kedge.care`) needs a local one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict, Unpack

from kedge.errors import Corrupted, NotFound, Validation
from kedge.model import Checkpoint
from kedge.ports import Catalogue, Checkpoints, Outcomes
from kedge.ports import Stored as Stored

if TYPE_CHECKING:
    from kedge.chunks import StoredStream, Target
    from kedge.codec import Encoded

    from .adoption import Exported, Moved
    from .request import Request
    from .rope import PartedTree
    from .transfer import Received


class How(TypedDict, total=False):
    """A state is loaded, as `CheckpointManager.load` says."""

    only: Sequence[str] | None
    into: object
    mapped: bool
    device: str | None


Save: TypeAlias = "tuple[Request, Encoded, str]"  # with its actor


class Store(Protocol):
    """One namespace of a store. Thread-safe; survives fork. Raises only `errors.*`."""

    @property
    def catalogue(self) -> Catalogue:
        """Which checkpoints there are: for finding and changing them. What this class does is about their states."""
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

    # Loading

    def load(self, stored: Stored, **how: Unpack[How]) -> object:
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

    # From and to other stores (`kedge.care.copy`)

    def export(self, checkpoint_id: str) -> Exported:
        """The checkpoint as another store can take it; Corrupted where its manifest is damaged."""
        ...

    def adopt(self, exported: Sequence[Exported], *, actor: str, moved: Moved) -> Checkpoints:
        """Save checkpoints of another store as they are there: one, or several that have no chunks.

        Chunks that are here already are not read. Answers what has their IDs here now.
        """
        ...

    # Life

    def after_fork(self) -> None:
        """In a forked child: let go of what belongs to the parent."""
        ...

    def close(self) -> None: ...


def knows(catalogue: Catalogue, checkpoint_id: str) -> bool:
    """Whether the checkpoint exists, damaged or not."""
    try:
        catalogue.get(checkpoint_id)
    except NotFound:
        return False
    except Corrupted:
        return True  # what is wrong with it, reading it tells
    return True


def not_over_http(what: str, hint: str = "use the store itself, where the service runs") -> Validation:
    """The refusal of what needs the store itself."""
    return Validation(f"{what} is not available over HTTP", hint=hint)
