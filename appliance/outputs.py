"""What the offline API returns, and how it grows from the engine's events."""

from __future__ import annotations

import time
from dataclasses import dataclass

from appliance.engine.types import PositionLogprobs, Request, TokenEvent
from appliance.text.continuation import Continuation, most_likely
from appliance.text.stream import HasTokenBytes


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        text: up to and without the stop string, where one ended it.
        token_ids: the ids generated, up to and with those of the stop string; without an end-of-sequence token.
        logprobs: of `token_ids`, one each, where `SamplingParams.logprobs` asks for them, else None.
        cumulative_logprob: their sum.
        finish_reason: "stop", "length" or "abort"; None while it goes on.
        stop_reason: the stop string or stop token id that ended it, None for anything else.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments of a request, in seconds of `time.monotonic`; None for what has not happened."""

    arrived_at: float
    first_token_at: float | None
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its continuations, best first where `best_of` chose them.

    Attributes:
        prompt: None where ids were given.
        prompt_logprobs: of the prompt's tokens from the second on, where asked for, else None.
        num_cached_tokens: tokens of the prompt that the prefix cache spared.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A sequence that beam search found.

    Attributes:
        text: of what follows the prompt.
        tokens: prompt and continuation, without an end-of-sequence token.
        cum_logprob: natural log probability of the continuation, the end included where it ended.
        finish_reason: "stop" or "length".
    """

    text: str
    tokens: tuple[int, ...]
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The sequences found for one prompt, best first."""

    sequences: tuple[BeamSearchSequence, ...]


class Collector:
    """Gathers one request's events into its output."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: HasTokenBytes) -> None:
        self.request = request
        self._prompt = prompt
        count = request.sampling.num_sequences
        self._continuations = [Continuation(index, tokenizer, request.sampling) for index in range(count)]
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._num_cached = 0
        self._first_token_at: float | None = None
        self._finished_at: float | None = None

    @property
    def finished(self) -> bool:
        return self._finished_at is not None

    def take(self, event: TokenEvent) -> bool:
        """Take in an event; whether its continuation is to be aborted, because a stop string ended it just now."""
        if event.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
        delta = self._continuations[event.index].take(event)
        self._prompt_logprobs += event.prompt_logprobs
        self._num_cached = max(self._num_cached, event.num_cached_tokens)
        if event.is_last:
            self._finished_at = time.monotonic()
        return delta is not None and delta.finish_reason is not None and event.finish_reason is None

    def output(self) -> RequestOutput:
        sampling = self.request.sampling
        chosen = self._continuations
        if self.finished and len(chosen) > sampling.n:
            chosen = most_likely(chosen, sampling.n)
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_ids,
            prompt_logprobs=tuple(self._prompt_logprobs) if sampling.prompt_logprobs is not None else None,
            outputs=tuple(
                _completion(place, each, sampling.logprobs is not None) for place, each in enumerate(chosen)
            ),
            finished=self.finished,
            num_cached_tokens=self._num_cached,
            metrics=RequestMetrics(self.request.arrived_at, self._first_token_at, self._finished_at),
        )


def _completion(place: int, continuation: Continuation, with_logprobs: bool) -> CompletionOutput:
    logprobs = tuple(continuation.logprobs) if with_logprobs else None
    return CompletionOutput(
        index=place,
        text=continuation.text,
        token_ids=tuple(continuation.token_ids),
        logprobs=logprobs,
        cumulative_logprob=sum(position.token.logprob for position in logprobs)
        if logprobs is not None
        else None,
        finish_reason=continuation.finish_reason,
        stop_reason=continuation.stop_reason,
    )
