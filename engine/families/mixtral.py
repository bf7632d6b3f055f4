"""Mixtral; its GGUF files are of architecture `llama`."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.families.common import Metadata, WeightNames, config_spec, config_window, gguf_spec
from appliance.engine.families.moe import GGUF_EXPERT_KEYS, config_experts, gguf_experts
from appliance.engine.spec import DecoderSpec, LayerSpec


def mixtral_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    spec = config_spec(config, names)
    window = config_window(config) or 0
    return replace(
        spec,
        layers=(LayerSpec(window),) * spec.num_layers,
        experts=config_experts(config, activation=spec.activation, normalised=True),
    )


def llama_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    """A Llama, or a Mixtral where there are experts."""
    if not metadata.get("llama.expert_count"):
        return gguf_spec(metadata, names)
    return replace(gguf_spec(metadata, names, also=GGUF_EXPERT_KEYS), experts=gguf_experts(metadata))
