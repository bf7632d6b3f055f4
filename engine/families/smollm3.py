"""SmolLM3: some layers do without RoPE, and may have a window instead."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.families.common import (
    Metadata,
    WeightNames,
    but_every,
    config_head_dim,
    config_spec,
    config_window,
    config_windows,
    gguf_spec,
)
from appliance.engine.families.ropes import config_rope
from appliance.engine.spec import DecoderSpec, LayerSpec
from appliance.quant import fields
from appliance.quant.errors import CheckpointError

_INTERVAL = 4


def smollm3_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    rope = config_rope(config, config_head_dim(config), theta=2_000_000.0)
    spec = config_spec(config, names, rope=rope)
    turned = _turned(config, spec.num_layers)
    window = config_window(config) if fields.flag(config, "use_sliding_window", False) else None
    windows = config_windows(config, window, [not own for own in turned])
    layers = zip(windows, turned, strict=True)
    return replace(spec, layers=tuple(LayerSpec(own, 0 if has_rope else None) for own, has_rope in layers))


def _turned(config: Metadata, layers: int) -> list[bool]:
    """Which layers have RoPE: those whose entry in `no_rope_layers` is 1."""
    listed = config.get("no_rope_layers")
    if listed is None:
        return but_every(fields.positive(config, "no_rope_layer_interval", _INTERVAL), layers)
    if not isinstance(listed, list) or len(listed) < layers or not all(own in (0, 1) for own in listed):
        raise CheckpointError(f"no_rope_layers is {repr(listed)[:80]}, expected {layers} times 0 or 1")
    return [bool(own) for own in listed[:layers]]


def smollm3_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    """The files do not say which layers; it is every fourth, as in llama.cpp."""
    spec = gguf_spec(metadata, names)
    turned = but_every(_INTERVAL, spec.num_layers)
    return replace(spec, layers=tuple(LayerSpec(0, 0 if own else None) for own in turned))
