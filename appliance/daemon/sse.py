"""Server-sent events, and the promise that a client which goes away is noticed at once, streaming or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def unless_client_leaves(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await `work`, the request's body having been read. If the client leaves, it is cancelled first.

    Raises:
        ClientDisconnect: the client left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Sends `frames` as they come. An error before the first one is raised: it can be a plain response."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await unless_client_leaves(self._send_frames(send), receive)

    async def _send_frames(self, send: Send) -> None:
        began = False
        async with aclosing(self._frames) as frames:
            async for data in frames:
                if not began:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    began = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
