"""Sampling: for each row of a batch the next ids, by its own logits, parameters, seeds and position alone.

A batch is sampled where its logits are. The numbers drawn are made on the host, from (seed, position) alone, before
the step; nothing waits for the device.
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
    finite = logits.isfinite().all(dim=-1)
    ruled = apply_rules(logits, rows)
    if allowed is not None:
        ruled = ruled.masked_fill(~_bits(allowed, logits.shape[1]), float("-inf"))
    draws = [
        (index, row.sampling, seed, row.start + row.n_tokens)
        for index, row in enumerate(rows)
        for seed in row.seeds
    ]
    ids = logits.new_empty(len(draws), dtype=torch.int64)
    for kind in (_take_largest, _draw_from_all, _draw_from_most_likely):
        places = [place for place, draw in enumerate(draws) if _kind(draw) is kind]
        if places:
            chosen = [draws[place] for place in places]
            of_rows = ruled[on_device([index for index, *_ in chosen], torch.int64, logits.device)]
            ids[on_device(places, torch.int64, logits.device)] = kind(of_rows, chosen)
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
    return keyed_uniform(seed, position, XTC_STREAM) < sampling.xtc_probability


def _take_largest(logits: torch.Tensor, _draws: Sequence[Draw]) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _draw_from_all(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _invert(_probabilities(logits, draws), draws)


def _draw_from_most_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    probabilities = _probabilities(logits, draws)
    vocab = probabilities.shape[1]
    widest = max(s.top_k if s.top_k > 0 else vocab for _, s, _, _ in draws)
    if widest < vocab:
        return _draw_sorted(*probabilities.topk(widest), draws)
    if logits.device.type != "cpu" or vocab <= _NUCLEUS_GUESS:
        return _draw_sorted(*probabilities.sort(descending=True, stable=True), draws)
    # Where it costs no waiting to look, only rows that need it are sorted to the end.
    ids = logits.new_empty(len(draws), dtype=torch.int64)
    kept, token_ids = probabilities.topk(_NUCLEUS_GUESS)
    enough = [_is_enough(each, sampling) for each, (_, sampling, _, _) in zip(kept, draws, strict=True)]
    near = [place for place, is_enough in enumerate(enough) if is_enough]
    if near:
        ids[near] = _draw_sorted(kept[near], token_ids[near], [draws[place] for place in near])
    far = [place for place, is_enough in enumerate(enough) if not is_enough]
    if far:
        rest = probabilities[far].sort(descending=True, stable=True)
        ids[far] = _draw_sorted(*rest, [draws[place] for place in far])
    return ids


def _is_enough(kept: torch.Tensor, sampling: SamplingParams) -> bool:
    """Whether all that the filters let pass is among the most likely tokens, whose probabilities are given."""
    if 0 < sampling.top_k <= len(kept):
        return True
    if sampling.min_p > 0:
        return float(kept[-1]) < sampling.min_p * float(kept[0])
    return sampling.top_k <= 0 and sampling.top_p < 1 and float(kept.sum()) >= sampling.top_p


def _draw_sorted(kept: torch.Tensor, token_ids: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Invert the filtered distributions of probabilities in descending order.

    Filters in order: temperature; min_p against the most likely token; the top_k most likely; of these, renormalised,
    the smallest set that reaches top_p; XTC. What they drop is 0 from then on.
    """
    device, parameters = kept.device, [sampling for _, sampling, _, _ in draws]

    def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return on_device(list(values), dtype, device).unsqueeze(1)

    rank = torch.arange(kept.shape[1], device=device)
    top_k = column((s.top_k if s.top_k > 0 else kept.shape[1] for s in parameters), torch.int64)
    min_p = column(s.min_p for s in parameters)
    kept = kept.masked_fill((rank >= top_k) | (kept < min_p * kept[:, :1]), 0)
    filtered = column((s.top_k > 0 or s.min_p > 0 for s in parameters), torch.bool)
    top_p = column(s.top_p for s in parameters)
    reached = kept.cumsum(1) - kept >= top_p * torch.where(filtered, kept.sum(1, keepdim=True), 1.0)
    kept = kept.masked_fill(reached & (top_p < 1) & (rank > 0), 0)
    threshold = column(s.xtc_threshold for s in parameters) * kept.sum(1, keepdim=True)
    likely = ((kept >= threshold) & (kept > 0)).sum(1, keepdim=True)
    excludes = column((_excludes(draw) for draw in draws), torch.bool)
    kept = kept.masked_fill(excludes & (rank < likely - 1), 0)
    return token_ids.gather(1, _invert(kept, draws).unsqueeze(1)).squeeze(1)


def _probabilities(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    temperatures = [sampling.temperature for _, sampling, _, _ in draws]
    divisor = on_device(temperatures, torch.float64, logits.device).unsqueeze(1)
    # Shifted first: a tiny temperature must not make infinities of differences.
    return torch.softmax((logits.double() - logits.amax(dim=1, keepdim=True)) / divisor, dim=-1)


def _invert(probabilities: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Where the cumulative distributions reach the numbers that are drawn."""
    numbers = [keyed_uniform(seed, position) for _, _, seed, position in draws]
    uniforms = on_device(numbers, torch.float64, probabilities.device).unsqueeze(1)
    cumulative = probabilities.cumsum(1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    # Nothing behind the token with which the total is reached, however the number was rounded.
    last = torch.searchsorted(cumulative, total)
    # Of what is no number there is no such token either.
    return torch.minimum(index, last).clamp(max=probabilities.shape[1] - 1).squeeze(1)
