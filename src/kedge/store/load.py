"""Loading: from a manifest to a state, the same for every store. `reader` returns verified chunks (I2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

from kedge import codec
from kedge.chunks import Entry, Reader, RecallingSource, Staged, StoredStream, Target, Writer, allocate
from kedge.errors import Corrupted, NotFound
from kedge.model import Checkpoint
from kedge.ports import Selection

from . import Store, Stored, knows
from .manifest import WHOLE_TREE, Manifest, Span, parse_manifest, root_of
from .rope import parts_of, read_parts, references
from .streams import SMALL_BUFFER_BYTES, LateReader, SharedChunk, add_streams, entries_at, part_of, place

_RECENT_CHUNKS = 4
_RECALLED_STATES = 8  # how far back a source may search for what it stored before


class NamedReader(Reader, Protocol):
    """Returns chunks of a store, verified (I2)."""

    def read_named(self, digests: Sequence[bytes], *, of: str) -> dict[bytes, bytes]:
        """Return chunks that are known only by their digests."""
        ...

    def map(self, entries: Sequence[Entry], *, of: str) -> memoryview:
        """Return a stream as read-only memory mapped from the store's files."""
        ...


class ChunkedStore(Store, Protocol):
    """A store that loads this way. It has a reader and opens manifests."""

    reader: NamedReader
    written_by: str = ""  # the newest Kedge that had opened the store for writing, if known here

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        """Return the verified manifest of a checkpoint."""
        ...

    def parse(self, packed: bytes, *, of: str) -> Manifest:
        """Parse the manifest in an index row; a spilled one is read from its chunks."""
        if packed[:1] == WHOLE_TREE:
            return Manifest(packed[1:])

        def read_spilled(size_bytes: int, entries: list[Entry]) -> bytes:
            data = allocate(size_bytes)
            self.reader.read(place(entries, data), of=of)
            return bytes(data)

        if (parts := parts_of(packed)) is not None:
            return Manifest(read_parts(parts, partial(self.reader.read_named, of=of)))
        return parse_manifest(packed, read_spilled, self.written_by)

    def contents(self, packed: bytes) -> Iterator[bytes]:
        """Yield the digests of all chunks a manifest names, and of its own if it is spilled."""
        if (parts := parts_of(packed)) is not None:
            yield from references(parts, partial(self.reader.read_named, of="a checkpoint"))
            return
        root = root_of(packed)
        if root is not None:
            yield from (e.digest for e in root[1] if not e.is_zero)
        yield from self.parse(packed, of="a checkpoint").digests()

    def read_chunks(self, digests: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Return chunks by digest, verified (I2)."""
        return self.reader.read_named(digests, of="a checkpoint to copy")

    def tree_of(self, checkpoint: Checkpoint, manifest: Manifest) -> bytes:
        """Return the encoded tree of an open manifest."""
        if manifest.tree is not None:
            return manifest.tree
        entries = manifest.streams[manifest.tree_stream]
        data = allocate(sum(e.size_bytes for e in entries))
        self.reader.read(place(entries, data), of=checkpoint.id)
        return bytes(data)

    def tree(self, stored: Stored) -> bytes:
        return self.tree_of(stored[0], self.open(*stored))

    def buffers(self, stored: Stored, ordinals: Sequence[int] | None = None) -> dict[int, Target | StoredStream]:
        manifest = self.open(*stored)
        return self.read_buffers(stored[0], manifest, range(len(manifest.buffers)) if ordinals is None else ordinals)

    def pieces(self, stored: Stored, ordinal: int) -> Iterator[memoryview]:
        manifest = self.open(*stored)
        span = manifest.buffers[ordinal]
        entries = manifest.streams[span.stream]
        starts = list(accumulate((e.size_bytes for e in entries), initial=0))
        for entry, at in entries_at(entries, starts, span):
            memory = allocate(entry.size_bytes)
            self.reader.read([(entry, memory)], of=stored[0].id)
            yield memory[max(span.offset - at, 0) : span.offset + span.size_bytes - at]

    def load(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: str | None = None,
    ) -> object:
        """Return the state, with each byte verified (I2); with `only`, just the matching branches."""
        checkpoint, packed = stored
        manifest = self.open(checkpoint, packed)
        tree = self.tree_of(checkpoint, manifest)
        recent: dict[tuple[int, int], memoryview] = {}
        if mapped:
            return codec.decode(tree, partial(self._map_buffer, checkpoint, manifest, recent), only=only)
        if only is not None or device is not None:
            fetch = partial(self._read_buffer, checkpoint, manifest, recent)
            sizes = [-1 if span.is_lazy else span.size_bytes for span in manifest.buffers]
            wanted = None if device is None else codec.DeviceTargets(device, sizes)
            state = codec.decode(tree, fetch, only=only, device=wanted)
            if wanted is not None:
                self.read_buffers(checkpoint, manifest, wanted.targets, wanted.targets)
            return state
        targets = codec.buffer_targets(tree, into) if into is not None else {}
        ready = self.read_buffers(checkpoint, manifest, range(len(manifest.buffers)), targets)
        return codec.decode(tree, ready.__getitem__, into=into)

    def read_buffers(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        ordinals: Iterable[int],
        targets: Mapping[int, Target] | None = None,
        recent: dict[tuple[int, int], memoryview] | None = None,
    ) -> dict[int, Target | StoredStream]:
        """Return buffers by ordinal, in the given targets or in new memory; lazy ones stay in the store.

        Small buffers share chunks: to read one buffer after another, pass a dictionary of `recent` ones.
        """
        ready: dict[int, Target | StoredStream] = {}
        wanted: list[tuple[Entry, memoryview | Staged]] = []
        shared: dict[tuple[int, int], SharedChunk] = {}  # (stream, offset)
        copies: list[tuple[Target, memoryview]] = []
        starts: dict[int, list[int]] = {}  # by stream
        for n in ordinals:
            span = _span(checkpoint, manifest, n)
            if span.is_lazy:
                ready[n] = self._stream(checkpoint, manifest, n)
                continue
            given = (targets or {}).get(n)
            ready[n] = target = allocate(span.size_bytes) if given is None else given
            if span.stream not in starts:
                starts[span.stream] = list(accumulate((e.size_bytes for e in manifest.streams[span.stream]), initial=0))
            for entry, at in entries_at(manifest.streams[span.stream], starts[span.stream], span):
                inside = at - span.offset  # where the chunk begins, relative to the buffer
                start, stop = max(inside, 0), min(inside + entry.size_bytes, span.size_bytes)
                part = part_of(target, start, stop)
                if stop - start == entry.size_bytes:
                    wanted.append((entry, part))
                elif recent is None:
                    if (chunk := shared.get((span.stream, at))) is None:
                        chunk = shared[span.stream, at] = SharedChunk(entry.size_bytes)
                        wanted.append((entry, chunk))
                    chunk.add(start - inside, part)
                else:
                    if (scratch := recent.get((span.stream, at))) is None:
                        scratch = recent[span.stream, at] = allocate(entry.size_bytes)
                        wanted.append((entry, scratch))
                    copies.append((part, scratch[start - inside : stop - inside]))
        if wanted:
            self.reader.read(wanted, of=checkpoint.id)
        for into, source in copies:
            _fill(into, source)
        while recent is not None and len(recent) > _RECENT_CHUNKS:
            del recent[next(iter(recent))]
        return ready

    def _read_buffer(
        self, checkpoint: Checkpoint, manifest: Manifest, recent: dict[tuple[int, int], memoryview], ordinal: int
    ) -> Target | StoredStream:
        return self.read_buffers(checkpoint, manifest, [ordinal], recent=recent)[ordinal]

    def _map_buffer(
        self, checkpoint: Checkpoint, manifest: Manifest, recent: dict[tuple[int, int], memoryview], ordinal: int
    ) -> Target | StoredStream:
        """Map a large buffer from the packs. Small ones, which share chunks, are read as usual."""
        span = manifest.buffers[ordinal] if 0 <= ordinal < len(manifest.buffers) else None
        if span is None or span.is_lazy or span.size_bytes < SMALL_BUFFER_BYTES:
            return self._read_buffer(checkpoint, manifest, recent, ordinal)
        try:
            return self.reader.map(manifest.streams[span.stream], of=checkpoint.id)
        except (NotFound, Corrupted):  # gc may have moved a chunk: repeat
            return self.reader.map(manifest.streams[span.stream], of=checkpoint.id)

    def _stream(self, checkpoint: Checkpoint, manifest: Manifest, ordinal: int) -> StoredStream:
        span = manifest.buffers[ordinal]
        reader = LateReader(self.reader, partial(knows, self.catalogue))
        return StoredStream(manifest.streams[span.stream], span.size_bytes, reader, checkpoint.id)

    def add_streams(self, writer: Writer, job: str, encoded: codec.Encoded) -> Manifest:
        """Add a state's streams; sources that compare themselves with the job's earlier states see these."""
        for buffer in encoded.buffers:
            if isinstance(buffer, RecallingSource):
                buffer.recall(self._earlier_states(job))
        return add_streams(writer, encoded)

    def _earlier_states(self, job: str) -> Iterator[tuple[object, Callable[[int], StoredStream]]]:
        """Yield outlines of the job's newest checkpoints, each with a function that opens its lazy buffers."""
        for checkpoint in reversed(self.catalogue.list(job, Selection(limit=_RECALLED_STATES))):
            try:
                checkpoint, packed = self.catalogue.read(checkpoint.id)
                manifest = self.open(checkpoint, packed)
                outline = codec.outline(self.tree_of(checkpoint, manifest))
            except (Corrupted, NotFound):
                continue  # damaged or deleted: this costs the comparison, not the save
            yield outline, partial(self._stream, checkpoint, manifest)


def _span(checkpoint: Checkpoint, manifest: Manifest, ordinal: int) -> Span:
    if not 0 <= ordinal < len(manifest.buffers):
        raise Corrupted(f"checkpoint {checkpoint.id} has no buffer {ordinal}", hint="run kedge check")
    return manifest.buffers[ordinal]


def _fill(target: Target, source: memoryview) -> None:
    if isinstance(target, memoryview):
        target[:] = source
    else:
        target.take(source)
