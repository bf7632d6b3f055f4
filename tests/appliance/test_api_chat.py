"""Chat completions through the real client, streamed and not."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from live_daemon import MODEL, LiveDaemon

pytestmark = pytest.mark.starter

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def ask(api: openai.OpenAI, messages: Any = FRANCE, **fields: Any) -> Any:
    return api.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **fields})


def test_a_question_is_answered(api: openai.OpenAI) -> None:
    answer = ask(api)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ANSWER,
        "stop",
    )
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 7, 44)


def test_the_stream_says_the_same_in_openais_frames(api: openai.OpenAI) -> None:
    chunks = list(ask(api, stream=True, stream_options={"include_usage": True}))
    *parts, last, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content for part in parts) == ANSWER
    assert all(part.choices[0].finish_reason is None and part.usage is None for part in parts)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "stop")
    assert (usage.choices, usage.usage.prompt_tokens, usage.usage.completion_tokens) == ([], 37, 7)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stream_has_no_usage_unless_asked_for(daemon: LiveDaemon) -> None:
    body = {"model": MODEL, "messages": FRANCE, "stream": True, "temperature": 0}
    answer = daemon.post("/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "usage" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_stop_string_over_several_tokens_never_shows(api: openai.OpenAI) -> None:
    chunks = list(ask(api, stream=True, stop=["no such text", "ance is Pa"]))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Fr"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_that_only_begins_like_a_stop_string_comes_out(api: openai.OpenAI) -> None:
    answer = ask(api, stop="Paris, the city")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_ends_with_length(api: openai.OpenAI, field: str) -> None:
    answer = ask(api, **{field: 3})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        "The capital of",
        "length",
    )
    assert answer.usage.completion_tokens == 3


def test_without_a_limit_the_context_is_the_limit(api: openai.OpenAI) -> None:
    answer = ask(api, [{"role": "user", "content": "word " * 470}], extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def test_a_limit_beyond_the_context_is_not_refused(api: openai.OpenAI) -> None:
    assert ask(api, max_tokens=10**30).choices[0].message.content == ANSWER


def test_messages_may_be_written_in_several_ways(api: openai.OpenAI) -> None:
    plain = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        *FRANCE,
    ]
    other = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        },
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]},
    ]
    expected, found = ask(api, plain, max_tokens=8), ask(api, other, max_tokens=8)
    assert found.choices[0].message.content == expected.choices[0].message.content
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens


def test_a_seed_decides_what_is_sampled(api: openai.OpenAI) -> None:
    def story(seed: int) -> str:
        messages = [{"role": "user", "content": "Tell me a story."}]
        text = ask(api, messages, temperature=1.0, seed=seed, max_tokens=12).choices[0].message.content
        return str(text)

    assert story(7) == story(7)
    assert len({story(7), story(8), story(9)}) > 1


def test_a_prompt_seen_before_is_taken_from_the_cache(api: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Count with me: " + " ".join(map(str, range(60)))}]
    first, second = ask(api, messages, max_tokens=2), ask(api, messages, max_tokens=2)
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == (second.usage.prompt_tokens - 1) // 16 * 16 > 64
    assert second.choices[0].message.content == first.choices[0].message.content


def test_fields_that_change_nothing_are_accepted(api: openai.OpenAI) -> None:
    neutral = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "store": False,
        "user": "someone",
        "logit_bias": None,
        "reasoning_effort": "none",
    }
    others = {
        "some_other_servers_field": None,
        "chat_template_kwargs": {},
        "options": {},
        "add_generation_prompt": True,
        "keep_alive": "5m",
        "stream_options": {"continuous_usage_stats": False},
    }
    part = {"type": "text", "text": FRANCE[0]["content"], "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part], "name": "Bob"}]
    assert ask(api, messages, **neutral, extra_body=others).choices[0].message.content == ANSWER
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ask(api, tools=tools, tool_choice="none").choices[0].message.content == ANSWER


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2:135M"])
def test_a_model_is_called_as_on_the_command_line(api: openai.OpenAI, name: str) -> None:
    answer = api.completions.create(model=name, prompt="Hi", max_tokens=1)
    assert answer.model == name
    assert api.models.retrieve(name).id == MODEL


def test_the_model_is_listed_with_its_context(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).max_model_len == 512  # type: ignore[attr-defined]


def test_requests_are_measured(daemon: LiveDaemon, api: openai.OpenAI) -> None:
    names = ("time_to_first_token", "inter_token_latency", "request_duration")
    counts = [f"appliance_{name}_seconds_count" for name in names]
    tokens = ("appliance_prompt_tokens_total", "appliance_generated_tokens_total")
    before = [daemon.metric(name) for name in (*counts, *tokens)]
    ask(api)
    after = [daemon.metric(name) for name in (*counts, *tokens)]
    # Seven tokens of text; the one that ends the answer is not among them.
    assert [round(now - then) for now, then in zip(after, before, strict=True)] == [1, 6, 1, 37, 7]


def test_the_daemon_may_open_as_many_connections_as_it_is_allowed(daemon: LiveDaemon) -> None:
    soft, hard = psutil.Process(daemon.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.usefixtures("daemon")
def test_what_is_served_cannot_be_removed(starter_model: Path) -> None:
    with (starter_model.parent / "manifest.json").open("rb") as manifest, pytest.raises(BlockingIOError):
        fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_daemon_has_no_torch_in_it(daemon: LiveDaemon, api: openai.OpenAI) -> None:
    ask(api, max_tokens=1)
    assert "libtorch" in Path(f"/proc/{daemon.worker().pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()
