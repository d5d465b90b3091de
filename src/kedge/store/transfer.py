"""A state that was cut into chunks elsewhere, for example by a client of the service.

Missing chunks are added as they arrive, in bounded memory, and named by their bytes: no digest or size is trusted. The
manifest comes last. All it names must have arrived or be in this namespace; the commit checks that again in its
transaction (I1, I3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kedge.chunks import ZERO, Entry, cut_by_content
from kedge.errors import Conflict, Corrupted, StorageError, TooLarge, UnsupportedFormat, Validation
from kedge.model import Checkpoint, CheckpointId
from kedge.ports import ChunksGone, IdTaken, KeysChanged, NewCheckpoint, digest_of

from .adoption import taken
from .chunk_writer import settled
from .manifest import SPILL_OVER_BYTES, Manifest, pack_root, parse_manifest, parse_small, root_of
from .rope import digests_of, may_be_node, parts_of
from .streams import TREE_CHUNK_BYTES

if TYPE_CHECKING:
    from .local import LocalStore
    from .request import Request

MAX_CHUNK_BYTES = 8 << 20  # no save creates larger ones
MAX_CHUNKS = 1 << 22  # of one save: facts about each stay in memory until the manifest arrives
_TREE_BYTES = 4 << 20  # of small chunks, which may belong to trees: a tree up to this size is inspected
_NODES_BYTES = 32 << 20  # of chunks that may be digests of others (`rope`), which are always inspected
_SMALL_BYTES = 4 * TREE_CHUNK_BYTES


class SendAgain(Conflict, code="send_again"):
    """The save relied on something that changed meanwhile. Send `digests`, even if the store says it has them."""

    def __init__(
        self,
        message: str = "the store changed while the state was sent",
        *,
        hint: str = "send it again",
        digests: Sequence[bytes] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.digests = digests


@dataclass(frozen=True, slots=True)
class Outline:
    """What a manifest says of the state: the tree, if available, and the length of each buffer; None for files."""

    tree: bytes | None
    buffers: Sequence[int | None]
    size_bytes: int


class IncomingState:
    """A state being received. Add chunks, `describe` them by a manifest, save once; or abort. One thread at a time."""

    def __init__(self, store: LocalStore, distrusted: Collection[bytes] = (), *, size_hint: int = 0) -> None:
        """Begin to receive. `distrusted` chunks are written even if the index seems to know them."""
        self._store = store
        key = store.key
        names = frozenset(digest if key is None else key.chunk_id(digest) for digest in distrusted)
        self._writer = store.writer(distrusted=names, size_hint=size_hint, key=key)
        self._sizes: dict[bytes, int] = {}
        self._small: dict[bytes, bytes] = {}
        self._tree_bytes = self._nodes_bytes = 0
        self._packed = b""
        self._size_bytes = 0
        self._relied: set[bytes] = set()
        self._is_spent = False
        self._failure: StorageError | None = None

    def add(self, pieces: Iterable[bytes]) -> None:
        """Store chunks that the namespace may lack."""
        named = {digest_of(piece): piece for piece in pieces}
        for digest, piece in named.items():
            if not 0 < len(piece) <= MAX_CHUNK_BYTES or len(self._sizes) >= MAX_CHUNKS:
                raise TooLarge(f"a chunk of {len(piece):,} bytes, after {len(self._sizes):,} others")
            self._sizes[digest] = len(piece)
            self._keep_small(digest, piece)
        self._writer.add_named(named)

    def _keep_small(self, digest: bytes, piece: bytes) -> None:
        if may_be_node(piece) and self._nodes_bytes + len(piece) <= _NODES_BYTES:
            self._nodes_bytes += len(piece)
        elif len(piece) <= _SMALL_BYTES and self._tree_bytes + len(piece) <= _TREE_BYTES:
            self._tree_bytes += len(piece)
        else:
            return
        self._small[digest] = piece

    def describe(self, packed: bytes, spilled: bytes = b"") -> Outline:
        """Set the manifest. `spilled` is its content in chunks if it is only a root (form 4).

        Raises Validation if it is not a manifest, SendAgain if chunks it names are missing.
        """
        try:
            root = root_of(packed)
            if root is not None:
                self._take_root(root[1], spilled)
            parts = parts_of(packed)
            outline = self._take_manifest(spilled or packed) if parts is None else self._take_parts(parts)
        except (Corrupted, UnsupportedFormat) as error:
            raise Validation(f"this is not a manifest: {error.message}", hint="send what kedge.client sends") from None
        self._packed, self._size_bytes = packed, outline.size_bytes
        return outline

    def _take_root(self, entries: Sequence[Entry], spilled: bytes) -> None:
        self._locate(entry.digest for entry in entries)
        start = 0
        for entry in entries:
            start, piece = start + entry.size_bytes, spilled[start : start + entry.size_bytes]
            if digest_of(piece) != entry.digest:
                raise Corrupted("what was spilled is not what its root names")
        if start != len(spilled):
            raise Corrupted("what was spilled is longer than its root says")

    def _take_manifest(self, packed: bytes) -> Outline:
        is_small = packed[:1] in (b"\x01", b"\x02")
        manifest = parse_small(packed) if is_small else parse_manifest(packed, _nothing_spilled)
        wanted: dict[bytes, int] = {}
        for entry in (entry for stream in manifest.streams for entry in stream if not entry.is_zero):
            if wanted.setdefault(entry.digest, entry.size_bytes) != entry.size_bytes:
                raise Corrupted("a chunk has two lengths")
        sizes = self._locate(wanted)
        if any(sizes[digest] != size for digest, size in wanted.items()):
            raise Corrupted("a chunk has another length")
        tree_bytes = (
            len(manifest.tree) if manifest.tree is not None else _size_of(manifest.streams[manifest.tree_stream])
        )
        buffers = [None if span.is_lazy else span.size_bytes for span in manifest.buffers]
        size_bytes = tree_bytes + sum(span.size_bytes for span in manifest.buffers)
        return Outline(self._tree_of(manifest, tree_bytes), buffers, size_bytes)

    def _tree_of(self, manifest: Manifest, tree_bytes: int) -> bytes | None:
        if manifest.tree is not None:
            return manifest.tree
        entries = manifest.streams[manifest.tree_stream]
        digests = [entry.digest for entry in entries if not entry.is_zero]
        if tree_bytes > _TREE_BYTES or not all(self._is_at_hand(digest) for digest in digests):
            return None
        pieces = self._read(digests)
        return b"".join(bytes(entry.size_bytes) if entry.is_zero else pieces[entry.digest] for entry in entries)

    def _take_parts(self, parts: Sequence[bytes | tuple[int, bytes]]) -> Outline:
        """Inspect each chunk of digests: what an earlier save reused of it is not assumed to exist."""
        size_bytes = 0
        for part in parts:
            if isinstance(part, bytes):
                size_bytes += len(part)
                continue
            height, digest = part
            level = [digest]
            for _ in range(height):
                self._locate(level)
                if not all(self._is_at_hand(digest) for digest in level):
                    raise TooLarge("too many pieces of one tree are new", hint="save it as one state")
                nodes = self._read(level)
                level = [below for digest in level for below in digests_of(nodes[digest])]
                if len(level) > MAX_CHUNKS:
                    raise Corrupted("it names too many chunks")
            sizes = self._locate(level)
            size_bytes += sum(sizes[digest] for digest in level)
        return Outline(None, (), size_bytes)

    def _locate(self, digests: Iterable[bytes]) -> Mapping[bytes, int]:
        """Return the length of each of these chunks; the commit checks that those of the namespace still exist."""
        sizes = {digest: self._sizes.get(digest) for digest in digests}
        absent = [digest for digest, size in sizes.items() if size is None]
        places = self._store.reader.find(absent) if absent else {}
        gone = [digest for digest in absent if digest not in places or not self._writer.reuse(digest)]
        if gone:
            raise SendAgain(digests=gone)
        self._relied.update(absent)
        return {digest: places[digest].size_bytes if size is None else size for digest, size in sizes.items()}

    def _is_at_hand(self, digest: bytes) -> bool:
        """Return whether its bytes can be read: before the commit, a received chunk that was not kept cannot."""
        return digest in self._small or digest not in self._sizes

    def _read(self, digests: Sequence[bytes]) -> Mapping[bytes, bytes]:
        stored = [digest for digest in dict.fromkeys(digests) if digest not in self._small]
        return {**self._small, **self._store.reader.read_named(stored, of="a state that is sent")}

    def commit(
        self, request: Request, checkpoint_id: CheckpointId, created_us: int, distrusted: Collection[bytes], actor: str
    ) -> Checkpoint:
        """Save the state. Raises SendAgain at a second attempt, because the received chunks are gone."""
        packed = self._packed if self._is_spent else self._spill(self._packed)
        record = request.record(checkpoint_id, created_us, self._size_bytes, packed, content=packed)
        return self.commit_record(record, distrusted, actor)

    def adopt(self, request: Request, fields: Mapping[str, Any], actor: str) -> Checkpoint:
        """Save it as a checkpoint of another store with these further fields. Return what has its ID here now."""
        if request.checkpoint_id is None or request.created_us is None:
            raise Validation("a copy has an ID and a time", hint="send what kedge.client sends")
        record = request.record(request.checkpoint_id, request.created_us, self._size_bytes, self._packed, content=b"")
        record = replace(record, **fields)
        try:
            if self._sizes or self._relied:  # else there are no chunks: the state is in its row
                return self.commit_record(record, (), actor)
            (checkpoint,) = self._store.index.commit((record,), actor=actor)
            self._store.note()
            return checkpoint
        except ChunksGone as gone:
            names = set(gone.digests)
            raise SendAgain(digests=[digest for digest in self._relied if self._writer.name(digest) in names]) from None
        except KeysChanged:
            self._store.refresh_keys()
            raise SendAgain from None
        except IdTaken:
            return taken(self._store, record)

    def commit_record(self, record: NewCheckpoint, distrusted: Collection[bytes], actor: str) -> Checkpoint:
        """The same for a record that was made elsewhere."""
        if self._failure is not None:
            raise self._failure
        if self._is_spent:
            names = set(distrusted)
            raise SendAgain(digests=[digest for digest in self._relied if self._writer.name(digest) in names])
        self._is_spent = True
        try:
            with settled(self._writer):
                return self._store.commit(self._writer, self._store.finish(self._writer, record), actor)
        except StorageError as error:
            self._failure = error  # it may have been saved: tell the sender
            raise

    def _spill(self, packed: bytes) -> bytes:
        if len(packed) <= SPILL_OVER_BYTES or packed[:1] == b"\x05":
            return packed
        table = self._writer.add(cut_by_content(packed, 4 * TREE_CHUNK_BYTES), size_bytes=len(packed))
        self._writer.drain()
        return pack_root(len(packed), table)

    def abort(self) -> None:
        """Discard what was received. Does nothing after a commit."""
        self._is_spent = True
        self._writer.abort()


def lacking(store: LocalStore, digests: Sequence[bytes]) -> list[bytes]:
    """Return the digests of chunks that a save would have to send."""
    places = store.reader.find([digest for digest in digests if digest != ZERO])
    return [digest for digest in digests if digest not in places or places[digest].is_damaged]


def _size_of(entries: Sequence[Entry]) -> int:
    return sum(entry.size_bytes for entry in entries)


def _nothing_spilled(size_bytes: int, entries: Sequence[Entry]) -> bytes:
    raise Corrupted("it is spilled")
