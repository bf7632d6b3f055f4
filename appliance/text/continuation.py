"""One continuation of a prompt as it grows from the engine's events: text, ids, log probabilities, how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PositionLogprobs, TokenEvent
from appliance.text.stream import HasTokenBytes, TextStream


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one continuation; the last one carries `finish_reason`.

    Attributes:
        index: which continuation of the prompt.
        text: what is added to it. Text that may begin a stop string comes later than its tokens.
        token_ids: the ids added to it.
        logprobs: of `token_ids`, where wanted.
        prompt_logprobs: of further tokens of the prompt, in order, where wanted.
        finish_reason, stop_reason: as of `Continuation`.
        num_tokens: of this continuation so far.
        num_cached_tokens: of the prompt, found in the prefix cache.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    num_tokens: int
    num_cached_tokens: int


class Continuation:
    """Collects what belongs to the answer; what the engine generated past a stop string does not.

    Attributes:
        token_ids: up to and with the one that completed a stop string; without a stop token that ended it.
        logprobs: of `token_ids`, where the request wants them.
        finish_reason: "stop" or "length" (or "abort"); None while it goes on.
        stop_reason: the stop string or stop token id that ended it, None for anything else.
    """

    def __init__(self, index: int, tokenizer: HasTokenBytes, sampling: SamplingParams) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._stream = TextStream(tokenizer, sampling.stop, sampling.min_tokens)

    @property
    def text(self) -> str:
        return self._stream.text

    def take(self, event: TokenEvent) -> Delta | None:
        """Take in an event; what it adds, None where the continuation has ended already."""
        if self.finish_reason is not None:
            return None
        text = self._stream.push(event.token_ids)
        used = self._stream.tokens_used - len(self.token_ids)
        token_ids, logprobs = event.token_ids[:used], event.logprobs[:used]
        self.token_ids += token_ids
        self.logprobs += logprobs
        if self._stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._stream.stopped
        elif event.finish_reason is not None:
            text += self._stream.finish()
            stopped = self._stream.stopped
            self.finish_reason = "stop" if stopped is not None else event.finish_reason
            self.stop_reason = stopped if stopped is not None else event.stop_token_id
        return Delta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_tokens=len(self.token_ids),
            num_cached_tokens=event.num_cached_tokens,
        )


class HasLogprobs(Protocol):
    @property
    def logprobs(self) -> list[PositionLogprobs]: ...


Scored = TypeVar("Scored", bound=HasLogprobs)


def most_likely(continuations: Iterable[Scored], count: int) -> list[Scored]:
    """The `count` continuations with the highest mean log probability, best first; of equals the earlier ones."""
    return sorted(continuations, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(continuation: HasLogprobs) -> float:
    positions = continuation.logprobs
    return sum(position.token.logprob for position in positions) / max(1, len(positions))
