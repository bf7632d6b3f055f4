"""Text completions: every form of prompt, batches, streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from live_daemon import MODEL

from appliance.text.tokenizer import Tokenizer

pytestmark = pytest.mark.starter

PROMPTS = ["The capital of France is", "Once upon a time, there was", "1, 2, 3, 4,"]


def complete(api: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 6, **fields}
    return api.completions.create(model=MODEL, prompt=prompt, **fields)


@pytest.fixture(scope="module")
def tokenizer(starter_model: Path) -> Tokenizer:
    return Tokenizer.load(starter_model)


@pytest.fixture(scope="module")
def singles(api: openai.OpenAI) -> list[str]:
    return [complete(api, prompt).choices[0].text for prompt in PROMPTS]


def test_a_prompt_is_continued(api: openai.OpenAI) -> None:
    answer = complete(api, PROMPTS[0])
    assert answer.choices[0].text.startswith(" Paris")
    assert (answer.object, answer.choices[0].finish_reason) == ("text_completion", "length")
    assert answer.usage.completion_tokens == 6


def test_sixteen_tokens_are_the_default(api: openai.OpenAI) -> None:
    answer = complete(api, PROMPTS[1], max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_a_batch_is_its_singles_in_order(api: openai.OpenAI, singles: list[str]) -> None:
    answer = complete(api, PROMPTS)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(singles))
    assert answer.usage.completion_tokens == 18


def test_a_streamed_batch_is_the_same_text(api: openai.OpenAI, singles: list[str]) -> None:
    texts, reasons = [""] * 3, {}
    for chunk in complete(api, PROMPTS, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts == singles
    assert reasons == {0: "length", 1: "length", 2: "length"}


def test_token_ids_are_prompts_too(api: openai.OpenAI, tokenizer: Tokenizer, singles: list[str]) -> None:
    ids = [tokenizer.encode(prompt, parse_special=True) for prompt in PROMPTS]
    assert complete(api, ids[1]).choices[0].text == singles[1]
    assert [choice.text for choice in complete(api, ids).choices] == singles


def test_fields_of_vllm_that_change_nothing_are_accepted(api: openai.OpenAI, singles: list[str]) -> None:
    neutral = {
        "include_stop_str_in_output": False,
        "spaces_between_special_tokens": True,
        "return_tokens_as_token_ids": False,
        "add_special_tokens": True,
        "length_penalty": 1.0,
        "early_stopping": False,
        "response_format": {"type": "text"},
    }
    assert complete(api, PROMPTS[0], extra_body=neutral).choices[0].text == singles[0]


def test_a_stop_token_ends_and_is_no_part_of_the_text(api: openai.OpenAI, tokenizer: Tokenizer) -> None:
    (comma,) = tokenizer.encode(",", parse_special=False)
    answer = complete(api, PROMPTS[2], extra_body={"stop_token_ids": [comma]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 5", "stop")


def test_a_stop_string_ends_only_its_own_prompt(api: openai.OpenAI, singles: list[str]) -> None:
    assert "5" in singles[2]
    assert "5" not in singles[0]
    answer = complete(api, [PROMPTS[2], PROMPTS[0]], stop="5")
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert [choice.text for choice in answer.choices] == [singles[2].split("5")[0], singles[0]]
