"""Which web pages may read answers: the real middleware, outermost in front of the real access guard."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_call import call
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from appliance.daemon.cors import Cors
from appliance.daemon.errors import ErrorEdge
from appliance.daemon.guards import AccessGuard
from appliance.daemon.metrics import Metrics
from appliance.settings import Settings

LISTED = "https://chat.lan:8443"
PREFLIGHT = {"access-control-request-method": "POST"}


def ask(settings: Settings, method: str = "GET", **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    app: ASGIApp = AccessGuard(PlainTextResponse("yes"), settings)
    app = Cors(ErrorEdge(app, Metrics(list)), settings.allowed_origins)
    return call(app, {"host": "localhost", **headers}, method)


def settings(**given: Any) -> Settings:
    return Settings(**{"allowed_origins": (LISTED,), "api_key": ("secret",), **given})


def test_a_preflight_of_a_listed_page_is_answered_without_a_key() -> None:
    wanted = "authorization,content-type, x-stainless-os"
    code, headers = ask(
        settings(), "OPTIONS", origin=LISTED, access_control_request_headers=wanted, **PREFLIGHT
    )
    assert code == 204
    assert headers == {
        "access-control-allow-origin": LISTED,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": wanted,
        "access-control-expose-headers": "Retry-After",
        "access-control-max-age": "600",
        "vary": "Origin",
    }


def test_a_public_page_may_reach_this_private_address_if_it_is_listed() -> None:
    _, headers = ask(
        settings(), "OPTIONS", origin=LISTED, access_control_request_private_network="true", **PREFLIGHT
    )
    assert headers["access-control-allow-private-network"] == "true"


def test_what_a_listed_page_gets_it_may_read_refusals_included() -> None:
    code, headers = ask(settings(), origin=LISTED, authorization="Bearer secret")
    assert (code, headers["access-control-allow-origin"], headers["vary"]) == (200, LISTED, "Origin")
    code, headers = ask(settings(), origin=LISTED)
    assert (code, headers["access-control-allow-origin"]) == (401, LISTED)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://chat.lan:8443",
        "https://chat.lan",
        "https://chat.lan:8443.evil.example",
        "http://localhost:3000",
        "http://127.0.0.1:8000",
        "null",
    ],
)
def test_no_other_page_may_read_anything_nor_send_what_needs_leave(origin: str) -> None:
    code, headers = ask(settings(), "OPTIONS", origin=origin, **PREFLIGHT)
    assert code == 403
    assert not [name for name in headers if name.startswith("access-control")]
    _, headers = ask(settings(), origin=origin, authorization="Bearer secret")
    assert not [name for name in headers if name.startswith("access-control")]


def test_a_page_on_loopback_may_be_listed() -> None:
    listed = settings(allowed_origins="http://localhost:3000")
    assert ask(listed, "OPTIONS", origin="http://localhost:3000", **PREFLIGHT)[0] == 204
    assert ask(listed, "OPTIONS", origin="http://localhost:3001", **PREFLIGHT)[0] == 403


def test_a_star_lists_every_page() -> None:
    everyone = settings(allowed_origins="*")
    code, headers = ask(everyone, origin="https://any.example", authorization="Bearer secret")
    assert (code, headers["access-control-allow-origin"]) == (200, "https://any.example")


def test_without_an_origin_nothing_is_added() -> None:
    code, headers = ask(settings(), authorization="Bearer secret")
    assert (code, sorted(headers)) == (200, ["content-length", "content-type"])


def test_header_names_that_are_none_are_not_sent_back() -> None:
    _, headers = ask(
        settings(), "OPTIONS", origin=LISTED, access_control_request_headers="x\r\ny: z", **PREFLIGHT
    )
    assert "access-control-allow-headers" not in headers
