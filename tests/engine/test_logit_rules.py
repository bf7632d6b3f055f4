"""Bias, penalties and bans against references written out token by token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from appliance.engine.logit_rules import apply_rules
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow

VOCAB = 12
contexts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


def rules(logits: torch.Tensor, context: list[int], num_prompt: int, **changes: Any) -> torch.Tensor:
    extra = {name: changes.pop(name) for name in ("forbidden", "bad_sequences") if name in changes}
    sampling = SamplingParams(**changes)
    row = PlanRow(
        "r", (0,), 0, ((0,),), True, sampling, (0,), num_prompt=num_prompt, context=tuple(context), **extra
    )
    before = logits.clone()
    out = apply_rules(logits.unsqueeze(0), [row])[0]
    assert torch.equal(logits, before), "the model's own logits were changed"
    return out


@settings(deadline=None)
@given(context=contexts, prompt=st.integers(0, 40), presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_what_was_generated(
    context: list[int], prompt: int, presence: float, frequency: float
) -> None:
    logits = torch.randn(VOCAB)
    num_prompt = min(prompt, len(context))
    got = rules(logits, context, num_prompt, presence_penalty=presence, frequency_penalty=frequency)
    generated = context[num_prompt:]
    for token in range(VOCAB):
        count = generated.count(token)
        expected = float(logits[token]) - frequency * count - (presence if count else 0.0)
        assert float(got[token]) == pytest.approx(expected, abs=1e-5)


@settings(deadline=None)
@given(context=contexts, penalty=st.floats(0.1, 5))
def test_repetition_is_that_of_transformers(context: list[int], penalty: float) -> None:
    logits = torch.randn(VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([context]), logits.unsqueeze(0).clone())
    assert torch.allclose(rules(logits, context, 3, repetition_penalty=penalty), expected[0])


@settings(deadline=None)
@given(context=contexts, allowed=st.integers(1, 4))
def test_dry_penalises_the_longest_repetition_that_a_token_would_prolong(
    context: list[int], allowed: int
) -> None:
    logits = torch.zeros(VOCAB)
    got = rules(logits, context, 0, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=allowed)
    for token in range(VOCAB):
        longest = 0
        for at in range(1, len(context)):
            if context[at] == token:
                length = 0
                while length < at and context[at - 1 - length] == context[-1 - length]:
                    length += 1
                longest = max(longest, length)
        expected = -0.5 * 2.0 ** (longest - allowed) if longest >= allowed else 0.0
        assert float(got[token]) == pytest.approx(expected)


def test_dry_of_a_very_long_repetition_bans_and_does_not_overflow() -> None:
    logits = torch.zeros(VOCAB)
    got = rules(logits, [3] + [1] * 1500, 0, dry_multiplier=0.8, dry_base=1.75)
    assert torch.isinf(got).nonzero().flatten().tolist() == [1]
    assert got[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]


def test_bias_and_bans() -> None:
    logits = torch.randn(VOCAB)
    got = rules(logits, [1, 2, 3], 1, logit_bias={4: 2.5, 0: -100.0}, forbidden=(7, 8))
    assert float(got[4]) == pytest.approx(float(logits[4]) + 2.5)
    assert float(got[0]) == pytest.approx(float(logits[0]) - 100)
    assert torch.isinf(got).nonzero().flatten().tolist() == [7, 8]


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    bad = ((5,), (2, 3, 9), (3, 4, 8), (1, 1, 2, 3, 6))
    got = rules(torch.zeros(VOCAB), [1, 2, 3], 1, bad_words=["x"], bad_sequences=bad)
    assert torch.isinf(got).nonzero().flatten().tolist() == [5, 9]


def test_without_rules_nothing_is_copied() -> None:
    logits = torch.randn(VOCAB)
    assert rules(logits, [random.randrange(VOCAB)], 0).data_ptr() == logits.data_ptr()
