"""What goes through the ports besides records of checkpoints: chunks, changes, and what an index answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import KEEP, IntFlag

from kedge.errors import UnsupportedFormat
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus, Event, Job, Lease
from kedge.version import __version__

Buffer = bytes | bytearray | memoryview

# Names for what Index answers, because inside it `list` is a method.
Checkpoints = list[Checkpoint]
CheckpointIds = list[CheckpointId]
Jobs = list[Job]
Events = list[Event]
Problems = list[str]
Outcomes = list[Checkpoint | BaseException]
Digests = list[bytes]
References = Callable[[str, bytes], Iterable[bytes]]  # checkpoint ID and manifest as the index has it → chunk digests
Stored = tuple[Checkpoint, bytes]  # with its manifest; over HTTP, with nothing until its state is asked for

FORMAT_VERSION = 1  # of every store, plain or encrypted (I8)


class Encoding(IntFlag, boundary=KEEP):
    """What was done to plain bytes before they were stored, a bit for each: first DELTA, then ZSTD, then SEALED.

    A chunk's name stays that of its plain bytes. A reader that cannot undo a bit refuses (`unsupported`).
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
    """For what a newer Kedge has written and this one does not know."""
    return UnsupportedFormat(
        f"{subject} is of a form that Kedge {__version__} does not know; Kedge {written_by or '(unknown)'} wrote it",
        hint="upgrade Kedge: install it from a newer clone (pip install .)",
    )


def is_older(version: str, than: str) -> bool:
    """Whether a version of Kedge is older than another; what is no version is older than all."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


@dataclass(slots=True, unsafe_hash=True)
class Chunk:
    """Where the bytes of one chunk are: in the index row itself (`data`), else at `offset` in `pack`.

    One that is a row has a pack too once it was copied there for rebuilding an index. Nobody changes it; freezing it
    would make the first read of a long thread, which has thousands, a tenth slower.
    """

    digest: bytes  # BLAKE3 of the plain bytes: 32 bytes; where they are encrypted, a name only the key gives (I10)
    size_bytes: int  # plain
    stored_bytes: int
    encoding: Encoding
    pack: str = ""  # "" when it is in the index alone
    offset: int = 0
    data: bytes | None = None  # the stored bytes when inline
    is_damaged: bool = False  # found so by verify: not to be reused; a new copy takes its place
    base: bytes | None = None  # the chunk that a DELTA is a difference from, which must stay as long as this one


@dataclass(frozen=True, slots=True)
class Then:
    """What a save does besides, in its transaction: all of it is durable, or nothing.

    Over HTTP it is done behind the save, if it can be: it may be nothing without which the save means something else.
    """

    delete: Sequence[CheckpointId] = ()  # also pinned ones; those that are gone are ignored
    releases_lease: bool = False  # the one it is saved under


@dataclass(frozen=True, slots=True)
class Mark:
    """Tags that a checkpoint gets, if it has those in `seen` until then."""

    checkpoint_id: CheckpointId
    seen: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Provided:
    """What must be so for a save to be made, looked at in its transaction: else Unmet, and nothing was changed."""

    absent_jobs: Sequence[str] = ()  # there is no such job
    absent_tag: tuple[str, str] | None = None  # no checkpoint of its job has this tag
    takes: Lease | None = None  # its job does not exist either: this, its first lease, is taken with the save (I5)
    marks: Mark | None = None  # done with the save


@dataclass(frozen=True, slots=True)
class NewEnvelope:
    """The metadata of an encrypted row, sealed anew because tags it proves have changed (I10)."""

    metadata_json: str
    replacing: str  # the one that was looked at, which must still be there
    key_id: str  # the data key it is sealed under, which must be the current one


@dataclass(frozen=True, slots=True)
class Update:
    """A change of what may change after a save; what is None stays as it is."""

    is_pinned: bool | None = None
    tags: Mapping[str, str | None] | None = None  # merged with those there are; a value of None removes a tag
    status: CheckpointStatus | None = None
    envelope: NewEnvelope | None = None  # made by an encrypted index, which goes with tags


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint as a check has read it, with what it found wrong there: `Index.mark` compares both.

    `chunks`: rows whose bytes do not verify or are gone. `missing`: names for which there was no row.
    """

    checkpoint: Checkpoint
    chunks: Sequence[Chunk] = ()
    missing: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The pack that tells of a checkpoint, as it was when its row had this digest."""

    checkpoint_id: CheckpointId
    digest: bytes
    pack: str
    stored_bytes: int


KEYS = ""  # where a lease is for a job: the right to change the keys of the namespace. No job is called so

ENVELOPE = 0xE1  # the first byte of whatever is sealed (I10): no manifest begins so
UNREADABLE = b"\0"  # what `Index.manifests` gives for a manifest that does not decrypt (I10): no manifest begins so


class ChunksGone(Exception):
    """Raised by `Index.commit`: gc removed chunks the save wanted to reuse. The store writes them and commits again."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        super().__init__(f"{len(digests)} chunks are gone")
        self.digests = digests


class KeysChanged(Exception):
    """Raised by `Index.commit`: the namespace has a new data key. The store seals the save again and commits again."""


class RowChanged(Exception):
    """Raised by `Index.update` and `reseal`: the row has another envelope than the one that was looked at."""


class Unmet(Exception):
    """Raised by `Index.commit`: what a save was `Provided` with is not so."""


class IdTaken(Exception):
    """Raised by `Index.commit`: the ID exists. The store draws another one."""


@dataclass(frozen=True, slots=True)
class PackUse:
    """How much of a pack the index still names."""

    pack: str
    live_chunks: int
    live_bytes: int
