"""Answers: documents of ours, which go out as they are, and bytes, as they are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse

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


def stream(access: Access, pieces: Iterator[Buffer], media_type: str, size: int | None) -> StreamingResponse:
    """Pieces, each read by a worker when the one before was sent. Whoever goes away leaves nothing behind."""

    async def body() -> AsyncIterator[Buffer]:
        try:
            while (piece := await access.service.in_thread(lambda: next(pieces, None))) is not None:
                yield piece
        finally:
            if (close := getattr(pieces, "close", None)) is not None:
                close()

    headers = {} if size is None else {"content-length": str(size)}
    return StreamingResponse(body(), media_type=media_type, headers=headers)  # type: ignore[arg-type]
