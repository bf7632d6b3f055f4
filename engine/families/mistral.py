"""Mistral: a Llama whose layers all have one window, or none."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.common import Metadata, WeightNames, config_spec, config_window
from appliance.engine.spec import DecoderSpec, LayerSpec


def mistral_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    """Of the GGUF files llama.cpp makes a `llama` without windows."""
    spec = config_spec(config, names)
    window = config_window(config, 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    types = config.get("layer_types") or [kind] * spec.num_layers
    if types != [kind] * spec.num_layers:
        raise UnsupportedModelError(f"layer_types is {types!r}; supported is {kind!r} for every layer")
    return replace(spec, layers=(LayerSpec(window or 0),) * spec.num_layers)
