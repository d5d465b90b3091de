"""The two ports. All stored data passes through them; nothing else is pluggable.

    Index   what exists: jobs, checkpoints, manifests, where each chunk is, leases, events.
            Every method is one transaction. Only the index acknowledges.
    Blobs   the bytes: immutable packs of chunks. A pack that no index row names is garbage.

A save is: append chunks to packs → `BlobWriter.commit` (durable) → `Index.commit` (durable) → acknowledge (I1).
Deletion has the opposite order: index rows first, bytes later, by gc (I3).

All methods are safe to call from several threads. Adapters raise only `errors.*`. The suites in `kedge.testing` state
these contracts as tests; an adapter is correct if it passes them.
"""

from __future__ import annotations

from .blobs import Blobs as Blobs
from .blobs import BlobWriter as BlobWriter
from .catalogue import Catalogue as Catalogue
from .index import Index as Index
from .record import NewCheckpoint as NewCheckpoint
from .record import SavedRow as SavedRow
from .record import Unrecorded as Unrecorded
from .record import digest_of as digest_of
from .selection import ALL as ALL
from .selection import NEWEST as NEWEST
from .selection import NEWEST_INTACT as NEWEST_INTACT
from .selection import Selection as Selection
from .selection import are_texts as are_texts
from .selection import pages as pages
from .selection import wanted_tags as wanted_tags
from .values import ENVELOPE as ENVELOPE
from .values import FORMAT_VERSION as FORMAT_VERSION
from .values import KEYS as KEYS
from .values import READABLE as READABLE
from .values import UNREADABLE as UNREADABLE
from .values import Buffer as Buffer
from .values import CheckpointIds as CheckpointIds
from .values import Checkpoints as Checkpoints
from .values import Chunk as Chunk
from .values import ChunksGone as ChunksGone
from .values import Digests as Digests
from .values import Encoding as Encoding
from .values import Events as Events
from .values import IdTaken as IdTaken
from .values import Jobs as Jobs
from .values import KeysChanged as KeysChanged
from .values import Mark as Mark
from .values import NewEnvelope as NewEnvelope
from .values import Outcomes as Outcomes
from .values import PackUse as PackUse
from .values import Problems as Problems
from .values import Provided as Provided
from .values import RecordPlace as RecordPlace
from .values import References as References
from .values import RowChanged as RowChanged
from .values import Seen as Seen
from .values import Stored as Stored
from .values import Then as Then
from .values import Unmet as Unmet
from .values import Update as Update
from .values import is_older as is_older
from .values import unsupported as unsupported
