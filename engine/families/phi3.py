"""Phi-3, Phi-3.5 and Phi-4: parts of heads are turned, with factors for short and long contexts."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.common import (
    Metadata,
    WeightNames,
    config_head_dim,
    config_spec,
    config_window,
    gguf_spec,
)
from appliance.engine.families.ropes import config_rope
from appliance.engine.spec import DecoderSpec, LayerSpec
from appliance.quant import fields


def phi3_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    rope = config_rope(config, config_head_dim(config), partial=True)
    if rope.kind not in ("default", "longrope"):
        raise UnsupportedModelError(f"RoPE of type {rope.kind!r} is not supported; what works: longrope")
    spec = config_spec(config, names, rope=rope)
    return replace(spec, layers=(LayerSpec(config_window(config) or 0),) * spec.num_layers)


def phi3_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    """A window of 0 tokens stands for none."""
    spec = gguf_spec(metadata, names, also=("attention.sliding_window",))
    window = fields.integer(metadata, "phi3.attention.sliding_window", 0)
    return replace(spec, layers=(LayerSpec(window),) * spec.num_layers)
