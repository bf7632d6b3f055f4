"""Sampling: for each row of a batch the next ids, by its own logits, parameters, seeds and position alone.

A batch is sampled where its logits are. The numbers drawn are made on the host, from (seed, position) alone, before
the step; nothing waits for the device. Weights of tokens are whole numbers, whose sums are exact in whatever order they
are added up, and no two tokens are equally likely: so what a row draws is the same in every batch, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from appliance.engine.logit_rules import apply_rules, has_rules, on_device
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import keyed_uniform
from appliance.engine.types import PlanRow

# Nearly always the nucleus lies within this many tokens, and the rest of the vocabulary need not be sorted.
_NUCLEUS_GUESS = 512
# What all weights of a row may add up to.
_LARGEST_SUM = 2**62
XTC_STREAM = 1

Draw = tuple[int, SamplingParams, int, int]
"""Row of the logits, its parameters, seed and position."""


def is_greedy(row: PlanRow) -> bool:
    """Whether the id of the row's largest logit is all that is wanted."""
    return row.sampling.temperature == 0 and row.sampling.logprobs is None and not has_rules(row)


def sample(
    logits: torch.Tensor, rows: Sequence[PlanRow], allowed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose an id for each seed of each row.

    Args:
        logits: [rows, vocab], float32, of the last token of each row.
        allowed: int32 [rows, ceil(vocab / 32)], bits of the tokens that may be chosen, the least significant first;
            None: all.

    Returns:
        int64 [seeds of all rows], in their order, and bool [rows], whether a row's logits are finite; where they are
        not, its ids mean nothing. Both on the device of the logits.
    """
    # What is not finite times 0 is not a number, nor is its sum with others.
    finite = logits.mul(0).sum(dim=-1) == 0
    ruled = apply_rules(logits, rows)
    if allowed is not None:
        ruled = ruled.masked_fill(~_bits(allowed, logits.shape[1]), float("-inf"))
    draws = [
        (index, row.sampling, seed, row.start + row.n_tokens)
        for index, row in enumerate(rows)
        for seed in row.seeds
    ]
    ids = logits.new_empty(len(draws), dtype=torch.int64)
    # A CPU has a row in its caches; elsewhere many seeds of a row take no more memory than one of each row does.
    at_once = 1 if logits.device.type == "cpu" else len(rows)
    for kind in (_take_largest, _draw_from_all, _draw_from_most_likely):
        places = [place for place, draw in enumerate(draws) if _kind(draw) is kind]
        for start in range(0, len(places), at_once):
            some = places[start : start + at_once]
            chosen = [draws[place] for place in some]
            of_rows = ruled.index_select(
                0, on_device([index for index, *_ in chosen], torch.int64, logits.device)
            )
            ids[on_device(some, torch.int64, logits.device)] = kind(of_rows, chosen)
    return ids, finite


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """bool [rows, count]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, :count]


def _kind(draw: Draw) -> Callable[[torch.Tensor, Sequence[Draw]], torch.Tensor]:
    _, sampling, _, _ = draw
    if sampling.temperature == 0:
        return _take_largest
    if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or _excludes(draw):
        return _draw_from_most_likely
    return _draw_from_all


def _excludes(draw: Draw) -> bool:
    _, sampling, seed, position = draw
    chance = sampling.xtc_probability
    return chance > 0 and keyed_uniform(seed, position, XTC_STREAM) < chance


