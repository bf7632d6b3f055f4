"""Qwen 2, 2.5 and 3, dense: windows from some layer on, where they are used at all."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.families.common import (
    Metadata,
    WeightNames,
    config_spec,
    config_window,
    config_windows,
)
from appliance.engine.spec import DecoderSpec, LayerSpec
from appliance.quant import fields


def qwen_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    spec = config_spec(config, names)
    used = fields.flag(config, "use_sliding_window", False)
    first = fields.integer(config, "max_window_layers", 28)
    windowed = [used and layer >= first for layer in range(spec.num_layers)]
    windows = config_windows(config, config_window(config, 4096) if used else None, windowed)
    return replace(spec, layers=tuple(LayerSpec(window) for window in windows))
