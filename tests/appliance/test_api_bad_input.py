"""What is wrong with a request is said in OpenAI's shape, naming the field; the engine never notices."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from live_daemon import MODEL, LiveDaemon

pytestmark = pytest.mark.starter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", **fields}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "Hi", **fields}])


def part(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}, fields]}])


# path, body, param, what the message says
REFUSED = [
    (CHAT, b"{", None, "not valid JSON"),
    (CHAT, b"", None, "not valid JSON"),
    (CHAT, b"\xff", None, "not valid JSON"),
    (CHAT, b"[" * 100_000, None, "not valid JSON"),
    (CHAT, b'{"temperature": NaN}', None, "not valid JSON"),
    (CHAT, b'{"model": "\\ud800"}', None, "not valid JSON"),
    (CHAT, b"[]", None, "a JSON array, expected an object"),
    (CHAT, {"messages": HI}, "model", "model is missing"),
    (CHAT, {"model": MODEL}, "messages", "messages is missing"),
    (CHAT, chat(model=1), "model", "found 1"),
    (CHAT, chat(messages=[]), "messages", "at least 1"),
    (CHAT, chat(messages="Hi"), "messages", 'found "Hi"'),
    (CHAT, chat(messages=["Hi"]), "messages[0]", 'found "Hi"'),
    (CHAT, chat(messages=[1] * 100_000), "messages[0]", "found 1"),
    (CHAT, message(role="robot"), "messages[0].role", 'found "robot"'),
    (CHAT, message(role="tool"), "messages[0].role", "tools are not supported"),
    (CHAT, message(content=3), "messages[0].content", "found 3"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", "missing"),
    (CHAT, message(name="Bob"), "messages[0].name", "not supported"),
    (CHAT, message(tool_calls=[{}]), "messages[0].tool_calls", "not supported"),
    (CHAT, message(mood="good"), "messages[0].mood", "not supported"),
    (
        CHAT,
        part(type="image_url", image_url={"url": "http://169.254.169.254/"}),
        "messages[0].content[1]",
        "image_url",
    ),
    (CHAT, part(type="text"), "messages[0].content[1].text", "missing"),
    (CHAT, chat(mood="good"), "mood", "unknown field mood"),
    (CHAT, chat(n=2), "n", "send 1"),
    (CHAT, chat(n=True), "n", "not supported"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools", "not supported"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format", "not supported"),
    (CHAT, chat(logit_bias={"49157": 5}), "logit_bias", "not supported"),
    (CHAT, chat(logprobs=True), "logprobs", "not supported"),
    (CHAT, chat(presence_penalty=0.1), "presence_penalty", "not supported"),
    (CHAT, chat(stream_options={"mood": 1}), "stream_options.mood", "not supported"),
    (CHAT, chat(stream="yes"), "stream", 'found "yes"'),
    (CHAT, chat(temperature="hot"), "temperature", 'found "hot"'),
    (CHAT, chat(temperature=2.5), "temperature", "2.5"),
    (
        CHAT,
        b'{"model": "%s", "messages": [{"role": "user", "content": ""}], "temperature": 1e999}'
        % MODEL.encode(),
        "temperature",
        "inf",
    ),
    (CHAT, chat(top_p=0), "top_p", "top_p is 0"),
    (CHAT, chat(top_k=-2), "top_k", "-2"),
    (CHAT, chat(top_k=10**30), "top_k", "less than or equal"),
    (CHAT, chat(min_p=2), "min_p", "min_p is 2"),
    (CHAT, chat(seed=-1), "seed", "found -1"),
    (CHAT, chat(seed=2**63), "seed", "found 9223372036854775808"),
    (CHAT, chat(max_tokens=-1), "max_tokens", "found -1"),
    (CHAT, chat(max_tokens=0), "max_tokens", "found 0"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "found 1.5"),
    (CHAT, chat(max_tokens=True), "max_tokens", "found true"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens", "send one"),
    (CHAT, chat(stop=["a", 1]), "stop[1]", "found 1"),
    (CHAT, chat(stop=["a"] * 17), "stop", "at most 16"),
    (CHAT, chat(stop=""), "stop", "1 to 256"),
    (CHAT, chat(stop="x" * 257), "stop", "1 to 256"),
    (CHAT, chat(stop_token_ids=[49152]), "stop_token_ids", "49152"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids", "49152"),
    (CHAT, chat(priority=2**40), "priority", "less than or equal"),
    (TEXT, {"model": MODEL}, "prompt", "prompt is missing"),
    (TEXT, text(prompt=None), "prompt", "found null"),
    (TEXT, text(prompt=""), "prompt", "empty"),
    (TEXT, text(prompt=[]), "prompt", "0 prompts"),
    (TEXT, text(prompt=[[]]), "prompt", "empty"),
    (TEXT, text(prompt=["a"] * 129), "prompt", "129 prompts"),
    (TEXT, text(prompt=["a", 1]), "prompt[1]", "found"),
    (TEXT, text(prompt=[1, 49157]), "prompt", "no token 49157 in the vocabulary of 49152"),
    (TEXT, text(prompt=[[1], [-1]]), "prompt", "no token -1"),
    (TEXT, text(prompt=[10**30]), "prompt", f"no token {10**30}"),
    (TEXT, text(echo=True), "echo", "not supported"),
    (TEXT, text(best_of=2), "best_of", "not supported"),
    (TEXT, text(logprobs=1), "logprobs", "not supported"),
    (TEXT, text(suffix="!"), "suffix", "not supported"),
    (TEXT, text(messages=HI), "messages", "unknown field"),
]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return dict(error)


@pytest.mark.parametrize(("path", "body", "param", "says"), REFUSED)
def test_what_is_wrong_is_named(
    daemon: LiveDaemon, path: str, body: Any, param: str | None, says: str
) -> None:
    answer = daemon.post(path, body)
    error = error_of(answer)
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, "prompt"),
        (TEXT, {"prompt": [5] * 512}, "prompt"),
    ],
)
def test_an_over_long_prompt_is_refused_with_both_numbers(
    daemon: LiveDaemon, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = daemon.post(path, {"model": MODEL, "stream": stream, "max_tokens": 1, **fields})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    prompt_tokens = 512 if path == TEXT else 631
    assert f"{prompt_tokens} tokens" in error["message"]
    assert "a context of 512 tokens" in error["message"]


def test_an_unknown_model_hears_which_there_are(daemon: LiveDaemon) -> None:
    for answer in (daemon.post(CHAT, chat(model="gpt-4")), daemon.get("/v1/models/gpt-4")):
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'gpt-4'" in error["message"]
        assert MODEL in error["message"]


def test_routes_that_are_not_there(daemon: LiveDaemon) -> None:
    missing, wrong = daemon.post("/v1/embeddings", {}), daemon.get(CHAT)
    assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_url")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    error_of(wrong)


def test_a_huge_body_is_refused_declared_or_not(daemon: LiveDaemon) -> None:
    huge = json.dumps(chat(messages=[{"role": "user", "content": "x" * 2**23}])).encode()
    declared = _post_raw(daemon, b"Content-Length: %d\r\n\r\n" % len(huge))
    chunked = _post_raw(daemon, b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b" % (len(huge), huge))
    assert declared.startswith(b"HTTP/1.1 413")
    assert chunked.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in declared


def _post_raw(daemon: LiveDaemon, rest: bytes) -> bytes:
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + rest)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_after_all_this_the_engine_goes_on(daemon: LiveDaemon) -> None:
    answer = daemon.post(CHAT, chat(max_tokens=1))
    assert answer.status_code == 200
    assert daemon.metric("appliance_worker_restarts_total") == 0
    assert daemon.metric("appliance_request_errors_total", code="internal_error") == 0
    assert "Traceback" not in daemon.log
