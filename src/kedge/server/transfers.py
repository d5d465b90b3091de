"""States in chunks: those that a client sends, and those that it asks for. All in bounded memory, whatever their size.

While a body comes no thread waits for it: a worker gets each few chunks when they are here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kedge import codec
from kedge.chunks import INLINE_BYTES, portions
from kedge.codec import BufferSummary
from kedge.diff.outline import children
from kedge.errors import CheckpointError, Corrupted, NotFound, TooLarge, Validation
from kedge.files import FilesSummary
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus
from kedge.ports import digest_of
from kedge.store.local import LocalStore, local_store
from kedge.store.manifest import Manifest, parse_small
from kedge.store.request import Request
from kedge.store.transfer import MAX_CHUNK_BYTES, IncomingState, Outline, SendAgain
from kedge.store.wire import DIGEST_BYTES, FAILED, LENGTH_BYTES, MAX_HEAD_BYTES, framed, length, parse_length

from .auth import Access
from .problems import of_error, without_paths
from .responses import JsonAnswer
from .schemas import CopiedFrom, SentSave
from .uploads import parse_save, request_of_save

_BATCH_BYTES = 1 << 20  # handed to a worker at once
_PORTION_BYTES = 1 << 19  # read and sent at once, or one chunk
_DRAIN_S = 10.0  # for the rest of a body that nobody wants, so that its sender hears why


class _Body:
    """The body of a request, in the pieces that are asked for."""

    def __init__(self, request: HttpRequest) -> None:
        self._stream = request.stream()
        self._waiting = bytearray()

    async def take(self, size: int) -> bytes:
        while len(self._waiting) < size:
            try:
                self._waiting += await anext(self._stream)
            except StopAsyncIteration:
                raise Validation("the body ends too soon", hint="send it again") from None
        piece = bytes(memoryview(self._waiting)[:size])
        del self._waiting[:size]
        return piece

    async def take_framed(self, most_bytes: int) -> bytes:
        size = parse_length(await self.take(LENGTH_BYTES))
        if size > most_bytes:
            raise TooLarge(
                f"{size:,} bytes where at most {most_bytes:,} are taken", hint="send what kedge.client sends"
            )
        return await self.take(size)

    async def drain(self) -> None:
        """Let the rest come and go: a sender that is still sending would not hear the answer."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                async for _ in self._stream:
                    pass
        except (TimeoutError, CheckpointError, ClientDisconnect):
            pass


@dataclass(frozen=True, slots=True)
class SmallSave:
    """A save whose state came with its manifest."""

    access: Access
    request: Request
    tree: bytes

    def read(self, _: ExitStack) -> tuple[Request, codec.Encoded, str]:
        return self.request, codec.Encoded(self.tree, []), self.access.caller.actor


async def save_in_chunks(access: Access, job: str, request: HttpRequest) -> Response:
    """Save a state that is sent in chunks. Durable when this answers."""
    body = _Body(request)
    try:
        saved = await _save(access, job, body)
        access.service.note_saved()
        return JsonAnswer(saved.to_json(), 201)
    except SendAgain as again:
        problem = json.loads(bytes(of_error(again).body))
        return JsonAnswer({**problem, "digests": [digest.hex() for digest in again.digests]}, again.http_status)
    except CheckpointError:
        await body.drain()
        raise


async def _save(access: Access, job: str, body: _Body) -> Checkpoint:
    service = access.service
    head = parse_save(await body.take_framed(MAX_HEAD_BYTES), SentSave)
    wish = request_of_save(job, head, head.idempotency_key)
    given = None if head.id is None else CheckpointId(head.id)
    holder = None if head.takes_key_from is None else CheckpointId(head.takes_key_from)
    wish = replace(wish, takes_key_from=holder, checkpoint_id=given, created_us=head.created_us)
    first = await body.take_framed(MAX_CHUNK_BYTES)
    if not first:
        packed, spilled = await _take_manifest(body, service.limits.json_bytes)
        small = None if spilled or head.copied else _small(packed)
        if small is not None:
            check_tree(Outline(small.tree, (), 0))
            return await service.saves.ask(SmallSave(access, wish, small.tree or b""))
        received = await service.in_thread(lambda: _open(access, head.distrusted))
    else:
        received = await service.in_thread(lambda: _open(access, head.distrusted))
    try:
        if first:
            async for batch in _batches(body, first):
                await service.in_thread(lambda batch=batch: received.add(batch))  # type: ignore[misc]
            packed, spilled = await _take_manifest(body, service.limits.json_bytes)

        def save() -> Checkpoint:
            check_tree(received.describe(packed, spilled))
            if head.copied is None:
                return access.store.commit(wish, received)
            return received.adopt(wish, _copied(head.copied), access.caller.actor)

        return await service.in_thread(save)
    finally:
        await asyncio.shield(service.in_thread(received.abort))


