"""What a config.json says of layers, and what is refused, naming the key."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families import read_spec
from appliance.engine.spec import Activation, DecoderSpec, RopeSpec
from appliance.quant.errors import CheckpointError

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 6}
SIZES |= {"vocab_size": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def spec_of(architecture: str, **config: Any) -> DecoderSpec:
    return read_spec(architecture, {**SIZES, "architectures": [architecture], **config}, frozenset())


def windows(spec: DecoderSpec) -> list[int]:
    return [layer.window for layer in spec.layers]


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("MistralForCausalLM", {}, [4096] * 6),
        ("MistralForCausalLM", {"sliding_window": None}, [0] * 6),
        ("LlamaForCausalLM", {"sliding_window": 7}, [0] * 6),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 2},
            [0] * 6,
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            [0, 0, 7, 7, 7, 7],
        ),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 7}, [0] * 6),
        ("Gemma2ForCausalLM", {"sliding_window": 7}, [7, 0] * 3),
        ("Gemma3ForCausalLM", {"sliding_window": 7}, [7, 7, 7, 7, 7, 0]),
        ("Gemma3ForCausalLM", {"sliding_window": 7, "sliding_window_pattern": 2}, [7, 0] * 3),
        ("Phi3ForCausalLM", {}, [0] * 6),
        ("Phi3ForCausalLM", {"sliding_window": 7}, [7] * 6),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 7}, [0, 0, 0, 7, 0, 0]),
        ("SmolLM3ForCausalLM", {"use_sliding_window": False, "sliding_window": 7}, [0] * 6),
    ],
)
def test_windows(architecture: str, config: dict[str, Any], expected: list[int]) -> None:
    assert windows(spec_of(architecture, **config)) == expected


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_are_activated_as_the_configuration_says(architecture: str) -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 16}
    spec = spec_of(architecture, **config, hidden_act="gelu_pytorch_tanh")
    assert spec.experts is not None
    assert spec.experts.activation is Activation.GELU_TANH


def test_a_section_of_transformers_4_comes_before_one_of_5() -> None:
    both = spec_of(
        "LlamaForCausalLM",
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    (rope,) = both.ropes
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, 5e5)


def test_gpt_oss_without_a_description_of_its_rope_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="neither rope_parameters nor rope_scaling"):
        spec_of("GptOssForCausalLM", rope_theta=150_000)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 10**400}, "'rope_theta' is 1000"),
        ({"sliding_window": 10**30}, "a window of 1000000000000000000000000000000 tokens, expected at most"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-322}},
            "beta_fast is 9.88131e-323, expected 1e-06 to 1e\\+06",
        ),
    ],
)
def test_absurd_numbers_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of("MistralForCausalLM", **config)


def test_listed_layer_types_come_first() -> None:
    types = ["sliding_attention"] + ["full_attention"] * 5
    spec = spec_of("Gemma3ForCausalLM", sliding_window=7, sliding_window_pattern=2, layer_types=types)
    assert windows(spec) == [7, 0, 0, 0, 0, 0]
    assert [layer.rope for layer in spec.layers] == [1, 0, 0, 0, 0, 0]


def test_gemma3_ropes_of_the_first_published_files() -> None:
    spec = spec_of("Gemma3ForCausalLM", rope_scaling={"factor": 8.0, "rope_type": "linear"})
    linear = RopeSpec(1e6, 16, "linear", 8.0, original_context=4096)
    assert spec.ropes == (linear, RopeSpec(1e4, 16, original_context=4096))


def test_smollm3_layers_without_rope() -> None:
    assert [layer.rope for layer in spec_of("SmolLM3ForCausalLM").layers] == [0, 0, 0, None, 0, 0]
    listed = spec_of("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 1, 0])
    assert [layer.rope for layer in listed.layers] == [None, 0, 0, 0, 0, None]


def test_soft_caps_that_are_null() -> None:
    assert spec_of("Gemma2ForCausalLM").attention_softcap == 50.0
    spec = spec_of("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention_softcap, spec.logits_softcap) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("architecture", "config", "error", "message"),
    [
        (
            "LlamaForCausalLM",
            {"hidden_act": "relu"},
            UnsupportedModelError,
            "hidden_act is 'relu'.*what works: silu",
        ),
        (
            "Gemma2ForCausalLM",
            {"hidden_activation": "relu"},
            UnsupportedModelError,
            "hidden_activation is 'relu'",
        ),
        (
            "MistralForCausalLM",
            {"layer_types": ["full_attention"] * 6},
            UnsupportedModelError,
            "layer_types is",
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["linear_attention"] * 6},
            UnsupportedModelError,
            "linear_attention",
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["full_attention"]},
            CheckpointError,
            "is 1, expected an array of 6",
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 6},
            CheckpointError,
            "no sliding_window",
        ),
        (
            "Gemma3ForCausalLM",
            {"attn_logit_softcapping": 50.0},
            UnsupportedModelError,
            "attn_logit_softcapping is 50",
        ),
        (
            "Gemma3ForCausalLM",
            {"use_bidirectional_attention": True},
            UnsupportedModelError,
            "use_bidirectional",
        ),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"rope_theta": 1.0}},
            UnsupportedModelError,
            "rope_theta is 1.0, which is not supported",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            UnsupportedModelError,
            "type 'linear' is not supported",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, CheckpointError, "expected 6 times 0 or 1"),
    ],
)
def test_refusals(architecture: str, config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_of(architecture, **config)
