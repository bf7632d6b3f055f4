"""Many streams at once, and clients that leave: nobody starves, nothing is kept."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from typing import Any

import openai
import pytest
from live_daemon import FREED_WITHIN_S, MODEL, LiveDaemon, eventually

pytestmark = pytest.mark.starter

STREAMS, TOKENS = 16, 64


def body(**fields: Any) -> dict[str, Any]:
    """A request that goes on to the end of the context, unless told otherwise."""
    messages = [{"role": "user", "content": "Tell me a long story."}]
    return {"model": MODEL, "messages": messages, "ignore_eos": True, **fields}


async def _stream(client: openai.AsyncOpenAI, number: int) -> tuple[str, int, float, float]:
    """The text, the tokens and when the first and the last one came."""
    messages = [{"role": "user", "content": f"Write {number + 3} lines about the sea."}]
    stream: Any = await client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, tokens, first = "", 0, 0.0
    async for chunk in stream:
        first = first or time.monotonic()
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text, tokens, first, time.monotonic()


def test_sixteen_streams_run_side_by_side(daemon: LiveDaemon, api: openai.OpenAI) -> None:
    async def all_at_once() -> list[tuple[str, int, float, float]]:
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(_stream(client, number) for number in range(STREAMS)))

    results = asyncio.run(all_at_once())
    assert [tokens for _, tokens, _, _ in results] == [TOKENS] * STREAMS
    # The last stream to begin begins before the first one ends: no one waits for another to finish.
    assert max(first for _, _, first, _ in results) < min(last for _, _, _, last in results)
    alone: Any = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write 3 lines about the sea."}],
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    assert results[0][0] == alone.choices[0].message.content
    assert eventually(daemon.is_idle, FREED_WITHIN_S)


def _send(daemon: LiveDaemon, **fields: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body(**fields)))
    return connection


def _is_running(daemon: LiveDaemon) -> bool:
    used = daemon.metric("appliance_kv_blocks", state="used")
    return used > 0 and daemon.metric("appliance_requests_running") == 1


def test_a_client_that_leaves_its_stream_frees_its_blocks(daemon: LiveDaemon) -> None:
    assert eventually(daemon.is_idle, FREED_WITHIN_S)
    connection = _send(daemon, stream=True)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    assert eventually(lambda: _is_running(daemon), 5.0)
    answer.close()
    connection.close()
    assert eventually(daemon.is_idle, FREED_WITHIN_S)


def test_a_client_that_leaves_without_streaming_frees_its_blocks(daemon: LiveDaemon) -> None:
    assert eventually(daemon.is_idle, FREED_WITHIN_S)
    connection = _send(daemon)
    assert eventually(lambda: _is_running(daemon), 10.0)
    connection.close()
    assert eventually(daemon.is_idle, FREED_WITHIN_S)


def test_a_stop_string_frees_blocks_at_once(daemon: LiveDaemon, api: openai.OpenAI) -> None:
    assert eventually(daemon.is_idle, 5.0)
    fields = body(stop=" ")
    extra = {"ignore_eos": fields.pop("ignore_eos")}
    answer = api.chat.completions.create(**fields, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    assert eventually(daemon.is_idle, FREED_WITHIN_S)
