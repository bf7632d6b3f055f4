"""The offline API: the same engine in this process, without a server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from appliance.engine.engine import Engine
from appliance.engine.errors import EngineError, ParameterError
from appliance.engine.types import Request, SamplingParams, TokenEvent
from appliance.pull.ensure import ensure_model
from appliance.settings import load_settings
from appliance.text.stream import TextStream
from appliance.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        text: up to and without the stop string, where one ended it.
        token_ids: the ids generated, up to and with those of the stop string; without an end-of-sequence token.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or stop token id that ended it, None for anything else.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its continuations. `prompt` is None where ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int


class LLM:
    """A model loaded into this process.

    Args:
        model: a catalogue name (pulled if absent), the name of an installed model, or a path to a .gguf file.
        settings: any setting by its name, e.g. `max_model_len=2048`.

    Raises:
        SettingsError, ModelError, CheckpointError, EngineError: what is wrong and what to do about it.
    """

    def __init__(self, model: str = "smollm2:135m", **settings: Any) -> None:
        resolved = load_settings({"model": model, **settings})
        path = ensure_model(resolved).path
        self.tokenizer = Tokenizer.from_gguf(path)
        self._engine = Engine(resolved.engine_config(path))
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; all of them share the engine's batch.

        Args:
            prompts: one prompt or several, each a text or token ids.
            sampling_params: for all prompts, or one for each; None: `SamplingParams()`.

        Returns:
            One output per prompt, in order.

        Raises:
            ParameterError: a prompt or parameter is unusable (`ContextLengthError` where it is too long); nothing
                has run then.
            EngineError: a step failed.
        """
        several = _as_list(prompts)
        params = _per_prompt(sampling_params, len(several))
        pending: dict[str, _Pending] = {}
        try:
            for prompt, sampling in zip(several, params, strict=True):
                self._submit(prompt, sampling, pending)
            while self._engine.has_work:
                for event in self._engine.step():
                    self._take(pending[event.request_id], event)
        finally:
            for request_id in pending:
                self._engine.abort(request_id)
        return [item.output() for item in pending.values()]

    def _submit(self, prompt: Prompt, sampling: SamplingParams, pending: dict[str, _Pending]) -> None:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else list(prompt)
        request = Request(
            id=f"{next(self._ids):08d}", prompt_ids=tuple(ids), sampling=sampling, arrived_at=time.monotonic()
        )
        self._engine.add(request)
        pending[request.id] = _Pending(request, text, TextStream(self.tokenizer, sampling.stop))

    def _take(self, item: _Pending, event: TokenEvent) -> None:
        if event.error is not None:
            raise EngineError(event.error.message)
        item.take(event)
        if item.stream.stopped is not None:
            self._engine.abort(event.request_id)


class _Pending:
    """A request on its way, collecting its text."""

    def __init__(self, request: Request, prompt: str | None, stream: TextStream) -> None:
        self.request = request
        self.prompt = prompt
        self.stream = stream
        self.token_ids: list[int] = []
        self.last = TokenEvent(request_id=request.id)

    def take(self, event: TokenEvent) -> None:
        self.last = event
        self.token_ids += event.token_ids
        self.stream.push(event.token_ids)
        if event.finish_reason is not None:
            self.stream.finish()

    def output(self) -> RequestOutput:
        stopped = self.stream.stopped
        completion = CompletionOutput(
            index=0,
            text=self.stream.text,
            token_ids=tuple(self.token_ids),
            finish_reason="stop" if stopped is not None else str(self.last.finish_reason),
            stop_reason=stopped if stopped is not None else self.last.stop_token_id,
        )
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_ids,
            outputs=(completion,),
            num_cached_tokens=self.last.num_cached_tokens,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise ParameterError(
            "prompts", "prompts as dictionaries are not supported; give texts or lists of token ids"
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]  # one prompt of token ids
    for item in items:
        if not isinstance(item, str) and not all(isinstance(token, int) for token in item):  # type: ignore[union-attr]
            raise ParameterError(
                "prompts", f"a prompt is {type(item).__name__}, expected a text or token ids"
            )
    return items  # type: ignore[return-value]  # each item was checked


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ParameterError(
            "sampling_params",
            f"{len(params)} sampling parameters for {num_prompts} prompts, expected one each",
        )
    return params
