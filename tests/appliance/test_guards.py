"""Who may ask: Host, Origin and API key, by the real middleware in front of a route that says yes to all."""

from __future__ import annotations

import pytest
from asgi_call import call
from starlette.responses import PlainTextResponse

from appliance.daemon.errors import ErrorEdge
from appliance.daemon.guards import AccessGuard
from appliance.daemon.metrics import Metrics
from appliance.settings import Settings


def status(settings: Settings, path: str = "/v1/models", **headers: str) -> int:
    """The status that a request gets."""
    guarded = ErrorEdge(AccessGuard(PlainTextResponse("yes"), settings), Metrics(dict))
    return call(guarded, headers, path=path)[0]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("host.docker.internal:8000", 200),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("localhost:8000@evil.example", 421),
        ("192.168.1.5:8000", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_host(host: str, expected: int) -> None:
    assert status(Settings(allowed_hosts=("host.docker.internal",)), host=host) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("http://chat.lan", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_origin(origin: str, expected: int) -> None:
    assert status(Settings(allowed_hosts=("chat.lan",)), host="localhost", origin=origin) == expected


def test_bound_to_all_addresses_any_address_will_do_but_no_name() -> None:
    public = Settings(host="0.0.0.0", api_key="secret")
    assert status(public, host="192.168.1.5:8000", authorization="Bearer secret") == 200
    assert status(public, host="evil.example", authorization="Bearer secret") == 421


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("Bearer  secret ", 200),
        ("Bearer secre", 401),
        ("Bearer s\u00e9cret", 401),
        ("Bearer", 401),
        ("secret", 401),
        ("Basic secret", 401),
        ("", 401),
    ],
)
def test_key(authorization: str, expected: int) -> None:
    assert status(Settings(api_key="secret"), host="localhost", authorization=authorization) == expected


def test_health_and_readiness_need_no_key_but_metrics_do() -> None:
    settings = Settings(api_key="secret")
    found = [
        status(settings, path, host="localhost") for path in ("/health", "/ready", "/metrics", "/v1/models")
    ]
    assert found == [200, 200, 401, 401]
