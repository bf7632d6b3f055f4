"""SamplingParams: every value that is not usable is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.engine.errors import ParameterError
from appliance.engine.sampling_params import SamplingParams

NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 65),
        ("n", 1.5),
        ("best_of", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", NAN),
        ("temperature", "warm"),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("top_k", -2),
        ("top_k", True),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", float("inf")),
        ("dry_multiplier", -1.0),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("xtc_probability", 2.0),
        ("xtc_threshold", 0.6),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [1]),
        ("stop", 1),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 257]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("bad_words", [""]),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: NAN}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", 5),
        ("ignore_eos", "yes"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(ParameterError, match="best_of is 2, expected at least n = 3"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=5).num_sequences == 5


def test_lists_may_be_given_as_people_write_them() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], bad_words=["y"], logit_bias={1: 2})  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("x",), (3,), ("y",))
    assert SamplingParams(stop=None, logit_bias=None).stop == ()  # type: ignore[arg-type]


def test_a_wrong_type_is_told_with_the_right_one() -> None:
    with pytest.raises(ParameterError, match=r"logit_bias is \{'5': 1\.0\}, expected dict\[int, float\]"):
        SamplingParams(logit_bias={"5": 1.0})  # type: ignore[dict-item]
    with pytest.raises(ParameterError, match="temperature is 'warm', expected float"):
        SamplingParams(temperature="warm")  # type: ignore[arg-type]