def _take_largest(logits: torch.Tensor, _draws: Sequence[Draw]) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _draw_from_all(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _invert(_weights(logits, draws, logits.shape[1]), draws)


def _draw_from_most_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    vocab, ranking = logits.shape[1], _ranking(logits)
    widest = max(s.top_k if 0 < s.top_k < vocab else vocab for _, s, _, _ in draws)
    if widest < vocab:
        token_ids = ranking.topk(widest).indices
        kept = _weights(logits.gather(1, token_ids), draws, vocab)
        return _draw_ranked(kept, token_ids, kept.sum(1, keepdim=True), draws)
    weights = _weights(logits, draws, vocab)
    total = weights.sum(1, keepdim=True)
    if logits.device.type == "cpu" and vocab > _NUCLEUS_GUESS:
        # Where it costs no waiting to look, the rest is only sorted for those that need it.
        token_ids = ranking.topk(_NUCLEUS_GUESS).indices
        kept = weights.gather(1, token_ids)
        if all(_is_enough(*each) for each in zip(kept, total, draws, strict=True)):
            return _draw_ranked(kept, token_ids, total, draws)
    token_ids = ranking.sort(descending=True).indices
    return _draw_ranked(weights.gather(1, token_ids), token_ids, total, draws)


def _is_enough(kept: torch.Tensor, total: torch.Tensor, draw: Draw) -> bool:
    """Whether all that the filters let pass is among the most likely tokens, whose weights are given."""
    _, sampling, _, _ = draw
    if sampling.min_p > 0:
        return float(kept[-1]) < sampling.min_p * float(kept[0])
    return sampling.top_k <= 0 and sampling.top_p < 1 and float(kept.sum()) >= sampling.top_p * float(total)


def _draw_ranked(
    kept: torch.Tensor, token_ids: torch.Tensor, total: torch.Tensor, draws: Sequence[Draw]
) -> torch.Tensor:
    """Invert the filtered distributions of weights in descending order.

    Filters in order: temperature; min_p against the most likely token; the top_k most likely; of these, renormalised,
    the smallest set that reaches top_p; XTC. What they drop is 0 from then on.

    Args:
        total: of the weights of all tokens, where the first two filters are off.
    """
    width, parameters = kept.shape[1], [sampling for _, sampling, _, _ in draws]

    def columns(rows: Iterable[tuple[float, ...]]) -> torch.Tensor:
        return on_device(list(rows), torch.float64, kept.device).t().unsqueeze(-1)

    top_k, min_p, top_p = columns((s.top_k if s.top_k > 0 else width, s.min_p, s.top_p) for s in parameters)
    rank = torch.arange(width, device=kept.device)
    kept = kept.masked_fill((rank >= top_k) | (kept < min_p * kept[:, :1]), 0)
    is_filtered = (top_k < width) | (min_p > 0)
    reached = kept.cumsum(1) - kept >= top_p * torch.where(is_filtered, kept.sum(1, keepdim=True), total)
    kept = kept.masked_fill(reached & (top_p < 1) & (rank > 0), 0)
    excludes = [_excludes(draw) for draw in draws]
    if any(excludes):
        excluding, threshold = columns(zip(excludes, (s.xtc_threshold for s in parameters), strict=True))
        likely = ((kept >= threshold * kept.sum(1, keepdim=True)) & (kept > 0)).sum(1, keepdim=True)
        kept = kept.masked_fill((excluding > 0) & (rank < likely - 1), 0)
    return token_ids.gather(1, _invert(kept, draws).unsqueeze(1)).squeeze(1)


def _weights(logits: torch.Tensor, draws: Sequence[Draw], vocab: int) -> torch.Tensor:
    """Probabilities after temperature times a number, int64 as the logits, which the largest of a row are among."""
    temperatures = [sampling.temperature for _, sampling, _, _ in draws]
    divisor = on_device(temperatures, torch.float64, logits.device).unsqueeze(1)
    # Shifted first: a tiny temperature must not make infinities of differences.
    shifted = logits.double().sub_(logits.amax(dim=1, keepdim=True)).div_(divisor)
    return shifted.exp_().mul_(_LARGEST_SUM // vocab).long()


def _ranking(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows, vocab] in the order of the logits, of equal ones the first being the largest.

    Which of equal ones `topk` takes, and in what order, depends on how many it is asked for, and on the device.
    """
    bits = logits.view(torch.int32)
    ascending = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).long()
    return ascending.bitwise_left_shift_(32).sub_(torch.arange(logits.shape[1], device=logits.device))


def _invert(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Where the cumulative distributions go beyond the numbers that are drawn."""
    numbers = [keyed_uniform(seed, position) for _, _, seed, position in draws]
    uniforms = on_device(numbers, torch.float64, weights.device).unsqueeze(1)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    drawn = torch.minimum((uniforms * total).long(), total - 1)
    index = torch.searchsorted(cumulative, drawn, right=True)
    # Of what is no number there is no such token.
    return index.clamp(max=weights.shape[1] - 1).squeeze(1)
