"""ASGI middleware that counts the requests being answered, and lets no more in once the daemon drains."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.daemon.errors import ApiError
from appliance.daemon.state import Daemon


class Gate:
    """A generation request counts from when its body is whole: a client that never sends the rest holds up no drain."""

    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app = app
        self._daemon = daemon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        is_active = False

        async def counted_receive() -> Message:
            nonlocal is_active
            if is_active:
                return await receive()
            message = await self._unless_draining(receive)
            if message["type"] == "http.request" and not message.get("more_body"):
                is_active = True
                self._daemon.active += 1
            return message

        try:
            await self._app(scope, counted_receive, send)
        finally:
            self._daemon.active -= is_active

    async def _unless_draining(self, receive: Receive) -> Message:
        """Raises ApiError (503): the daemon drains, or began to before anything was received."""
        receiving = asyncio.ensure_future(receive())
        draining = asyncio.ensure_future(self._daemon.draining.wait())
        try:
            await asyncio.wait({receiving, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not self._daemon.draining.is_set():
                return receiving.result()
        finally:
            receiving.cancel()
            draining.cancel()
        raise ApiError(
            503, "the daemon is shutting down", code="shutting_down", headers={"Connection": "close"}
        )
