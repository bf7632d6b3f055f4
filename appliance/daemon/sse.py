"""Server-sent events, and the promise that a client which goes away is noticed at once, streaming or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

# A comment, which clients skip. Proxies cut connections that are silent, the usual limit being 60 s.
PING = b": ping\n\n"
PING_S = 15.0

MEDIA_TYPE = b"text/event-stream; charset=utf-8"
_HEADERS = [
    (b"content-type", MEDIA_TYPE),
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
    """Sends `frames` as they come, and a comment whenever there was none for `PING_S`.

    The headers go out with the first of either. What `frames` raises is raised: before that, it can still be a
    plain response with a status of its own; after it, `ErrorEdge` sends it as the stream's last frame.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await unless_client_leaves(self._send_frames(send), receive)

    async def _send_frames(self, send: Send) -> None:
        body = _Body(send)
        async with aclosing(self._frames) as frames, body.pinged():
            async for data in frames:
                await body.send(data)
        await body.end()


class _Body:
    """A response's body, preceded by its headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._began = False
        self._sent_at = time.monotonic()
        self._sending = asyncio.Lock()

    async def send(self, data: bytes) -> None:
        async with self._sending:
            await self._send_now(data)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def pinged(self) -> AsyncIterator[None]:
        """Meanwhile, silence is broken by pings."""
        pinger = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            # Not in the midst of sending one.
            async with self._sending:
                pinger.cancel()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._sent_at + PING_S - time.monotonic())
            async with self._sending:
                if time.monotonic() - self._sent_at >= PING_S:
                    await self._send_now(PING)

    async def _send_now(self, data: bytes) -> None:
        if not self._began:
            self._began = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_at = time.monotonic()
