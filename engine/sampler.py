"""Sampling on logits: the next ids of a row, a function of its own logits, parameters, seeds and position alone."""

from __future__ import annotations

import torch

from appliance.engine.logit_rules import apply_rules, has_rules
from appliance.engine.logprobs import score
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import keyed_uniform
from appliance.engine.types import PlanRow, RowResult

# Nearly always the nucleus lies within this many tokens, and the rest of the vocabulary need not be sorted.
_NUCLEUS_GUESS = 512
XTC_STREAM = 1


def is_greedy(row: PlanRow) -> bool:
    """Whether the id of the row's largest logit is all that is wanted."""
    return row.sampling.temperature == 0 and row.sampling.logprobs is None and not has_rules(row)


def sample(logits: torch.Tensor, row: PlanRow) -> RowResult:
    """Choose an id for each of the row's seeds.

    Args:
        logits: [vocab], float32, of the row's last token.

    Returns:
        The ids, with their log probabilities where they are wanted; `failed` where the logits are not finite.
    """
    if not bool(logits.isfinite().all()):
        return RowResult((0,), failed=True)
    ruled = apply_rules(logits.unsqueeze(0), [row])[0]
    if row.sampling.temperature == 0:
        ids = [int(ruled.argmax())] * len(row.seeds)
    else:
        position = row.start + row.n_tokens
        ids = [_draw(ruled, row.sampling, seed, position) for seed in row.seeds]
    if row.sampling.logprobs is None:
        return RowResult(tuple(ids))
    logprobs = score(logits.expand(len(ids), -1), ids, row.sampling.logprobs)
    return RowResult(tuple(ids), logprobs)


def _draw(logits: torch.Tensor, sampling: SamplingParams, seed: int, position: int) -> int:
    """Invert the cumulative distribution of the filtered probabilities at the number that (seed, position) draws.

    Filters in order: temperature; min_p against the most likely token; the top_k most likely; of these, renormalised,
    the smallest set that reaches top_p; XTC.
    """
    uniform = keyed_uniform(seed, position)
    # Shifted first: a tiny temperature must not make infinities of differences.
    shifted = (logits.double() - logits.max()) / sampling.temperature
    probabilities = torch.softmax(shifted, dim=-1)
    excludes = keyed_uniform(seed, position, XTC_STREAM) < sampling.xtc_probability
    if sampling.top_k <= 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0 and not excludes:
        return _invert(probabilities, uniform)
    kept, token_ids = _most_likely(probabilities, sampling)
    kept = kept[kept >= sampling.min_p * kept[0]]
    if sampling.top_p < 1.0:
        filtered = sampling.top_k > 0 or sampling.min_p > 0
        total = float(kept.sum()) if filtered else 1.0
        within = int((kept.cumsum(0) - kept < sampling.top_p * total).sum())
        kept = kept[: max(1, within)]
    if excludes:
        likely = int((kept >= sampling.xtc_threshold * kept.sum()).sum())
        first = max(0, likely - 1)
        kept, token_ids = kept[first:], token_ids[first:]
    return int(token_ids[_invert(kept, uniform)])


def _most_likely(probabilities: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in descending order with their ids: the top_k, or as many as min_p and top_p can keep."""
    vocab = probabilities.numel()
    if 0 < sampling.top_k < vocab:
        return probabilities.topk(sampling.top_k)
    if vocab > _NUCLEUS_GUESS:
        kept, token_ids = probabilities.topk(_NUCLEUS_GUESS)
        enough = float(kept[-1]) < sampling.min_p * float(kept[0])
        if sampling.min_p == 0.0 and sampling.top_p < 1.0:
            enough = float(kept.sum()) >= sampling.top_p
        if enough:
            return kept, token_ids
    return probabilities.sort(descending=True, stable=True)


def _invert(probabilities: torch.Tensor, uniform: float) -> int:
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return min(index, int(probabilities.nonzero()[-1]))
