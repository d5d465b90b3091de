"""The store: turns a state into a durable checkpoint, and returns it verified.

`Store` is the only interface for saving and loading. It has two implementations: `local.LocalStore`, an index and blobs
that this process writes itself, and `kedge.client.store.HttpStore`, which talks to a service. Maintenance
(`kedge.care`) needs a local store.
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
    from .transfer import IncomingState


class How(TypedDict, total=False):
    """Options for loading a state, as in `CheckpointManager.load`."""

    only: Sequence[str] | None
    into: object
    mapped: bool
    device: str | None


Save: TypeAlias = "tuple[Request, Encoded, str]"  # with its actor


class Store(Protocol):
    """One namespace of a store. Thread-safe; survives fork. Raises only `errors.*`."""

    @property
    def catalogue(self) -> Catalogue:
        """Which checkpoints exist, to find and change them. The other methods of this class handle states."""
        ...

    # Saving

    def save(self, request: Request, encoded: Encoded | PartedTree | IncomingState, *, actor: str) -> Checkpoint:
        """Make the encoded state durable and acknowledge it by returning its checkpoint (I1)."""
        ...

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        """`save` each independently: return its checkpoint or the exception. Small ones may share one commit (I1)."""
        ...

    def branch(self, source: Stored, request: Request, *, actor: str) -> Checkpoint:
        """Save the state of `source` again as `request` says. Nothing is copied: both share their chunks."""
        ...

    # Loading

    def load(self, stored: Stored, **how: Unpack[How]) -> object:
        """Return the state, with each byte verified (I2); with `only`, just the matching branches."""
        ...

    def tree(self, stored: Stored) -> bytes:
        """Return the encoded tree of the state, without its buffers."""
        ...

    def buffers(self, stored: Stored, ordinals: Sequence[int] | None = None) -> Mapping[int, Target | StoredStream]:
        """Return buffers by ordinal, all by default; large sources stay in the store until they are read."""
        ...

    def pieces(self, stored: Stored, ordinal: int) -> Iterator[memoryview]:
        """Yield the bytes of one buffer by chunk, each verified (I2)."""
        ...

    # From and to other stores (`kedge.care.copy`)

    def export(self, checkpoint_id: str) -> Exported:
        """Return the checkpoint in a form another store can adopt. Raises Corrupted if its manifest is damaged."""
        ...

    def adopt(self, exported: Sequence[Exported], *, actor: str, moved: Moved) -> Checkpoints:
        """Save checkpoints of another store unchanged: one, or several without chunks.

        Reads only the chunks that are missing here. Returns the checkpoints that now have these IDs here.
        """
        ...

    # Life

    def after_fork(self) -> None:
        """Discard the parent's threads and locks in a forked child."""
        ...

    def close(self) -> None: ...


def knows(catalogue: Catalogue, checkpoint_id: str) -> bool:
    """Return whether the checkpoint exists, damaged or not."""
    try:
        catalogue.get(checkpoint_id)
    except NotFound:
        return False
    except Corrupted:
        return True  # reading it will tell what is wrong
    return True


def not_over_http(what: str, hint: str = "use the store itself, where the service runs") -> Validation:
    """The error for an operation that needs a local store."""
    return Validation(f"{what} is not available over HTTP", hint=hint)
