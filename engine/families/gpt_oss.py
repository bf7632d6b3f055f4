"""gpt-oss: experts with clamped gates, windows in every other layer, sinks."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.common import (
    Metadata,
    WeightNames,
    config_spec,
    config_window,
    config_windows,
    gguf_spec,
    gguf_windows,
)
from appliance.engine.families.moe import GGUF_EXPERT_KEYS, config_experts, gguf_experts
from appliance.engine.spec import ClampedSwiglu, DecoderSpec, LayerSpec
from appliance.quant import fields

# Of the published models; GGUF files do not say.
_ALPHA, _LIMIT, _WINDOW = 1.702, 7.0, 128
_GGUF_KEYS = (*GGUF_EXPERT_KEYS, "attention.sliding_window")


def gpt_oss_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    if not any(config.get(key) for key in ("rope_parameters", "rope_scaling")):
        raise UnsupportedModelError(
            "there is neither rope_parameters nor rope_scaling; supported is gpt-oss whose RoPE is described"
        )
    spec = config_spec(config, names)
    every_other = [layer % 2 == 0 for layer in range(spec.num_layers)]
    windows = config_windows(config, config_window(config, _WINDOW), every_other)
    gate = ClampedSwiglu(
        fields.number(config, "swiglu_alpha", _ALPHA), fields.number(config, "swiglu_limit", _LIMIT)
    )
    return replace(
        spec,
        layers=tuple(LayerSpec(window) for window in windows),
        sinks=True,
        experts=replace(config_experts(config, activation=spec.activation, normalised=True), activation=gate),
    )


def gpt_oss_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    spec = gguf_spec(metadata, names, also=_GGUF_KEYS)
    windows = gguf_windows(metadata, "gpt-oss.", spec.num_layers, 2, _WINDOW)
    (rope,) = spec.ropes
    # The dimensions between which YaRN's frequencies change are not rounded in this model; GGUF files do not say.
    exact = tuple((key, 0.0 if key == "truncate" else value) for key, value in rope.parameters)
    return replace(
        spec,
        layers=tuple(LayerSpec(window) for window in windows),
        ropes=(replace(rope, parameters=exact),),
        sinks=True,
        experts=replace(gguf_experts(metadata), activation=ClampedSwiglu(_ALPHA, _LIMIT)),
    )
