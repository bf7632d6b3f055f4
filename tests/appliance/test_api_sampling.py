"""Sampling in full through the API, against the offline engine's answers and OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from live_daemon import MODEL, LiveDaemon

pytestmark = pytest.mark.starter

PROMPT = "The capital of France is"
GREEDY = {"model": MODEL, "prompt": PROMPT, "temperature": 0}


def complete(api: openai.OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    return api.completions.create(**{**GREEDY, "max_tokens": 8, **fields}, extra_body=extra or {})


def test_continuations_of_one_prompt(api: openai.OpenAI) -> None:
    answer = complete(api, n=3, temperature=1.0, seed=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.choices[0].text == complete(api, temperature=1.0, seed=4).choices[0].text
    assert answer.usage.prompt_tokens == complete(api).usage.prompt_tokens
    assert answer.usage.completion_tokens == 24


def test_streamed_continuations_are_the_whole_ones(api: openai.OpenAI) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 4, "prompt": [PROMPT, "Once upon"], "stop": ["the"]}
    whole = complete(api, **fields)
    texts, reasons = [""] * 6, [""] * 6
    for chunk in complete(api, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_best_of_returns_the_most_likely(api: openai.OpenAI) -> None:
    every = complete(api, n=4, temperature=1.0, seed=4, logprobs=0).choices
    means = {
        each.text: sum(each.logprobs.token_logprobs) / len(each.logprobs.token_logprobs) for each in every
    }
    best = complete(api, best_of=4, n=2, temperature=1.0, seed=4)
    assert [each.text for each in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 32


def test_chat_logprobs(api: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    fields: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "logprobs": True}
    answer = api.chat.completions.create(**fields, top_logprobs=2)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert (
        bytes(b for token in content for b in token.bytes or []).decode() == answer.choices[0].message.content
    )
    for token in content:
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed = [
        token
        for chunk in api.chat.completions.create(**fields, stream=True)
        for choice in chunk.choices
        for token in (choice.logprobs and choice.logprobs.content) or []
    ]
    assert [(token.token, token.logprob) for token in streamed] == [
        (token.token, token.logprob) for token in content
    ]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs(api: openai.OpenAI, max_tokens: int) -> None:
    (choice,) = complete(api, echo=True, logprobs=1, max_tokens=max_tokens).choices
    told = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    assert all(value < 0 for value in told.token_logprobs[1:])
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    prompt_tokens = complete(api).usage.prompt_tokens
    assert len(told.tokens) == prompt_tokens + max_tokens
    tokens: list[str] = []
    values: list[float | None] = []
    text = ""
    for chunk in complete(api, echo=True, logprobs=1, max_tokens=max_tokens, stream=True):
        for part in chunk.choices:
            text += part.text
            if part.logprobs:
                tokens += part.logprobs.tokens
                values += part.logprobs.token_logprobs
    assert (text, tokens, values) == (choice.text, told.tokens, told.token_logprobs)


def test_prompt_logprobs_in_vllms_shape(daemon: LiveDaemon) -> None:
    body = {**GREEDY, "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = daemon.post("/v1/completions", body).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert all(2 <= len(position) <= 3 for position in rest)
    assert {"logprob", "rank", "decoded_token"} == set(next(iter(rest[0].values())))


def test_penalties_bias_and_bans_change_the_answer_as_they_should(api: openai.OpenAI) -> None:
    plain = complete(api, logprobs=0, max_tokens=24).choices[0]
    first = plain.logprobs.tokens[0]
    banned = complete(api, {"bad_words": [first.strip()]}).choices[0]
    assert not banned.text.startswith(first)
    assert (
        complete(api, logit_bias={"42": 100}, max_tokens=3, logprobs=0).choices[0].logprobs.tokens[0] != first
    )
    repeated = (
        complete(api, {"repetition_penalty": 5.0}, logprobs=0, max_tokens=24).choices[0].logprobs.tokens
    )
    assert len(set(repeated)) == len(repeated)
    assert (
        complete(api, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=24).choices[0].text
        != plain.text
    )


def test_min_tokens_holds_back_ends_and_stop_strings(api: openai.OpenAI) -> None:
    stop = complete(api, max_tokens=8).choices[0].text[1:3]
    assert complete(api, stop=[stop]).usage.completion_tokens < 8
    late = complete(api, {"min_tokens": 6}, stop=[stop], max_tokens=24)
    assert late.usage.completion_tokens >= 6


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"49157": 5}}, "logit_bias"),
        ({"logit_bias": {"paris": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_is_out_of_range_is_named(daemon: LiveDaemon, body: dict[str, Any], param: str) -> None:
    answer = daemon.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    if body == {"logit_bias": {"49157": 5}}:
        assert "49157" in error["message"]
        assert "49152" in error["message"]


def test_top_logprobs_need_logprobs(daemon: LiveDaemon) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = daemon.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "top_logprobs": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
