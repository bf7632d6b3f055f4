"""What a client may ask for: strict models of the request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from appliance.daemon.errors import bad_request
from appliance.engine.config import EngineInfo
from appliance.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from appliance.sampling import SamplingDefaults

COMPLETION_MAX_TOKENS = 16
_LARGE = 2**31 - 1

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
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = None
    priority: int | None = Field(default=None, ge=-_LARGE, le=_LARGE)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """How many tokens to generate at most; None: to the end of the context."""
        return self.max_tokens

    def extras(self) -> dict[str, Any]:
        """Sampling parameters that the routes name differently, by their own names."""
        return {}

    def sampling(self, model: EngineInfo, defaults: SamplingDefaults) -> SamplingParams:
        """Raises ParameterError: a value outside its range; ApiError: a token id outside the vocabulary."""
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request(
                "prompt_logprobs cannot be streamed; leave out one of the two", "prompt_logprobs"
            )
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        bias = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        check_token_ids(self.stop_token_ids or (), model.vocab_size, "stop_token_ids")
        check_token_ids(tuple(bias), model.vocab_size, "logit_bias")
        limit = self.token_limit
        params = SamplingParams(
            **{
                **msgspec.structs.asdict(defaults),
                **given,
                **self.extras(),
                "logit_bias": bias,
                "max_tokens": None if limit is None else min(limit, model.max_model_len),
            }
        )
        if params.max_tokens == 0 and params.prompt_logprobs is None and not getattr(self, "echo", None):
            raise bad_request(
                "max_tokens is 0, expected at least 1 (or echo, or prompt_logprobs)", "max_tokens"
            )
        return params


_SAMPLING = tuple(
    name
    for name in GenerationBody.model_fields
    if name in SamplingParams.__struct_fields__ and name not in ("logit_bias", "max_tokens")
)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise bad_request(f"logit_bias: {key!r} is no token id, expected a number as a string", "logit_bias")
    return int(key)


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
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def extras(self) -> dict[str, Any]:
        if not self.logprobs:
            if self.top_logprobs:
                raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
            return {}
        return {"logprobs": self.top_logprobs or 0}


class CompletionBody(GenerationBody):
    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]

    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def token_limit(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def extras(self) -> dict[str, Any]:
        several = self.best_of is not None and self.best_of > (self.n or 1)
        if several and self.stream:
            raise bad_request("best_of cannot be streamed: the best are known only at the end", "best_of")
        if self.stream and self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise bad_request("echo with logprobs can be streamed with n = 1 only", "n")
        extras: dict[str, Any] = {"best_of": self.best_of}
        # Choosing the best needs the log probabilities, whether they are shown or not.
        extras["logprobs"] = self.logprobs if self.logprobs is not None else 0 if several else None
        if self.echo and self.logprobs is not None:
            extras["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return extras

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt per choice."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str] | list[list[int]]", prompt)


def check_token_ids(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"{param}: no token {token} in the vocabulary of {vocab_size} (0 to {vocab_size - 1})",
                param,
            )
