"""One request to an ASGI application, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp


def call(
    app: ASGIApp, headers: Mapping[str, str], method: str = "GET", path: str = "/v1/models"
) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer. Names of headers may be written with underscores."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}
