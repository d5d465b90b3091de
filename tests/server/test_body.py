"""The body of a request: what is there already is taken without a timer, what comes later is not lost."""

from __future__ import annotations

import asyncio
from unittest import mock

import kedge
from kedge.server import create_app
from kedge.server.limits import Body, Message

WHOLE: Message = {"type": "http.request", "body": b"abc", "more_body": False}


def read(store: kedge.CheckpointManager, pieces: list[Message], *, comes_later: bool) -> tuple[list[Message], int]:
    """The pieces as a route gets them, and how many timers that took."""
    service = create_app(store).state.service

    async def receive_all() -> tuple[list[Message], int]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Message] = asyncio.Queue()
        body = Body(queue.get, service, b"3")
        body.open(100, 60.0)
        with mock.patch.object(loop, "call_at", wraps=loop.call_at) as timers:
            for piece in pieces:
                if comes_later:
                    loop.call_soon(queue.put_nowait, piece)
                else:
                    queue.put_nowait(piece)
            return [await body() for _ in pieces], timers.call_count

    return asyncio.run(receive_all())


def test_what_is_there_needs_no_timer(store: kedge.CheckpointManager) -> None:
    assert read(store, [WHOLE], comes_later=False) == ([WHOLE], 0)


def test_what_comes_later_is_waited_for_with_a_deadline(store: kedge.CheckpointManager) -> None:
    pieces = [{**WHOLE, "more_body": True}, WHOLE]
    received, timers = read(store, pieces, comes_later=True)
    assert received == pieces
    assert timers > 0
