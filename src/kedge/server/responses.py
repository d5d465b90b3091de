"""Answers: documents of ours, which go out as they are, and bytes, as they are read."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from traceback import clear_frames
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from kedge.ports import Buffer

if TYPE_CHECKING:
    from .auth import Access


class JsonAnswer(Response):
    """JSON of a document whose form its route states as response_model. That it keeps to it is tested, not checked."""

    media_type = "application/json"

    def __init__(self, document: object, status: int = 200) -> None:
        super().__init__(document, status)

    def render(self, content: object) -> bytes:
        return _dump(content).encode("utf-8", "surrogatepass")


_dump = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False).encode


class _Reading:
    """Pieces that workers read until nobody wants them; then they end, once a worker that reads has its piece."""

    def __init__(self, pieces: Iterator[Buffer]) -> None:
        self._pieces = pieces
        self._is_read = threading.Lock()
        self._is_over = False

    def read(self) -> Buffer | None:
        with self._is_read:
            piece = None if self._is_over else next(self._pieces, None)
        if self._is_over:
            self.end()
        return piece

    def end(self) -> None:
        """Never waits: whoever reads at this moment sees that it is over, and ends them."""
        self._is_over = True
        if not self._is_read.acquire(blocking=False):
            return
        try:
            if (close := getattr(self._pieces, "close", None)) is not None:
                close()
            self._pieces = iter(())
        finally:
            self._is_read.release()


class _Streamed(StreamingResponse):
    async def stream_response(self, send: Send) -> None:
        """A caller that goes away stops it in the middle: what was read for it goes then, not at some collection.

        The error that stops it is in a cycle with the frames it passed, which would keep the piece they were sending.
        """
        piece: object = b""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self.body_iterator:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BaseException as error:
            clear_frames(error.__traceback__)
            raise
        finally:
            del piece
            if isinstance(self.body_iterator, AsyncGenerator):
                await self.body_iterator.aclose()


def stream(access: Access, pieces: Iterator[Buffer], media_type: str, size: int | None) -> StreamingResponse:
    """Pieces, each read by a worker when the one before was sent. Whoever goes away leaves nothing behind."""
    reading = _Reading(pieces)
    del pieces

    async def body() -> AsyncIterator[Buffer]:
        try:
            while (piece := await access.service.in_thread(reading.read)) is not None:
                yield piece
                del piece
        finally:
            reading.end()

    headers = {} if size is None else {"content-length": str(size)}
    return _Streamed(body(), media_type=media_type, headers=headers)  # type: ignore[arg-type]
