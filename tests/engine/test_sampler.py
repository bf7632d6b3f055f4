"""Sampling against exact probabilities, and its independence of everything but (logits, parameters, seed, position)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from appliance.engine.sampler import keyed_uniform, sample
from appliance.engine.types import PlanRow, SamplingParams

VOCAB = 1000


def row(seed: int = 0, position: int = 1, **sampling: Any) -> PlanRow:
    return PlanRow("r", (0,), position - 1, ((0,),), True, SamplingParams(**sampling), seed)


def exact(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The filtered distribution, token by token, in plain Python."""
    p = torch.softmax(logits.double() / sampling.temperature, -1).tolist()
    order = sorted(range(len(p)), key=lambda t: -p[t])
    order = [t for t in order if p[t] >= sampling.min_p * p[order[0]]]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    total, kept, reached = sum(p[t] for t in order), [], 0.0
    for t in order:
        if sampling.top_p < 1 and reached >= sampling.top_p * total:
            break
        kept.append(t)
        reached += p[t]
    result = torch.zeros(len(p), dtype=torch.float64)
    for t in kept:
        result[t] = p[t] / reached
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 2.0, "top_p": 0.999},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 2.0, "min_p": 1e-9, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_frequencies_match_the_exact_distribution(sampling: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    expected = exact(logits, SamplingParams(**sampling))
    draws = 4000
    ids, failed = sample(logits.expand(draws, -1), [row(seed=s, **sampling) for s in range(draws)])
    assert not failed
    counts = torch.bincount(torch.tensor(ids), minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0, "a token that the filters drop was drawn"
    # Pearson's statistic over tokens expected at least 5 times, the others pooled; 6 sigma.
    common = expected * draws >= 5
    seen = torch.cat([counts[common], counts[~common].sum().view(1)])
    wanted = torch.cat([expected[common] * draws, expected[~common].sum().view(1) * draws]).clamp(min=1e-9)
    used = wanted > 1e-6
    statistic = float(((seen - wanted) ** 2 / wanted)[used].sum())
    freedom = max(1, int(used.sum()) - 1)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


def test_greedy_is_argmax_and_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 9]] = 5.0
    logits[1, 3] = 1.0
    assert sample(logits, [row(temperature=0.0)] * 2)[0] == [7, 3]


def test_a_draw_depends_on_seed_and_position_and_on_no_neighbour() -> None:
    logits = torch.randn(6, VOCAB)
    rows = [
        row(seed=s, position=p, temperature=1.0, top_p=0.9)
        for s, p in ((1, 5), (1, 6), (2, 5), (3, 9), (1, 5), (8, 1))
    ]
    together = sample(logits, rows)[0]
    assert together == [sample(logits[i : i + 1], [rows[i]])[0][0] for i in range(6)]
    assert sample(logits.flip(0), rows[::-1])[0] == together[::-1]
    assert len({keyed_uniform(s, p) for s in range(30) for p in range(30)}) == 900


def test_rows_that_are_not_finite_are_named() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 17] = float("nan")
    logits[2, 0] = float("inf")
    assert sample(logits, [row(temperature=0.0), row(), row(temperature=0.0)])[1] == {1, 2}


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == ([], frozenset())
