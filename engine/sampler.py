"""Sampling on logits: the next id of each row, a function of its own logits, parameters, seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

import torch

from appliance.engine.types import PlanRow, SamplingParams

# Nearly always the nucleus lies within this many tokens, and the rest of the vocabulary need not be sorted.
_NUCLEUS_GUESS = 512


def sample(logits: torch.Tensor, rows: Sequence[PlanRow]) -> tuple[list[int], frozenset[int]]:
    """Choose an id for each row.

    Args:
        logits: [rows, vocab], float32.
        rows: the plan rows that these logits belong to, in order.

    Returns:
        The ids, and the indices of rows whose logits are not finite (their ids mean nothing).
    """
    if not rows:
        return [], frozenset()
    ids = logits.argmax(dim=-1).tolist()
    finite = logits.isfinite().all(dim=-1).tolist()
    for index, row in enumerate(rows):
        if finite[index] and row.sampling.temperature > 0:
            uniform = keyed_uniform(row.seed, row.start + row.n_tokens)
            ids[index] = _draw(logits[index], row.sampling, uniform)
    return ids, frozenset(index for index, ok in enumerate(finite) if not ok)


def keyed_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone."""
    digest = blake2b(pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, sampling: SamplingParams, uniform: float) -> int:
    """Invert the cumulative distribution of the filtered probabilities at `uniform`.

    Filters in order: temperature; min_p against the most likely token; the top_k most likely; of these, renormalised,
    the smallest set that reaches top_p.
    """
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if sampling.top_k <= 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return _invert(probabilities, uniform)
    kept, token_ids = _most_likely(probabilities, sampling)
    kept = kept[kept >= sampling.min_p * kept[0]]
    if sampling.top_p < 1.0:
        filtered = sampling.top_k > 0 or sampling.min_p > 0
        total = float(kept.sum()) if filtered else 1.0
        kept = kept[kept.cumsum(0) - kept < sampling.top_p * total]
    return int(token_ids[_invert(kept, uniform)])


def _most_likely(probabilities: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in descending order with their ids: the top_k, or as many as min_p and top_p can keep."""
    vocab = probabilities.numel()
    if 0 < sampling.top_k < vocab:
        return probabilities.topk(sampling.top_k)
    if vocab > _NUCLEUS_GUESS:
        kept, token_ids = probabilities.topk(_NUCLEUS_GUESS)
        enough = float(kept[-1]) < sampling.min_p * float(kept[0])
        if sampling.min_p == 0.0:
            enough = float(kept.sum()) >= sampling.top_p
        if enough:
            return kept, token_ids
    return probabilities.sort(descending=True, stable=True)


def _invert(probabilities: torch.Tensor, uniform: float) -> int:
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return min(index, int(probabilities.nonzero()[-1]))
