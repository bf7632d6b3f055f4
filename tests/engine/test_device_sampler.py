"""Sampling of a batch draws what sampling row by row draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from appliance.engine.device_sampler import sample_rows
from appliance.engine.sampler import sample
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow

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


def row(index: int, seeds: tuple[int, ...], **sampling: Any) -> PlanRow:
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


@pytest.mark.parametrize("vocab", [37, 2003])
def test_every_row_gets_what_it_gets_alone(vocab: int) -> None:
    rows = [row(i, tuple(range(100 * i, 100 * i + 1 + 30 * (i % 3))), **p) for i, p in enumerate(PARAMETERS)]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    before = logits.clone()
    ids, finite = sample_rows(logits, rows)
    assert torch.equal(logits, before), "the model's own logits were changed"
    assert finite.all()
    expected = [sample(each, r).token_ids for each, r in zip(logits, rows, strict=True)]
    assert ids.split([len(r.seeds) for r in rows])[2].unique().numel() > 2
    assert tuple(ids.tolist()) == sum(expected, ())


def test_rows_whose_logits_are_not_finite_are_named_and_disturb_no_other() -> None:
    rows = [row(i, (i,), temperature=1.0, top_p=top_p) for i, top_p in enumerate((0.9, 1.0, 0.9, 1.0, 0.9))]
    logits = torch.randn(5, 64)
    expected, _ = sample_rows(logits, rows)
    logits[1, 5] = float("nan")
    logits[2, 6] = float("inf")
    ids, finite = sample_rows(logits, rows)
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
    rows = [row(2 * i, tuple(range(40)), temperature=2.0) for i in range(3)]
    ids, _ = sample_rows(torch.zeros(3, vocab), rows, allowed)
    found = [set(each.tolist()) for each in ids.view(3, 40)]
    assert found[0] == wanted[0]
    assert found[1] == wanted[1]
    assert len(found[2]) > 15


def test_no_value_on_the_device_is_waited_for() -> None:
    """Tensors on torch's meta device have none, and mix with no others."""
    rows = [row(i, (i, i + 1), **parameters) for i, parameters in enumerate(PARAMETERS)]
    logits = torch.empty(len(rows), 100, device="meta")
    ids, finite = sample_rows(logits, rows, torch.empty(len(rows), 4, dtype=torch.int32, device="meta"))
    assert ids.shape == (2 * len(rows),)
    assert ids.device == finite.device == logits.device


def test_no_seeds_no_ids() -> None:
    ids, finite = sample_rows(torch.zeros(2, 5), [row(0, ()), row(1, ())])
    assert ids.shape == (0,)
    assert finite.shape == (2,)
