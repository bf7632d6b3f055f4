"""Sampling against exact probabilities, and its independence of all but (logits, parameters, seed, position)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from appliance.engine import sampler
from appliance.engine.logprobs import score
from appliance.engine.sampler import sample
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.seeds import derive_seed, keyed_uniform
from appliance.engine.types import PlanRow

VOCAB = 1000

PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {3: 40.0, 9: -7.5}},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.5, "top_k": 10**6},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "top_k": 10, "xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"temperature": 1.1, "presence_penalty": 1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    {"temperature": 0.8, "dry_multiplier": 1.5, "top_p": 0.9, "bad_words": ["x"]},
]


def row(*seeds: int, position: int = 1, **sampling: Any) -> PlanRow:
    return PlanRow("r", (0,), position - 1, ((0,),), True, SamplingParams(**sampling), seeds or (0,))


def busy_row(index: int, seeds: tuple[int, ...], **sampling: Any) -> PlanRow:
    context = tuple(torch.randint(0, 30, (40,), generator=torch.Generator().manual_seed(index)).tolist())
    return PlanRow(
        f"r{index}",
        (0,),
        39 + index,
        ((0,),),
        True,
        SamplingParams(**sampling),
        seeds,
        num_prompt=20,
        context=context,
        forbidden=(1, 2) if index % 2 else (),
        bad_sequences=((4,), (context[-1], 7)) if "bad_words" in sampling else (),
    )


def draw(logits: torch.Tensor, row: PlanRow) -> list[int]:
    ids, finite = sample(logits.unsqueeze(0), [row])
    assert finite.tolist() == [True]
    return ids.tolist()


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
    ids = draw(logits, row(*range(draws), **sampling))
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
    assert draw(logits, row(1, 2, temperature=0.0)) == [7, 7]


def test_a_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    logits = torch.randn(VOCAB)
    assert draw(logits, row(*range(20), temperature=1e-9)) == [int(logits.argmax())] * 20


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(VOCAB)
    rows = [row(s, position=p, temperature=1.0, top_p=0.9) for s, p in ((1, 5), (1, 6), (2, 5), (3, 9))]
    draws = [draw(logits, each)[0] for each in rows]
    assert [draw(logits.clone(), each)[0] for each in rows] == draws
    assert draw(logits, row(1, 2, position=5, temperature=1.0, top_p=0.9)) == [draws[0], draws[2]]
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
    assert draw(logits, row(*range(8), **sampling)) == [int(logits.argmax())] * 8


def test_logprobs_are_of_the_distribution_before_sampling_parameters() -> None:
    logits = torch.randn(VOCAB) * 4
    expected = torch.log_softmax(logits.double(), -1)
    found = score(logits.expand(2, -1), torch.tensor([5, 6]), 3).read()
    for token_id, position in zip((5, 6), found, strict=True):
        assert position.token.token_id == token_id
        assert position.token.logprob == pytest.approx(float(expected[token_id]), abs=1e-9)
        assert position.token.rank == int((expected > expected[token_id]).sum()) + 1
        assert [top.token_id for top in position.top] == expected.topk(3).indices.tolist()
        assert [top.rank for top in position.top] == [1, 2, 3]
        assert [top.logprob for top in position.top] == pytest.approx(expected.topk(3).values.tolist())
    assert score(logits.unsqueeze(0), torch.tensor([3]), 0).read()[0].top == ()


@pytest.mark.parametrize("vocab", [37, 2003])
def test_every_row_gets_what_it_gets_alone(vocab: int) -> None:
    rows = [
        busy_row(i, tuple(range(100 * i, 100 * i + 1 + 30 * (i % 3))), **p) for i, p in enumerate(PARAMETERS)
    ]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    before = logits.clone()
    ids, finite = sample(logits, rows)
    assert torch.equal(logits, before), "the model's own logits were changed"
    assert finite.all()
    expected = [draw(each, r) for each, r in zip(logits, rows, strict=True)]
    assert ids.split([len(r.seeds) for r in rows])[2].unique().numel() > 2
    assert ids.tolist() == [token_id for each in expected for token_id in each]


@pytest.mark.parametrize("vocab", [37, 2003])
def test_of_equally_likely_tokens_a_batch_chooses_as_a_row_alone(vocab: int) -> None:
    parameters = [{"temperature": 1.0, "top_k": k} for k in (2, 5, 30)]
    parameters += [{"temperature": 1.0, "top_p": 0.7}, {"temperature": 1.0, "min_p": 0.2}]
    rows = [busy_row(0, tuple(range(100)), **each) for each in parameters]
    logits = torch.randint(0, 6, (1, vocab), generator=torch.Generator().manual_seed(1)).float()
    batch = logits.expand(len(rows), -1).contiguous()
    expected = torch.cat([sample(logits, [each])[0] for each in rows])
    assert torch.equal(sample(batch, rows)[0], expected)
    best = set(logits[0].sort(descending=True, stable=True).indices[:2].tolist())
    assert set(expected[:100].tolist()) == best
    # As where looking at the logits would mean to wait, and all are sampled at once.
    draws = [(row, each.sampling, seed, 40) for row, each in enumerate(rows) for seed in each.seeds]
    assert torch.equal(sampler._draw_from_most_likely(batch.repeat_interleave(100, 0), draws), expected)


def test_rows_whose_logits_are_not_finite_are_named_and_disturb_no_other() -> None:
    rows = [
        busy_row(i, (i,), temperature=1.0, top_p=top_p) for i, top_p in enumerate((0.9, 1.0, 0.9, 1.0, 0.9))
    ]
    logits = torch.randn(5, 64)
    expected, _ = sample(logits, rows)
    logits[1, 5] = float("nan")
    logits[2, 6] = float("inf")
    ids, finite = sample(logits, rows)
    assert finite.tolist() == [True, False, False, True, True]
    assert torch.equal(ids[finite], expected[finite])
    assert ((ids >= 0) & (ids < 64)).all()


@pytest.mark.parametrize("vocab", [32, 33, 100])
def test_only_allowed_tokens_are_chosen(vocab: int) -> None:
    wanted = [{0, vocab - 1}, {31}, set(range(vocab))]
    words = torch.zeros(3, -(-vocab // 32), dtype=torch.int64)
    for place, tokens in enumerate(wanted):
        for token in tokens:
            words[place, token // 32] |= 1 << (token % 32)
    allowed = (words - (words >> 31 << 32)).int()
    rows = [busy_row(2 * i, tuple(range(40)), temperature=2.0) for i in range(3)]
    ids, _ = sample(torch.zeros(3, vocab), rows, allowed)
    found = [set(each.tolist()) for each in ids.view(3, 40)]
    assert found[0] == wanted[0]
    assert found[1] == wanted[1]
    assert len(found[2]) > 15


def test_no_value_on_the_device_is_waited_for() -> None:
    """Tensors on torch's meta device have none, and mix with no others."""
    rows = [busy_row(i, (i, i + 1), **parameters) for i, parameters in enumerate(PARAMETERS)]
    logits = torch.empty(len(rows), 100, device="meta")
    ids, finite = sample(logits, rows, torch.empty(len(rows), 4, dtype=torch.int32, device="meta"))
    assert ids.shape == (2 * len(rows),)
    assert ids.device == finite.device == logits.device


def test_no_seeds_no_ids() -> None:
    ids, finite = sample(torch.zeros(2, 5), [busy_row(0, ()), busy_row(1, ())])
    assert ids.shape == (0,)
    assert finite.shape == (2,)
