"""The commit protocol: how a state becomes a durable checkpoint, and comes back verified.

    save   encode → chunk → digest → compress → (seal) → packs durable → index commit → acknowledge  (I1, I10)
    load   index row → manifest digest → chunks, each verified → decode, data only                   (I2, I7)

Between any two of these steps a crash leaves at most packs that no index row names; gc removes them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kedge.blobs.shelter import Turns, guarded
from kedge.blobs.workers import Workers
from kedge.chunks import INLINE_BYTES, WORKERS
from kedge.errors import Corrupted
from kedge.model import Checkpoint
from kedge.ports import Blobs, Checkpoints, Index, digest_of

from . import Store, not_over_http
from .adoption import Exported, Moved, ReadChunks, adopt, export
from .backlog import Backlog
from .chunk_cache import KnownChunks
from .chunk_reader import ChunkReader
from .manifest import Manifest
from .saving import Saving

if TYPE_CHECKING:
    from kedge.crypto import Vault


T = TypeVar("T")


class LocalStore(Saving):
    """An index, blobs, and the order in which they are written. Thread-safe; survives fork.

    With a vault, the index is one that seals what it is given (`index.encrypted`), and chunks are sealed here (I10).
    """

    def __init__(
        self,
        index: Index,
        blobs: Blobs,
        vault: Vault | None = None,
        *,
        inline_bytes: int = INLINE_BYTES,
        has_backlog: bool = False,
    ) -> None:
        """`inline_bytes`: new chunks of a save up to this go to the index, if none of them is large by itself.

        `has_backlog`: packs outlive the index, and what is in it alone is copied there (`backlog`).
        """
        self.index = guarded(index)
        self.blobs = guarded(blobs)
        self.vault = vault
        self.written_by = index.written_by
        self.inline_bytes = inline_bytes
        self._recent = OrderedDict()
        self._known = KnownChunks(index, blobs)
        self._lock = threading.Lock()
        self.turns = Turns()
        self._workers = _new_workers()
        self.reader = ChunkReader(blobs, index.locate, self.pool, vault)
        self.backlog = Backlog(self.index, self.blobs, self.describe, lambda: self.key) if has_backlog else None

    @property
    def catalogue(self) -> Index:
        return self.index

    def pool(self) -> Workers:
        """Threads for large states, which begin when first needed."""
        return self._workers

    def at_rest(self) -> LocalStore:
        """The store that outlives the process, whose keys count: another one where this is memory that is kept."""
        return self

    def after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here, and its lock may never be released."""
        self._lock = threading.Lock()
        self._known.after_fork()
        if self.backlog is not None:
            self.backlog.after_fork()
        self.turns = Turns()
        self._workers = _new_workers()

    def close(self) -> None:
        if self.backlog is not None:
            self.backlog.close()
        self.turns.close()
        workers, self._workers = self._workers, _new_workers()
        workers.shutdown(wait=True)
        self.blobs.close()
        self.index.close()

    # Loading

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        """The verified manifest of a checkpoint row."""
        if not self.is_intact(checkpoint, packed):
            raise Corrupted(
                f"the manifest of checkpoint {checkpoint.id} does not match its digest",
                hint="run kedge check; restore an earlier checkpoint",
            )
        return self.parse(packed, of=checkpoint.id)

    def is_intact(self, checkpoint: Checkpoint, packed: bytes) -> bool:
        """Whether a manifest is the one that was saved. What was sealed has proved that by opening."""
        return self.vault is not None or digest_of(packed).hex() == checkpoint.digest

    # From and to other stores

    def export(self, checkpoint_id: str) -> Exported:
        return export(self, checkpoint_id)

    def adopt(self, exported: Sequence[Exported], read: ReadChunks, *, actor: str, moved: Moved) -> Checkpoints:
        return adopt(self, exported, read, actor=actor, moved=moved)

    def references(self, packed: bytes) -> Iterable[bytes]:
        """Every chunk a manifest names, as the index calls it, those of a spilled manifest included (for gc).

        While keys are changed, by all names it may have.
        """
        if self.vault is None:
            return self.contents(packed)
        return (name for digest in self.contents(packed) for name in self.vault.chunk_ids(digest))


def _new_workers() -> Workers:
    return Workers(WORKERS, "kedge", keep=WORKERS)


def local_store(store: Store, what: str) -> LocalStore:
    """`store` for what needs the index and the packs themselves; `what` names it in the refusal."""
    if not isinstance(store, LocalStore):
        raise not_over_http(what)
    return store
