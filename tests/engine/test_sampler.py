"""Sampling against exact probabilities, and its independence of all but (logits, parameters, seed, position)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from appliance.engine.sampler import sample
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import derive_seed, keyed_uniform
from appliance.engine.types import PlanRow

VOCAB = 1000


def row(*seeds: int, position: int = 1, **sampling: Any) -> PlanRow:
    return PlanRow("r", (0,), position - 1, ((0,),), True, SamplingParams(**sampling), seeds or (0,))


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
    for excluded, weight in ((True, sampling.xtc_probability), (False, 1 - sampling.xtc_probability)):
        likely = [t for t in kept if p[t] / reached >= sampling.xtc_threshold] if excluded else []
        left = kept[max(0, len(likely) - 1) :]
        for t in left:
            result[t] += weight * p[t] / sum(p[t] for t in left)
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
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"temperature": 1.0, "top_k": 10, "xtc_probability": 1.0, "xtc_threshold": 0.02},
    ],
)
def test_frequencies_match_the_exact_distribution(sampling: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    expected = exact(logits, SamplingParams(**sampling))
    draws = 4000
    ids = sample(logits, row(*range(draws), **sampling)).token_ids
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
    logits = torch.zeros(VOCAB)
    logits[[7, 9]] = 5.0
    assert sample(logits, row(1, 2, temperature=0.0)).token_ids == (7, 7)


def test_a_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    logits = torch.randn(VOCAB)
    assert sample(logits, row(*range(20), temperature=1e-9)).token_ids == (int(logits.argmax()),) * 20


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(VOCAB)
    rows = [row(s, position=p, temperature=1.0, top_p=0.9) for s, p in ((1, 5), (1, 6), (2, 5), (3, 9))]
    draws = [sample(logits, each).token_ids[0] for each in rows]
    assert [sample(logits.clone(), each).token_ids[0] for each in rows] == draws
    assert sample(logits, row(1, 2, position=5, temperature=1.0, top_p=0.9)).token_ids == (draws[0], draws[2])
    assert len({keyed_uniform(s, p, k) for s in range(20) for p in range(20) for k in range(2)}) == 800
    assert derive_seed(5, 0) == 5
    assert len({derive_seed(s, i) for s in range(30) for i in range(30)}) == 900


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-310},
        {"temperature": 1e-310, "top_p": 0.9},
        {"temperature": 1e-310, "min_p": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"temperature": 2.0, "top_k": 5, "top_p": 5e-324},
        {"temperature": 2.0, "top_k": 10**9, "top_p": 1e-300},
    ],
)
def test_extreme_filters_leave_the_most_likely_token(sampling: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB)
    assert sample(logits, row(*range(8), **sampling)).token_ids == (int(logits.argmax()),) * 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_fail(value: float) -> None:
    logits = torch.randn(VOCAB)
    assert not sample(logits, row(temperature=0.0)).failed
    logits[17] = value
    assert sample(logits, row(temperature=0.0)).failed


def test_logprobs_are_of_the_distribution_before_sampling_parameters() -> None:
    logits = torch.randn(VOCAB) * 4
    expected = torch.log_softmax(logits.double(), -1)
    result = sample(logits, row(3, 4, temperature=0.5, top_p=0.9, logit_bias={5: 50.0}, logprobs=3))
    assert result.token_ids == (5, 5)
    for position in result.logprobs:
        assert position.token.token_id == 5
        assert position.token.logprob == pytest.approx(float(expected[5]), abs=1e-9)
        assert position.token.rank == int((expected > expected[5]).sum()) + 1
        assert [top.token_id for top in position.top] == expected.topk(3).indices.tolist()
        assert [top.rank for top in position.top] == [1, 2, 3]
        assert [top.logprob for top in position.top] == pytest.approx(expected.topk(3).values.tolist())
    assert sample(logits, row(logprobs=0)).logprobs[0].top == ()
    assert sample(logits, row()).logprobs == ()
