"""ASGI middleware that lets the pages of `allowed_origins` read answers (CORS, https://fetch.spec.whatwg.org).

Nobody else's page can, those on loopback included: a browser runs the pages of many, and a key is not always set.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# How long a browser may remember the answer to its preflight.
MAX_AGE_S = 600
# A wish for headers is sent back as it came, so it has to be a list of header names and nothing else.
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")
_EXPOSED = b"Retry-After"

Headers = list[tuple[bytes, bytes]]


class Cors:
    """Answers preflights of allowed pages, and marks what they may read. Everything else passes untouched."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin", b"")
        if not origin or not is_listed(origin.decode("latin-1"), self._origins):
            await self._app(scope, receive, send)
            return
        marks: Headers = [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]
        if is_preflight(scope):
            await send({"type": "http.response.start", "status": 204, "headers": marks + _permits(headers)})
            await send({"type": "http.response.body", "body": b""})
            return

        async def marked_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *marks]}
            await send(message)

        await self._app(scope, receive, marked_send)


def is_listed(origin: str, origins: frozenset[str]) -> bool:
    return "*" in origins or origin.lower() in origins


def is_preflight(scope: Scope) -> bool:
    """A browser asks whether a page may send something; the page's own request follows, with its key."""
    return scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-method" for name, _ in scope["headers"]
    )


def _permits(headers: dict[bytes, bytes]) -> Headers:
    permits = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", str(MAX_AGE_S).encode()),
    ]
    wanted = headers.get(b"access-control-request-headers", b"").strip()
    if _HEADER_NAMES.fullmatch(wanted):
        permits.append((b"access-control-allow-headers", wanted))
    if headers.get(b"access-control-request-private-network") == b"true":
        permits.append((b"access-control-allow-private-network", b"true"))
    return permits
