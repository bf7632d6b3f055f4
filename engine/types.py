"""The engine's nouns: what a request asks, what a step does, what comes back. Imports no torch.

Frozen records that cross the process boundary are `msgspec.Struct`s; they are their own wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from appliance.engine.errors import ParameterError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen and when a sequence ends.

    Attributes:
        temperature: 0 picks the most likely token (greedy); otherwise logits are divided by it. Range 0…2.
        top_p: keep the smallest set of tokens whose probabilities sum to at least `top_p`. Range (0, 1].
        top_k: keep the `top_k` most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than `min_p` times the most likely one. Range 0…1.
        seed: makes the sampled ids a function of (seed, position) alone; None draws a seed per request.
        max_tokens: end with reason "length" after this many tokens; None runs to the end of the context.
        stop: strings that end the text and are not part of it (at most 16, each at most 256 characters).
        stop_token_ids: ids that end the sequence, in addition to the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.

    Raises:
        ParameterError: a value is outside its range; `param` names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop: str | Iterable[str] | None = self.stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        msgspec.structs.force_setattr(self, "stop", stops)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check()

    def _check(self) -> None:
        # `not (a <= x <= b)` rather than `x < a or x > b`, so that NaN is refused too.
        if not 0.0 <= self.temperature <= 2.0:
            raise ParameterError("temperature", f"temperature is {self.temperature}, expected 0 to 2")
        if not 0.0 < self.top_p <= 1.0:
            raise ParameterError("top_p", f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.top_k < -1:
            raise ParameterError(
                "top_k", f"top_k is {self.top_k}, expected -1 or 0 (all) or a positive count"
            )
        if not 0.0 <= self.min_p <= 1.0:
            raise ParameterError("min_p", f"min_p is {self.min_p}, expected 0 to 1")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ParameterError("seed", f"seed is {self.seed}, expected 0 to 2**63 - 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParameterError("max_tokens", f"max_tokens is {self.max_tokens}, expected at least 1")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError(
                "stop", f"{len(self.stop)} stop strings, expected at most {MAX_STOP_STRINGS}"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise ParameterError(
                    "stop", f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters"
                )
        if any(token < 0 for token in self.stop_token_ids):
            raise ParameterError("stop_token_ids", "stop_token_ids must not be negative")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. Lower `priority` runs first; `arrived_at` (seconds) breaks ties."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    priority: int = 0


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
    """A request being served.

    Attributes:
        tokens: prompt and generated ids, oldest first.
        num_computed: how many of `tokens` have their keys and values in KV memory; the rest is the deficit.
        tables: for each KV group, the ids of the blocks that hold this sequence, in token order.
        block_hashes: for each full block of `tokens` known so far, its chained hash (group 0's block size).
        seed: the request's seed, or the one drawn for it; kept over preemption.
        num_cached: prompt tokens that the prefix cache spared on first admission.
    """

    request: Request
    tokens: list[int]
    seed: int
    num_computed: int = 0
    tables: tuple[list[int], ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    state: State = State.WAITING
    num_cached: int = 0
    num_preemptions: int = 0

    @property
    def id(self) -> str:
        return self.request.id

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
    def rank(self) -> tuple[int, float, str]:
        """Order of service: priority, then arrival; the id makes it total."""
        return (self.request.priority, self.request.arrived_at, self.request.id)


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
        token_ids: the tokens whose keys and values are computed, at positions start, start + 1, …
        tables: for each KV group, the block ids covering positions 0 … start + len(token_ids) - 1.
        wants_logits: whether the last token's logits are sampled (the row has no deficit left).
        seed: with the sampled position, the key of the random number that this row draws.
        n_draft: how many trailing `token_ids` are unverified guesses.
        mask_id: the grammar mask that applies to the logits, None for none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    tables: tuple[tuple[int, ...], ...]
    wants_logits: bool
    sampling: SamplingParams
    seed: int
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed.

    Attributes:
        token_ids: for each row of the plan, in order, the ids it sampled (empty where no logits were wanted).
        failed: indices of rows whose logits were not finite.
    """

    token_ids: tuple[tuple[int, ...], ...]
    failed: frozenset[int] = frozenset()


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as it crosses the process boundary: a stable code and a sentence."""

    code: str
    message: str


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request. The last one of a request carries `finish_reason`, and nothing follows it.

    Attributes:
        token_ids: newly generated ids, in order. A stop token that ended the sequence is not among them.
        finish_reason: "stop", "length", "abort" or "error"; None while the sequence goes on.
        stop_token_id: the token that ended it, where one did.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
