"""The families' own chat templates on 30 conversations each, against transformers' rendering of the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from appliance.text.chat_template import ChatTemplate, TemplateError

FAMILIES = (
    "gemma2",
    "gpt-oss",
    "granite3.3",
    "llama3.2",
    "mistral-nemo",
    "phi3.5",
    "qwen2.5",
    "qwen3",
    "smollm3",
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = (
    "Hi",
    "What is 2 + 2?",
    "  padded \n",
    "日本語 😀 é",
    "<b>&'\"</b>",
    "{{ 1 + 1 }} {% raw %}",
    "<|im_end|><end_of_turn></s>",
    "a\n\n\tb",
    "<think>\nhm\n</think>\n\nFour.",
    "x" * 300,
)


def conversation(number: int) -> list[dict[str, Any]]:
    """Of five kinds: a question, with a system message, several turns, an ending answer, and turns out of order."""
    said = [WORDS[(number + place) % len(WORDS)] for place in range(7)]
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    match number % 5:
        case 0:
            return turns[:1]
        case 1:
            return [{"role": "system", "content": said[5]}, *turns[:3]]
        case 2:
            return turns[:5]
        case 3:
            return turns[:4]
        case _:
            return [{"role": "system", "content": said[6]}, turns[0], turns[2], turns[1]]


def theirs(source: str, messages: list[dict[str, Any]], prompted: bool) -> str | None:
    """What transformers renders, None where the template refuses the messages."""
    try:
        [text], _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=prompted, **TOKENS
        )
    except jinja2.TemplateError:
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_are_rendered_as_transformers_does(golden: Path, family: str) -> None:
    source = (golden / "chat_templates" / f"{family}.jinja").read_text()
    template, refused = ChatTemplate(source, TOKENS), 0
    for number in range(30):
        for prompted in (True, False):
            messages = conversation(number)
            expected = theirs(source, messages, prompted)
            if expected is None:
                refused += 1
                with pytest.raises(TemplateError, match="refused the messages"):
                    template.render(messages, add_generation_prompt=prompted)
            else:
                assert template.render(messages, add_generation_prompt=prompted) == expected
    # Gemma knows no system messages, Mistral and it want turns to alternate.
    assert refused == {"gemma2": 24, "mistral-nemo": 12}.get(family, 0)


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("gemma2", "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
        ("mistral-nemo", "<s>[INST]Hi[/INST]"),
        ("phi3.5", "<|user|>\nHi<|end|>\n<|assistant|>\n"),
        ("qwen3", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_question_is_what_the_family_was_trained_on(golden: Path, family: str, prompt: str) -> None:
    source = (golden / "chat_templates" / f"{family}.jinja").read_text()
    assert ChatTemplate(source, TOKENS).render([{"role": "user", "content": "Hi"}]) == prompt
