"""ASGI middleware in front of every route: who may ask, from where, and how much. No framework involved."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api_keys import KeyRing
from appliance.daemon.cors import is_listed, is_preflight
from appliance.daemon.errors import ApiError
from appliance.settings import LOOPBACK_HOSTS, Settings

OPEN_PATHS = frozenset({"/health", "/ready"})
_WILDCARDS = ("0.0.0.0", "::")


class AccessGuard:
    """Host, Origin and API key.

    A web page that somebody visits can send requests to their loopback address. The Host check stops one that
    made its own name point here (DNS rebinding), the Origin check stops all others.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._names = frozenset((*LOOPBACK_HOSTS, settings.host, *settings.allowed_hosts))
        # Rebinding needs a name; whoever binds to all addresses means to be reached by any of them.
        self._any_address = settings.host in _WILDCARDS
        self._origins = frozenset(settings.allowed_origins)
        self._keys = KeyRing(settings.api_key, settings.keys_file)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check_host(headers.get(b"host", ""))
            self._check_origin(headers.get(b"origin"), is_preflight(scope))
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers.get(b"authorization", ""))
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        if not self._is_known(_host_name(f"//{host}")):
            raise ApiError(
                421,
                f"this server is not known as {host!r}; if it should be, add it to the setting allowed_hosts",
                code="host_not_allowed",
            )

    def _check_origin(self, origin: str | None, asks_to_read: bool) -> None:
        if origin is None or is_listed(origin, self._origins):
            return
        # A preflight that gets here is of a page that is not listed, so its browser would keep the answer from it.
        if asks_to_read or not self._is_known(_host_name(origin)):
            raise ApiError(
                403,
                f"requests from pages of {origin!r} are not allowed; if they should be, add it to the setting "
                "allowed_origins",
                code="origin_not_allowed",
            )

    def _check_key(self, authorization: str) -> None:
        if not self._keys.is_required:
            return
        scheme, _, key = authorization.partition(" ")
        is_good = self._keys.accepts(key.strip().encode("latin-1"))
        if scheme.lower() != "bearer" or not is_good:
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_known(self, name: str) -> bool:
        return name in self._names or (self._any_address and _is_address(name))


class BodyLimit:
    """Refuses a body over `max_bytes` (413), by its declared length or as it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = _header(scope["headers"], b"content-length")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._max_bytes):
            raise self._too_large()
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted_receive, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._max_bytes} bytes (max_body_bytes)",
            code="request_too_large",
            headers={"Connection": "close"},
        )


def _header(headers: Collection[tuple[bytes, bytes]], name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def _host_name(url: str) -> str:
    """The lower-case host of a URL without its port and brackets; "" where there is none to be found."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