def _copied(copied: CopiedFrom) -> dict[str, object]:
    return {
        "seq": copied.seq,
        "codec": copied.codec,
        "status": CheckpointStatus(copied.status),
        "request_digest": bytes.fromhex(copied.request_digest),
    }


def _open(access: Access, distrusted: Sequence[str]) -> IncomingState:
    return IncomingState(local_of(access), [bytes.fromhex(digest) for digest in distrusted])


def local_of(access: Access) -> LocalStore:
    return local_store(access.store.store, "sending chunks through another service")


async def _batches(body: _Body, first: bytes) -> AsyncIterator[list[bytes]]:
    batch, size = [first], len(first)
    while chunk := await body.take_framed(MAX_CHUNK_BYTES):
        batch.append(chunk)
        size += len(chunk)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _take_manifest(body: _Body, most_bytes: int) -> tuple[bytes, bytes]:
    packed = await body.take_framed(most_bytes)
    spilled = await body.take_framed(most_bytes)
    if await body.take(DIGEST_BYTES) != digest_of(packed + spilled):
        raise Validation("the manifest was damaged on its way", hint="send it again")
    return packed, spilled


def _small(packed: bytes) -> Manifest | None:
    """A manifest that is only a tree, which is saved together with others."""
    if packed[:1] not in (b"\x01", b"\x02") or len(packed) > 2 * INLINE_BYTES:
        return None
    try:
        return parse_small(packed)
    except Corrupted as error:
        raise Validation(f"this is no manifest: {error.message}", hint="send what kedge.client sends") from None


def check_tree(outline: Outline) -> None:
    """Whether the tree is one, and is about these buffers; Validation if not. One that is not at hand passes: whoever
    reads it checks it again."""
    if outline.tree is None:
        return
    try:
        summaries = list(_summaries(codec.outline(outline.tree)))
    except Corrupted as error:
        raise Validation(f"this is no state: {error.message}", hint="send what kedge.client sends") from None
    except RecursionError:
        raise Validation("the state is nested too deeply", hint="save it in a flatter form") from None
    named = {number for summary in summaries for number in summary.ordinals}
    if sorted(named) != list(range(len(outline.buffers))):
        raise Validation("the buffers sent are not those the state names", hint="send what kedge.client sends")
    for summary in summaries:
        sizes = [outline.buffers[number] for number in summary.ordinals]
        if isinstance(summary, FilesSummary) != (None in sizes) and sizes:
            raise Validation("a buffer is not what the state says", hint="send what kedge.client sends")
        if isinstance(summary, FilesSummary) or summary.kind == "tensor":
            continue  # several tensors may be views of one buffer; decoding checks them
        held = len(summary.data) + sum(size for size in sizes if size is not None)
        if held != summary.size_bytes:
            raise Validation(f"a buffer of {held:,} bytes claims {summary.size_bytes:,}", hint="send it again")


def _summaries(value: object) -> Iterator[BufferSummary]:
    if isinstance(value, BufferSummary):
        yield value
        return
    if isinstance(value, Mapping):
        for key in value:
            yield from _summaries(key) if not isinstance(key, str) else ()
    for _, child in children(value):
        yield from _summaries(child)


def read_chunks(store: LocalStore, digests: Sequence[bytes]) -> Iterator[bytes]:
    """The chunks, each with its length, some MiB at a time; NotFound before anything when one is not there."""
    places = store.reader.find(digests)
    if len(places) < len(set(digests)):
        raise NotFound("a chunk is not in this namespace", hint="the checkpoint may have been deleted: list them again")

    def pieces() -> Iterator[bytes]:
        try:
            for some in portions(digests, lambda digest: places[digest].size_bytes, _PORTION_BYTES):
                chunks = store.reader.read_named(some, of="a checkpoint that is read")
                if len(some) > 1:
                    yield b"".join(framed(chunks[digest]) for digest in some)
                else:  # as it is: copies of many large ones at once add up
                    yield length(len(chunks[some[0]]))
                    yield chunks[some[0]]
                del chunks
        except CheckpointError as error:
            failure = {"code": error.code, "detail": without_paths(error.message), "hint": without_paths(error.hint)}
            yield length(FAILED) + framed(json.dumps(failure).encode())

    return pieces()


def pack_stored(checkpoint: Checkpoint, packed: bytes, more: Mapping[str, object]) -> bytes:
    """A checkpoint with its manifest."""
    head = json.dumps({"checkpoint": checkpoint.to_json(), **more}).encode()
    return framed(head) + framed(packed) + digest_of(packed)
