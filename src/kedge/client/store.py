"""A store behind a service: `kedge.open("http://…")`. The service has the index and the commit protocol."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar, Unpack
from urllib.parse import quote

from kedge.chunks import INLINE_BYTES
from kedge.codec import Encoded
from kedge.errors import CheckpointError, Conflict, Corrupted, NotFound
from kedge.model import Checkpoint
from kedge.ports import Checkpoints, NewCheckpoint, Outcomes, Unmet
from kedge.store import How, Save, Stored, knows, not_over_http
from kedge.store.adoption import Exported, Moved, record_to_export
from kedge.store.load import ChunkedStore
from kedge.store.manifest import Manifest, pack_manifest, pack_tree, root_of
from kedge.store.request import Request, request_of
from kedge.store.rope import PartedTree, write_parts
from kedge.store.transfer import IncomingState, SendAgain
from kedge.store.wire import SAVE_TYPE

from .catalogue import HttpCatalogue
from .connection import Client
from .transfer import HttpReader, Outbox, body_of

_MAX_ATTEMPTS = 8
_MOST_KNOWN = 65536

T = TypeVar("T")


class HttpStore(ChunkedStore):
    """`kedge.store.Store` behind a service, which alone knows where the chunks of a state are."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._catalogue = HttpCatalogue(client)
        self.reader = HttpReader(client)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # pieces of parted trees that were saved here
        self._lock = threading.Lock()

    @property
    def catalogue(self) -> HttpCatalogue:
        return self._catalogue

    def save(self, request: Request, encoded: Encoded | PartedTree | IncomingState, *, actor: str) -> Checkpoint:
        if isinstance(encoded, IncomingState):
            raise not_over_http("handing on what another client sends")
        if request.provided is not None:
            raise Unmet  # the service has no such request
        saved = _again(partial(self._save_once, request, encoded), f"job {request.job}")
        return self._and_then(request, saved, actor)

    def _and_then(self, request: Request, saved: Checkpoint, actor: str) -> Checkpoint:
        """Make a save's further changes one by one: the service has no such request.

        The save is durable in any case. A lease expires, and a worker that finds the entry finds that its run has
        ended.
        """
        if request.then is not None:
            with suppress(CheckpointError):
                if request.then.delete:
                    self.catalogue.delete(request.then.delete, even_pinned=True, actor=actor)
            with suppress(CheckpointError):
                if request.then.releases_lease and request.lease is not None:
                    self.catalogue.release_lease(request.lease)
        return saved

    def _save_once(self, request: Request, encoded: Encoded | PartedTree, distrusted: frozenset[bytes]) -> Checkpoint:
        outbox = Outbox(self.client, distrusted)
        named: Sequence[bytes] = ()
        if isinstance(encoded, PartedTree):
            packed, named = write_parts(encoded, outbox, self._known.__contains__)
            pack = partial(bytes, packed)
        elif not encoded.buffers and len(encoded.tree) <= INLINE_BYTES:
            pack = partial(pack_tree, encoded.tree)
        else:
            pack = partial(pack_manifest, self.add_streams(outbox, request.job, encoded))
        saved = self._send(request, outbox, pack, distrusted)
        self._remember(named)
        return saved

    def _send(
        self,
        request: Request,
        outbox: Outbox,
        pack: Callable[[], bytes],
        distrusted: Collection[bytes] = (),
        *,
        spilled: bytes = b"",
        copied: Mapping[str, object] | None = None,
    ) -> Checkpoint:
        head = {**request.to_json(), "distrusted": [digest.hex() for digest in distrusted], "copied": copied}
        path = f"/api/v1/jobs/{quote(request.job, safe='')}/checkpoints"
        return self.client.upload(path, SAVE_TYPE, body_of(head, outbox, pack, spilled), Checkpoint.from_json)

    def _remember(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            for digest in digests:
                self._known[digest] = None
                self._known.move_to_end(digest)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        outcomes: Outcomes = []
        for request, encoded, actor in saves:
            try:
                outcomes.append(self.save(request, encoded, actor=actor))
            except CheckpointError as error:
                outcomes.append(error)
        return outcomes

    def branch(self, source: Stored, request: Request, *, actor: str) -> Checkpoint:
        checkpoint, packed = source if source[1] else self.catalogue.read(source[0].id)
        spilled = self._spilled(packed)

        def send(distrusted: frozenset[bytes]) -> Checkpoint:
            """Send the chunks that the service cannot reuse: a change of keys has renamed them."""
            outbox = Outbox(self.client, distrusted)
            outbox.add_from(Exported(NewCheckpoint.of(checkpoint, packed), sorted(distrusted), self.read_chunks))
            return self._send(request, outbox, partial(bytes, packed), distrusted, spilled=spilled)

        try:
            return _again(send, f"job {request.job}")
        except (Conflict, Corrupted):
            if knows(self.catalogue, checkpoint.id):
                raise
            raise NotFound(
                f"the checkpoint to copy to job {request.job} was deleted meanwhile", hint="choose another one"
            ) from None

    def _spilled(self, packed: bytes) -> bytes:
        """Return the content in chunks of a manifest that is only its root."""
        root = root_of(packed)
        if root is None:
            return b""
        memory = bytearray(root[0])
        self.reader.read_row(root[1], memoryview(memory), of="a checkpoint")
        return bytes(memory)

    def load(self, stored: Stored, **how: Unpack[How]) -> object:
        if how.get("mapped"):
            raise not_over_http("mapping a state", "load it as usual")
        return super().load(stored, **how)

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        """The manifest, fetched if it is missing. It was verified when it arrived."""
        return self.parse(packed or self.catalogue.read(checkpoint.id)[1], of=checkpoint.id)

    # From and to other stores

    def export(self, checkpoint_id: str) -> Exported:
        head, packed = self.catalogue.download(checkpoint_id)
        key = None if head["key"] is None else (head["key"], bytes.fromhex(head["request_digest"]))
        record = record_to_export(Checkpoint.from_json(head["checkpoint"]), packed, key)
        references = sorted(set(self.contents(packed)))
        return Exported(record, references, self.read_chunks, spilled=self._spilled(packed))

    def adopt(self, exported: Sequence[Exported], *, actor: str, moved: Moved) -> Checkpoints:
        return [self._adopt(export, moved) for export in exported]

    def _adopt(self, exported: Exported, moved: Moved) -> Checkpoint:
        def read(digests: Sequence[bytes]) -> Mapping[bytes, bytes]:
            pieces = exported.read(digests)
            moved(len(pieces), sum(map(len, pieces.values())))
            return pieces

        record = exported.record
        copied = {
            "seq": record.seq,
            "codec": record.codec,
            "status": str(record.status),
            "request_digest": record.request_digest.hex(),
        }

        def send(distrusted: frozenset[bytes]) -> Checkpoint:
            outbox = Outbox(self.client, distrusted)
            outbox.add_from(replace(exported, read=read))
            pack, spilled = partial(bytes, record.manifest), exported.spilled
            return self._send(request_of(record), outbox, pack, distrusted, spilled=spilled, copied=copied)

        return _again(send, f"checkpoint {record.id}")

    # Life

    def after_fork(self) -> None:
        """Replace the client, because the parent's connections cannot be shared."""
        self.client = self.catalogue.client = self.client.again()
        self.reader = HttpReader(self.client)
        self._lock = threading.Lock()

    def close(self) -> None:
        self.client.close()


def _again(send: Callable[[frozenset[bytes]], Checkpoint], what: str) -> Checkpoint:
    """Call `send(distrusted)` until the service has everything: each time with what it could not reuse before."""
    distrusted: frozenset[bytes] = frozenset()
    for _ in range(_MAX_ATTEMPTS):
        try:
            return send(distrusted)
        except SendAgain as again:
            distrusted |= frozenset(again.digests)
    raise Conflict(f"{what}: the service kept losing chunks that this save needs", hint="run it again")
