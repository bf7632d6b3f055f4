"""What a sequence does in a step, as a row of the plan. Imports no torch."""

from __future__ import annotations

from appliance.engine.seeds import derive_seed
from appliance.engine.types import PlanRow, Sequence


def plan_row(seq: Sequence, num_tokens: int, eos_token_ids: frozenset[int]) -> PlanRow:
    """The row that computes the next `num_tokens` of a sequence, whose tables cover them already."""
    start, stop = seq.num_computed, seq.num_computed + num_tokens
    sampling = seq.request.sampling
    wants_logits = stop == len(seq.tokens) and sampling.max_tokens != 0
    score_offset, targets = _scored(seq, start, stop)
    too_short = wants_logits and seq.num_generated < sampling.min_tokens
    return PlanRow(
        request_id=seq.request.id,
        index=seq.index,
        token_ids=tuple(seq.tokens[start:stop]),
        start=start,
        tables=tuple(tuple(table) for table in seq.tables),
        wants_logits=wants_logits,
        sampling=sampling,
        seeds=_seeds(seq) if wants_logits else (),
        num_prompt=seq.num_prompt,
        context=tuple(seq.tokens) if wants_logits and sampling.needs_context else (),
        forbidden=_ends(seq, eos_token_ids) if too_short else (),
        bad_sequences=seq.request.bad_sequences,
        score_offset=score_offset,
        targets=targets,
    )


def _seeds(seq: Sequence) -> tuple[int, ...]:
    """One seed a continuation where they all begin, else the sequence's own."""
    begins = seq.index == 0 and seq.num_generated == 0
    count = seq.request.sampling.num_sequences if begins else 1
    return tuple(derive_seed(seq.seed, index) for index in range(count))


def _ends(seq: Sequence, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    sampling = seq.request.sampling
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
    return tuple(sorted(ends))


def _scored(seq: Sequence, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
    """Offset of the first computed token whose successor is a prompt token to be scored, and these successors."""
    if seq.request.sampling.prompt_logprobs is None:
        return 0, ()
    first = max(start, seq.num_scored) + 1
    last = min(stop + 1, seq.num_prompt)
    return first - start - 1, tuple(seq.tokens[first:last])
