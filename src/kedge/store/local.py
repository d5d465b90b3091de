"""The commit protocol: how a state becomes a durable checkpoint, and comes back verified.

    save   encode → chunk → digest → compress → (seal) → packs durable → index commit → acknowledge  (I1, I10)
    load   index row → manifest digest → chunks, each verified → decode, data only                   (I2, I7)

Between any two of these steps a crash leaves at most packs that no index row names; gc removes them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kedge.blobs import shelter
from kedge.blobs.shelter import Turns
from kedge.blobs.sheltered import guarded
from kedge.blobs.workers import Workers
from kedge.chunks import INLINE_BYTES, WORKERS
from kedge.errors import Corrupted
from kedge.model import Checkpoint, CheckpointLevel, Job, Lease
from kedge.ports import ALL, Blobs, CheckpointIds, Checkpoints, Events, Index, Jobs, Selection, Update, digest_of

from . import Store, Stored, not_over_http
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
        self._reads_in_place = "latest" in getattr(index, "in_place", ())
        self._lock = threading.Lock()
        self.turns = Turns()
        self._workers = _new_workers()
        self.reader = ChunkReader(blobs, index.locate, self.pool, vault)
        self.backlog = Backlog(self.index, self.blobs, self.describe, lambda: self.key) if has_backlog else None

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

    # What the index decides alone. One line each, so that `Store` is the only door.

    @property
    def row_bytes(self) -> int:
        return self.index.row_bytes

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self.index.get(checkpoint_id)

    def read(self, checkpoint_id: str) -> Stored:
        return self.index.read(checkpoint_id)

    def latest(self, job: str, level: CheckpointLevel | None = None) -> Stored | None:
        return self.index.latest(job, level)

    def generation(self) -> Hashable | None:
        return self.index.generation()

    def together(self, read: Callable[[], T]) -> T:
        return read() if self._reads_in_place else shelter.run(read)

    def find(self, job: str, keys: Sequence[str]) -> dict[str, Stored]:
        return self.index.find(job, keys)

    def find_next(self, job: str, after: int, limit: int) -> dict[str, Stored]:
        return self.index.find_next(job, after, limit)

    def list(self, job: str, wanted: Selection = ALL) -> Checkpoints:
        return self.index.list(job, wanted)

    def list_stored(self, job: str, wanted: Selection = ALL) -> Sequence[Stored]:
        return self.index.list_stored(job, wanted)

    def job(self, name: str) -> Job | None:
        return self.index.job(name)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        return self.index.jobs(prefix, limit, after)

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self.index.delete(checkpoint_ids, even_pinned=even_pinned, actor=actor)

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        return self.index.update(checkpoint_id, update, actor=actor)

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self.index.set_retention(job, policy_json, actor=actor)

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self.index.acquire_lease(job, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self.index.renew_lease(lease)

    def release_lease(self, lease: Lease) -> None:
        self.index.release_lease(lease)

    def events(
        self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None, wait_s: float = 0.0
    ) -> Events:
        events = self.index.events(after, limit, newest=newest, before=before)
        if not events and wait_s > 0 and self.index.wait_for_event(after, wait_s):
            return self.index.events(after, limit, newest=newest, before=before)
        return events

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

    @property
    def is_encrypted(self) -> bool:
        return self.vault is not None

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
