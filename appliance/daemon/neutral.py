"""Fields of other servers' APIs that are not supported, and the values with which they change nothing.

Clients send many fields whether they need them or not. A value listed here is accepted and dropped, as is null; any
other is refused by name, because an answer that silently ignores what was asked for is a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from appliance.daemon.errors import ApiError

ANYTHING = object()
"""The field never has an effect on the answer, whatever its value."""

Table = Mapping[str, tuple[Any, ...]]

_BOTH: Table = {
    "user": (ANYTHING,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "options": ({},),
    "keep_alive": (ANYTHING,),
}

CHAT: Table = {
    **_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
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
    "suffix": ("",),
    "add_special_tokens": (True,),
}

MESSAGE: Table = {
    "name": (ANYTHING,),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}


PART: Table = {"cache_control": (ANYTHING,)}

STREAM_OPTIONS: Table = {"continuous_usage_stats": (False,)}

_SHOWN_CHARS = 80


def only_known(
    fields: Mapping[str, Any], known: Collection[str], table: Table, where: str = ""
) -> dict[str, Any]:
    """The fields that are `known`. `where` goes before a field's name in an error ("messages[0].").

    Raises:
        ApiError: the first other field that asks for something, whether `table` has it or not.
    """
    kept = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in table.get(name, ())):
            param = f"{where}{_shown(name)}"
            refusal = (
                _refusal(param, table[name])
                if name in table
                else f"unknown field {param}; it is not supported here"
            )
            raise ApiError(400, refusal, code="unsupported_parameter", param=param)
    return kept


def _shown(name: str) -> str:
    """A name as it is, or quoted where it would not be seen to be one."""
    text = name if name.isidentifier() else json.dumps(name, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, and 1 == 1.0: a number may be written either way, a truth value is no number.
    return neutral is ANYTHING or (isinstance(value, bool) == isinstance(neutral, bool) and value == neutral)


def _refusal(name: str, neutral: tuple[Any, ...]) -> str:
    accepted = " or ".join(repr(value) for value in neutral)
    return f"{name} is not supported here; leave it out" + (f" or send {accepted}" if accepted else "")
