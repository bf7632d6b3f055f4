"""Event streams: silence is broken by pings, and an error is a status or a frame, whichever is still possible."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_daemon import MODEL, Impatient, live_daemon
from starlette.types import Message, Receive, Scope, Send

from appliance.daemon import sse
from appliance.daemon.errors import ApiError, ErrorEdge
from appliance.daemon.metrics import Metrics
from appliance.daemon.sse import EventStreamResponse

TICK_S = 0.1


async def frames(*script: bytes | float | Exception) -> AsyncGenerator[bytes, None]:
    """Bytes are sent, seconds are waited, errors are raised."""
    for item in script:
        if isinstance(item, Exception):
            raise item
        if isinstance(item, float):
            await asyncio.sleep(item)
        else:
            yield item


def answer(*script: bytes | float | Exception) -> tuple[int, list[bytes]]:
    """The status and the bodies that a client would get, the last, empty one included."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStreamResponse(frames(*script))(scope, receive, send)

    edge = ErrorEdge(app, Metrics(dict))
    asyncio.run(edge({"type": "http"}, receive, send))
    assert [message["type"] for message in sent[:2]] == ["http.response.start", "http.response.body"]
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0]["status"], [message["body"] for message in sent[1:]]


@pytest.fixture(autouse=True)
def short_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", TICK_S)


def code_of(body: bytes) -> Any:
    return json.loads(body.removeprefix(b"data: "))["error"]["code"]


def test_a_long_wait_for_the_first_frame_is_filled_with_pings() -> None:
    status, bodies = answer(2.5 * TICK_S, b"data: a\n\n", b"data: b\n\n")
    assert (status, bodies) == (200, [b": ping\n\n", b": ping\n\n", b"data: a\n\n", b"data: b\n\n", b""])


def test_a_pause_between_frames_is_too() -> None:
    _, bodies = answer(b"data: a\n\n", 1.5 * TICK_S, b"data: b\n\n")
    assert bodies == [b"data: a\n\n", b": ping\n\n", b"data: b\n\n", b""]


def test_frames_that_come_often_enough_are_alone() -> None:
    script: list[bytes | float] = [b"data: a\n\n", 0.3 * TICK_S] * 10
    assert answer(*script) == (200, [b"data: a\n\n"] * 10 + [b""])


def test_an_error_before_anything_was_sent_has_its_status() -> None:
    status, bodies = answer(ApiError(503, "gone", code="model_unavailable"))
    assert (status, len(bodies), code_of(bodies[0])) == (503, 1, "model_unavailable")


def test_an_error_after_the_first_ping_is_the_last_frame() -> None:
    status, bodies = answer(1.5 * TICK_S, ApiError(503, "gone", code="model_unavailable"))
    assert (status, bodies[:-1]) == (200, [b": ping\n\n"])
    assert bodies[-1].startswith(b"data: {")
    assert bodies[-1].endswith(b"\n\n")
    assert code_of(bodies[-1]) == "model_unavailable"


def test_an_error_between_frames_is_the_last_frame() -> None:
    status, bodies = answer(b"data: a\n\n", RuntimeError("a bug"))
    assert (status, bodies[:-1], code_of(bodies[-1])) == (200, [b"data: a\n\n"], "internal_error")


@pytest.mark.starter
def test_a_daemon_whose_worker_stands_still_pings_and_then_says_what_is_wrong(
    starter_models_dir: Path, tmp_path: Path
) -> None:
    with live_daemon(starter_models_dir, tmp_path, Impatient, request_timeout=2.2) as daemon:
        worker = daemon.worker()
        worker.suspend()
        try:
            body = {"model": MODEL, "prompt": "a", "stream": True}
            answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=30)
        finally:
            worker.resume()
    *pings, last, rest = answer.content.split(b"\n\n")
    assert (answer.status_code, pings, rest) == (200, [b": ping"] * 4, b"")
    assert code_of(last) == "request_timeout"
