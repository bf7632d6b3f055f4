"""Frequencies bit for bit as transformers computes them, and the contexts they are served in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.executors.rope_frequencies import rope_frequencies
from appliance.engine.families import read_spec
from appliance.engine.spec import DecoderSpec
from appliance.quant.errors import CheckpointError

SIZES = {"hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 1}
SIZES |= {"vocab_size": 16, "max_position_embeddings": 4096}
EXTRA = {"rms_norm_eps": 1e-5}
LONG = {"short_factor": [1 + i / 50 for i in range(48)], "long_factor": [1 + i for i in range(48)]}


def spec_of(architecture: str, **config: Any) -> DecoderSpec:
    metadata = {**SIZES, **EXTRA, "architectures": [architecture], **config}
    return read_spec(architecture, metadata, frozenset())


@pytest.mark.parametrize(
    ("rope", "served"),
    [
        ({"rope_type": "linear", "factor": 3.0}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 7000),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 4096),
        ({"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}, 4096),
    ],
)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_kinds_of_llama(rope: dict[str, Any], served: int, theta: float) -> None:
    rope = {"rope_theta": theta, "original_max_position_embeddings": 2048} | rope
    if rope["rope_type"] in ("linear", "dynamic"):
        del rope["original_max_position_embeddings"]
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    frequencies, factor = compute(LlamaConfig(**SIZES, rope_parameters=dict(rope)), seq_len=served)
    legacy = {key: value for key, value in rope.items() if key != "rope_theta"}
    for spelling in ({"rope_parameters": rope}, {"rope_theta": theta, "rope_scaling": legacy}):
        got, got_factor = rope_frequencies(spec_of("LlamaForCausalLM", **spelling).ropes[0], served)
        assert torch.equal(got, frequencies)
        assert got_factor == factor


@pytest.mark.parametrize("served", [1024, 1025, 4096])
@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.5}, {"factor": 16.0}])
def test_longrope_by_the_served_context(served: int, extra: dict[str, float]) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, **LONG, **extra}
    config = Phi3Config(**SIZES, original_max_position_embeddings=1024, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=served)
    legacy = {"type": "su", **LONG, **extra}
    for spelling in (
        {"rope_parameters": rope},
        {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "rope_scaling": legacy},
    ):
        spec = spec_of("Phi3ForCausalLM", original_max_position_embeddings=1024, **spelling)
        got, got_factor = rope_frequencies(spec.ropes[0], served)
        assert torch.equal(got, frequencies)
        assert got_factor == factor
        assert (spec.context_len, spec.longest_context(None), spec.longest_context(900)) == (1024, 1024, 1024)
        assert spec.longest_context(1025) == 4096


@pytest.mark.parametrize(
    ("rope", "default", "longest"),
    [
        ({"rope_type": "default"}, 4096, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 4096, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096, 4096),
    ],
)
def test_contexts(rope: dict[str, Any], default: int, longest: int) -> None:
    spec = spec_of("LlamaForCausalLM", rope_parameters=rope)
    assert spec.context_len == default
    assert spec.longest_context(1 << 20) == longest


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"rope_scaling": {"type": "mrope"}},
            UnsupportedModelError,
            "type 'mrope' is not supported; what works",
        ),
        ({"rope_scaling": {"mrope_section": [1, 2]}}, UnsupportedModelError, r"mrope_section is \[1, 2\]"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "'factor' is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e300}}, CheckpointError, "factor is 1e.300"),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1.0}, CheckpointError, "base is 1, expected more"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            CheckpointError,
            "'low_freq_factor' is missing",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            CheckpointError,
            "'long_factor' is miss",
        ),
        (
            {"rope_scaling": {"type": "longrope", **LONG}},
            CheckpointError,
            "RoPE has 48 factors, expected 64",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec_of("LlamaForCausalLM", **config)
