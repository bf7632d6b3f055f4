"""Fields of the OpenAI API that are not supported, and the values with which they change nothing.

Clients send many fields whether they need them or not. A value listed here is accepted and dropped; any other
is refused by name, because an answer that silently ignores what was asked for is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.daemon.errors import ApiError

ANYTHING = object()
"""The field never has an effect on the answer, whatever its value."""

Table = Mapping[str, tuple[Any, ...]]

_BOTH: Table = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "user": (ANYTHING,),
    "service_tier": ("auto", "default"),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
}

CHAT: Table = {
    **_BOTH,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "metadata": (ANYTHING,),
    "safety_identifier": (ANYTHING,),
    "prompt_cache_key": (ANYTHING,),
    "prompt_cache_retention": (ANYTHING,),
}

COMPLETION: Table = {
    **_BOTH,
    "logprobs": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}

MESSAGE: Table = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}


def drop_neutral(fields: Mapping[str, Any], table: Table, where: str = "") -> dict[str, Any]:
    """The fields that are not in `table`. `where` goes before a field's name in an error ("messages[0].").

    Raises:
        ApiError: a field of the table has a value that asks for something.
    """
    kept = {}
    for name, value in fields.items():
        if name not in table:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in table[name]):
            raise ApiError(
                400,
                _refusal(f"{where}{name}", table[name]),
                code="unsupported_parameter",
                param=f"{where}{name}",
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, and 1 == 1.0: a number may be written either way, a truth value is no number.
    return neutral is ANYTHING or (isinstance(value, bool) == isinstance(neutral, bool) and value == neutral)


def _refusal(name: str, neutral: tuple[Any, ...]) -> str:
    accepted = " or ".join(repr(value) for value in neutral)
    return f"{name} is not supported here; leave it out" + (f" or send {accepted}" if accepted else "")
