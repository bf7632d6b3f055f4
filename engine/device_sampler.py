"""Sampling of all rows of a batch where their logits are. What it draws is what `sampler.sample` draws.

The numbers drawn are made on the host, from (seed, position) alone, before the step; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from appliance.engine.logit_rules import apply_rules, on_device
from appliance.engine.sampler import XTC_STREAM
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import keyed_uniform
from appliance.engine.types import PlanRow

Draw = tuple[int, SamplingParams, int, int]
"""Row of the logits, its parameters, seed and position."""


def sample_rows(
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
    """The filters in the order of `sampler.sample`; what they drop of the sorted probabilities is 0 from then on."""
    vocab, device = logits.shape[1], logits.device

    def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return on_device(list(values), dtype, device).unsqueeze(1)

    probabilities = _probabilities(logits, draws)
    parameters = [sampling for _, sampling, _, _ in draws]
    counts = [s.top_k if s.top_k > 0 else vocab for s in parameters]
    if max(counts) < vocab:
        kept, token_ids = probabilities.topk(max(counts))
    else:
        kept, token_ids = probabilities.sort(descending=True, stable=True)
    rank = torch.arange(kept.shape[1], device=device)
    min_p = column(s.min_p for s in parameters)
    kept = kept.masked_fill((rank >= column(counts, torch.int64)) | (kept < min_p * kept[:, :1]), 0)
    filtered = column([s.top_k > 0 or s.min_p > 0 for s in parameters], torch.bool)
    top_p = column(s.top_p for s in parameters)
    reached = kept.cumsum(1) - kept >= top_p * torch.where(filtered, kept.sum(1, keepdim=True), 1.0)
    kept = kept.masked_fill(reached & (top_p < 1) & (rank > 0), 0)
    threshold = column(s.xtc_threshold for s in parameters) * kept.sum(1, keepdim=True)
    likely = ((kept >= threshold) & (kept > 0)).sum(1, keepdim=True)
    excludes = column([_excludes(draw) for draw in draws], torch.bool)
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
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    rank = torch.arange(probabilities.shape[1], device=probabilities.device)
    last = (rank * (probabilities > 0)).amax(dim=1, keepdim=True)
    return torch.minimum(index, last).squeeze(1)
