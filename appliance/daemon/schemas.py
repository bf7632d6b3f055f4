"""What a client may ask for: strict models of the request bodies, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.daemon import neutral
from appliance.daemon.errors import ApiError, bad_request
from appliance.engine.config import EngineInfo
from appliance.engine.types import MAX_SEED, SamplingParams
from appliance.sampling import SamplingDefaults

MAX_PROMPTS = 128
COMPLETION_MAX_TOKENS = 16
_LARGE = 2**31 - 1

Body = TypeVar("Body", bound="GenerationBody")
# One complaint is enough: a body of a million wrong items must not cost a million error records.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(BaseModel):
    """What chat and completions have in common. `None` is the same as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, le=_LARGE)
    min_p: float | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(default=None, ge=-_LARGE, le=_LARGE)
    max_tokens: int | None = Field(default=None, ge=1)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """How many tokens to generate at most; None: to the end of the context."""
        return self.max_tokens

    def sampling(self, model: EngineInfo, defaults: SamplingDefaults) -> SamplingParams:
        """Raises ParameterError: a value outside its range; ApiError: a token id outside the vocabulary."""
        check_token_ids(self.stop_token_ids or (), model.vocab_size, "stop_token_ids")
        limit = self.token_limit
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=self.seed,
            max_tokens=None if limit is None else min(limit, model.max_model_len),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        fields = self.model_dump()
        return {**fields, "role": "system"} if self.role == "developer" else fields


class ChatBody(GenerationBody):
    messages: Annotated[list[MessageBody], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or COMPLETION_MAX_TOKENS

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt per choice."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str] | list[list[int]]", prompt)


def parse_chat(body: bytes) -> ChatBody:
    """Raises ApiError (400) naming the first field that is wrong or not supported."""
    fields = neutral.drop_neutral(_parse_object(body), neutral.CHAT)
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
    fields = neutral.drop_neutral(_parse_object(body), neutral.COMPLETION)
    parsed = _validate(CompletionBody, fields)
    if not 1 <= len(parsed.prompts) <= MAX_PROMPTS:
        raise bad_request(
            f"prompt lists {len(parsed.prompts)} prompts, expected 1 to {MAX_PROMPTS}", "prompt"
        )
    return parsed


def check_token_ids(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"{param}: no token {token} in the vocabulary of {vocab_size} (0 to {vocab_size - 1})",
                param,
            )


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
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            param = f"{where}.content[{i}]"
            raise ApiError(
                400,
                f"{param} is of type {kind!r}, but this model takes text only; nothing was fetched",
                code="unsupported_content",
                param=param,
            )
    return neutral.drop_neutral(message, neutral.MESSAGE, f"{where}.")


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
        case "extra_forbidden":
            return bad_request(
                f"unknown field {param}; it is not supported here", param, "unsupported_parameter"
            )
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
