"""Request bodies from bytes to their models, checked before anything else happens; the first fault is named."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from appliance.daemon import neutral
from appliance.daemon.errors import ApiError, bad_request
from appliance.daemon.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    MessageBody,
    StreamOptions,
    TextPart,
)
from appliance.engine.sampling_params import MAX_LOGIT_BIAS

MAX_PROMPTS = 128

Body = TypeVar("Body", bound=GenerationBody)


def parse_chat(body: bytes) -> ChatBody:
    """Raises ApiError (400) naming the first field that is wrong or not supported."""
    asked = _parse_object(body)
    for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
        if asked.get(choice) == "none":
            asked.pop(tools, None)
    fields = _known(ChatBody, asked, neutral.CHAT)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [_parse_message(message, i) for i, message in enumerate(messages)]
    parsed = _validate(ChatBody, fields)
    limits = {parsed.max_tokens, parsed.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_tokens is {parsed.max_tokens} and max_completion_tokens {parsed.max_completion_tokens}; "
            "they mean the same, send one of them",
            "max_completion_tokens",
        )
    return parsed


def parse_completion(body: bytes) -> CompletionBody:
    """Raises ApiError (400) naming the first field that is wrong or not supported."""
    fields = _known(CompletionBody, _parse_object(body), neutral.COMPLETION)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        _check_size("prompt", prompt, "prompts", 1, MAX_PROMPTS)
    return _validate(CompletionBody, fields)


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request(
            f"the body is a JSON {_json_type(fields)}, expected an object", None, "invalid_type"
        )
    return fields


def _known(model: type[BaseModel], fields: Mapping[str, Any], table: neutral.Table) -> dict[str, Any]:
    """The fields of a body that mean something here.

    Raises:
        ApiError: the first that asks for something else. Left to pydantic, every one of a hundred thousand unknown
            fields would become an error record.
    """
    known = neutral.only_known(fields, model.model_fields, table)
    options = known.get("stream_options")
    if isinstance(options, dict):
        known["stream_options"] = neutral.only_known(
            options, StreamOptions.model_fields, neutral.STREAM_OPTIONS, "stream_options."
        )
    bias = known.get("logit_bias")
    if isinstance(bias, dict):
        _check_size("logit_bias", bias, "entries", 0, MAX_LOGIT_BIAS)
    return known


def _check_size(name: str, value: Sized, what: str, least: int, most: int) -> None:
    if not least <= len(value) <= most:
        raise bad_request(f"{name} has {len(value)} {what}, expected {least} to {most}", name)


def _parse_message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    where = f"messages[{index}]"
    role = message.get("role")
    if role in ("tool", "function"):
        raise ApiError(
            400,
            f"{where}.role: tools are not supported here",
            code="unsupported_parameter",
            param=f"{where}.role",
        )
    if "content" not in message and role != "assistant":
        raise bad_request(f"{where}.content is missing", f"{where}.content", "missing_required_parameter")
    known = neutral.only_known(message, MessageBody.model_fields, neutral.MESSAGE, f"{where}.")
    content = known.get("content")
    if isinstance(content, list):
        known["content"] = [_parse_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return known


def _parse_part(part: Any, param: str) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        raise ApiError(
            400,
            f"{param} is of type {kind!r:.80}, but this model takes text only; nothing was fetched",
            code="unsupported_content",
            param=param,
        )
    return neutral.only_known(part, TextPart.model_fields, neutral.PART, f"{param}.")


def _validate(model: type[Body], fields: Mapping[str, Any]) -> Body:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error) from None


def _as_api_error(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False)
    # Every branch of a union complains; the one that got furthest into the value is the one that was meant.
    detail = max(details, key=lambda item: len(_path(item["loc"])))
    param = _path_text(_path(detail["loc"]))
    match detail["type"]:
        case "missing":
            return bad_request(f"{param} is missing", param, "missing_required_parameter")
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            message = (
                f"{param}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, found {_shown(detail['input'])}"
            )
            return bad_request(message, param, code)


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    """Without the names of union branches ("str", "list[str]"), which pydantic puts among the fields."""
    return [part for part in loc if isinstance(part, int) or (part.isidentifier() and part != "str")]


def _path_text(path: list[int | str]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: Any) -> str:
    text = pydantic_core.to_json(value, fallback=repr).decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}…"


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")
