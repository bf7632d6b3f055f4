"""Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.families.common import Metadata, WeightNames, config_spec, config_window, gguf_spec
from appliance.engine.families.moe import GGUF_EXPERT_KEYS, config_experts, gguf_experts
from appliance.engine.spec import DecoderSpec, LayerSpec
from appliance.quant import fields


def qwen3_moe_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    spec = config_spec(config, names)
    windowed = fields.flag(config, "use_sliding_window", False)
    window = config_window(config, 4096) if windowed else None
    return replace(
        spec,
        layers=(LayerSpec(window or 0),) * spec.num_layers,
        experts=config_experts(
            config,
            activation=spec.activation,
            normalised=fields.flag(config, "norm_topk_prob", False),
        ),
    )


def qwen3_moe_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    return replace(gguf_spec(metadata, names, also=GGUF_EXPERT_KEYS), experts=gguf_experts(metadata))
