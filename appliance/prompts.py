"""Prompts and parameters of the offline API, in all the forms in which they may be given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from appliance.engine.errors import ParameterError
from appliance.engine.sampling_params import SamplingParams
from appliance.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    ids = _integers(items)
    return [ids] if items and len(ids) == len(items) else items


def parsed(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """The text of a prompt, None where ids were given, and its ids.

    Raises:
        ParameterError: it is no prompt.
    """
    if isinstance(prompt, Mapping):
        known = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
        if not known or set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ParameterError(
                "prompts",
                f"a prompt has the keys {list(prompt)}, expected 'prompt' or 'prompt_token_ids'",
            )
        prompt = prompt[known[0]]
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt, parse_special=True)
    if not isinstance(prompt, bytes | set) and isinstance(prompt, Iterable):
        tokens = list(prompt)
        ids = _integers(tokens)
        if len(ids) == len(tokens):
            return None, ids
    raise ParameterError("prompts", f"a prompt is {prompt!r:.80}, expected a text or a list of token ids")


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as several.

    Raises:
        ParameterError: they are none.
    """
    several: list[Any] = [messages]
    if isinstance(messages, list | tuple) and not any(isinstance(each, Mapping) for each in messages):
        several = list(messages)
    for each in several:
        if not isinstance(each, list | tuple) or not all(isinstance(message, Mapping) for message in each):
            raise ParameterError(
                "messages",
                f"a conversation is {each!r:.80}, expected a list of messages with 'role' and 'content'",
            )
    return several


def per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """The parameters of each prompt.

    Raises:
        ParameterError: they are none, or not as many.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    given: list[Any] = (
        list(params) if isinstance(params, Iterable) and not isinstance(params, Mapping) else [params]
    )
    if not all(isinstance(each, SamplingParams) for each in given):
        raise ParameterError(
            "sampling_params", "expected SamplingParams, one for all prompts or a list of one each"
        )
    if len(given) != num_prompts:
        raise ParameterError(
            "sampling_params",
            f"{len(given)} sampling parameters for {num_prompts} prompts, expected one each",
        )
    return given


def _integers(items: Iterable[object]) -> list[int]:
    """Those of the items that are whole numbers, numpy's included, and no truth values."""
    return [int(item) for item in items if isinstance(item, Integral) and not isinstance(item, bool)]
