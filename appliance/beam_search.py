"""Beam search on copy-on-write forks: beams share the KV memory of what they have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from appliance.engine.engine import Engine
from appliance.engine.errors import EngineError, ParameterError
from appliance.engine.sampling_params import MAX_LOGPROBS, SamplingParams, check_types
from appliance.engine.types import PositionLogprobs, Request, TokenEvent

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How beams are searched; names and meanings are vLLM's.

    Attributes:
        beam_width: beams kept, and sequences returned. Range 1…10.
        max_tokens: longest continuation.
        ignore_eos: go on past end-of-sequence tokens.
        length_penalty: a beam's score is its log probability over (its length, prompt included) to this power.
            Range -10…10.

    Raises:
        ParameterError: a value has the wrong type or is outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ParameterError(
                "beam_width", f"beam_width is {self.beam_width}, expected 1 to {MAX_BEAM_WIDTH}"
            )
        if not self.max_tokens >= 1:
            raise ParameterError("max_tokens", f"max_tokens is {self.max_tokens}, expected at least 1")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise ParameterError(
                "length_penalty",
                f"length_penalty is {self.length_penalty}, "
                f"expected {-MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}",
            )


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence found: `tokens` with the prompt, without an end-of-sequence token; natural log probability."""

    tokens: tuple[int, ...]
    num_prompt: int
    cum_logprob: float
    is_ended: bool

    def score(self, length_penalty: float) -> float:
        length = len(self.tokens) + self.is_ended
        return float(self.cum_logprob / length**length_penalty)


class BeamSearch:
    """The search for one prompt, fed with the engine's events.

    Args:
        eos_token_ids: ids that end a beam.
    """

    def __init__(
        self, request_id: str, prompt_ids: Sequence[int], params: BeamSearchParams, eos: frozenset[int]
    ) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos
        self._beams = {0: Beam(tuple(prompt_ids), len(prompt_ids), 0.0, False)}
        self._found: list[Beam] = []
        self._candidates: dict[int, PositionLogprobs] = {}
        # Of each beam as many as could all be kept, and as many again that end it.
        sampling = SamplingParams(
            temperature=0.0, max_tokens=None, ignore_eos=True, logprobs=2 * params.beam_width
        )
        self.request = Request(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            arrived_at=time.monotonic(),
            is_steered=True,
        )

    def take(self, event: TokenEvent) -> None:
        """Take in what may follow a beam. A beam that was preempted says it again."""
        if event.error is not None:
            raise EngineError(event.error.message)
        for position in event.logprobs:
            self._candidates[event.index] = position

    def advance(self, engine: Engine) -> bool:
        """Where every beam has said what may follow it: choose, and tell the engine. False: the search is over."""
        if self._candidates.keys() != self._beams.keys():
            return True
        grown: list[tuple[Beam, int]] = []
        for index, beam in self._beams.items():
            for token in self._candidates[index].top:
                logprob = beam.cum_logprob + token.logprob
                if token.token_id in self._eos:
                    self._found.append(Beam(beam.tokens, beam.num_prompt, logprob, True))
                else:
                    grown.append(
                        (Beam((*beam.tokens, token.token_id), beam.num_prompt, logprob, False), index)
                    )
        best = sorted(grown, key=lambda item: item[0].score(self._params.length_penalty), reverse=True)
        kept = best[: self._params.beam_width]
        self._candidates = {}
        longest = len(kept[0][0].tokens)
        if longest - kept[0][0].num_prompt == self._params.max_tokens or longest == engine.info.max_model_len:
            self._found += [beam for beam, _ in kept]
            engine.abort(self.request.id)
            return False
        indices = engine.steer(self.request.id, [(parent, beam.tokens[-1]) for beam, parent in kept])
        self._beams = {index: beam for index, (beam, _) in zip(indices, kept, strict=True)}
        return True

    def best(self) -> list[Beam]:
        """The `beam_width` best sequences, best first."""
        found = sorted(self._found, key=lambda beam: beam.score(self._params.length_penalty), reverse=True)
        return found[: self._params.beam_width]
