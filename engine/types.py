"""The engine's nouns: what a request asks, what a step does, what comes back. Imports no torch.

Frozen records that cross the process boundary are `msgspec.Struct`s; they are their own wire format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from appliance.engine.sampling_params import SamplingParams

HOLE = -1
"""In a block table: the place of a block that lies behind the window and was given back."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. Of those that wait, lower `priority` comes first, then earlier `arrived_at` (seconds).

    A request that runs is not interrupted for one that waits; when memory is short, the lowest claim gives way.

    Attributes:
        bad_sequences: the token ids of `sampling.bad_words`, each in all the spellings that the tokeniser knows.
        is_steered: the engine samples nothing: it tells the log probabilities of what may follow each continuation, and
            goes on with those that `Engine.steer` names.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    priority: int = 0
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    is_steered: bool = False


class State(Enum):
    """Where a sequence is in its life. The SWAP states are reached once KV memory has a second tier."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPING_OUT = "swapping_out"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A continuation of a request's prompt being generated.

    Attributes:
        index: which continuation it is; the first one computes the prompt, the others are forked from it.
        tokens: prompt and generated ids, oldest first.
        num_computed: how many of `tokens` have their keys and values in KV memory; the rest is the deficit.
        tables: for each KV group, the ids of the blocks that hold this sequence, in token order; `HOLE` where no token
            still to be computed sees what was there.
        block_hashes: for each full block of `tokens` known so far, its chained hash (group 0's block size).
        seed: of this continuation: the request's seed, or the one drawn for it, and the index; kept over preemption.
        num_scored: prompt tokens whose log probabilities have been given out.
        num_cached: prompt tokens that the prefix cache spared on first admission.
    """

    request: Request
    tokens: list[int]
    seed: int
    num_computed: int = 0
    tables: tuple[list[int], ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    state: State = State.WAITING
    index: int = 0
    num_cached: int = 0
    num_scored: int = 0
    num_preemptions: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Names the sequence among all that live: the request's id and the index."""
        return (self.request.id, self.index)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def deficit(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def rank(self) -> tuple[int, float, str, int]:
        """Order of service: priority, then arrival; the id and the index make it total."""
        return (self.request.priority, self.request.arrived_at, self.request.id, self.index)


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of KV memory: which group, which tier ("device", "host"), which place in that tier's pool."""

    group: int
    tier: str
    id: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole block before the step runs."""

    source: BlockRef
    target: BlockRef


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What one sequence does in a step.

    Attributes:
        index: which continuation of the request.
        token_ids: the tokens whose keys and values are computed, at positions start, start + 1, …
        tables: for each KV group, the block ids covering positions 0 … start + len(token_ids) - 1 and perhaps more;
            `HOLE` where none of these tokens sees any.
        wants_logits: whether the last token's logits are sampled (the row has no deficit left).
        seeds: one for each id to sample from these logits; with the sampled position, it keys the random numbers.
        num_prompt: how many of the sequence's tokens are the prompt.
        context: all tokens of the sequence, where `sampling.needs_context`, else empty.
        forbidden: ids that may not be sampled here (the ends of a sequence that is too short to end).
        score_offset, targets: `targets[i]` is the prompt token that follows `token_ids[score_offset + i]`, and its
            log probability is wanted.
        n_draft: how many trailing `token_ids` are unverified guesses.
        mask_id: the grammar mask that applies to the logits, None for none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    tables: tuple[tuple[int, ...], ...]
    wants_logits: bool
    sampling: SamplingParams
    seeds: tuple[int, ...]
    index: int = 0
    num_prompt: int = 0
    context: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    score_offset: int = 0
    targets: tuple[int, ...] = ()
    n_draft: int = 0
    mask_id: int | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a step will do, decided before anything moves."""

    step_id: int
    rows: tuple[PlanRow, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        return sum(row.n_tokens for row in self.rows)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's natural log probability before any sampling parameter, and its rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """At one position: the token that is there, and the most likely ones, best first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a step computed for one row of the plan.

    Attributes:
        token_ids: one for each of the row's seeds; empty where no logits were wanted.
        logprobs: of these ids, where the request wants log probabilities, else empty.
        prompt_logprobs: of the row's `targets`.
        failed: the logits were not finite; the ids mean nothing.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, row by row of its plan."""

    rows: tuple[RowResult, ...]


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as it crosses the process boundary: a stable code and a sentence."""

    code: str
    message: str


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """News of one continuation of a request.

    Attributes:
        index: which continuation; of an error or an abort of the whole request, 0.
        token_ids: newly generated ids, in order. A stop token that ended the sequence is not among them.
        logprobs: of these ids, where wanted.
        prompt_logprobs: of further tokens of the prompt, in order, where wanted.
        finish_reason: "stop", "length", "abort" or "error"; None while the continuation goes on.
        is_last: nothing follows of this request.
        stop_token_id: the token that ended it, where one did.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: str | None = None
    is_last: bool = False
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
