"""What is wrong with a request is said in OpenAI's shape, naming the field; the engine never notices."""

from __future__ import annotations

import json
import re
import socket
import time
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
    (CHAT, chat(**{"foo bar": 1}), '"foo bar"', 'unknown field "foo bar"'),
    (CHAT, chat(**{"": 1}), '""', 'unknown field ""'),
    (CHAT, chat(str=1), "str", "unknown field str"),
    (CHAT, message(**{"list[str]": 1}), 'messages[0]."list[str]"', 'unknown field messages[0]."list[str]"'),
    (CHAT, part(type="text", text="", mood=1), "messages[0].content[1].mood", "unknown field"),
    (CHAT, chat(n=0), "n", "n is 0, expected 1 to 64"),
    (CHAT, chat(n=True), "n", "found true"),
    (CHAT, chat(chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs", "send {}"),
    (CHAT, chat(options={"num_ctx": 5}), "options", "not supported"),
    (CHAT, chat(add_generation_prompt=False), "add_generation_prompt", "send True"),
    (CHAT, chat(reasoning_effort="high"), "reasoning_effort", "send 'none'"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools", "not supported"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "not supported"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format", "not supported"),
    (CHAT, chat(logit_bias={"49157": 5}), "logit_bias", "no token 49157 in the vocabulary of 49152"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias", "is 101.0, expected -100 to 100"),
    (CHAT, chat(logit_bias={"Paris": 5}), "logit_bias", "'Paris' is no token id"),
    (CHAT, chat(logit_bias={"5": "much"}), "logit_bias", 'found "much"'),
    (CHAT, chat(logprobs=1), "logprobs", "found 1"),
    (CHAT, chat(top_logprobs=1), "top_logprobs", "needs logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "21"),
    (CHAT, chat(presence_penalty=2.1), "presence_penalty", "2.1, expected -2.0 to 2.0"),
    (CHAT, chat(frequency_penalty=-2.1), "frequency_penalty", "-2.1, expected -2.0 to 2.0"),
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
    (CHAT, chat(top_k=10**30), "top_k", "expected -1 to 2147483647"),
    (CHAT, chat(min_p=2), "min_p", "min_p is 2"),
    (CHAT, chat(seed=-1), "seed", "seed is -1, expected 0"),
    (CHAT, chat(seed=2**63), "seed", "seed is 9223372036854775808"),
    (CHAT, chat(max_tokens=-1), "max_tokens", "found -1"),
    (CHAT, chat(max_tokens=0), "max_tokens", "max_tokens is 0"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "found 1.5"),
    (CHAT, chat(max_tokens=True), "max_tokens", "found true"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens", "send one"),
    (CHAT, chat(stop=["a", 1]), "stop[1]", "found 1"),
    (CHAT, chat(stop=["a"] * 17), "stop", "at most 16"),
    (CHAT, chat(stop=""), "stop", "1 to 256"),
    (CHAT, chat(stop="x" * 257), "stop", "1 to 256"),
    (CHAT, chat(stop_token_ids=[49152]), "stop_token_ids", "49152"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids", "49152"),
    (CHAT, chat(prompt_logprobs=1, stream=True), "prompt_logprobs", "cannot be streamed"),
    (CHAT, chat(repetition_penalty=1e-300), "repetition_penalty", "1e-300, expected 0.01 to 10"),
    (CHAT, chat(priority=2**40), "priority", "less than or equal"),
    (TEXT, {"model": MODEL}, "prompt", "prompt is missing"),
    (TEXT, text(prompt=None), "prompt", "found null"),
    (TEXT, text(prompt=""), "prompt", "empty"),
    (TEXT, text(prompt=[]), "prompt", "prompt has 0 prompts, expected 1 to 128"),
    (TEXT, text(prompt=[[]]), "prompt", "empty"),
    (TEXT, text(prompt=["a"] * 129), "prompt", "prompt has 129 prompts, expected 1 to 128"),
    (TEXT, text(prompt=["a", 1]), "prompt[1]", "found"),
    (TEXT, text(prompt=[1, 49157]), "prompt", "no token 49157 in the vocabulary of 49152"),
    (TEXT, text(prompt=[[1], [-1]]), "prompt", "no token -1"),
    (TEXT, text(prompt=[10**30]), "prompt", f"no token {10**30}"),
    (TEXT, text(echo="yes"), "echo", 'found "yes"'),
    (TEXT, text(n=2, best_of=1), "best_of", "best_of is 1, expected at least n = 2"),
    (TEXT, text(best_of=2, stream=True), "best_of", "cannot be streamed"),
    (TEXT, text(prompt_logprobs=1, stream=True), "prompt_logprobs", "cannot be streamed"),
    (TEXT, text(include_stop_str_in_output=True), "include_stop_str_in_output", "send False"),
    (TEXT, text(response_format={"type": "json_object"}), "response_format", "not supported"),
    (TEXT, text(logprobs=21), "logprobs", "logprobs is 21, expected 0 to 20"),
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


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_hopeless_prompt_is_refused_before_it_is_encoded(daemon: LiveDaemon, path: str) -> None:
    huge = "x" * 4_000_000
    answer = daemon.post(path, message(content=huge) if path == CHAT else text(prompt=huge))
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    # The longest token of this vocabulary stands for 81 bytes; the template adds some.
    assert re.search(r"at least 4938[3-9] tokens", error["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({f"field{number}": 1 for number in range(200_000)}, "field0"),
        ({"logit_bias": {f"{number}": "x" for number in range(200_000)}}, "logit_bias"),
        (
            {"messages": [{**HI[0], **{f"field{number}": 1 for number in range(200_000)}}]},
            "messages[0].field0",
        ),
        ({"stream_options": {f"field{number}": 1 for number in range(200_000)}}, "stream_options.field0"),
    ],
    ids=["fields", "logit_bias", "messages", "stream_options"],
)
def test_the_first_fault_of_many_is_named_at_once(
    daemon: LiveDaemon, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps(chat(**fields)).encode()
    began = time.monotonic()
    answer = daemon.post(CHAT, body)
    assert time.monotonic() - began < 0.5
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


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
