"""What passes through the ports besides records of checkpoints: chunks, changes, and an index's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import KEEP, IntFlag

from kedge.errors import UnsupportedFormat
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus, Event, Job, Lease
from kedge.version import __version__

Buffer = bytes | bytearray | memoryview

# Names for what Index returns, because `list` is a method there.
Checkpoints = list[Checkpoint]
CheckpointIds = list[CheckpointId]
Jobs = list[Job]
Events = list[Event]
Problems = list[str]
Outcomes = list[Checkpoint | BaseException]
Digests = list[bytes]
References = Callable[[str, bytes], Iterable[bytes]]  # checkpoint ID and manifest as the index has it → chunk digests
Stored = tuple[Checkpoint, bytes]  # with its manifest; over HTTP, with b"" until its state is requested

FORMAT_VERSION = 1  # of every store, plain or encrypted (I8)


class Encoding(IntFlag, boundary=KEEP):
    """What was done to plain bytes before they were stored, one bit each: first DELTA, then ZSTD, then SEALED.

    A chunk is always named by its plain bytes. A reader that cannot undo a bit refuses (`unsupported`).
    """

    RAW = 0
    ZSTD = 1  # a frame that declares its size
    SEALED = 2  # an envelope (I10)
    DELTA = 4  # the difference from another chunk, its base; nothing writes it yet

    @property
    def is_sealed(self) -> bool:
        return self._value_ & 2 != 0

    @property
    def is_zstd(self) -> bool:
        return self._value_ & 1 != 0


READABLE = 3  # the bits of Encoding that this Kedge can undo


def unsupported(subject: str, written_by: str) -> UnsupportedFormat:
    """The error for a form that a newer Kedge wrote and this one does not know."""
    return UnsupportedFormat(
        f"{subject} is of a form that Kedge {__version__} does not know; Kedge {written_by or '(unknown)'} wrote it",
        hint="upgrade Kedge: install it from a newer clone (pip install .)",
    )


def is_older(version: str, than: str) -> bool:
    """Return whether a Kedge version is older than another. An invalid version is older than all."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


@dataclass(slots=True, unsafe_hash=True)
class Chunk:
    """Where the bytes of one chunk are: in the index row itself (`data`), or at `offset` in `pack`.

    An inline chunk gets a pack, too, once it is copied there for rebuilding an index. Never mutated, but not frozen:
    that would make the first read of a long thread, which has thousands of chunks, a tenth slower.
    """

    digest: bytes  # BLAKE3 of the plain bytes, 32 bytes; in an encrypted store a name that only the key gives (I10)
    size_bytes: int  # plain
    stored_bytes: int
    encoding: Encoding
    pack: str = ""  # "" if only the index has it
    offset: int = 0
    data: bytes | None = None  # the stored bytes when inline
    is_damaged: bool = False  # set by verify: not to be reused; a new copy replaces it
    base: bytes | None = None  # the chunk a DELTA is a difference from, which must stay as long as this one


@dataclass(frozen=True, slots=True)
class Then:
    """Further changes of a save, in its transaction: all of it is durable, or nothing.

    Over HTTP they follow after the save, if they succeed. So the save must be meaningful without them.
    """

    delete: Sequence[CheckpointId] = ()  # pinned ones, too; missing ones are ignored
    releases_lease: bool = False  # the one this is saved under


@dataclass(frozen=True, slots=True)
class Mark:
    """Tags to set on a checkpoint if its tags are still those in `seen`."""

    checkpoint_id: CheckpointId
    seen: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Provided:
    """The conditions of a save, checked in its transaction. If one fails: Unmet, and nothing was changed."""

    absent_jobs: Sequence[str] = ()  # these jobs do not exist
    absent_tag: tuple[str, str] | None = None  # no checkpoint of its job has this tag
    takes: Lease | None = None  # this job does not exist either; its first lease is taken with the save (I5)
    marks: Mark | None = None  # applied with the save


@dataclass(frozen=True, slots=True)
class NewEnvelope:
    """The metadata of an encrypted row, sealed again because tags it proves have changed (I10)."""

    metadata_json: str
    replacing: str  # the previous envelope, which must still be there
    key_id: str  # the data key it is sealed under, which must be current


@dataclass(frozen=True, slots=True)
class Update:
    """A change of mutable fields; None leaves a field unchanged."""

    is_pinned: bool | None = None
    tags: Mapping[str, str | None] | None = None  # merged with the existing ones; the value None removes a tag
    status: CheckpointStatus | None = None
    envelope: NewEnvelope | None = None  # added by an encrypted index, together with tags


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint as a check read it, and what it found wrong. `Index.mark` compares both.

    `chunks`: rows whose bytes are gone or do not verify. `missing`: names that had no row.
    """

    checkpoint: Checkpoint
    chunks: Sequence[Chunk] = ()
    missing: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The pack that holds a checkpoint's record, made when its row had this digest."""

    checkpoint_id: CheckpointId
    digest: bytes
    pack: str
    stored_bytes: int


KEYS = ""  # a lease on this "job" is the right to change the namespace's keys; no job has this name

ENVELOPE = 0xE1  # the first byte of all sealed data (I10), and of no manifest
UNREADABLE = b"\0"  # what `Index.manifests` yields for a manifest that cannot be decrypted (I10); no manifest begins so


class ChunksGone(Exception):
    """Raised by `Index.commit`: gc removed chunks that the save reuses. The store writes them and commits again."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        super().__init__(f"{len(digests)} chunks are gone")
        self.digests = digests


class KeysChanged(Exception):
    """Raised by `Index.commit`: the namespace has a new data key. The store seals the save again and commits again."""


class RowChanged(Exception):
    """Raised by `Index.update` and `reseal`: the row's envelope is not the one that was read."""


class Unmet(Exception):
    """Raised by `Index.commit`: a condition in `Provided` is not met."""


class IdTaken(Exception):
    """Raised by `Index.commit`: the ID exists. The store generates another one."""


@dataclass(frozen=True, slots=True)
class PackUse:
    """How much of a pack the index still references."""

    pack: str
    live_chunks: int
    live_bytes: int
